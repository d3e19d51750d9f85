"""Weights of a group are quantised with the largest amax of the group, and nothing else changes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from compiled_layers import needs_graphs
from prepared import prepared_forms, sharing
from torch import Tensor, nn

import fp4train as f4
from fp4train.nn import Linear
from fp4train.parameters import ParameterSpec
from fp4train.precision import NVFP4, FP8Current, Recipe
from fp4train.precision.recipes import QuartetII
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import quantize

RECIPES: dict[str, Any] = {
    "nvfp4": NVFP4,
    "nvfp4_1d": lambda **options: NVFP4(two_d_weights=False, **options),
    "four_over_six": lambda **options: NVFP4(four_over_six="weights", **options),
    "fp8_current": FP8Current,
    "quartet_ii": QuartetII,
}
DETERMINISTIC = {"hadamard": False, "stochastic_rounding": False}


class Pair(nn.Module):
    """Gate and up; the amax of up is three times that of gate."""

    def fp4train_parameters(self) -> list[ParameterSpec]:
        """The two layers are one group."""
        return [
            ParameterSpec(name=f"{name}.weight", fused="gate and up") for name in ("gate", "up")
        ]

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False)
        self.up.weight.data.mul_(3.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gate(x) * self.up(x)
        return y


def pair(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return f4.convert(Pair())


def result(
    model: Any, recipe: Recipe, step: int | None = 0, constant: ConstantWeights | None = None
) -> list[Tensor]:
    """y, dx, and both dw."""
    model.zero_grad()
    x = torch.linspace(-2, 2, 32 * 64).view(32, 64).sin().requires_grad_()
    with f4.autocast(recipe, step=step, token_offset=0), sharing(constant):
        y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, model.gate.weight.grad, model.up.weight.grad]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def scaled_pair(model: Any, recipe: Recipe) -> list[Tensor]:
    """The oracle: each weight gets a row that has the amax of the group, which enters no result."""
    amax = max(each.weight.abs().max() for each in (model.gate, model.up))
    wide = copy.deepcopy(model)
    for each in (wide.gate, wide.up):
        rows = torch.zeros(16, 64)
        rows[0, 0] = amax
        each.weight = nn.Parameter(torch.cat((each.weight.detach(), rows)))
        each.out_features += 16
    x = torch.linspace(-2, 2, 32 * 64).view(32, 64).sin()
    with f4.autocast(recipe, step=0, token_offset=0):
        return [wide.gate(x)[:, :48], wide.up(x)[:, :48]]


@pytest.mark.parametrize("name", RECIPES)
def test_the_weights_are_quantised_with_the_amax_of_the_group(name: str) -> None:
    own = RECIPES[name]()
    joint = RECIPES[name](fused_scales=True)
    model = pair()
    x = torch.linspace(-2, 2, 32 * 64).view(32, 64).sin()
    with f4.autocast(joint, step=0, token_offset=0):
        found = [model.gate(x), model.up(x)]
    assert same(found, scaled_pair(model, own))
    with f4.autocast(own, step=0, token_offset=0):
        apart = [model.gate(x), model.up(x)]
    assert torch.equal(apart[1], found[1]) and not torch.equal(apart[0], found[0])


def test_dgrad_multiplies_what_fprop_multiplied() -> None:
    """dx of an identity dy is the dequantised weight."""
    recipe = NVFP4(fused_scales=True, **DETERMINISTIC)
    model = pair()
    spec = recipe.table()["fprop"].second
    w = model.gate.weight.detach()
    wanted = quantize(w, spec, amax=model.up.weight.detach().abs().max()).dequantize()
    x = torch.eye(64, requires_grad=True)
    with f4.autocast(recipe, step=0, token_offset=0):
        y = model.gate(x)
    y.backward(torch.eye(64, 48))
    assert x.grad is not None
    assert torch.equal(x.grad[:48], wanted.bfloat16().float()) and torch.equal(
        y.detach(), wanted.T.bfloat16().float()
    )


@pytest.mark.parametrize("step", [0, None])
def test_a_changed_partner_changes_the_scale(step: int | None) -> None:
    """Within a step too, and without one, where nothing is kept."""
    recipe = NVFP4(fused_scales=True, **DETERMINISTIC)
    model = pair()
    before = result(model, recipe, step)
    with torch.no_grad():
        model.up.weight.mul_(1.37)
    x = torch.linspace(-2, 2, 32 * 64).view(32, 64).sin()
    with torch.no_grad(), f4.autocast(recipe, step=step, token_offset=0):
        after = model.gate(x)
    fresh = pair()
    with torch.no_grad():
        fresh.up.weight.mul_(1.37)
    with torch.no_grad(), f4.autocast(recipe, step=step, token_offset=0):
        assert torch.equal(after, fresh.gate(x))
    assert not torch.equal(before[0], result(model, recipe, step)[0])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_groups_of_its_own(how: Any) -> None:
    recipe = NVFP4(fused_scales=True)
    model = pair()
    wanted = result(model, recipe)
    other = how(model)
    with torch.no_grad():
        model.up.weight.mul_(100)
    assert same(result(other, recipe), wanted)
    del model
    assert same(result(other, recipe, step=1), result(pair(), recipe, step=1))


def test_a_layer_that_is_copied_without_its_partner_says_so() -> None:
    layer = copy.deepcopy(pair().gate)
    with f4.autocast(NVFP4()):
        layer(torch.ones(16, 64))
    with (
        pytest.raises(
            RuntimeError, match=r"gate, up share one scale .*, and up is not in this model"
        ),
        f4.autocast(NVFP4(fused_scales=True)),
    ):
        layer(torch.ones(16, 64))


@pytest.mark.long
@needs_graphs
def test_compiled_layers_share_the_scale_too() -> None:
    recipe = NVFP4(fused_scales=True)
    model = pair()
    wanted = result(model, recipe)
    compiled = pair()
    compiled.compile(backend="aot_eager")
    assert same(result(compiled, recipe), wanted)


def test_a_group_stays_one_when_a_model_is_converted_again() -> None:
    model = nn.Sequential(pair())
    f4.convert(model)
    layer = model[0].gate
    assert isinstance(layer, Linear) and layer.layer.fused == ("0.gate", "0.up")
    assert torch.equal(*(result(each, NVFP4(fused_scales=True))[0] for each in (model[0], pair())))


def test_forms_without_the_shared_scale_leave_those_with_it_to_the_next_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """dgrad in high precision takes a form of the weight that has no amax of the group."""
    forms = prepared_forms(monkeypatch)
    model = pair()
    mixed = NVFP4(fused_scales=True, high_precision=("dgrad",))
    constant = ConstantWeights()
    first_microbatch = result(model, mixed, constant=constant)
    assert len(forms) == 4, "a form for fprop and one for dgrad, of two weights"
    assert same(result(model, mixed, constant=constant), first_microbatch)
    assert len(forms) == 4
