"""Tensor scales that are held for N steps: measured by the first call of steps 0, N, 2N, …, taken
by all calls between, saved, joined over ranks, and refused where they cannot be.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4train.backends import Operands
from fp4train.nn import Experts, HeldAmaxes, Linear
from fp4train.precision import Custom, FP8Delayed, Mixed, Recipe, autocast, by_tensor, recompute
from fp4train.quantize import Delayed, Hadamard, QuantSpec, quantize

HELD = QuantSpec(held=3)
W = replace(HELD, block=(16, 16))
DY = replace(HELD, rounding="stochastic")
RECIPE = Custom(label="held", **by_tensor(HELD, W, DY))


def layer(k: int = 32, n: int = 16) -> Linear:
    torch.manual_seed(0)
    return Linear(k, n, bias=False)


def inputs(step: int, rows: int = 16, columns: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, columns, generator=generator) * (1 + step % 5)


def train(module: Linear, recipe: Recipe, x: Tensor, step: int) -> Tensor:
    with autocast(recipe, step=step):
        y = module(x)
    y.float().square().sum().backward()
    return y.detach()


def held(module: Linear, name: str) -> tuple[float, int]:
    state = module.scaling_state()
    return float(state[f"held.amax.{name}"]), int(state[f"held.step.{name}"])


def test_the_amax_of_steps_0_n_2n_scales_all_steps_up_to_the_next_one() -> None:
    module = layer()
    for step in range(8):
        x = inputs(step)
        y = train(module, RECIPE, x, step)
        measured = step // 3 * 3
        amax = inputs(measured).bfloat16().abs().max().float()
        assert held(module, "x") == (float(amax), measured)
        a = quantize(x.bfloat16(), HELD, amax=amax).dequantize()
        b = quantize(module.weight.detach(), W).dequantize()
        torch.testing.assert_close(y.float(), a @ b.T, rtol=0.01, atol=0.02)
    assert {"held.amax.w", "held.amax.dy"} <= set(module.scaling_state())


def test_both_forms_of_a_tensor_and_all_microbatches_take_the_amax_of_the_first_call() -> None:
    module = layer()
    train(module, RECIPE, inputs(1), 0)
    amaxes = {name: held(module, name) for name in ("x", "w", "dy")}
    train(module, RECIPE, 50 * inputs(2), 0)
    assert {name: held(module, name) for name in ("x", "w", "dy")} == amaxes
    assert len(module.scaling_state()) == 6, "an amax and a step for each of x, w and dy"


def test_what_exceeds_the_held_amax_saturates() -> None:
    module = layer()
    train(module, RECIPE, inputs(0), 0)
    amax, _ = held(module, "x")
    large = torch.full((16, 32), 100 * amax)
    with autocast(RECIPE, step=1):
        y = module(large)
    b = quantize(module.weight.detach(), W).dequantize()
    torch.testing.assert_close(y.float(), torch.full((16, 32), amax) @ b.T, rtol=0.02, atol=0.02)


def test_a_number_that_is_none_is_seen_and_not_held() -> None:
    module = layer()
    train(module, RECIPE, inputs(0), 0)
    broken = inputs(1)
    broken[3, 4] = torch.nan
    assert train(module, RECIPE, broken, 1)[3].isnan().any()
    module.load_scaling_state({})
    assert train(module, RECIPE, broken, 2).isnan().any()
    assert not train(module, RECIPE, inputs(3), 3).isnan().any(), "an infinite amax is not held"
    assert held(module, "x")[1] == 3


def test_an_amax_of_zero_is_measured_anew() -> None:
    module = layer()
    train(module, RECIPE, torch.zeros(16, 32), 0)
    train(module, RECIPE, inputs(1), 1)
    assert held(module, "x") == (float(inputs(1).bfloat16().abs().max()), 1)


def test_an_evaluation_takes_the_held_amax_and_holds_none() -> None:
    module = layer()
    with torch.no_grad(), autocast(RECIPE, step=0):
        module(inputs(5))
    assert not module.scaling_state()
    train(module, RECIPE, inputs(0), 0)
    state = module.scaling_state()
    with torch.no_grad(), autocast(RECIPE, step=2):
        y = module(inputs(2))
    again = layer()
    again.load_scaling_state(state)
    torch.testing.assert_close(y, train(again, RECIPE, inputs(2), 2), rtol=0, atol=0)
    assert module.scaling_state().keys() == state.keys()
    assert held(module, "x")[1] == 0


def test_a_recomputed_call_takes_the_amaxes_of_its_first_pass() -> None:
    gradients = []
    for recomputed in (False, True):
        module = layer()
        x = inputs(0).requires_grad_()
        with autocast(RECIPE, step=0):
            y = recompute(module, x) if recomputed else module(x)
        y.float().square().sum().backward()
        assert x.grad is not None and module.weight.grad is not None
        gradients.append((x.grad, module.weight.grad, module.scaling_state()))
    plain, again = gradients
    assert torch.equal(plain[0], again[0]) and torch.equal(plain[1], again[1])
    assert all(torch.equal(plain[2][key], again[2][key]) for key in plain[2])


def test_a_loaded_state_goes_on_in_the_same_bits() -> None:
    straight, first = layer(), layer()
    for step in range(4):
        train(straight, RECIPE, inputs(step), step)
        train(first, RECIPE, inputs(step), step)
    resumed = layer()
    resumed.load_scaling_state(first.scaling_state())
    for step in range(4, 8):
        expected = train(straight, RECIPE, inputs(step), step)
        assert torch.equal(expected, train(resumed, RECIPE, inputs(step), step))


class TwoRanks:
    """Ranks that join with one other, whose amaxes are twice as large."""

    def largest(self, x: Tensor) -> Tensor:
        return torch.maximum(x, 2 * x)

    def summed_over_data(self, x: Tensor) -> Tensor:
        raise AssertionError


def test_ranks_hold_the_largest_amax_from_the_next_step_on() -> None:
    module = layer()
    train(module, RECIPE, inputs(0), 0)
    own, _ = held(module, "x")
    states: Any = [state for state in module.states.values() if isinstance(state, HeldAmaxes)]
    HeldAmaxes.join(states, TwoRanks())
    assert held(module, "x") == (2 * own, 0)
    HeldAmaxes.join(states, TwoRanks())
    assert held(module, "x") == (2 * own, 0), "nothing was measured since"


def test_each_expert_has_amaxes_of_its_own() -> None:
    torch.manual_seed(0)
    experts = Experts(2, 32, 16)
    x = torch.cat([inputs(0), 7 * inputs(1)])
    with autocast(RECIPE, step=0):
        y = experts(x, [16, 16])
    y.float().square().sum().backward()
    state = experts.scaling_state()
    for number, rows in enumerate(x.split(16)):
        amax = rows.bfloat16().abs().max().float()
        assert torch.equal(state[f"held.amax.x.{number}"], amax)
        assert f"held.amax.dy.{number}" in state and f"held.amax.w.{number}" in state


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"held": 0}, "held=0: allowed are integers ≥ 1"),
    "half a step": ({"held": 1.5}, "held=1.5"),
    "a switch": ({"held": True}, "held=True"),
    "rows": ({"held": 2, "global_scale": "row"}, "needs one amax per tensor"),
    "MX": (
        {"held": 2, "scale": "e8m0", "block": (1, 32), "global_scale": None},
        "needs one amax per tensor",
    ),
    "a transform": ({"held": 2, "hadamard": Hadamard()}, "not of what a transform"),
    "rounded twice": (
        {"held": 2, "requantises": QuantSpec()},
        "not of what a transform or a rounding before",
    ),
    "held below": ({"requantises": HELD}, "without delayed scaling or a held amax"),
    "a history": (
        {
            "held": 2,
            "element": "e4m3",
            "scale": "fp32",
            "block": (None, None),
            "global_scale": None,
            "delayed": Delayed(),
        },
        "the amax is held, or that of a history",
    ),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_spec_that_cannot_hold_an_amax_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantSpec(**values)


def test_recipes_whose_scales_do_not_go_together_are_refused_by_operand() -> None:
    with pytest.raises(ValueError, match="dgrad, dy: held=3, and fprop has delayed scaling"):
        Mixed(fprop=FP8Delayed(), dgrad=RECIPE)
    other = replace(HELD, held=5)
    with pytest.raises(ValueError, match="wgrad, x: held=5, and held=3 in fprop"):
        Custom(fprop=Operands(first=HELD), wgrad=Operands(second=other))
    with pytest.raises(ValueError, match="holds the scale of each weight by itself"):
        replace(RECIPE, fused_scales=True)


def test_the_table_shows_the_steps_and_a_plain_spec_is_shown_as_before() -> None:
    assert "E4M3 + FP32 tensor held 3 steps" in str(RECIPE)
    assert "held" not in repr(QuantSpec()) and "held=3" in repr(HELD)
