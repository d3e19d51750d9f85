"""What the C kernels of norms, gates and rotations made."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from fp4train.kernels import cpu
from fp4train.models.common import on_cpu


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Their kinds from now on, but for the first comparison with torch's operators."""
    for kind, dtype in product(("norm", "gate", "rotation"), (torch.bfloat16, torch.float32)):
        assert on_cpu.why_not(kind, 64, dtype) is None or (kind, dtype) == ("norm", torch.float32)
    made: Counter[str] = Counter()

    def noted(kind: str, *args: Any, own: Callable[..., None] = cpu.fused, **options: Any) -> None:
        made[kind] += 1
        own(kind, *args, **options)

    monkeypatch.setattr(cpu, "fused", noted)
    return made
