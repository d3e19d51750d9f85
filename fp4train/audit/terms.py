"""Comparison of GEMMs whose operands have two terms: the means that are taken out, the residuals of
codes, the products of each term, and their sum (the formulas of `nn.executors.terms`).

Means are sums in float32 whose order the device chooses: one must lie within (M + 8)·2⁻²⁴·mean|x| of
that in float64. What follows is made from the mean that was taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp4train.audit import products
from fp4train.audit.bits import Difference, difference, where_differing
from fp4train.audit.call import ObservedCall, Product
from fp4train.audit.expected import Expectation, centred, takes_mean, tensors
from fp4train.backends import Prepared
from fp4train.precision.layer_plan import Gemm
from fp4train.precision.terms import Residual
from fp4train.quantize import Decoded, QuantSpec, reference

RESIDUAL_CHANNELS: Final = "the channels of residuals, which sums of another device choose"
_ULP: Final = 2.0**-24


@dataclass(frozen=True)
class TermFault:
    """A difference in a GEMM of several terms.

    Args:
        what: sentence about it.
        apart: elements that differ; None: a term is missing, or too many are there.
        operand: "x", "w" or "dy"; empty: a product or the sum.
        names: faults that give it.
    """

    what: str
    apart: Difference | None = None
    operand: str = ""
    names: tuple[str, ...] = ()


class TermComparison:
    """The comparison of one GEMM of a call.

    Args:
        product: its first product, that of the codes.
        turn: number of the audit, for `products.sampled`.
    """

    def __init__(
        self,
        call: ObservedCall,
        expected: Expectation,
        gemm: Gemm,
        product: Product,
        turn: int = 0,
    ) -> None:
        self._call = call
        self._plan = expected.plan
        self._tensors = tensors(call, expected)
        self._gemm = gemm
        self._product = product
        self._turn = turn
        self._terms = call.terms.get(gemm.name, [])
        self._joined = product.further
        self.uncovered: str | None = None
        """Why a part of it was not compared; None: all was."""

    def findings(self, result: Tensor | None) -> Iterator[TermFault]:
        """The differences, in the order of the computation.

        Args:
            result: y, dx or dw; None: it was not wanted.
        """
        yield from self._of_means()
        planned = self._planned()
        joined = list(self._joined)
        if joined and self._adds_outer:
            yield from self._of_outer(joined.pop(0))
        if self.uncovered is None:
            products_seen = len(self._terms) + len(joined)
            if len(planned) != products_seen:
                what = f"the sum has {1 + products_seen} products, and the plan says {1 + len(planned)}"
                yield TermFault(what)
                return
            for (name, operands), term in zip(planned, self._terms, strict=False):
                yield from self._of_operands(name, operands, (term.left, term.right))
                yield from self._of_product(name, term)
            for (name, operands), seen in zip(planned[len(self._terms) :], joined, strict=True):
                yield from self._of_operands(name, operands, seen)
        if result is not None:
            yield from self._of_sum(result)

    @property
    def _adds_outer(self) -> bool:
        """Whether a column times a row is added: of a mean, or of both means."""
        row = {"fprop": "x", "dgrad": "dy"}.get(self._gemm.name)
        if row is None:
            return self._adds_means
        return takes_mean(self._plan, self._gemm.name, row)

    def _of_outer(self, operands: tuple[Decoded, Decoded]) -> Iterator[TermFault]:
        """A column times a row within a joined product: ones and the product of the mean, or the
        sum of dy and the mean of x.
        """
        if self._gemm.name == "wgrad":
            dy, x = self._call.means.get("dy"), self._call.means.get("x")
            tokens = self._tensors["dy"]
            if dy is None or x is None or tokens is None:
                self.uncovered = "the sum, whose means are not seen"
                return
            expected = dy * len(tokens), x
        elif self._terms:
            row = self._terms[0].result.flatten()
            expected = torch.ones(len(operands[0].values)), row
        else:
            return  # the number of products tells it
        for vector, seen in zip(expected, operands, strict=True):
            apart = difference(_values(seen).flatten(), vector)
            if apart is not None:
                yield TermFault("the term of the mean is another one", apart)
                return

    def _of_means(self) -> Iterator[TermFault]:
        """The means must be those of their tokens."""
        for name in {"fprop": ("x",), "dgrad": ("dy",), "wgrad": ()}[self._gemm.name]:
            mean = self._call.means.get(name)
            tensor = self._tensors[name]
            if mean is None or tensor is None or not len(tensor):
                continue
            exact = tensor.double()
            bound = (len(exact) + 8) * _ULP * exact.abs().mean(0)
            error = (mean.double() - exact.mean(0)).abs()
            apart = where_differing(~(error <= bound))
            if apart is not None and bool(exact.isfinite().all()):
                what = f"the mean of {name} is not that of its tokens"
                yield TermFault(what, apart, name)

    def _planned(self) -> list[tuple[str, tuple[Decoded, Decoded]]]:
        """(name, operands) of the products that follow the first one."""
        recipe = self._plan.recipe
        left = products.decoded(self._product.left)
        right = products.decoded(self._product.right)
        planned = []
        row = {"fprop": "x", "dgrad": "dy"}.get(self._gemm.name)
        if row is not None and takes_mean(self._plan, self._gemm.name, row):
            mean = self._call.means[row]
            planned.append((f"the mean of {row}", (Decoded(mean.unsqueeze(0), None), right)))
        if self._gemm.name == "fprop" and recipe.residual is not None and self._quantised:
            planned += self._residuals(recipe.residual, left, right)
        return planned

    @property
    def _quantised(self) -> bool:
        return bool(self._gemm.operands.quantised)

    def _residuals(
        self, residual: Residual, x: Decoded, w: Decoded
    ) -> list[tuple[str, tuple[Decoded, Decoded]]]:
        if residual.share < 1 and self._product.elsewhere:
            self.uncovered = RESIDUAL_CHANNELS
            return []
        values = {"x": x.tensor(torch.float32), "w": w.tensor(torch.float32)}
        residues = {}
        for name in residual.tensors:
            tensor = self._tensors[name]
            if tensor is None:
                self.uncovered = f"residuals of {name}, whose values are not seen"
                return []
            if name == "x":
                tensor = centred(self._call, self._plan, "fprop", "x", tensor)
            residues[name] = tensor.float() - values[name]
        channels = torch.arange(values["x"].shape[1])
        if residual.share < 1:
            scores = [residue.abs().mean(0) for residue in residues.values()]
            score = torch.stack(scores).sum(0)
            largest = score.sort(descending=True, stable=True).indices
            channels = largest[: residual.count(len(score))].sort().values
        planned = []
        for name, residue in residues.items():
            other = "w" if name == "x" else "x"
            term = _quantised(residue[:, channels], residual.spec, self._plan.table.torch_dtype)
            factor = Decoded(values[other][:, channels], None)
            operands = (term, factor) if name == "x" else (factor, term)
            planned.append((f"the residual of {name}", operands))
        return planned

    def _of_operands(
        self, name: str, operands: tuple[Decoded, Decoded], seen: tuple[Prepared, Prepared]
    ) -> Iterator[TermFault]:
        for expected, operand in zip(operands, seen, strict=True):
            apart = difference(_values(products.decoded(operand)), _values(expected))
            if apart is not None:
                yield TermFault(f"an operand of {name} is not that of the reference", apart)
                return

    def _of_product(self, name: str, term: Product) -> Iterator[TermFault]:
        executed: Gemm = getattr(self._call.plan, self._gemm.name)
        apart = products.compare(term, executed, self._turn)
        if apart is not None:
            yield TermFault(f"the product of {name} is not that of its operands", apart)

    def _of_sum(self, result: Tensor) -> Iterator[TermFault]:
        """y, dx or dw must be the sum of its products, rounded once."""
        total = self._product.result.clone()
        if self._joined:
            yield from self._of_returned(result)
            return
        for term in self._terms:
            total += term.result
        dtype = self._plan.table.torch_dtype
        if self._gemm.name == "wgrad" and self._adds_means:
            mean_of_dy = self._call.means.get("dy")
            mean_of_x = self._call.means.get("x")
            tokens = self._tensors["dy"]
            if mean_of_dy is None or mean_of_x is None or tokens is None:
                self.uncovered = "the sum, whose means are not seen"
                return
            total.addr_(mean_of_dy * len(tokens), mean_of_x)
        if self._gemm.name == "fprop" and self._call.bias is not None:
            total += self._call.bias.to(dtype)
        candidates = [total.to(dtype).to(result.dtype)]
        if self._gemm.name == "wgrad":  # in float32 where it is a term of a sum over calls
            candidates.append(total.to(result.dtype))
        if any(difference(result, candidate) is None for candidate in candidates):
            return
        if self._product.elsewhere and self._close(result, total, dtype):
            return
        apart = difference(result, candidates[0])
        names = products.explain(result, candidates[0], self._call.bias)
        what = "the layer returns something else than the sum of its products"
        yield TermFault(what, apart, names=names)

    def _of_returned(self, result: Tensor) -> Iterator[TermFault]:
        """y, dx or dw must be the product that has all terms."""
        expected = self._product.result.to(result.dtype)
        apart = difference(result, expected)
        if apart is not None:
            names = products.explain(result, expected, self._call.bias)
            what = "the layer returns something else than the sum of its products"
            yield TermFault(what, apart, names=names)

    @property
    def _adds_means(self) -> bool:
        """Whether an operand of wgrad is centred, so that M·ν·μᵀ is added."""
        return any(takes_mean(self._plan, "wgrad", name) for name in ("x", "dy"))

    def _close(self, result: Tensor, total: Tensor, dtype: torch.dtype) -> bool:
        """Whether a result of another device is the sum but for its rounding."""
        magnitude = self._product.result.abs() + (total - self._product.result).abs()
        bound = 2 * torch.finfo(dtype).eps * total.abs() + 8 * _ULP * magnitude
        return bool(((result.float() - total).abs() <= bound).all())


def _values(operand: Decoded) -> Tensor:
    return operand.tensor(torch.float32)


def _quantised(residue: Tensor, spec: QuantSpec | None, dtype: torch.dtype) -> Decoded:
    if spec is None:
        return Decoded(residue.to(dtype), None)
    return reference.quantize(residue, spec).decoded()
