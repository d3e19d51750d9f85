"""Sums of the bits of tensors."""

from __future__ import annotations

import pytest
import torch

from fp4train.audit import bit_sum


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_tensor_has_the_same_sum_wherever_it_lies_in_its_memory(
    dtype: torch.dtype, offset: int
) -> None:
    memory = torch.arange(64).to(dtype)
    part = memory[offset : offset + 33]
    assert int(bit_sum(part)) == int(bit_sum(part.clone()))
    assert int(bit_sum(part)) != int(bit_sum(memory[offset + 1 : offset + 34]))
