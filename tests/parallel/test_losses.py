"""Losses without gradients leave the caller's gradients as they are."""

from contextlib import nullcontext

import torch
from torch import nn

from fp4train.parallel import pipeline
from fp4train.parallel.pipeline import Microbatch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        return self.w * tokens_BT.sum()


def test_an_iteration_that_is_given_up_leaves_gradients_on() -> None:
    rows = torch.ones(2, 3)
    microbatches = [
        Microbatch(tokens_BT=rows, targets_BT=rows, context=nullcontext, dtype=torch.float32) for _ in range(3)
    ]
    losses = pipeline.losses(Model(), None, microbatches)
    assert not next(losses).requires_grad
    assert torch.is_grad_enabled(), "between two losses"
    with torch.no_grad():
        next(losses)
    losses.close()  # type: ignore[attr-defined]
    assert torch.is_grad_enabled(), "after it was given up"
