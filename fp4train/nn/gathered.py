"""A weight that was gathered from its shards as codes, or rounded: what a layer multiplies, without the float32 values.

FSDP gives a layer its weight for the time of a call. `Gathered` stands there for the weight: it has the weight's shape
and gradient, and a source that gives what GEMMs need. Any other operation on it gathers the float32 master from the
shards: every rank must then do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fp4train.backends import Prepared

if TYPE_CHECKING:
    from fp4train.nn.call import Call
    from fp4train.nn.weights import WeightForm
    from fp4train.quantize import QuantSpec

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Source(Protocol):
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

    source: Source

    def copied(self) -> Tensor:
        """The weight in memory of its own, not freed after the call: in BF16 if it came so, else in float32."""
        return self.to(torch.bfloat16 if self.source.rounds else torch.float32, copy=True)

    @staticmethod
    def __new__(cls, source: Source, shape: torch.Size, device: torch.device) -> Gathered:
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
