"""A few training steps of a tiny Llama, on one rank or cut over several: losses, gradient norms,
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fp4train as f4
from fp4train.models.llama import Llama
from fp4train.optim.adamw import AdamW
from fp4train.precision import (
    BF16,
    FP32,
    MXFP8,
    NVFP4,
    FP8Block,
    FP8Current,
    FP8Delayed,
    FP8Row,
    LayerPolicy,
    Recipe,
)
from fp4train.precision.recipes import QuartetII, TetraJetV2

RECIPES: dict[str, Callable[[], Recipe]] = {
    "fp32": FP32,
    "bf16": BF16,
    "nvfp4": NVFP4,
    "nvfp4_fp32": lambda: NVFP4(dtype="float32"),
    "nvfp4_fused": lambda: NVFP4(fused_scales=True),
    "nvfp4_dequantised": lambda: NVFP4(backward="dequantised"),
    "fp8_row_dequantised": lambda: FP8Row(backward="dequantised"),
    "mxfp8": MXFP8,
    "mxfp8_fp32": lambda: MXFP8(dtype="float32"),
    "fp8_current": FP8Current,
    "fp8_row": FP8Row,
    "fp8_block": FP8Block,
    "fp8_delayed": lambda: FP8Delayed(history=4),
    "quartet_ii": QuartetII,
    "tetrajet_v2": TetraJetV2,
}
TIME = 64


def model(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    shape = {"width": 128, "layers": 3, "heads": 4, "kv_heads": 4, "hidden": 256, **changes}
    return f4.convert(Llama(**shape).build(vocab_size=256, seq_len=TIME))


def batch(step: int, sequences: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 3, (sequences, TIME + 1), generator=generator).cumsum(1) % 256
    return ids[:, :-1], ids[:, 1:]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def gradient_norm(model: nn.Module) -> float:
    """In float64, so that the order of the sum does not show."""
    squares = [
        whole(p.grad).double().square().sum() for p in model.parameters() if p.grad is not None
    ]
    return float(torch.stack(squares).sum().sqrt())


def train(
    model: nn.Module,
    recipe: Recipe,
    *,
    steps: int = 2,
    sequences: int = 4,
    first: int = 0,
    share: float = 1.0,
    total: Callable[[Tensor], Tensor] = lambda loss: loss,
    policy: LayerPolicy | None = None,
) -> dict[str, Any]:
    """Losses, gradient norms and the largest weights' sums.

    Args:
        sequences, first: the rows of each batch of 4 that this rank takes.
        share, total: a rank's share of the loss, and the sum over ranks.
    """
    optimizer = AdamW(lr=1e-3).build(model)
    losses = []
    norms = []
    for step in range(steps):
        tokens, targets = batch(step, 4)
        rows = slice(first, first + sequences)
        with f4.autocast(recipe, policy=policy, seed=0, step=step, token_offset=first * TIME):
            loss = model(tokens[rows], targets[rows])
        loss.backward()
        losses.append(float(total(loss.detach() * share)))
        norms.append(gradient_norm(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"losses": losses, "norms": norms}


def difference(ours: dict[str, Any], theirs: dict[str, Any], what: str, step: int) -> float:
    """Relative difference of a loss or norm."""
    a = float(ours[what][step])
    b = float(theirs[what][step])
    return abs(a - b) / abs(b)
