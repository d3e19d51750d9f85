"""Convolutions equal their definition in float64, whatever the lengths, documents and pieces."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from lengths import long_but
from torch import Tensor

from fp4train.models.common.convolution import (
    long_convolution,
    modal_filter,
    modal_rest,
    modal_state,
    short_convolution,
)

TIME = 53
ENDS = [0, 5, 6, 36, TIME]
DOCUMENTS = torch.cat([torch.full((end - first,), first) for first, end in pairwise(ENDS)]).expand(
    2, -1
)


def inputs(taps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """x [B, T, C], and a filter [C, K] whose first tap multiplies the token itself."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, TIME, 3, generator=draw, dtype=torch.float64)
    return x.to(dtype), torch.randn(3, taps, generator=draw, dtype=torch.float64).to(dtype)


def definition(x: Tensor, h: Tensor) -> Tensor:
    """y_t = Σ_s h_s x_{t−s}, term by term."""
    return torch.stack(
        [
            sum((h[:, s] * x[:, t - s] for s in range(min(h.shape[1], t + 1))), x[:, 0] * 0)
            for t in range(x.shape[1])
        ],
        1,
    )


def short(x: Tensor, h: Tensor, document: Tensor | None = None) -> Tensor:
    return short_convolution(x, h.flip(-1), document_BT=document)[0]


@pytest.mark.parametrize("convolve", [long_convolution, short], ids=["long", "short"])
@pytest.mark.parametrize("taps", [1, 7, TIME, 80])
def test_it_is_its_definition_whatever_the_length_of_the_filter(convolve: Any, taps: int) -> None:
    x, h = inputs(taps)
    torch.testing.assert_close(convolve(x, h), definition(x, h), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("convolve", [long_convolution, short], ids=["long", "short"])
@pytest.mark.parametrize("taps", [7, 80])
def test_documents_that_are_told_apart_are_those_by_themselves(convolve: Any, taps: int) -> None:
    x, h = inputs(taps)
    parts = [convolve(x[:, first:end], h) for first, end in pairwise(ENDS)]
    torch.testing.assert_close(
        convolve(x, h, DOCUMENTS), torch.cat(parts, 1), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("document", [None, DOCUMENTS], ids=["one document", "several"])
@pytest.mark.parametrize("taps", long_but([7], [7, 80]))
def test_gradients_of_the_long_one_are_those_of_finite_differences(
    taps: int, document: Tensor | None
) -> None:
    given = [each.requires_grad_() for each in inputs(taps)]
    assert torch.autograd.gradcheck(lambda *each: long_convolution(*each, document), given)


def test_float32_loses_no_more_than_its_own_rounding() -> None:
    expected = definition(*inputs(TIME))
    found = long_convolution(*inputs(TIME, torch.float32))
    assert (found.double() - expected).abs().max() / expected.abs().max() < 1e-6


@pytest.mark.parametrize("time", [1, 2, 3, 97, 128, 1000])
def test_no_length_wraps_around(time: int) -> None:
    """A last input never reaches the first output."""
    x = torch.zeros(1, time, 1)
    x[0, -1] = 1
    y = long_convolution(x, torch.ones(1, time))
    assert (
        y[0, -1].item() == pytest.approx(1) and y[0, :-1].abs().amax() < 1e-6
        if time > 1
        else y.item() == 1
    )


def modes() -> tuple[Tensor, Tensor]:
    """Logarithms of poles, and residues [C, N]."""
    draw = torch.Generator().manual_seed(1)
    return tuple(
        torch.rand(2, 3, 4, generator=draw, dtype=torch.float64) * torch.tensor([[[-1.0]], [[1.0]]])
    )  # type: ignore[return-value]


def test_a_filter_of_exponentials_and_its_gradients() -> None:
    log_poles, residues = modes()
    ages = torch.arange(TIME)
    expected = (residues[..., None] * (log_poles[..., None] * ages).exp()).sum(1)
    torch.testing.assert_close(
        modal_filter(log_poles, residues, TIME), expected, rtol=1e-12, atol=1e-12
    )
    given = [each.requires_grad_() for each in modes()]
    assert torch.autograd.gradcheck(lambda *each: modal_filter(*each, 20), given)


def test_a_state_that_is_passed_on_is_the_whole_at_once() -> None:
    """The filter as a recurrence."""
    x, _ = inputs(1)
    log_poles, residues = modes()
    whole = long_convolution(x, modal_filter(log_poles, residues, TIME))
    state = None
    found = []
    for part in x.split([20, 1, 32], 1):
        y = long_convolution(part, modal_filter(log_poles, residues, part.shape[1]))
        found.append(
            y if state is None else y + modal_rest(state, log_poles, residues, part.shape[1])
        )
        state = modal_state(part, log_poles, state)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-12, atol=1e-12)
