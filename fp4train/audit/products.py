"""Comparison of a product with one that is made again.

Two ways: by the same backend from the same operands, equal in every bit on a CPU, which finds what
happens once; and in float64 for some of the rows, which finds what a backend always does. There
each element must lie within

    2⁻⁸·|y| + (K + 8)·2⁻²⁴·Σ|a|·|b|                    (K: length of the contraction)

the rounding of the result to BF16 and the largest error of sums in float32. Tensor cores that
multiply codes sum in fewer bits: the second factor is four times the share that their model
(`backends.tensor_cores`) errs by in some rows and columns of these operands, or 2⁻⁸ on a unit whose
sums are not known. Elements beyond it must be what the model gives, however K is split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from fp4train.audit.bits import Difference, difference, where_differing
from fp4train.audit.call import Product
from fp4train.backends import BACKENDS, Prepared, tensor_cores
from fp4train.backends.tensor_cores import TensorCore
from fp4train.precision.layer_plan import Gemm
from fp4train.quantize import Decoded, Quantized

ROWS: Final = 256
"""Rows of a product that are computed in float64."""
_RELATIVE: Final = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-23}
_SUM: Final = 2.0**-24
_UNKNOWN_SUM: Final = 2.0**-8
_MARGIN: Final = 4.0
"""Errors of other rows, as a multiple of those that were looked at."""
_CHECKED: Final = 48
_SPLITS: Final = range(1, 9)
"""Parts of K that a GPU may sum apart."""
_FEW: Final = 4


def decoded(operand: Prepared) -> Decoded:
    """The values of an operand, by the readable reference."""
    if isinstance(operand, Quantized):
        return operand.decoded()
    return operand


def exact(operand: Prepared, rows: Tensor | None = None) -> Tensor:
    """The values of an operand with all scales, float64 [R, C], or of these rows of it."""
    values, scale = decoded(operand)
    if rows is not None:
        values = values[rows]
        if scale is not None and scale.dim():
            scale = scale[rows]
    values = values.double()
    return values if scale is None else values * scale.double()


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that rounds most."""
    return max(dtypes, key=_RELATIVE.__getitem__)


def sampled(count: int) -> Tensor:
    """Indices of at most `ROWS` of `count` rows, evenly spaced, the first and the last included."""
    if count <= ROWS:
        return torch.arange(count)
    return torch.linspace(0, count - 1, ROWS, dtype=torch.float64).round().long()


def bounds(
    first: Prepared,
    second: Prepared,
    bias: Tensor | None,
    result: Tensor,
    *,
    share: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(indices of rows, the product of these rows in float64, the largest error of each element).

    Args:
        share: the largest error of its sums as a share of Σ|a|·|b|; None: that of float32 sums.
    """
    rows = sampled(len(result)).to(result.device)
    a, b = exact(first, rows), exact(second)
    product = a @ b.T
    magnitude = a.abs() @ b.abs().T
    if bias is not None:
        product = product + bias.double()
        magnitude = magnitude + bias.double().abs()
    sums = (a.shape[1] + 8) * _SUM if share is None else share
    smallest = torch.finfo(result.dtype).smallest_normal
    bound = _RELATIVE[result.dtype] * product.abs() + sums * magnitude + smallest
    if bias is not None:
        # the bias is rounded to the dtype of the result before it is added
        bound = bound + _RELATIVE[result.dtype] * bias.double().abs()
    return rows, product, bound


def beyond_rounding(result: Tensor, rows: Tensor, product: Tensor, bound: Tensor) -> Tensor:
    """Where rows of a result lie beyond the bound of its rounding: bool [rows, S]."""
    value = result[rows].double()
    largest = torch.finfo(result.dtype).max
    overflows = (product.abs() + bound >= largest) & ~value.isnan()
    same = (product == value) | (product.isnan() & value.isnan())
    return ~(((value - product).abs() <= bound) | same | (overflows & (value.abs() >= largest / 2)))


def compare(product: Product, gemm: Gemm) -> Difference | None:
    """The elements of a product that are not those of its operands; None: all are."""
    result = product.result
    if product.before is not None:
        return _compare_sum(product, gemm)
    share = error_share(product, gemm)
    rows, exact_product, bound = bounds(
        product.first, product.second, product.bias, result, share=share
    )
    wrong = beyond_rounding(result, rows, exact_product, bound)
    where = torch.zeros(result.shape, dtype=torch.bool, device=result.device)
    where[rows] = wrong
    if bool(wrong.any()) and _as_units_sum(product, gemm, where):
        where.zero_()
    again = repeated(product, gemm)
    if again is not None:
        apart = difference(result, again)
        if apart is not None:
            where |= apart.where
    return where_differing(where)


def _compare_sum(product: Product, gemm: Gemm) -> Difference | None:
    """As `compare`, of a product that was added to a float32 sum."""
    assert product.before is not None
    term = product.result.double() - product.before.double()
    share = error_share(product, gemm)
    rows, exact_product, bound = bounds(
        product.first, product.second, None, product.result, share=share
    )
    bound = bound + rounding_of_sum(product.before[rows], exact_product)
    wrong = beyond_rounding(term.float(), rows, exact_product, bound)
    where = torch.zeros(product.result.shape, dtype=torch.bool, device=product.result.device)
    where[rows] = wrong
    return where_differing(where)


def rounding_of_sum(before: Tensor, term: Tensor) -> Tensor:
    """The largest error of `term`, seen as the difference of the float32 sums after and before."""
    return 2.0**-22 * (before.double().abs() + term.abs())


def error_share(product: Product, gemm: Gemm) -> float | None:
    """The largest error of the sums of a product of codes as a share of Σ|a|·|b|; None: they are
    summed in float32.
    """
    if not product.elsewhere or not gemm.operands.quantised:
        return None
    first, second = product.first, product.second
    if not isinstance(first, Quantized) or not isinstance(second, Quantized):
        return None
    unit = _unit(product, first)
    if unit is None:
        return _UNKNOWN_SUM
    fast = gemm.operands.accumulator == "fast"
    share = _MARGIN * tensor_cores.error_share(first, second, unit, fast=fast)
    float32_share = (first.shape[1] + 8) * _SUM
    return share if share > float32_share else float32_share


def _unit(product: Product, operand: Quantized) -> TensorCore | None:
    if product.capability is None:
        return None
    return tensor_cores.unit_for(product.capability, operand.spec.format)


def _as_units_sum(product: Product, gemm: Gemm, where: Tensor) -> bool:
    """Whether the elements at these places, or the first `_CHECKED` of them, are what the model of
    the tensor cores gives.
    """
    first, second = product.first, product.second
    if not isinstance(first, Quantized) or not isinstance(second, Quantized):
        return False
    unit = _unit(product, first)
    if unit is None:
        return False
    rows, columns = where.nonzero()[:_CHECKED].unbind(dim=1)
    value = product.result[rows, columns].double()
    close = torch.zeros(len(rows), dtype=torch.bool)
    for splits in _SPLITS:
        fast = gemm.operands.accumulator == "fast"
        sums = tensor_cores.product(
            first, second, unit, fast=fast, splits=splits, rows=rows, columns=columns
        )
        modelled = sums.diagonal().double()
        if product.bias is not None:
            modelled = modelled + product.bias[columns].double()
        rounding = 2 * _RELATIVE[product.result.dtype] * modelled.abs()
        close |= (value - modelled).abs() <= rounding
    return bool(close.all())


def repeated(product: Product, gemm: Gemm) -> Tensor | None:
    """The product, made again by its backend; None: it was added to a sum, or on another device."""
    if product.before is not None or product.elsewhere:
        return None
    backend = BACKENDS[gemm.backend].summing(gemm.operands.accumulator)
    return backend.product(
        product.first, product.second, out_dtype=product.result.dtype, bias=product.bias
    )


def explain(result: Tensor, expected: Tensor, bias: Tensor | None = None) -> tuple[str, ...]:
    """The names of the faults that give `result` in place of `expected`."""
    names = [
        name
        for name, candidate in _candidates(expected, bias)
        if difference(result, candidate.to(result.dtype)) is None
    ]
    return tuple(names or _structural(result, expected))


def _candidates(expected: Tensor, bias: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    yield "the product is zero", torch.zeros_like(expected)
    yield "the product is doubled", expected * 2
    yield "the product is halved", expected / 2
    yield "the product is negated", -expected
    if bias is not None:
        yield "the bias is left out", expected - bias.to(expected.dtype)
        yield "the bias is added twice", expected + bias.to(expected.dtype)
    if expected.dim() == 2 and expected.shape[0] == expected.shape[1]:
        yield "the product is transposed", expected.T.contiguous()


def _structural(result: Tensor, expected: Tensor) -> list[str]:
    """What the place of the differences says, where no fault of the list gives the bits."""
    apart = difference(result, expected)
    if apart is None:
        return []
    if not bool(result.isfinite().all()):
        return ["NaN or infinity"]
    if apart.count <= _FEW:
        changed = ", ".join(
            f"{float(expected[at]):.4g} → {float(result[at]):.4g}"
            for at in map(tuple, apart.where.nonzero().tolist())
        )
        return [f"single elements changed ({changed})"]
    value, reference = result.double(), expected.double()
    rows = apart.where.any(dim=1).nonzero().flatten()
    columns = apart.where.any(dim=0).nonzero().flatten()
    if len(rows) == 1 and len(result) > 1:
        at = int(rows[0])
        return [f"row {at} alone is another one{_factor(value[at], reference[at])}"]
    if len(columns) == 1 and result.shape[1] > 1:
        at = int(columns[0])
        words = _factor(value[:, at], reference[:, at])
        return [f"column {at} alone is another one{words}"]
    words = _factor(value, reference)
    return [f"the whole product is another one{words}"] if words else []


def _factor(value: Tensor, reference: Tensor) -> str:
    """ ", multiplied by 1.01" where one factor explains all elements; else empty."""
    large = reference.abs() >= reference.abs().mean()
    ratios = value[large] / reference[large]
    if not ratios.numel() or not bool(ratios.isfinite().all()):
        return ""
    middle = float(ratios.median())
    if float((ratios - middle).abs().max()) > 2.0**-6 * max(abs(middle), 1e-3):
        return ""
    if f"{middle:.3g}" == "1":
        return ""
    return f", multiplied by {middle:.3g}"
