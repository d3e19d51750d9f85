"""Codes of tensors that are never in memory: of RMSNorm(h), of silu(gate) ⊙ up, and of the
gradients of gate and up. The sum h of a residual stream and its change is made in the same kernels.

`SourceTensors` are the tensors that x is computed from. `produce` gives the codes of both forms of
x, in kernels that compute x where they would load it (`kernels/triton/both.py`); they are those of
x in BF16 as the functions here compute it in torch, in every bit. Only Triton has such kernels;
`why_not` says why they do not run for a pair of quantizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp4train.quantize import triton_launch
from fp4train.quantize.launch import Launch
from fp4train.quantize.quantized import Quantized
from fp4train.quantize.quantizer import Quantizer
from fp4train.quantize.random import LANES, RandomKey, words_of_both
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.triton import MOST_KINDS, TritonQuantizer, has_pair_kernel, why_not_spec
from fp4train.quantize.triton_launch import BothPlan

_PLACES: Final = {"norm": (128, 1), "root": (128, 1), "gate": (128, 1), "gradients": (64, 2)}
"""Features, and blocks of tokens, of a program that makes codes without an amax, where few tokens
should make a strip, or many numbers take the registers.
"""
_MEASURED: Final = 64, 4
"""Features, and blocks of tokens, of a program that makes codes by an amax: one of four warps, so
that more than one lies on a multiprocessor also with Triton 3.6, which takes up to twice as many
registers.
"""
_TURNED: Final = 32, 8
"""Tokens, and groups of eight features, of a program of four warps that makes codes of one
scale.
"""
STRIP: Final = 16
"""Tokens of a program of `norm_backward`."""
NORM_BACKWARD: Final = 6 + 8 / STRIP
"""Bytes per element that `norm_backward` moves: dy, h and dh, and a program's float32 terms of
dweight, twice.
"""
ADDED: Final = 2
"""Bytes per element of a gradient that `norm_backward` adds to dh."""
_LOG2_E: Final = 1.4426950216293335
_POWERS: Final = (
    0.0013400432653725147,
    0.009676037356257439,
    0.05550327152013779,
    0.2402210682630539,
)
_LAST_POWERS: Final = (0.6931471824645996, 1.0000001192092896)
"""Coefficients of 2^f, |f| ≤ 1/2, from that of f⁵."""


class SourceTensors(NamedTuple):
    """The tensors that x is computed from, BF16 [M, K], the rows of which lie alike and are
    contiguous.

    kind: "norm": (h, weight [K], rstd float32 [M], which is filled with 1 / √(mean(h²) + ε)), or
        (h, weight, rstd, x, change), where h is filled with x + change; "root": the same with 1 /
        (√mean(h²) + ε); "gate": (gate, up); "gradients": (dh, gate, up), from which two tensors are
        made, the gradients of gate and of up.
    eps: ε of a norm.
    """

    kind: str
    tensors: tuple[Tensor, ...]
    eps: float = 0.0

    @property
    def results(self) -> int:
        """Tensors that are made from it."""
        return 2 if self.kind == "gradients" else 1

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the tensors, for which the kernels are compiled: a norm's weight may be
        float32 or BF16.
        """
        return tuple([tensor.dtype for tensor in self.tensors])

    def values(self) -> tuple[Tensor, ...]:
        """x in BF16, or both gradients: the readable reference; of a norm with the h and rstd that
        are there.
        """
        if self.kind in ("norm", "root"):
            h, weight, rstd = self.tensors[:3]
            return (normed(h, weight.bfloat16() if self.kind == "norm" else weight, rstd),)
        if self.kind == "gate":
            return (gated(*self.tensors),)
        return gate_gradients(*self.tensors)


def normed(h_MK: Tensor, weight_K: Tensor, rstd_M: Tensor) -> Tensor:
    """h · rstd · weight, rounded once to BF16. RMSNorm has its weight rounded to BF16, too."""
    return (h_MK.float() * rstd_M[:, None] * weight_K.float()).bfloat16()


def exponential(x: Tensor) -> Tensor:
    """exp(x) of float32, in operations of float32 that have the same bits everywhere; relative
    error 2e-7.
    """
    t = (x * _LOG2_E).clamp(min=-126)
    infinite = t >= 128
    k = (t + 12582912.0) - 12582912.0  # to the nearest integer
    f = t - k
    p = torch.full_like(f, _POWERS[0])
    for power in (*_POWERS[1:], *_LAST_POWERS):
        p = p * f + power
    half = p * ((k.masked_fill(infinite, 0).nan_to_num().int() + 126) << 23).view(torch.float32)
    return torch.where(infinite, torch.inf, half * 2)


def gated(gate_MK: Tensor, up_MK: Tensor) -> Tensor:
    """silu(gate), rounded to BF16, times up, rounded, as torch's operators round."""
    a = gate_MK.float()
    return (a / (exponential(-a) + 1)).bfloat16() * up_MK


def gate_gradients(dh_MK: Tensor, gate_MK: Tensor, up_MK: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and of up where dh is that of `gated`, rounded as those of torch's
    operators; that of gate may have another last digit, as torch's exponential has (17 of 4·10⁷ on
    N(0, 1)).
    """
    a = gate_MK.float()
    total = exponential(-a) + 1
    sigmoid = total.reciprocal()
    dgate = (dh_MK * up_MK).float() * sigmoid * (a * (1 - sigmoid) + 1)
    return dgate.bfloat16(), (a / total).bfloat16() * dh_MK


def why_not(row: Quantizer, column: Quantizer, *, codes: bool, here: bool = True) -> str | None:
    """Why both forms cannot be made from a source, in words; None: they can.

    Args:
        codes: whether the products take codes of both, and not values.
        here: with what is installed on this machine; else where Triton is.
    """
    if not codes:
        return "emulation multiplies its values, not its codes"
    for form_quantizer in (row, column):
        if isinstance(form_quantizer, TritonQuantizer):
            reason = None
        elif form_quantizer.kernel == "triton":
            reason = why_not_spec(form_quantizer.spec)
        else:
            reason = form_quantizer.why or form_quantizer.kernel
        if reason is not None and (
            here or (reason := why_not_spec(form_quantizer.spec)) is not None
        ):
            return f"the kernels that quantise are not Triton's ({reason})"
    if not has_pair_kernel(row.spec, column.spec):
        return (
            f"no kernel makes both forms of {row.spec.element.upper()} in blocks of "
            f"{row.spec.block} at once"
        )
    return None


def produce(
    row: Quantizer,
    column: Quantizer,
    source: SourceTensors,
    keys: Sequence[tuple[RandomKey | None, ...]],
    turned: bool = False,
) -> list[tuple[Quantized, Quantized]]:
    """(codes of x by `row`, those of x.T by `column`) of each result of the source.

    Args:
        row, column: a pair that `why_not` has nothing against.
        keys: for every result the keys of both forms, all of one seed and, but for the layer, of
            one position.
        turned: store the codes of x.T, of a byte, as x lies: [M, K].
    """
    assert isinstance(row, TritonQuantizer) and isinstance(column, TritonQuantizer)
    x_MK, (first_words, *other_words) = (
        source.tensors[0],
        [words_of_both(*key_pair) for key_pair in keys],
    )
    assert first_words is not None and None not in other_words
    if row.spec.block == (None, None):
        return _produce_turned(row, source)
    tiled = row._tiled, column._tiled
    form = source.kind, source.eps, source.dtypes
    plan: BothPlan = row._planned(_plan, x_MK, column.spec, tiled, turned, *form)
    if any(plan.needs):
        amaxes = torch.zeros(source.results, 4, device=x_MK.device)
    else:
        amaxes = None
    buffers = [make() for _ in range(source.results) for make in plan.results]
    read = source.tensors
    if plan.amax is not None and amaxes is not None:
        plan.amax(*read, amaxes)
        read = read[: _counts(source.kind)[0]]
    if other_words and other_words[0] is not None:
        layer = other_words[0][2]
    else:
        layer = first_words[2]
    words = (*first_words[:3], layer, *first_words[3:])
    plan.launch(*read, buffers[1] if amaxes is None else amaxes, *buffers, words=words)
    (rows, columns), pairs = x_MK.shape, []
    for i in range(source.results):
        a, b, c, d = buffers[4 * i : 4 * i + 4]
        row_amax, other, factor, other_factor = (
            (None,) * 4 if amaxes is None else amaxes[i].unbind()
        )
        first_form = Quantized(
            row.spec, (rows, columns), a, b, *((row_amax, factor) if plan.needs[0] else (None,))
        )
        column_factors = (other, other_factor) if plan.needs[1] else (None,)
        pairs.append((first_form, Quantized(column.spec, (columns, rows), c, d, *column_factors)))
    return pairs


def _produce_turned(
    row: TritonQuantizer, source: SourceTensors
) -> list[tuple[Quantized, Quantized]]:
    """`produce` by one float32 scale."""
    x_MK = source.tensors[0]
    results = source.results
    plan: BothPlan = row._planned(_plan_turned, x_MK, source.kind, source.eps, source.dtypes)
    amaxes = torch.zeros(results, 4, device=x_MK.device)
    assert plan.amax is not None
    plan.amax(*source.tensors, amaxes)
    buffers = [[make() for make in plan.results] for _ in range(results)]
    read = source.tensors[: _counts(source.kind)[0]]
    plan.launch(*read, amaxes, *(buffer for result in buffers for buffer in result))
    (rows, columns), spec = x_MK.shape, row.spec
    return [
        (
            Quantized(spec, (rows, columns), codes, scale, amax),
            Quantized(spec, (columns, rows), turned, scale, amax),
        )
        for (codes, turned, scale), amax in zip(buffers, amaxes[:, 0].unbind(), strict=True)
    ]


def _plan_turned(
    spec: QuantSpec, x_MK: Tensor, kind: str, eps: float, dtypes: tuple[torch.dtype, ...]
) -> BothPlan:
    """The launches for x of a source of tensors of these dtypes: that of `plan_turned` with another
    kernel.
    """
    from fp4train.kernels.triton.both import turned_produced

    plan, tensors, results = (
        triton_launch.plan_turned(spec, x_MK, False, False, _TURNED),
        *_counts(kind),
    )
    old = plan.launch
    place = (128, 2 if eps else 4)
    constants = old.constants | {"S": kind}
    groups = (tensors, 1, 3 * results)
    launch = Launch(turned_produced, old.programs * results, old.sizes, constants, groups=groups)
    return BothPlan(
        _plan_amax(spec, x_MK, place, kind, eps, len(dtypes)), (True, True), launch, plan.results
    )


def _counts(kind: str) -> tuple[int, int]:
    """(Tensors of a source of this kind that is filled, results)."""
    return 2 if kind == "gate" else 3, 2 if kind == "gradients" else 1


def _plan_amax(
    column: QuantSpec, x_MK: Tensor, place: tuple[int, int], kind: str, eps: float, dtypes: int
) -> Launch:
    """The kernel of the amaxes of x of a source of `given` tensors, in tiles of features and blocks
    of tokens.
    """
    from fp4train.kernels.triton.both import amax_produced

    (tokens, features), results = x_MK.shape, _counts(kind)[1]
    strips = -(-tokens // (place[1] * (column.block[1] or LANES)))
    tiles = -(-features // place[0])
    return Launch(
        amax_produced,
        strips if eps else strips * tiles * results,
        (tokens, features, x_MK.stride(0)),
        {"EPS": eps, "V": triton_launch.amax_variant(column, place), "S": kind},
        dtypes={dtypes: torch.int32},
        groups=(dtypes,),
    )


def _plan(
    row: QuantSpec,
    x_MK: Tensor,
    column: QuantSpec,
    tiled: tuple[bool, bool],
    turned: bool,
    kind: str,
    eps: float,
    dtypes: tuple[torch.dtype, ...],
) -> BothPlan:
    """The launches for x of a source of tensors of these dtypes: that of `plan_both` with other
    kernels, and of a norm with other tiles.
    """
    from fp4train.kernels.triton.both import quantize_produced

    (tensors, results), dtype_count = _counts(kind), len(dtypes)
    measured = row.global_scale or column.global_scale
    features = x_MK.shape[1]
    place = _MEASURED if measured else _PLACES[kind]
    plan = triton_launch.plan_both(row, x_MK, column, tiled, place, turned)
    assert plan is not None, "the rows of x are contiguous"
    amax = None
    if measured:
        place = triton_launch.column_tile(column.block[1] or 0, column)
        amax = _plan_amax(column, x_MK, (place[0], 1 if eps else place[1]), kind, eps, dtype_count)
    old = plan.launch
    own_eps = 0.0 if measured else eps
    tensors = tensors if measured else dtype_count
    if own_eps:
        programs = old.programs // -(-features // old.constants["C"].tile_rows)
    else:
        programs = old.programs * results
    words = {tensors + 1 + 4 * i + at: old.dtypes[2 + at] for i in range(results) for at in (0, 2)}
    constants = {"EPS": own_eps, **old.constants, "S": kind}
    groups = tensors, 1, 4 * results
    launch = Launch(quantize_produced, programs, old.sizes, constants, old.warps, words, groups)
    return plan._replace(amax=amax, launch=launch)


def norm_backward(
    dy_MK: Tensor,
    h_MK: Tensor,
    weight_K: Tensor,
    rstd_M: Tensor,
    outside: float = 0.0,
    added_MK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dh [M, K] in BF16, dweight float32 [K]) of a norm; `outside`: ε of "root", 0 of "norm".
    added_MK: a gradient of h from elsewhere, in BF16, that is added to dh and lies as h does.
    """
    read = (h_MK,) if added_MK is None else (h_MK, added_MK)
    sizes = (*h_MK.shape, dy_MK.stride(0), h_MK.stride(0))
    dtypes = tuple([tensor.dtype for tensor in (dy_MK, *read, weight_K, rstd_M)])
    launch = _plan_backward(sizes, (*dtypes, h_MK.device), outside, len(read))
    dh = torch.empty_like(h_MK)
    dw = torch.empty(launch.programs, h_MK.shape[1], device=h_MK.device)
    launch(dy_MK, *read, weight_K, rstd_M, dh, dw)
    return dh, dw.sum(0)


@lru_cache(MOST_KINDS)
def _plan_backward(
    sizes: tuple[int, ...], kind: tuple[object, ...], outside: float, read: int
) -> Launch:
    """The launch of `norm_backward` for tensors of a kind, of which `read` lie as h does."""
    from fp4train.kernels.triton.norm import norm_backward as kernel

    constants = {"ROWS": STRIP, "COLS": 256, "OUTSIDE": outside, "ADDS": read > 1}
    constants["HARDWARE"] = not triton_launch.interpreted()
    return Launch(kernel, -(-sizes[0] // STRIP), sizes, constants, groups=(1, read))
