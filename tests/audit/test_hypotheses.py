"""Explanations of a difference."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from limits import set_limit

from fp4train.audit import hypotheses
from fp4train.quantize import Decoded


def test_an_explanation_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def endless(suspect: Any) -> Iterator[tuple[str, Any]]:
        while len(tried) < 100_000:
            tried.append(1)
            yield "slow", lambda: Decoded(torch.zeros(2, 2), None)

    set_limit(monkeypatch, "seconds to explain a difference", 0.01)
    monkeypatch.setattr(hypotheses, "_other_plans", endless)
    monkeypatch.setattr(hypotheses, "_structural", lambda *_: ["no name"])
    suspect: Any = SimpleNamespace(source=SimpleNamespace(spec=None))
    assert hypotheses.explain(Decoded(torch.ones(2, 2), None), suspect) == ("no name",)
    assert 0 < len(tried) < 100_000
