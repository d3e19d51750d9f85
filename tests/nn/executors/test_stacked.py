"""Weights of layers that a backend runs as one: rows of one matrix in memory."""

import torch
from torch import nn

from fp4train.nn.executors.stacked import rows_of_one, stack_in_memory


def parameters(*rows: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(count, 8)) for count in rows]


def test_parameters_move_once_into_one_matrix_and_keep_their_values() -> None:
    weights = parameters(4, 2, 2)
    before = [each.detach().clone() for each in weights]
    assert stack_in_memory(weights)
    matrix = rows_of_one(weights)
    assert matrix is not None and torch.equal(matrix, torch.cat(before))
    assert all(torch.equal(each, old) for each, old in zip(weights, before, strict=True))
    places = [each.data_ptr() for each in weights]
    assert stack_in_memory(weights) and places == [each.data_ptr() for each in weights]


def test_one_parameter_of_two_layers_and_unlike_ones_stay_where_they_are() -> None:
    (tied,) = parameters(4)
    other = nn.Parameter(torch.randn(4, 8, dtype=torch.bfloat16))
    for weights in ([tied, tied], [tied, other], [tied, tied.detach()[:2]]):
        places = [each.data_ptr() for each in weights]
        assert not stack_in_memory(weights) and places == [each.data_ptr() for each in weights]
