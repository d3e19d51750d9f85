"""Operands as a layer prepares them for a backend, and the forms of weights that layers prepare."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from fp4train.backends import Backend, Prepared
from fp4train.nn import PreparedWeights, WeightForm
from fp4train.precision import current
from fp4train.precision.context import use
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import Decoded, QuantSpec, quantizer


def sharing(constant: ConstantWeights | None) -> AbstractContextManager[None]:
    """The context around this one, in which calls share what they make of weights, as in
    fp4train's own loop.
    """
    context = current()
    assert context is not None
    return use(replace(context, constant=constant))


def prepared(backend: Backend, x_RC: Tensor, spec: QuantSpec | None) -> Prepared:
    """x as codes or values, as the backend takes them; itself in high precision."""
    if spec is None:
        return Decoded(x_RC, None)
    found = quantizer(spec, x_RC.device.type)
    return found.codes(x_RC) if backend.takes_codes else found.values(x_RC)


def prepared_forms(monkeypatch: pytest.MonkeyPatch) -> list[WeightForm]:
    """The forms in which weights are prepared from now on, in their order; those that a layer has
    already are not among them.
    """
    forms: list[WeightForm] = []
    prepare = PreparedWeights._prepare

    def noted(self: PreparedWeights, w_NK: Tensor, form: WeightForm, *others: Any) -> Any:
        forms.append(form)
        return prepare(self, w_NK, form, *others)

    monkeypatch.setattr(PreparedWeights, "_prepare", noted)
    return forms
