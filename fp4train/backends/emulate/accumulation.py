"""Products whose partial sums stay in float32 on CUDA devices, as the tensor cores' that are emulated do.

cuBLAS may cut a long contraction into parts and add them up in the output's dtype. torch allows it for BF16 and FP16 by
default (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`), and a user may have set it either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def float32_accumulation(device: str) -> AbstractContextManager[None]:
    """Around a product on a device of this type; nothing on others than CUDA's."""
    return _without_reduced_precision() if device == "cuda" else nullcontext()


@contextmanager
def _without_reduced_precision() -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction = before
