"""`recompute` with a graph break around it. Imported only while torch.compile is tracing."""

from __future__ import annotations

import torch

from fp4train.precision.context import recompute_eagerly

recompute = torch.compiler.disable(recompute_eagerly, recursive=False)  # type: ignore[no-untyped-call]
