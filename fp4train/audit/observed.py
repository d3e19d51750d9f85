"""Parts of an executor that report what they compute to the observer of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fp4train.audit.call import Product
from fp4train.backends import Backend, Prepared
from fp4train.backends.table import Shape, Table
from fp4train.hardware import Device
from fp4train.nn.executors.joined import Term
from fp4train.nn.executors.terms import CentredForms, TermGemms
from fp4train.nn.operands import TensorForms
from fp4train.quantize import Decoded, QuantSpec


class PassRecorder(Protocol):
    """Keeps what the running pass of a layer computes (`audit.observe.Observer`)."""

    def product(self, gemm: str, product: Product) -> None:
        """A product of the running pass, whose tensors are copied."""

    def mean(self, tensor: str, mean: Tensor | None) -> None:
        """The mean of the tokens of x or dy; None: no product takes it."""

    def copied(self, tensor: Tensor) -> Tensor | None:
        """A copy of a tensor of the running pass; None: the pass is not kept."""


class ObservedBackend:
    """A backend that reports what it multiplies for one GEMM."""

    def __init__(self, backend: Backend, gemm: str, recorder: PassRecorder) -> None:
        self._backend = backend
        self._gemm = gemm
        self._recorder = recorder
        self.name = backend.name
        self.takes_codes = backend.takes_codes
        self.takes_tiles = backend.takes_tiles
        self.adds = backend.adds

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        return self._backend.why_not(table, gemm, layer, device)

    def product(
        self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        result = self._backend.product(a, b, out_dtype=out_dtype, bias=bias)
        self._recorder.product(self._gemm, Product(a, b, result, bias))
        return result

    def add(self, total_RS: Tensor, a: Prepared, b: Prepared) -> None:
        earlier_sum = self._recorder.copied(total_RS)
        self._backend.add(total_RS, a, b)
        if earlier_sum is not None:
            self._recorder.product(self._gemm, Product(a, b, total_RS, None, earlier_sum))

    def summing(self, accumulator: str) -> Backend:
        return ObservedBackend(self._backend.summing(accumulator), self._gemm, self._recorder)

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        return self._backend.writes_float32(spec)


class ObservedTerms(TermGemms):
    """A layer whose operands have two terms, which reports the means that it takes out, and
    the codes of joined products.
    """

    def __init__(self, executor: TermGemms, recorder: PassRecorder) -> None:
        self.__dict__.update(executor.__dict__)
        self._executor = executor
        self._recorder = recorder

    def _forms_of_x(self, *arguments: Any) -> CentredForms:
        forms = super()._forms_of_x(*arguments)
        self._recorder.mean("x", forms.mean)
        return forms

    def _forms(self, forms: TensorForms, *arguments: Any) -> CentredForms:
        centred = super()._forms(forms, *arguments)
        if forms is self.dy:
            self._recorder.mean("dy", centred.mean)
        return centred

    def row_of_mean(self, gemm: str, mean: Decoded, w: Prepared) -> Tensor:
        return self._executor.row_of_mean(gemm, mean, w)  # not the product of the GEMM

    def joined_product(
        self,
        gemm: str,
        terms: tuple[tuple[Prepared, Prepared], Sequence[Term]],
        operands: Term,
        bias: Tensor | None,
    ) -> Tensor:
        result = self._executor.joined_product(gemm, terms, operands, bias)
        self._recorder.product(gemm, Product(*terms[0], result, bias, joined=True))
        return result
