"""The chunked scan equals its recurrence, step by step in float64, whatever the chunks, documents
and pieces.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from pretended import Machine
from torch import Tensor

from fp4train.models.common.scan import CausalConvolution, running_sums, scan

TIME = 53


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x [B, T, H, P], a [B, T, H], b and c [B, T, G, N], of 6 heads in 2 groups."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, TIME, *shape, generator=draw, dtype=torch.float64).to(dtype)

    return normal(6, 3), -normal(6).abs(), normal(2, 5), normal(2, 5)


def recurrence(
    x: Tensor, a: Tensor, b: Tensor, c: Tensor, document: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, one token after another."""
    b, c = (t.repeat_interleave(3, 2) for t in (b, c))
    h = x.new_zeros(2, 6, 3, 5)
    ys = []
    for t in range(TIME):
        if document is not None and t:
            h = h * (document[:, t] == document[:, t - 1]).view(-1, 1, 1, 1)
        h = h * a[:, t].exp()[..., None, None] + x[:, t][..., None] * b[:, t][..., None, :]
        ys.append((h * c[:, t][..., None, :]).sum(-1))
    return torch.stack(ys, 1), h


DOCUMENTS = torch.tensor([0] * 5 + [5] * 1 + [6] * 30 + [36] * 17).expand(2, -1)


@pytest.mark.parametrize("chunk", [1, 7, 16, 53, 64])
@pytest.mark.parametrize("document", [None, DOCUMENTS], ids=["one document", "several"])
def test_the_scan_is_its_recurrence(chunk: int, document: Tensor | None) -> None:
    given = inputs()
    for found, expected in zip(
        scan(*given, chunk=chunk, document_BT=document), recurrence(*given, document), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_the_recurrence() -> None:
    def gradients(run: Any) -> list[Tensor]:
        given = [each.requires_grad_() for each in inputs()]
        y, h = run(*given)
        (y.square().sum() + h.square().sum()).backward()
        return [each.grad for each in given if each.grad is not None]

    for found, expected in zip(
        gradients(lambda *given: scan(*given, chunk=16)), gradients(recurrence), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_float32_loses_no_more_than_its_own_rounding() -> None:
    y, _ = scan(*inputs(torch.float32), chunk=16)
    expected, _ = recurrence(*inputs())
    assert (y.double() - expected).abs().max() / expected.abs().max() < 1e-6


def test_a_state_that_is_passed_on_is_the_whole_at_once() -> None:
    given = inputs()
    whole, last = scan(*given, chunk=16)
    state = None
    found = []
    for first, end in ((0, 20), (20, 21), (21, TIME)):
        y, state = scan(*(each[:, first:end] for each in given), chunk=16, state_BHPN=state)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


def test_the_convolution_is_torchs_and_stops_at_a_document() -> None:
    layer = CausalConvolution(6, 4)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    x = torch.randn(2, TIME, 6, generator=draw)
    y, window = layer(x, None, None)
    expected = torch.nn.functional.conv1d(x.mT, layer.weight, layer.bias, padding=3, groups=6)[
        ..., :TIME
    ].mT
    torch.testing.assert_close(y, expected)
    assert torch.equal(window, x[:, -3:])
    ends = [0, 5, 6, 36, TIME]
    parts = [layer(x[:, first:end], None, None)[0] for first, end in pairwise(ends)]
    torch.testing.assert_close(layer(x, None, DOCUMENTS)[0], torch.cat(parts, 1))


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_running_sums_of_deterministic_runs_on_a_gpu_are_sums_of_two(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own raises there, and so does its gradient, which is one, too."""
    a = torch.randn(
        3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    dy = torch.randn(3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = a.cumsum(-1)
    (da,) = torch.autograd.grad(wanted, a, dy)
    Machine(monkeypatch).sums_in_order(lambda a: True)
    found = running_sums(a)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, a, dy)[0], da)
