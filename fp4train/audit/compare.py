"""Comparison of one call of a layer with the readable reference.

Of each GEMM both operands are compared code by code with those that the reference makes, then the
product with that of the operands that were multiplied, then what the layer returned with the
product. So a fault is named where it arises, and not by what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fp4train.audit import products
from fp4train.audit.bits import Difference, difference, where_differing
from fp4train.audit.call import ObservedCall, Product
from fp4train.audit.cut import CutCall
from fp4train.audit.expected import Expectation, OperandSource, source_of
from fp4train.audit.fault import Audited, Fault
from fp4train.audit.hypotheses import Suspect, explain
from fp4train.audit.rounding import rounding_of
from fp4train.audit.terms import TermComparison
from fp4train.backends import GEMMS, OPERANDS, Prepared
from fp4train.precision.layer_plan import Gemm
from fp4train.quantize import Decoded, Quantized, QuantSpec
from fp4train.quantize.quantized import apply_block_scales, operand_width
from fp4train.text import first_line

_DECISIONS: Final = 16.0
"""Elements that chance decides, above which all of them do not go to the nearest value by
chance.
"""


@dataclass
class CallComparison:
    """The comparison of one call.

    Args:
        call: the call, whose backward pass has run.
        expected: plan and position that it should have had.
        previous: call of the same layer in the step before; None: it was not kept.
        turn: number of the audit, for `products.sampled`: `run` sets it to the step.
    """

    call: ObservedCall
    expected: Expectation
    previous: ObservedCall | None = None
    turn: int = 0
    faults: list[Fault] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @torch.no_grad()
    def run(self, step: int = 0) -> Audited:
        """Compare all GEMMs. One whose comparison fails leaves the faults of the others."""
        self.turn = step
        self._compare_plan()
        self._compare_weight()
        compared = []
        for gemm in self.expected.plan.gemms:
            try:
                if self._compare_gemm(gemm):
                    compared.append(gemm.name)
            except Exception as error:
                self.failures.append(f"{gemm.name}: its comparison failed: {first_line(error)}")
        return Audited(
            layer=self.call.name,
            step=step,
            gemms=compared,
            faults=self.faults,
            uncovered=self.uncovered,
            failures=self.failures,
        )

    # -- plan and weight ---------------------------------------------------------------------------

    def _compare_plan(self) -> None:
        """The executor must run the plan of the step."""
        for gemm in GEMMS:
            planned = self.expected.plan.operands[gemm]
            executed = self.call.plan.operands[gemm]
            if planned != executed:
                what = "the executor runs another plan than that of the step"
                self._add(what, gemm=gemm)

    def _compare_weight(self) -> None:
        """The layer must multiply the weight that the optimizer holds."""
        planned = self.expected.weight
        multiplied = self.call.w
        if planned is None or multiplied is None:
            return
        apart = difference(multiplied, planned)
        if apart is None:
            return
        candidates = {"rounded to BF16": planned.bfloat16().to(planned.dtype)}
        if self.previous is not None and self.previous.w is not None:
            candidates["weight of the step before"] = self.previous.w

        def explained() -> list[str]:
            return [
                name
                for name, weight in candidates.items()
                if difference(multiplied, weight) is None
            ]

        what = "the layer is called with another weight than the optimizer holds"
        self._add(what, apart, explained, operand="w")

    # -- a GEMM ------------------------------------------------------------------------------------

    def _compare_gemm(self, gemm: Gemm) -> bool:
        """Compare a GEMM; whether anything of it could be compared."""
        result = self.call.result(gemm.name)
        product = self.call.products.get(gemm.name)
        if result is None and gemm.name in self.call.unseen:
            self.uncovered.append(f"{gemm.name}: {self.call.unseen[gemm.name]}")
        if product is None:
            return result is not None and self._compare_in_high_precision(gemm, result)
        correct = True
        operands = (product.left, product.right)
        for tensor, operand in zip(OPERANDS[gemm.name], operands, strict=True):
            correct &= self._compare_operand(gemm.name, tensor, operand)
        executed: Gemm = getattr(self.call.plan, gemm.name)
        apart = products.compare(product, executed, self.turn)
        if apart is not None:

            def explained() -> Iterable[str]:
                again = products.repeated(product, executed)
                if again is None or difference(product.result, again) is None:
                    again = _float64_product(product)
                return products.explain(product.result, again, product.bias)

            what = "the product is not that of its operands"
            self._add(what, apart, explained, gemm=gemm.name)
        recipe = self.expected.plan.recipe
        if recipe.centred or recipe.residual is not None:
            self._compare_terms(gemm, product, result)
        elif result is not None:
            cut = self.call.cut
            if cut is not None and cut.summed == gemm.name:
                self._compare_sum(gemm, cut, result)
            else:
                self._compare_returned(gemm, product, result)
        return True

    def _compare_operand(self, gemm: str, tensor: str, operand: Prepared) -> bool:
        """Compare an operand with the reference; whether it is equal or cannot be compared."""
        source = source_of(self.call, self.expected, gemm, tensor)
        if source is None:
            reason = self.call.hidden.get(tensor, "its values are on other ranks")
            self.uncovered.append(f"{gemm}, operand {tensor}: {reason}")
            return True
        finding = _compare_codes(operand, source)
        if finding is None:
            return True
        what, apart = finding
        suspect = Suspect(source, self.call, self.expected, gemm, tensor, self.previous)

        def explained() -> Iterable[str]:
            return explain(products.decoded(operand), suspect)

        self._add(what, apart, explained, gemm=gemm, operand=tensor)
        return False

    def _compare_returned(self, gemm: Gemm, product: Product, result: Tensor) -> None:
        """y, dx or dw must be the product, in its dtype."""
        expected = product.result[: len(result)].to(result.dtype)  # without rows of padding
        apart = difference(result, expected.view(result.shape))
        if apart is not None:
            what = "the layer returns something else than the product"
            self._add(
                what,
                apart,
                lambda: products.explain(result, expected, product.bias),
                gemm=gemm.name,
            )

    def _compare_terms(self, gemm: Gemm, product: Product, result: Tensor | None) -> None:
        """Further terms of the GEMM, and their sum."""
        terms = TermComparison(self.call, self.expected, gemm, product, self.turn)
        for finding in terms.findings(result):
            explained = partial(tuple, finding.names)
            self._add(
                finding.what, finding.apart, explained, gemm=gemm.name, operand=finding.operand
            )
        if terms.uncovered is not None:
            self.uncovered.append(f"{gemm.name}: {terms.uncovered}")

    def _compare_sum(self, gemm: Gemm, cut: CutCall, result: Tensor) -> None:
        """y or dx must be the sum of the terms of all ranks."""
        if cut.terms is None:
            self.uncovered.append(f"{gemm.name}: its sum, of which other ranks saw no term")
            return
        bias = self.call.bias if gemm.name == "fprop" else None
        apart = cut.compare_sum(result, bias, self.expected.plan.table.torch_dtype)
        if apart is not None:
            what = "the layer returns something else than the sum of the terms of all ranks"
            self._add(what, apart[0], lambda: apart[1], gemm=gemm.name)

    def _compare_in_high_precision(self, gemm: Gemm, result: Tensor) -> bool:
        """Compare a product of torch's own, whose operands are not seen."""
        sources = [
            source_of(self.call, self.expected, gemm.name, tensor) for tensor in OPERANDS[gemm.name]
        ]
        left, right = sources
        if left is None or right is None:
            self.uncovered.append(f"{gemm.name}: a tensor of it is on other ranks")
            return False
        bias = self.call.bias if gemm.name == "fprop" else None
        earlier_sum = self.call.dw_before if gemm.name == "wgrad" else None
        if earlier_sum is not None:
            result = (result.double() - earlier_sum.double()).float()
        dtype = self.expected.plan.table.torch_dtype
        narrow = result.to(products.coarser(result.dtype, dtype))
        rows, exact, bound = products.bounds(
            left.decoded(), right.decoded(), bias, narrow, turn=self.turn
        )
        # in the dtype of the layer small numbers are rounded to multiples of its smallest one
        limits = torch.finfo(dtype)
        bound = bound + limits.smallest_normal * limits.eps
        if narrow.dtype is not dtype:  # it is rounded twice
            bound = bound + limits.eps * exact.abs()
        if earlier_sum is not None:
            bound = bound + products.rounding_of_sum(earlier_sum[rows], exact)
        wrong = products.beyond_rounding(narrow, rows, exact, bound)
        if not bool(wrong.any()):
            return True
        where = torch.zeros(result.shape, dtype=torch.bool)
        where[rows] = wrong
        index = where.nonzero()[0].tolist()
        apart = Difference(int(wrong.sum()), wrong.numel(), tuple(index), where)

        def explained() -> Iterable[str]:
            names = list(self._explained_product(narrow, bias, (left, right)))
            return names or products.explain(narrow[rows], exact.to(narrow.dtype), bias)

        self._add("the product is not that of the plan", apart, explained, gemm=gemm.name)
        return True

    def _explained_product(
        self,
        result: Tensor,
        bias: Tensor | None,
        sources: tuple[OperandSource, OperandSource],
    ) -> Iterator[str]:
        """The names of specs with which both operands would give this product."""
        for recipe, specs in _recipes().items():
            changed = [
                replace(source, spec=spec) for source, spec in zip(sources, specs, strict=True)
            ]
            left, right = [source.decoded() for source in changed]
            rows, exact, bound = products.bounds(left, right, bias, result)
            if not bool(products.beyond_rounding(result, rows, exact, bound).any()):
                yield f"quantised in {recipe} where the plan keeps high precision"

    def _add(
        self,
        what: str,
        apart: Difference | None = None,
        explained: Callable[[], Iterable[str]] = tuple,
        *,
        gemm: str = "",
        operand: str = "",
    ) -> None:
        """Add a fault, then its explanation: a fault counts without one."""
        fault = Fault(
            layer=self.call.name,
            what=what,
            gemm=gemm,
            operand=operand,
            first=() if apart is None else apart.first,
            share=0.0 if apart is None else apart.share,
        )
        self.faults.append(fault)
        with suppress(Exception):
            self.faults[-1] = replace(fault, hypotheses=tuple(explained()))


def _float64_product(product: Product) -> Tensor:
    total = products.exact(product.left) @ products.exact(product.right).T
    for left, right in product.further:
        total = total + products.exact(left) @ products.exact(right).T
    if product.bias is not None:
        total = total + product.bias.double()
    if product.earlier_sum is not None:
        total = total + product.earlier_sum.double()
    return total.to(product.result.dtype)


def _recipes() -> dict[str, tuple[QuantSpec, QuantSpec]]:
    """Specs of both operands of recipes that a program may run in place of high precision."""
    nvfp4 = QuantSpec(block=(1, 16))
    mxfp8 = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None)
    return {
        "NVFP4": (nvfp4, QuantSpec(block=(16, 16))),
        "NVFP4 1×16": (nvfp4, nvfp4),
        "MXFP8": (mxfp8, mxfp8),
    }


def _compare_codes(operand: Prepared, source: OperandSource) -> tuple[str, Difference] | None:
    """What differs between an operand and the reference; None: nothing does."""
    if isinstance(operand, Quantized):
        expected = source.quantized()
        if expected is None:
            values = operand.decoded()
            return _compare_values(values, source.decoded())
        return _compare_quantized(operand, expected, source)
    return _compare_values(operand, source.decoded())


def _compare_quantized(
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
    return _compare_rounding(operand, expected, source) if source.rounds_freely else None


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


def _compare_rounding(
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


def _compare_values(values: Decoded, expected: Decoded) -> tuple[str, Difference] | None:
    if (apart := difference(values.values, expected.values)) is not None:
        return "the values of the codes are not those of the reference", apart
    apart = difference(_global_scale(values), _global_scale(expected))
    if apart is not None:
        return "the global scale is not that of the reference", apart
    return None


def _global_scale(values: Decoded) -> Tensor:
    """The global scale, flat: 1 where there is none."""
    return torch.ones(1) if values.scale is None else values.scale.reshape(-1)
