"""Sums of the bits of tensors."""

from __future__ import annotations

import pytest
import torch

from fp4train.audits.bits import COLUMNS, bit_sum


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_tensor_has_the_same_sum_wherever_it_lies_in_its_memory(
    dtype: torch.dtype, offset: int
) -> None:
    memory = torch.arange(64).to(dtype)
    part = memory[offset : offset + 33]
    assert int(bit_sum(part)) == int(bit_sum(part.clone()))
    assert int(bit_sum(part)) != int(bit_sum(memory[offset + 1 : offset + 34]))


@pytest.mark.parametrize("bit", [0, 31, 62])
def test_two_flips_that_cancel_in_a_plain_sum_change_the_weighted_one(bit: int) -> None:
    words = torch.arange(COLUMNS + 9)
    flipped = words.clone()
    flipped[3] += 1 << bit
    flipped[COLUMNS + 5] -= 1 << bit
    assert flipped.sum() == words.sum()
    assert int(bit_sum(flipped)) != int(bit_sum(words))


def test_last_bits_of_a_norm_that_an_update_moved_change_the_sum() -> None:
    ones = torch.ones(8).view(torch.int32)
    moved = ones + torch.tensor([-1, 0, 0, 5, 2, -10, 1, 3], dtype=torch.int32)
    assert int(bit_sum(moved)) != int(bit_sum(ones))
