"""Comparison of a product with one that is made again.

Two ways: by the same backend from the same operands, equal in every bit on a CPU, which finds what
happens once; and in float64 for some of the rows, which finds what a backend always does. There
each element must lie within

    2⁻⁸·|y| + (K + 8)·2⁻²⁴·Σ|a|·|b|                    (K: length of the contraction)

the rounding of the result to BF16 and the largest error of sums in float32. Tensor cores that
multiply codes sum in fewer bits: the second factor is four times the share that their model
(`backends.tensor_cores`) errs by in some rows and columns of these operands, or 2⁻⁸ on a unit whose
sums are not known. Elements beyond it must be what the model gives, however K is split; where they
are many, some are computed in the model, and the rest must lie within 2⁻⁸ of Σ|a|·|b|.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp4train.audits.bits import FEW, Difference, changed_elements, difference, where_differing
from fp4train.audits.call import Product
from fp4train.audits.fault import CallFinding
from fp4train.backends import BACKENDS, Prepared, asks_fast_sums, tensor_cores
from fp4train.backends.tensor_cores import TensorCore
from fp4train.nn.executors.joined import Term, columns_of
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
"""Elements of a product that are computed in the model of the tensor cores."""
_GOLDEN: Final = 0.6180339887498949
"""Multiples of it, modulo 1, lie evenly, whatever the stride."""
_SPLITS: Final = range(1, 9)
"""Parts of K that a GPU may sum apart."""


def decoded(operand: Prepared) -> Decoded:
    """The values of an operand, by the readable reference."""
    if isinstance(operand, Quantized):
        return operand.decoded()
    return operand


def exact(operand: Prepared, rows: Tensor | None = None) -> Tensor:
    """The values of an operand with all scales, float64 [R, C], or of these rows of it."""
    values, scale, _ = decoded(operand)
    if rows is not None:
        values = values[rows]
        if scale is not None and scale.dim():
            scale = scale[rows]
    values = values.double()
    if scale is None:
        return values
    return values * scale.double()


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that rounds most."""
    return max(dtypes, key=_RELATIVE.__getitem__)


def sampled(count: int, turn: int = 0) -> Tensor:
    """Indices of at most `ROWS` of `count` rows, evenly spaced, the first and the last included.

    Args:
        turn: number of the audit; in each other rows between the first and the last are taken.
    """
    if count <= ROWS:
        return torch.arange(count)
    shift = turn * _GOLDEN % 1.0
    stride = (count - 2) / (ROWS - 2)
    places = torch.arange(ROWS - 2, dtype=torch.float64) + shift
    between = 1 + (places * stride).long()
    return torch.cat([torch.tensor([0]), between, torch.tensor([count - 1])])


def bounds(
    left: Prepared,
    right: Prepared,
    bias: Tensor | None,
    result: Tensor,
    *,
    further: Sequence[Term] = (),
    share: float | None = None,
    turn: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(indices of rows, the product of these rows in float64, the largest error of each element).

    Args:
        further: operands of products that are added within it.
        share: the largest error of its sums as a share of Σ|a|·|b|; None: that of float32 sums.
        turn: number of the audit, for `sampled`.
    """
    rows = sampled(len(result), turn).to(result.device)
    lefts = [exact(left, rows), *(exact(operand, rows) for operand, _ in further)]
    rights = [exact(right), *(exact(operand) for _, operand in further)]
    a = torch.cat(lefts, dim=1)
    b = torch.cat(rights, dim=1)
    product = a @ b.T
    magnitude = a.abs() @ b.abs().T
    if bias is not None:
        product = product + bias.double()
        magnitude = magnitude + bias.double().abs()
    columns = a.shape[1] + sum(map(columns_of, further))
    sums = (columns + 8) * _SUM if share is None else share
    smallest = torch.finfo(result.dtype).smallest_normal
    bound = _RELATIVE[result.dtype] * product.abs() + sums * magnitude + smallest
    # a CPU takes smaller numbers than normal ones for zeros
    flushed = a.abs().sum(1, keepdim=True) + b.abs().sum(1)
    bound = bound + torch.finfo(torch.float32).tiny * flushed
    if bias is not None:
        # the bias is rounded to the dtype of the result before it is added
        bound = bound + _RELATIVE[result.dtype] * bias.double().abs()
    return rows, product, bound


def beyond_rounding(result: Tensor, rows: Tensor, product: Tensor, bound: Tensor) -> Tensor:
    """Where rows of a result lie beyond the bound of its rounding: bool [rows, S]."""
    value = result[rows].double()
    close = (value - product).abs() <= bound
    same = (product == value) | (product.isnan() & value.isnan())
    largest = torch.finfo(result.dtype).max
    may_overflow = (product.abs() + bound >= largest) & ~value.isnan()
    overflows = may_overflow & (value.abs() >= largest / 2)
    return ~(close | same | overflows)


def compare(product: Product, gemm: Gemm, turn: int = 0) -> Difference | None:
    """The elements of a product that are not those of its operands; None: all are. Of a product
    that was added to a float32 sum it compares what was added.

    Args:
        turn: number of the audit, for `sampled`.
    """
    value = product.result
    if product.earlier_sum is not None:
        value = (value.double() - product.earlier_sum.double()).float()
    rows, exact_product, bound = _bounds(product, error_share(product, gemm), turn)
    wrong = beyond_rounding(value, rows, exact_product, bound)
    if bool(wrong.any()):
        error = (value[rows].double() - exact_product).abs()
        wrong = _not_of_unit(product, gemm, turn, _Beyond(rows, wrong, error, bound))
    where = torch.zeros(product.result.shape, dtype=torch.bool, device=product.result.device)
    where[rows] = wrong
    again = repeated(product, gemm)
    if again is not None:
        apart = difference(product.result, again)
        if apart is not None:
            where |= apart.where
    return where_differing(where)


def _bounds(product: Product, share: float | None, turn: int) -> tuple[Tensor, Tensor, Tensor]:
    """`bounds` of a product, or of what was added to a float32 sum."""
    rows, exact_product, bound = bounds(
        product.left, product.right, product.bias, product.result, share=share, turn=turn
    )
    if product.earlier_sum is not None:
        bound = bound + rounding_of_sum(product.earlier_sum[rows], exact_product)
    return rows, exact_product, bound


def rounding_of_sum(earlier_sum: Tensor, term: Tensor) -> Tensor:
    """The largest error of `term`, seen as the difference of the float32 sums after and before."""
    return 2.0**-22 * (earlier_sum.double().abs() + term.abs())


def error_share(product: Product, gemm: Gemm) -> float | None:
    """The largest error of the sums of a product of codes as a share of Σ|a|·|b|; None: they are
    summed in float32.
    """
    if not product.elsewhere or not gemm.operands.quantised:
        return None
    left = product.left
    right = product.right
    if not isinstance(left, Quantized) or not isinstance(right, Quantized):
        return None
    unit = _unit(product, left)
    if unit is None:
        return _UNKNOWN_SUM
    fast = _sums_fast(product, gemm)
    share = _MARGIN * tensor_cores.error_share(left, right, unit, fast=fast)
    float32_share = (left.shape[1] + 8) * _SUM
    if share > float32_share:
        return share
    return float32_share


def _unit(product: Product, operand: Quantized) -> TensorCore | None:
    if product.capability is None:
        return None
    return tensor_cores.unit_for(product.capability, operand.spec.format)


def _sums_fast(product: Product, gemm: Gemm) -> bool:
    return asks_fast_sums(gemm.operands, gemm.name, product.backend or gemm.backend)


class _Beyond(NamedTuple):
    """The elements of a product beyond the bound of its rounding.

    rows: indices of the rows that were compared, int64 [R].
    wrong: where they are, bool [R, S].
    error: distance from the product in float64, [R, S].
    bound: its bound, [R, S].
    """

    rows: Tensor
    wrong: Tensor
    error: Tensor
    bound: Tensor


def _not_of_unit(product: Product, gemm: Gemm, turn: int, beyond: _Beyond) -> Tensor:
    """The elements that are wrong, and not what the model of the tensor cores gives: bool [R, S].

    Of many elements those farthest beyond their bound are computed in the model, and some that lie
    evenly among all. Where most of the latter are as in the model, elements that were not computed
    may err as much as on a unit whose sums are not known.
    """
    left = product.left
    if not isinstance(left, Quantized) or not isinstance(product.right, Quantized):
        return beyond.wrong
    unit = _unit(product, left)
    if unit is None:
        return beyond.wrong
    excess = (beyond.error - beyond.bound)[beyond.wrong]
    checked, even = _checked(excess)
    rows, columns = beyond.wrong.nonzero()[checked].unbind(dim=1)
    fast = _sums_fast(product, gemm)
    modelled = _as_modelled(product, unit, fast, beyond.rows[rows], columns)
    wrong = beyond.wrong.clone()
    wrong[rows[modelled], columns[modelled]] = False
    if len(checked) < len(excess) and float(modelled[even].double().mean()) > 0.5:
        *_, limit = _bounds(product, _UNKNOWN_SUM, turn)
        passing = beyond.error <= limit
        passing[rows, columns] = False
        wrong &= ~passing
    return wrong


def _checked(excess: Tensor) -> tuple[Tensor, Tensor]:
    """(Indices of at most `_CHECKED` elements: half of them have the largest excess, half lie
    evenly among all; which of these lie evenly, bool).
    """
    count = len(excess)
    if count <= _CHECKED:
        return torch.arange(count), torch.ones(count, dtype=torch.bool)
    farthest = excess.nan_to_num(nan=torch.inf).topk(_CHECKED // 2).indices
    even = torch.linspace(0, count - 1, _CHECKED // 2, dtype=torch.float64).round().long()
    checked = torch.unique(torch.cat([farthest, even]))
    return checked, torch.isin(checked, even)


def _as_modelled(
    product: Product, unit: TensorCore, fast: bool, rows: Tensor, columns: Tensor
) -> Tensor:
    """Whether each of these elements is what the model of the tensor cores gives, bool."""
    left = product.left
    right = product.right
    assert isinstance(left, Quantized) and isinstance(right, Quantized)
    value = product.result[rows, columns].double()
    relative = _RELATIVE[product.result.dtype]
    modelled = torch.zeros(len(rows), dtype=torch.bool)
    for splits in _SPLITS:
        sums = tensor_cores.product(
            left, right, unit, fast=fast, splits=splits, rows=rows, columns=columns
        )
        term = sums.diagonal().double()
        total = term
        rounding = torch.zeros_like(term)
        if product.bias is not None:
            total = total + product.bias[columns].to(product.result.dtype).double()
        if product.earlier_sum is not None:
            earlier_sum = product.earlier_sum[rows, columns]
            total = total + earlier_sum.double()
            rounding = rounding_of_sum(earlier_sum, term)
        # the sum is rounded before the bias is added, or only after it
        rounding = rounding + relative * (term.abs() + total.abs())
        modelled |= (value - total).abs() <= rounding
    return modelled


def repeated(product: Product, gemm: Gemm) -> Tensor | None:
    """The product, made again by its backend; None: it was added to a sum, or on another device."""
    if product.earlier_sum is not None or product.elsewhere:
        return None
    backend = BACKENDS[gemm.backend].summing(gemm.operands.accumulator)
    return backend.product(
        product.left, product.right, out_dtype=product.result.dtype, bias=product.bias
    )


def cause_of_product(product: Product, gemm: Gemm) -> str:
    """The fault that gives a product in place of that of its operands."""
    again = repeated(product, gemm)
    if again is None or difference(product.result, again) is None:
        total = exact(product.left) @ exact(product.right).T
        for addend in (product.bias, product.earlier_sum):
            if addend is not None:
                total = total + addend.double()
        again = total.to(product.result.dtype)
    return cause(product.result, again)


def returned(result: Tensor, expected: Tensor, what: str) -> Iterator[CallFinding]:
    """The finding that y, dx or dw is something else than `what`."""
    apart = difference(result, expected)
    if apart is not None:
        sentence = f"the layer returns something else than {what}"
        yield CallFinding(sentence, apart, partial(cause, result, expected))


def cause(result: Tensor, expected: Tensor) -> str:
    """The fault that gives `result` in place of `expected`; empty: none is known."""
    for name, factor in (("zero", 0), ("doubled", 2)):
        if torch.equal(result, (expected * factor).to(result.dtype)):
            return f"the product is {name}"
    apart = difference(result, expected)
    if apart is None:
        return ""
    if not bool(result.isfinite().all()):
        return "NaN or infinity"
    if apart.count <= FEW:
        return f"single elements changed ({changed_elements(expected, result, apart.where)})"
    words = _factor(result[apart.where].double(), expected[apart.where].double())
    rows = apart.where.any(dim=1).nonzero().flatten()
    if len(rows) == 1 and len(result) > 1:
        return f"row {int(rows[0])} alone is another one{words}"
    if words:
        return f"the whole product is another one{words}"
    return ""


def _factor(value: Tensor, reference: Tensor) -> str:
    """ ", multiplied by 1.01" where one factor explains all elements; else empty."""
    large = reference.abs() >= reference.abs().mean()
    ratios = value[large] / reference[large]
    if not ratios.numel() or not bool(ratios.isfinite().all()):
        return ""
    middle = float(ratios.median())
    scatter = float((ratios - middle).abs().max())
    if scatter > 2.0**-6 * max(abs(middle), 1e-3):
        return ""
    if f"{middle:.3g}" == "1":
        return ""
    return f", multiplied by {middle:.3g}"
