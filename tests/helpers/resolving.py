"""Layers that hold their plan: one that resolves it again, within a call, fails the test."""

from typing import Any

import pytest

from fp4train.nn import planned
from fp4train.precision import Layer


def refuse_resolving(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no layer resolves its plan."""

    def refused(layer: Layer, *_: Any, **options: Any) -> None:
        pytest.fail(f"{layer.name}: resolved again")

    monkeypatch.setattr(planned, "resolve", refused)
