"""Gradients of a small model on Transformer Engine whose norms and gates fp4train's kernels quantise, or leave to it: a
part of te_selfcheck.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4train.config.schema import TrainSettings
from fp4train.models.llama import Llama
from fp4train.nn import convert
from fp4train.precision import Recipe
from fp4train.precision.context import autocast
from fp4train.run.fuse import fuse


def gradients(recipe: Recipe, kernels: str, device: str = "cuda", width: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the weights of down, the embedding and gate, of one pass of 128 tokens.

    Args:
        kernels: of `train.kernels`: "auto" quantises norms and gates where they are made, "torch" does not.
        width: of a Llama of one block.
    """
    torch.manual_seed(0)
    shape = Llama(width=width, layers=1, heads=4, kv_heads=2, hidden=2 * width, tied=False)
    model = convert(shape.build(vocab_size=64, seq_len=64), backend="te").to(device)
    fuse(model, TrainSettings(steps=1, batch_size=2, microbatch=None, seq_len=64, kernels=kernels), device)
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(1)).to(device)
    with autocast(recipe, step=0):
        loss = model(tokens, tokens.flip(1))
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    embedding = next(name for name in found if not name.startswith("blocks."))
    return found["blocks.0.mlp.down.weight"], found[embedding], found["blocks.0.mlp.gate.weight"]
