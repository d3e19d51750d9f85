"""Products in BF16 and FP16 on CPUs that lack the instructions: in float32, rounded once.

Without these instructions torch takes 3 to 30 times as long for a GEMM as in float32, and 9 times for the backward pass
of attention in FP16. Both formats are exact in float32, so the float32 product has the same exact element products and
float32 accumulation as the instructions. Its one rounding, to the operands' dtype, overflows to infinity as theirs
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}

# Both dtypes on CPUs other than x86: only some builds of torch use their instructions. torch.compile needs a constant.
WITHOUT_INSTRUCTIONS = frozenset(
    dtype for dtype, names in _INSTRUCTIONS.items() if not any(torch.cpu.get_capabilities().get(n) for n in names)
)


def widens(x: Tensor) -> bool:
    """Whether products of x run in float32: x is on a CPU without instructions for its dtype."""
    return x.device.type == "cpu" and x.dtype in WITHOUT_INSTRUCTIONS


def widened(product: Callable[..., Tensor], x: Tensor, *others: Tensor | None, **options: Any) -> Tensor:
    """`product(x, *others, **options)`, in float32 if `widens(x)`.

    All tensors have x's dtype and device. The result and, in backward, the gradients have that dtype too, each rounded
    once; autograd keeps float32 copies of what it needs.
    """
    if not widens(x):
        return product(x, *others, **options)
    return product(x.float(), *(None if o is None else o.float() for o in others), **options).to(x.dtype)
