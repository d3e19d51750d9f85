"""Quantisation by the C kernels: the same bits as `reference`, near the speed of memory.

The kernels work on finite numbers. What holds a NaN or an infinity they report, and the reference does it: rare, and
its rules need no second home. Transposed views are read in place; other strides that a kernel cannot use are copied
first.
"""

import math
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp4train.kernels import cpu
from fp4train.kernels.cpu import Machine, Output, Request, Scheme
from fp4train.quantize import reference
from fp4train.quantize.quantized import Decoded, Form, Quantized, operand_width
from fp4train.quantize.random import MASK, RandomKey
from fp4train.quantize.scaling import element_range, scales_float
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard, hadamard_signs

HERE: Final = Machine()
"""The fastest instruction set of this CPU, with torch's number of threads."""


_GivenScales = tuple[Tensor, Tensor]
"""The amax and scale_inv of FP8 with one scale for the tensor or for each row."""


class _Result(NamedTuple):
    output: Output
    given: _GivenScales | None


PAIR_BYTES = 1 << 25
"""Tensors from here on are read once for both forms. Smaller ones stay in the cache between two reads, and each form by
itself is faster, because it takes whole rows or whole columns: 1.3 times at 4096×384, the same at 4096×4096."""


def why_not(x_RC: Tensor, spec: QuantSpec) -> str | None:
    """The reason why the reference must do it, or None."""
    if reason := cpu.unavailable():
        return reason
    if x_RC.device.type != "cpu":
        return f"x is on {x_RC.device}"
    if x_RC.numel() == 0:
        return "x has no elements"
    return _why_not_spec(spec)


@cache
def _why_not_spec(spec: QuantSpec) -> str | None:
    cols = spec.block[1]
    if spec.four_over_six is not None:
        return f"four_over_six={spec.four_over_six!r} has no kernel"
    if cols is None and spec.scale == "e8m0":
        return f"scale='e8m0' with block={spec.block!r} has no kernel"
    if cols is not None and cols not in cpu.ROW_BLOCKS:
        return f"block={spec.block!r}: kernels have blocks of {', '.join(map(str, cpu.ROW_BLOCKS))} columns"
    if spec.hadamard is not None:
        if not isinstance(spec.hadamard, Hadamard):
            return f"hadamard={spec.hadamard!r} has no kernel"
        if spec.hadamard.size != 16:
            return f"hadamard.size={spec.hadamard.size}: the kernel transforms 16"
        if spec.block[0] != 1 or cols not in cpu.COLUMN_BLOCKS:
            return f"hadamard with block={spec.block!r}: the kernel has (1, 16) and (1, 32)"
    return None


@cache
def _scheme(spec: QuantSpec) -> Scheme:
    whole = None in spec.block
    signs = None
    if isinstance(spec.hadamard, Hadamard):
        signs = sum(1 << i for i, sign in enumerate(hadamard_signs(spec.hadamard)) if sign < 0)
    return Scheme(
        element=spec.element,
        scale="given" if whole else spec.scale,
        scale_rounding=spec.scale_rounding,
        formula=spec.formula,
        block=(1, 16) if whole else spec.block,  # type: ignore[arg-type]
        largest=element_range(spec),
        bound=spec.global_bound * element_range(spec),
        stochastic=spec.rounding == "stochastic",
        signs=signs,
    )


def _random(key: RandomKey | None) -> cpu.Random:
    if key is None:
        return cpu.NO_RANDOM
    return (
        key.seed,
        key.row_offset & MASK,
        key.col_offset // 8 & MASK,
        key.step * 8 + key.operand & MASK,
        key.layer,
    )


def _across(spec: QuantSpec) -> bool:
    """Whether a kernel works along the strided axis of x.T: for single rows of narrow blocks."""
    return spec.block[0] in (1, None) and spec.block[1] in (None, *cpu.COLUMN_BLOCKS)


def _readable(x_RC: Tensor, spec: QuantSpec) -> Tensor:
    """x, or a copy where no kernel reads these strides well."""
    if x_RC.stride(1) == 1 or (x_RC.stride(0) == 1 and _across(spec)):
        return x_RC
    return x_RC.contiguous()


@cache
def _amax_shape(spec: QuantSpec) -> str | None:
    """Of what a global amax is needed: tensor, row, or None where only blocks count."""
    if spec.global_scale is not None:
        return spec.global_scale
    return None if None not in spec.block else "tensor" if spec.block[0] is None else "row"


def _float32_amax(amax: Tensor, spec: QuantSpec) -> Tensor:
    """An amax from elsewhere in the shape that `Quantized` holds."""
    return amax.to(torch.float32).reshape((-1, 1) if _amax_shape(spec) == "row" else ()).contiguous()


def _given_scales(amax: Tensor, x_RC: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(scale, scale_inv) of FP8 with one scale for the tensor or for each row."""
    margin = spec.delayed.margin if spec.delayed else 0
    return scales_float(amax.reshape(-1, 1), spec.format, spec.scale_format, x_RC.dtype, margin=margin)


def _request(
    x_RC: Tensor,
    spec: QuantSpec,
    key: RandomKey | None,
    amax: Tensor | None,
    machine: Machine,
    *,
    values: bool,
    own_cols: int = 0,
) -> tuple[Request, _GivenScales | None]:
    """The request for one form of x, and what FP8 with one scale for the tensor or a row knows before it."""
    scheme, measure, given = _scheme(spec), _amax_shape(spec), None
    if amax is not None:
        amax, measure = _float32_amax(amax, spec), None
    if scheme.scale == "given":
        if amax is None:
            amax, measure = cpu.amax(x_RC, machine, rowwise=measure == "row"), None
        factors, inverse = _given_scales(amax, x_RC, spec)
        given, amax = (amax, inverse), factors
    return Request(scheme, amax, measure, _random(key), own_cols, values, not values), given


def _run(
    x_RC: Tensor, spec: QuantSpec, key: RandomKey | None, amax: Tensor | None, machine: Machine, *, values: bool
) -> _Result | None:
    """The result, or None where x is not finite."""
    rows, cols = x_RC.shape
    x_RC = _readable(x_RC, spec)
    together = _together(x_RC, spec)
    if together > 1:
        x_RC = x_RC.view(rows // together, cols * together)
    own_cols = cols if together > 1 and spec.rounding == "stochastic" else 0
    request, given = _request(x_RC, spec, key, amax, machine, values=values, own_cols=own_cols)
    output = cpu.quantize(x_RC, request, machine)
    if output is None:
        return None
    return _Result(output.with_rows(rows) if together > 1 else output, given)


def _together(x_RC: Tensor, spec: QuantSpec) -> int:
    """How many rows of x the kernel gets as one: it takes strips of 16 blocks of a row, and narrow rows fill few."""
    rows, cols = x_RC.shape
    block = spec.block[1]
    if block is None or cols % block or cols % (16 * block) == 0 or cols >= 128 * block:
        return 1
    if spec.block[0] != 1 or spec.global_scale == "row" or spec.hadamard is not None or not x_RC.is_contiguous():
        return 1
    return math.gcd(rows, 16)


def _quantized(shape: torch.Size, spec: QuantSpec, result: _Result) -> Quantized:
    output, given = result
    amax, scales = (output.amax, output.scales) if given is None else given
    assert output.codes is not None and scales is not None
    return Quantized(spec, (shape[0], shape[1]), output.codes, scales, amax)


def _operand(spec: QuantSpec, result: _Result) -> Decoded:
    output, given = result
    assert output.values is not None
    left = output.global_decode if given is None else _one_scale(given[1], spec)
    return Decoded(output.values, left, spec.transposable)


def _one_scale(inverse: Tensor, spec: QuantSpec) -> Tensor:
    """FP8's scale_inv as the product takes it: 0-d for the tensor, [R, 1] for rows."""
    return inverse.reshape(()) if spec.block[0] is None else inverse


def quantize(
    x_RC: Tensor,
    spec: QuantSpec,
    *,
    key: RandomKey | None = None,
    amax: Tensor | None = None,
    machine: Machine = HERE,
) -> Quantized:
    """Codes and scales. See `fp4train.quantize.quantize`."""
    result = _run(x_RC, spec, key, amax, machine, values=False)
    if result is None:
        return reference.quantize(x_RC, spec, key=key, amax=amax)
    return _quantized(x_RC.shape, spec, result)


def quantize_dequantize(
    x_RC: Tensor,
    spec: QuantSpec,
    *,
    key: RandomKey | None = None,
    amax: Tensor | None = None,
    machine: Machine = HERE,
) -> Decoded:
    """`quantize(...).decoded()` to the bit, without the codes."""
    result = _run(x_RC, spec, key, amax, machine, values=True)
    if result is None:
        return reference.quantize_dequantize(x_RC, spec, key=key, amax=amax)
    return _operand(spec, result)


def operand(quantized: Quantized, *, machine: Machine = HERE) -> Decoded:
    """`quantized.decoded()` to the bit, in one pass: what backward does with the codes that forward kept."""
    spec, (_, cols) = quantized.spec, quantized.shape
    if 0 in quantized.shape or why_not(quantized.codes, spec) is not None:
        return quantized.decoded()
    scheme = _scheme(spec)
    given = scheme.scale == "given"
    values = cpu.decode(
        quantized.codes.contiguous(),
        None if given else quantized.scales.contiguous(),
        element=scheme.element,
        scale=scheme.scale,
        block=scheme.block,
        cols=operand_width(spec, cols),
        machine=machine,
    )
    if given:
        left: Tensor | None = _one_scale(quantized.scales, spec)
    else:
        left = None if quantized.amax is None else cpu.global_decode(quantized.amax, scheme.bound)
    return Decoded(values, left, spec.transposable)


def both_operands(x_MK: Tensor, rowwise: Form, columnwise: Form, *, machine: Machine = HERE) -> tuple[Decoded, Decoded]:
    """The operands of x [M, K] and of x.T [K, M], from one read of x where that is possible: what backward needs of dy.

    Both specs must be without a reason in `why_not`. The results are those of two calls of `quantize_dequantize`.
    """
    both = _run_both(x_MK, rowwise, columnwise, machine, values=True)
    if both is not None:
        return _operand(rowwise.spec, both[0]), _operand(columnwise.spec, both[1])
    return (
        quantize_dequantize(x_MK, rowwise.spec, key=rowwise.key, amax=rowwise.amax, machine=machine),
        quantize_dequantize(x_MK.T, columnwise.spec, key=columnwise.key, amax=columnwise.amax, machine=machine),
    )


def operand_and_codes(
    x_MK: Tensor, rowwise: Form, columnwise: Form, *, machine: Machine = HERE
) -> tuple[Decoded, Quantized]:
    """The operand of x [M, K] and the codes of x.T [K, M]: what forward multiplies, and what it keeps for backward."""
    both = _run_both(x_MK, rowwise, columnwise, machine, values=False)
    if both is not None:
        return _operand(rowwise.spec, both[0]), _quantized(x_MK.T.shape, columnwise.spec, both[1])
    return (
        quantize_dequantize(x_MK, rowwise.spec, key=rowwise.key, amax=rowwise.amax, machine=machine),
        quantize(x_MK.T, columnwise.spec, key=columnwise.key, amax=columnwise.amax, machine=machine),
    )


def _run_both(
    x_MK: Tensor, rowwise: Form, columnwise: Form, machine: Machine, *, values: bool
) -> tuple[_Result, _Result] | None:
    """Both results of `_run`, or None where one read cannot give them or two are faster. values: of the column-wise
    form, else codes."""
    if x_MK.nbytes < PAIR_BYTES:
        return None
    row_spec, column_spec = rowwise.spec, columnwise.spec
    if x_MK.stride(1) != 1 or row_spec.hadamard is not None or not _across(column_spec):
        return None
    if cpu.PAIR_ROWS % (row_spec.block[0] or 1):
        return None
    row_request, row_given = _request(x_MK, row_spec, rowwise.key, rowwise.amax, machine, values=True)
    amax = columnwise.amax
    if amax is None and row_given is not None and row_spec.block == column_spec.block == (None, None):
        amax = row_given[0]  # that of x.T too
    column_request, column_given = _request(x_MK.T, column_spec, columnwise.key, amax, machine, values=values)
    outputs = cpu.quantize_both(x_MK, row_request, column_request, machine)
    return None if outputs is None else (_Result(outputs[0], row_given), _Result(outputs[1], column_given))
