"""Functions with a graph break around them. Imported only while torch.compile is tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp4train.precision.context import recompute_eagerly

recompute = torch.compiler.disable(recompute_eagerly, recursive=False)  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], *args: object) -> Any:
    """`function(*args)`, nothing of it traced."""
    return function(*args)
