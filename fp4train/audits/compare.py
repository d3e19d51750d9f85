"""Comparison of one call of a layer with the readable reference.

Of each GEMM both operands are compared code by code with those that the reference makes, then the
product with that of the operands that were multiplied, then what the layer returned with the
product. So a fault is named where it arises, and not by what follows from it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fp4train.audits import products
from fp4train.audits.bits import Difference, difference, where_differing
from fp4train.audits.call import ObservedCall, Product
from fp4train.audits.expected import AuditedCall, OperandSource
from fp4train.audits.fault import Audited, CallFinding, Fault, first_fitting, joined
from fp4train.audits.hypotheses import Suspect
from fp4train.audits.recorder import CallRecorder
from fp4train.audits.rounding import rounding_of
from fp4train.audits.terms import further_terms, of_means
from fp4train.backends import GEMMS, OPERANDS, Prepared
from fp4train.backends.protocol import NotShownError
from fp4train.nn.executors.joined import Term
from fp4train.precision.layer_plan import Gemm
from fp4train.quantize import Decoded, Quantized
from fp4train.quantize.quantized import apply_block_scales, operand_width
from fp4train.text import first_line

_DECISIONS: Final = 16.0
"""Elements that chance decides, above which all of them do not go to the nearest value by
chance.
"""

_FLOAT32: Final = {"highest": None, "high": 2.0**-9, "medium": 2.0**-6}
"""Setting of torch → the largest error of a product in float32, as a share of Σ|a|·|b|, for `bounds`."""


@torch.no_grad()
def compare(audited: AuditedCall, step: int = 0) -> Audited:
    """Compare a call, whose backward pass has run, with what it should have been. A GEMM whose
    comparison fails leaves the faults of the others.

    Args:
        step: number of the audit, for `products.sampled`.
    """
    name = audited.call.name
    faults = [_fault(name, gemm, finding) for gemm, finding in _of_call(audited)]
    compared = []
    uncovered = []
    failures = []
    for gemm in audited.plan.gemms:
        comparison = GemmComparison(audited, gemm, step)
        try:
            for finding in comparison.findings():
                faults.append(_fault(name, gemm.name, finding))
            if comparison.compared:
                compared.append(gemm.name)
        except Exception as error:
            failures.append(f"{gemm.name}: {first_line(error)}")
        uncovered += [f"{gemm.name}{reason}" for reason in comparison.uncovered]
    return Audited(
        layer=name,
        step=step,
        gemms=compared,
        faults=faults,
        uncovered=uncovered,
        failures=failures,
    )


def compare_records(
    name: str,
    recorder: CallRecorder,
    step: int,
    expect: Callable[[int, ObservedCall], AuditedCall] = lambda number, record: AuditedCall(record),
) -> Audited:
    """The audit of a layer from the records of its calls; one without a record at least says why.

    Args:
        expect: gives what the record of this number should have been.
    """
    if recorder.failure is not None:
        return Audited(layer=name, step=step, failures=(recorder.failure,))
    if recorder.uncovered is not None:
        return Audited(layer=name, step=step, uncovered=(recorder.uncovered,))
    calls = [expect(number, record) for number, record in enumerate(recorder.records)]
    audits = [compare(audited, step) for audited in calls]
    if audits:
        return joined(audits)
    return Audited(layer=name, step=step)


def _fault(layer: str, gemm: str, finding: CallFinding) -> Fault:
    """The fault of a finding; it counts without a cause."""
    cause = ""
    with suppress(Exception):
        cause = finding.cause()
    apart = finding.apart
    return Fault(
        layer=layer,
        what=finding.what,
        gemm=gemm,
        operand=finding.operand,
        first=() if apart is None else apart.first,
        share=0.0 if apart is None else apart.share,
        cause=cause,
    )


def _of_call(audited: AuditedCall) -> Iterator[tuple[str, CallFinding]]:
    """(GEMM, or empty; finding): the executor must run the plan of the step, on the weight that the
    optimizer holds.
    """
    call = audited.call
    for gemm in GEMMS:
        if audited.plan.operands[gemm] != call.plan.operands[gemm]:
            yield gemm, CallFinding("the executor runs another plan than that of the step")
    if audited.weight is None or call.w is None:
        return
    apart = difference(call.w, audited.weight)
    if apart is not None:
        candidates = {"rounded to BF16": audited.weight.bfloat16().to(audited.weight.dtype)}
        if audited.previous is not None and audited.previous.w is not None:
            candidates["weight of the step before"] = audited.previous.w
        what = "the layer is called with another weight than the optimizer holds"
        yield "", CallFinding(what, apart, partial(_equal_one, call.w, candidates), "w")


def _equal_one(tensor: Tensor, candidates: dict[str, Tensor]) -> str:
    """The name of the first candidate that has the bits of a tensor."""
    return first_fitting(
        (name, partial(torch.equal, tensor, candidate)) for name, candidate in candidates.items()
    )


class GemmComparison:
    """The comparison of one GEMM of a call.

    Attributes:
        compared: whether anything of it could be compared.
        uncovered: reasons why parts of it could not be, each the end of a sentence that begins
            with the GEMM.
    """

    def __init__(self, audited: AuditedCall, gemm: Gemm, turn: int) -> None:
        self.audited = audited
        self.gemm = gemm
        self.turn = turn
        self.compared = False
        self.uncovered: list[str] = []

    def findings(self) -> Iterator[CallFinding]:
        """What differs, in the order of the computation."""
        call = self.audited.call
        name = self.gemm.name
        result = call.result(name)
        product = call.products.get(name)
        if result is None and name in call.unseen:
            self.uncovered.append(f": {call.unseen[name]}")
        if product is None:
            if result is not None:
                yield from self._of_high_precision(result)
            return
        self.compared = True
        operands = (product.left, product.right)
        for tensor, operand in zip(OPERANDS[name], operands, strict=True):
            yield from self._of_operand(tensor, operand)
        if not product.joined:
            yield from self._of_product(product)
        recipe = self.audited.plan.recipe
        if recipe.centred or recipe.residual is not None:
            yield from of_means(self.audited, name)
            if result is not None:
                yield from self._of_terms(product, result)
        elif result is not None and call.cut is not None and call.cut.summed == name:
            if call.cut.terms is None:
                self.uncovered.append(": its sum, of which other ranks saw no term")
            else:
                bias = call.bias if name == "fprop" else None
                yield from call.cut.findings(result, bias, self.audited.dtype)
        elif result is not None:
            expected = product.result[: len(result)].to(result.dtype)  # without rows of padding
            yield from products.returned(result, expected.view(result.shape), "the product")

    def _of_operand(self, tensor: str, operand: Prepared) -> Iterator[CallFinding]:
        source = self.audited.source(self.gemm.name, tensor)
        if source is None:
            self.uncovered.append(f", operand {tensor}: its values are on other ranks")
            return
        finding = _codes_apart(operand, source)
        if finding is not None:
            values = products.decoded(operand)
            suspect = Suspect(self.audited, self.gemm.name, tensor, source, values)
            yield CallFinding(*finding, suspect.cause, tensor)

    def _of_product(self, product: Product) -> Iterator[CallFinding]:
        executed: Gemm = getattr(self.audited.call.plan, self.gemm.name)
        apart = products.compare(product, executed, self.turn)
        if apart is not None:
            cause = partial(products.cause_of_product, product, executed)
            yield CallFinding("the product is not that of its operands", apart, cause)

    def _of_high_precision(self, result: Tensor) -> Iterator[CallFinding]:
        """A product of torch's own, whose operands are not seen."""
        name = self.gemm.name
        left, right = [self.audited.source(name, tensor) for tensor in OPERANDS[name]]
        if left is None or right is None:
            self.uncovered.append(": a tensor of it is on other ranks")
            return
        self.compared = True
        terms = [(left.decoded(), right.decoded())]
        setting = torch.get_float32_matmul_precision()
        share = _FLOAT32[setting] if self.audited.dtype is torch.float32 else None
        yield from self._of_sum(result, terms, "the product is not that of the plan", share)

    def _of_terms(self, product: Product, result: Tensor) -> Iterator[CallFinding]:
        """The sum of a product of codes and of those that follow it."""
        try:
            further = further_terms(self.audited, self.gemm, product)
        except NotShownError as error:
            self.uncovered.append(f": {error}")
            return
        terms = [(products.decoded(product.left), products.decoded(product.right)), *further]
        share = products.error_share(product, self.gemm)
        what = "the layer returns something else than the sum of its products"
        yield from self._of_sum(result, terms, what, share)

    def _of_sum(
        self, result: Tensor, terms: Sequence[Term], what: str, share: float | None = None
    ) -> Iterator[CallFinding]:
        """y, dx or dw must be the sum of these products and the bias within its rounding.

        Args:
            share: largest error of the sums, for `products.bounds`.
        """
        call = self.audited.call
        name = self.gemm.name
        bias = call.bias if name == "fprop" else None
        earlier_sum = call.dw_before if name == "wgrad" else None
        if earlier_sum is not None:
            result = (result.double() - earlier_sum.double()).float()
        dtype = self.audited.dtype
        narrow = result.to(products.coarser(result.dtype, dtype))
        rows, exact, bound = products.bounds(
            *terms[0], bias, narrow, further=terms[1:], share=share, turn=self.turn
        )
        # small numbers are rounded to multiples of the smallest one of a dtype
        for rounded in (result.dtype, dtype):
            limits = torch.finfo(rounded)
            bound = bound + limits.smallest_normal * limits.eps
        if narrow.dtype is not dtype:  # it is rounded twice
            bound = bound + limits.eps * exact.abs()
        if earlier_sum is not None:
            bound = bound + products.rounding_of_sum(earlier_sum[rows], exact)
        where = torch.zeros(result.shape, dtype=torch.bool)
        where[rows] = products.beyond_rounding(narrow, rows, exact, bound)
        apart = where_differing(where)
        if apart is not None:
            cause = partial(products.cause, narrow[rows], exact.to(narrow.dtype))
            yield CallFinding(what, apart, cause)


def _codes_apart(operand: Prepared, source: OperandSource) -> tuple[str, Difference] | None:
    """What differs between an operand and the reference; None: nothing does."""
    if isinstance(operand, Quantized):
        expected = source.quantized()
        if expected is None:
            values = operand.decoded()
            return _values_apart(values, source.decoded())
        return _quantized_apart(operand, expected, source)
    return _values_apart(operand, source.decoded())


def _quantized_apart(
    operand: Quantized, expected: Quantized, source: OperandSource
) -> tuple[str, Difference] | None:
    rows, columns = expected.element_codes.shape
    scales = _scales_of_rows(operand)[:rows, : _scales_of_rows(expected).shape[1]]
    apart_in_scales = difference(scales, _scales_of_rows(expected))
    if not source.rounds_freely:
        codes = operand.element_codes.view(torch.uint8)[:rows, :columns]
        if (apart := difference(codes, expected.element_codes)) is not None:
            return "the codes are not those of the reference", apart
    if apart_in_scales is not None:
        return "the block scales are not those of the reference", apart_in_scales
    factor = operand.global_decode()
    expected_factor = expected.global_decode()
    if factor is not None and expected_factor is not None:
        apart = difference(factor.reshape(-1), expected_factor.reshape(-1))
        if apart is not None:
            return "the global scale is not that of the reference", apart
    if source.rounds_freely:
        columns = operand_width(expected.spec, expected.shape[1])
    if operand.element_codes.shape != (rows, columns):
        apart = where_differing(_values_beyond(operand, rows, columns))
        if apart is not None:
            return "its padding is not zero", apart
    if source.rounds_freely:
        return _rounding_apart(operand, expected, source)
    return None


def _values_beyond(operand: Quantized, rows: int, columns: int) -> Tensor:
    """Where elements beyond so many rows and columns are not zero: bool, of all codes."""
    values = operand.element_values()
    if not operand.spec.has_outer_scale:
        values = apply_block_scales(values, operand.block_scales(), operand.spec)
    wrong = values != 0
    wrong[:rows, :columns] = False
    return wrong


def _scales_of_rows(codes: Quantized) -> Tensor:
    """The block scales of each row: a backend's square blocks have them so."""
    scales = codes.block_scales()
    height = codes.spec.block[0]
    if height in (1, None):
        return scales
    return scales.repeat_interleave(height, dim=0)[: codes.shape[0]]


def _rounding_apart(
    operand: Quantized, nearest: Quantized, source: OperandSource
) -> tuple[str, Difference] | None:
    """What speaks against unbiased rounding by random bits that are not known; None: nothing.

    Args:
        nearest: the operand rounded to nearest.
    """
    assert source.spec is not None
    rounding = rounding_of(operand.decoded(), source.tensor, source.spec, None, source.amax)
    apart = where_differing(rounding.strange)
    if apart is not None:
        return "codes are none of the two neighbours of their elements", apart
    everywhere = where_differing(torch.ones_like(rounding.strange))
    assert everywhere is not None
    to_nearest = difference(operand.decoded().values, nearest.decoded().values) is None
    if to_nearest and rounding.undecided > _DECISIONS:
        return "all codes are those of rounding to nearest, planned stochastically", everywhere
    if rounding.unbiased:
        return None
    what = (
        f"stochastic rounding is biased by {rounding.bias:.1f} standard deviations, between 0 and "
        f"the smallest value by {rounding.zeros:.1f}"
    )
    return what, everywhere


def _values_apart(values: Decoded, expected: Decoded) -> tuple[str, Difference] | None:
    if (apart := difference(values.values, expected.values)) is not None:
        return "the values of the codes are not those of the reference", apart
    apart = difference(_global_scale(values), _global_scale(expected))
    if apart is not None:
        return "the global scale is not that of the reference", apart
    return None


def _global_scale(values: Decoded) -> Tensor:
    """The global scale, flat: 1 where there is none."""
    if values.scale is None:
        return torch.ones(1)
    return values.scale.reshape(-1)
