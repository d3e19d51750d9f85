"""A Mamba-2 layer's outputs and gradients equal those of its recurrence in float64, however strong
the decays are.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.models.common.scan import Mamba2, ScanShape

WIDTH = 16
HEADS = 4
HEAD_DIM = 8
GROUPS = 2
STATE = 8
TAPS = 4
EPS = 1e-5
INNER = HEADS * HEAD_DIM
BOUND = 1e-5


def layer(chunk: int, most_decay: float, step: float) -> Mamba2:
    """A layer whose heads decay by A = most_decay / HEADS, …, most_decay, at time steps around
    `step`.
    """
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "state": STATE, "groups": GROUPS}
    built = Mamba2(ScanShape(**sizes, kernel=TAPS, chunk=chunk), width=WIDTH, eps=EPS)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=draw)
        built.A_log.copy_((most_decay * torch.arange(1, HEADS + 1) / HEADS).log())
        built.dt_bias.fill_(math.log(math.expm1(step)))
    return built


def recurrence(weights: dict[str, Tensor], u_BTD: Tensor) -> Tensor:
    """The layer's definition, one token after another."""
    batch, time, _ = u_BTD.shape
    mixed_size = INNER + 2 * GROUPS * STATE
    z, mixed, dt = (u_BTD @ weights["in_proj.weight"].mT).split([INNER, mixed_size, HEADS], -1)
    mixed = F.pad(mixed.mT, (TAPS - 1, 0))
    mixed = F.conv1d(mixed, weights["conv1d.weight"], weights["conv1d.bias"], groups=mixed_size).mT
    x, b, c = F.silu(mixed).split([INNER, GROUPS * STATE, GROUPS * STATE], -1)
    x = x.view(batch, time, HEADS, HEAD_DIM)
    b, c = (
        t.view(batch, time, GROUPS, STATE).repeat_interleave(HEADS // GROUPS, 2) for t in (b, c)
    )
    dt = F.softplus(dt + weights["dt_bias"])
    decay = (-weights["A_log"].exp() * dt).exp()
    h = x.new_zeros(batch, HEADS, HEAD_DIM, STATE)
    ys = []
    for t in range(time):
        h = (
            h * decay[:, t, :, None, None]
            + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        )
        ys.append((h * c[:, t, :, None]).sum(-1))
    y = (torch.stack(ys, 1) + weights["D"][:, None] * x).flatten(2) * F.silu(z)
    y = y.view(batch, time, GROUPS, -1)
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)).flatten(-2)
    return (weights["norm.weight"] * y) @ weights["out_proj.weight"].mT


class Compared:
    """Outputs and gradients of a layer, and those of its recurrence, for one input and one gradient
    of the output.
    """

    def __init__(self, layer: Mamba2, time: int, *, compiled: bool = False) -> None:
        draw = torch.Generator().manual_seed(1)
        u = torch.randn(2, time, WIDTH, generator=draw)
        dy = torch.randn(2, time, WIDTH, generator=draw)
        weights = {
            name: weight.detach().double().requires_grad_()
            for name, weight in layer.named_parameters()
        }
        exact_u = u.double().requires_grad_()
        exact_y = recurrence(weights, exact_u)
        (exact_y * dy).sum().backward()
        forward = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        u.requires_grad_()
        y = forward(u, time)
        (y * dy).sum().backward()
        self.pairs = {"y": (y.detach(), exact_y.detach()), "u": (u.grad, exact_u.grad)}
        self.pairs |= {
            name: (weight.grad, weights[name].grad) for name, weight in layer.named_parameters()
        }

    def error(self, name: str) -> float:
        """Norm of the difference over the norm."""
        here, exact = self.pairs[name]
        assert here is not None and exact is not None
        return float((here.double() - exact).norm() / exact.norm())

    def check(self) -> None:
        assert self.error("y") < 2e-6
        errors = {name: self.error(name) for name in self.pairs}
        assert len(errors) == 10
        assert max(errors.values()) < BOUND, errors


CASES = [
    pytest.param(64, 7.4, 0.69, id="ordinary"),
    pytest.param(64, 16.0, 1.0, id="strong decay"),
    pytest.param(64, 7.4, 3.0, id="long steps"),
    pytest.param(256, 16.0, 3.0, id="both, in chunks of 256"),
    pytest.param(256, 1.0, 0.01, id="weak decay, in chunks of 256"),
]


@pytest.mark.parametrize(("chunk", "most_decay", "step"), CASES)
def test_gradients_of_every_parameter_are_those_of_the_recurrence(
    chunk: int, most_decay: float, step: float
) -> None:
    """Gradients through differences of float32 sums were wrong by 1.9 of A_log's where A is 7.4 and
    a step 3.
    """
    Compared(layer(chunk, most_decay, step), 260).check()


def test_each_head_has_its_gradient_where_another_has_a_million_times_as_much() -> None:
    built = layer(64, 16.0, 3.0)
    with torch.no_grad():
        built.A_log[0] = -5
    here, exact = Compared(built, 130).pairs["A_log"]
    assert exact.abs().max() > 1e5 * exact.abs().min()
    torch.testing.assert_close(here.double(), exact, rtol=2e-5, atol=0)


def test_an_empty_past_and_documents_leave_no_gradient_that_is_not_finite() -> None:
    """Segments across the border of two documents are no part of any gradient."""
    built = layer(16, 16.0, 3.0)
    mask = torch.ones(2, 1, 48, 48, dtype=torch.bool).tril()
    mask[..., 20:, :20] = False
    u = torch.randn(2, 48, WIDTH, generator=torch.Generator().manual_seed(1))
    built(u, 48, None, mask).square().sum().backward()
    together = built.A_log.grad
    assert together is not None
    built.A_log.grad = None
    for part in (u[:, :20], u[:, 20:]):
        built(part, part.shape[1]).square().sum().backward()
    assert built.A_log.grad is not None
    torch.testing.assert_close(together, built.A_log.grad, rtol=1e-4, atol=0)
