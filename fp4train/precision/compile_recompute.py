"""`recompute` with a graph break around it. Imported only while torch.compile traces."""

import torch

from fp4train.precision.recomputation import recompute_eagerly

recompute = torch.compiler.disable(recompute_eagerly, recursive=False)  # type: ignore[no-untyped-call]
