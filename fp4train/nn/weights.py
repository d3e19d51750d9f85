"""Weights prepared once per optimizer step, not once per microbatch or GEMM.

The prepared form of a weight is a function of the weight, of the spec and, under stochastic rounding, of seed and step.
It is cached while the seed and step of the autocast context stay the same. torch's version counter alone is not enough:
the fused optimizers change weights without incrementing it. For square blocks the column-wise form is the transpose of
the row-wise form, a view.

The cache belongs to one weight, to which it holds a weak reference, and is cleared with it. No address is compared.
Where a weight is gathered for the time of a call only (FSDP), no form is kept: those of all layers would be a whole
model on every rank. `Gathered` then stands for the weight: it has the weight's shape and gradient, and a source that
gives what GEMMs need of what was sent. Any other operation on it gathers the float32 master from the shards: every rank
must then do the same.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fp4train.backends import Backend, Prepared
from fp4train.nn.call import Call
from fp4train.nn.ranks import Ranks, amax_over
from fp4train.quantize import Decoded, Quantized, QuantSpec, RandomKey, amax_extent, quantizer, requantised
from fp4train.quantize.random import DGRAD_W, FPROP_W

if TYPE_CHECKING:
    from fp4train.nn.executors.cut import LayerShard

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class WeightForm:
    """The form of the weight [N, K] that one GEMM needs: spec, backend, row-wise or column-wise (wᵀ).

    Args:
        device: device type of the weight.
        column: whether the form is that of wᵀ, blocked along out_features, for dgrad.
        shard: where the weight lies in the whole layer's; None: it is whole.
    """

    __slots__ = (
        *("amax_ranks", "decode", "dtype", "key", "make", "operand", "requantise", "rounding_ranks", "spec", "start"),
        "transposed",
    )

    def __init__(
        self,
        spec: QuantSpec | None,
        backend: Backend,
        dtype: torch.dtype,
        device: str,
        *,
        column: bool,
        shard: LayerShard | None = None,
    ) -> None:
        self.spec, self.dtype = spec, dtype
        # For square blocks and for high precision one set of values serves both forms: one is a view of the other.
        self.transposed = column and (spec is None or (spec.transposable and not backend.takes_codes))
        self.operand = DGRAD_W if column and not self.transposed else FPROP_W
        turned = self.operand == DGRAD_W
        self.amax_ranks: tuple[Ranks, ...] = ()
        self.rounding_ranks: tuple[Ranks, ...] = ()
        """Over which the amax is taken of what the spec requantises."""
        self.start = (0, 0)
        if shard is not None:
            self.amax_ranks, self.rounding_ranks = shard.amax_and_rounding_ranks("w", spec, transposed=turned)
            row, column_start = shard.starts("w")
            self.start = (column_start, row) if turned else (row, column_start)
        if spec is not None:
            rest = quantizer(replace(spec, requantises=None), device)
            chosen = rest if self.rounding_ranks else quantizer(spec, device)
            self.make, self.requantise = (each.codes if backend.takes_codes else each.values for each in (chosen, rest))
            self.decode = None if backend.takes_codes else chosen.decode
        self.key = (spec, backend.name, dtype, column and not self.transposed)

    def finish(self, prepared: Prepared) -> Prepared:
        """This form from codes that were gathered, or from the values that serve both forms."""
        if isinstance(prepared, Quantized) and self.decode is not None:
            prepared = self.decode(prepared)
        if self.transposed:
            assert isinstance(prepared, Decoded)
            return Decoded(prepared.values.T, prepared.scale)
        return prepared


class PreparedWeights:
    """The prepared forms of one weight [N, K] in one step.

    Args:
        keep: whether forms are kept for later calls of the step; else each call makes its own, from the same amax and
            random bits.
    """

    __slots__ = ("__weakref__", "_amax", "_amaxes", "_entered", "_forms", "_keep", "_of", "_position", "_version")

    def __init__(self, keep: bool = True) -> None:
        self._keep = keep
        self._position: tuple[int, int] | None = None
        self._of: weakref.ref[Tensor] | None = None
        self._version = 0
        self._forms: list[tuple[tuple[object, ...], Prepared]] = []
        self._amax: Tensor | None = None
        self._amaxes: dict[tuple[object, ...], Tensor] = {}
        self._entered = False

    def __reduce__(self) -> tuple[type[PreparedWeights], tuple[bool]]:
        """Copies and pickles start empty: the forms belong to the original tensor."""
        return PreparedWeights, (self._keep,)

    def form(self, w_NK: Tensor, form: WeightForm, call: Call) -> Prepared:
        """The weight in the given form, cached within a step."""
        rounded = None
        if isinstance(w_NK, Gathered):
            sent = w_NK.source.form(form, call)
            if sent is not None:
                return sent
            if form.spec is not None and form.spec.requantises is not None and form.operand == DGRAD_W:
                rounded = w_NK.source.rounded(form.spec.requantises, call)
            w_NK = values_of(w_NK, w_NK.dtype) if rounded is None else rounded
        own = w_NK if call.parameter is None else call.parameter
        if (call.seed, call.step) != self._position:
            self._begin(call)
        version = 0 if own.is_inference() else own._version
        known = None if self._of is None else self._of()
        if known is not own or version != self._version:
            if known is None or version != self._version or own is not w_NK or not known.is_set_to(own):
                self._forms.clear()
                self._amaxes.clear()
                self._amax = None
            forms = self._forms
            self._of, self._version = weakref.ref(own, lambda _: forms.clear()), version
        amax = None
        if form.spec is not None and form.spec.delayed is not None:
            amax = self.delayed_amax(w_NK, form.spec, call)
        prepared = None
        for key, found in self._forms:
            if key == form.key:
                prepared = found
                break
        if prepared is None:
            prepared = self._prepare(w_NK.detach(), form, call, amax, rounded is not None)
            if self._keep:
                self._forms.append((form.key, prepared))
        return form.finish(prepared) if form.transposed else prepared

    def _begin(self, call: Call) -> None:
        """Forget what belongs to another step than that of `call`."""
        self._position = (call.seed, call.step)
        self._forms.clear()
        self._amaxes.clear()
        self._amax, self._entered = None, False

    def _prepare(
        self, w_NK: Tensor, form: WeightForm, call: Call, amax: Tensor | None, rounded: bool = False
    ) -> Prepared:
        """`rounded`: w is what `form.spec.requantises` gave."""
        spec = form.spec
        w = w_NK.T if form.operand == DGRAD_W else w_NK
        if spec is None:  # high precision uses the recipe's dtype; otherwise the master weight is quantised
            return Decoded(w.to(form.dtype), None)
        key = call.key_at(form.operand, *form.start) if spec.random else None
        if form.rounding_ranks and spec.requantises is not None and not rounded:
            w = requantised(w, spec, self._amax_over_ranks(w.T, spec.requantises, form.rounding_ranks, form.operand))
        if form.amax_ranks:
            amax = self._amax_over_ranks(w, spec, form.amax_ranks, form.operand, key)
        return (form.requantise if rounded else form.make)(w, key, amax)

    def _amax_over_ranks(
        self, w: Tensor, spec: QuantSpec, amax_ranks: tuple[Ranks, ...], operand: int, key: RandomKey | None = None
    ) -> Tensor:
        """The amax of the whole weight: one collective per step, whichever forms are made and made again."""
        whole = amax_extent(spec) == "tensor" and spec.hadamard is None and spec.requantises is None
        known = ("tensor",) if whole else (spec, operand)
        if known not in self._amaxes:
            self._amaxes[known] = amax_over(amax_ranks, w, spec, key)
        return self._amaxes[known]

    def delayed_amax(self, w_NK: Tensor, spec: QuantSpec, call: Call) -> Tensor:
        """The weight's delayed amax; its own enters the history once per step, at its first call in training.

        Args:
            w_NK: the weight, or its amax (0-d).
        """
        if (call.seed, call.step) != self._position:
            self._begin(call)
        if self._amax is None or (call.training and not self._entered):
            enter, position = call.training and not self._entered, (call.seed, call.step)
            assert call.scaling is not None
            self._amax = call.scaling.amax("w", spec, w_NK.detach(), enter=enter, position=position)
            self._entered = self._entered or call.training
        return self._amax


class GatheredSource(Protocol):
    """Where a gathered weight comes from. What it gives is valid until the weight is freed after the layer's call.

    rounds: whether ranks send each other BF16 values that stand for the float32 master.
    """

    rounds: bool

    def form(self, form: WeightForm, call: Call) -> Prepared | None:
        """The weight in a form, from codes; None if the weight did not come as codes: `values` has it then."""
        ...

    def rounded(self, spec: QuantSpec, call: Call) -> Tensor | None:
        """The whole weight [N, K] as `spec` rounds it, in BF16, from its codes; None if they did not come."""
        ...

    def values(self, dtype: torch.dtype) -> Tensor:
        """The whole weight [N, K]: as it came if that is `dtype`, else cast from the float32 master."""
        ...

    def master(self) -> Tensor:
        """The whole float32 weight [N, K] in memory of its own, of rounded values if ranks send each other only those:
        a collective if it did not come so."""
        ...


class Gathered(Tensor):
    """A weight [N, K] without memory of its own."""

    source: GatheredSource

    def copied(self) -> Tensor:
        """The weight in memory of its own, not freed after the call: in BF16 if it came so, else in float32."""
        return self.to(torch.bfloat16 if self.source.rounds else torch.float32, copy=True)

    @staticmethod
    def __new__(cls, source: GatheredSource, shape: torch.Size, device: torch.device) -> Gathered:
        made: Gathered = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)
        made.source = source
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Gathered({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        own = args[0] if args and isinstance(args[0], Gathered) else None
        if own is not None and func is torch.ops.aten._to_copy.default and set(kwargs or {}) == {"dtype"}:
            return own.source.values(kwargs["dtype"]).clone()
        if own is not None and (func in _SAME or _is_whole_view(func, args, own)):
            return Gathered(own.source, own.shape, own.device)
        return func(*_with_masters(args), **{name: _master(each) for name, each in (kwargs or {}).items()})


def values_of(w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a weight in `dtype`, whether it is gathered or not; not a copy if it has them."""
    return w_NK.source.values(dtype) if isinstance(w_NK, Gathered) else w_NK.to(dtype)


def _is_whole_view(func: Any, args: Any, own: Gathered) -> bool:
    if func is torch.ops.aten.view.default:  # DTensor.to_local
        return tuple(args[1]) == own.shape
    return func is torch.ops.aten.as_strided.default and tuple(args[1]) == own.shape and tuple(args[2]) == own.stride()


def _master(value: Any) -> Any:
    if isinstance(value, Gathered):
        return value.source.master()
    return _with_masters(value) if isinstance(value, (list, tuple)) else value


def _with_masters(values: Any) -> Any:
    return type(values)(_master(each) for each in values)
