"""Blocks of rotary decoders."""

import torch

from fp4train.models.common import PreNormBlock, SwiGLU
from fp4train.models.llama import Llama


def test_a_block_without_positions_is_one_whose_angles_are_zero() -> None:
    torch.manual_seed(0)
    block = PreNormBlock(Llama(width=32, heads=2, kv_heads=1), SwiGLU(32, 64))
    x_BTD = torch.randn(2, 8, 32)
    angles_TE = torch.randn(8, 16)
    unmoved = block(x_BTD, torch.ones(8, 16), torch.zeros(8, 16))
    assert not torch.equal(block(x_BTD, angles_TE.cos(), angles_TE.sin()), unmoved)
    assert len(block.fp4train_operations()) == 1
    block.rotated = False
    assert torch.equal(block(x_BTD, angles_TE.cos(), angles_TE.sin()), unmoved)
    assert not block.fp4train_operations()
