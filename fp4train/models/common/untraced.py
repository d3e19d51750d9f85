"""`shared_by` with a graph break around it. Imported only while torch.compile is tracing."""

from __future__ import annotations

import torch

from fp4train.models.common import cut

shared_by = torch.compiler.disable(cut.shared_by)  # type: ignore[no-untyped-call]
