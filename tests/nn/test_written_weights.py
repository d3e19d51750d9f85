"""Whoever writes a weight, no call multiplies what was made of the old one: each pass after a write
equals that of a copy of the model, which has quantised nothing yet.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from compiled_layers import COMPILER
from linear_layers import gradients, rand, same
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fp4train as f4
from fp4train.nn import PlannedLayer
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Block,
    FP8Current,
    FP8Delayed,
    Recipe,
    autocast,
)
from fp4train.precision.settings import ConstantWeights

X = rand(32, 32)
RECIPES = [
    BF16(),
    NVFP4(),
    NVFP4(two_d_weights=False),
    MXFP8(),
    FP8Current(),
    FP8Block(),
    FP8Delayed(),
]
Write = Callable[[Tensor, Tensor], object]


@torch.no_grad()
def copied(weight: Tensor, new: Tensor) -> None:
    weight.copy_(new)


@torch.no_grad()
def in_other_memory(weight: Tensor, new: Tensor) -> None:
    weight.set_(new)  # type: ignore[call-overload]


def in_place_of_its_data(weight: Tensor, new: Tensor) -> None:
    weight.data = new


def perturbed(weight: Tensor, new: Tensor) -> None:
    """MeZO's `zo_perturb_parameters`."""
    weight.data = weight.data + 0.5 * new


def by(kind: Callable[..., torch.optim.Optimizer], **options: bool) -> Write:
    """The step of an optimizer."""

    def step(weight: Tensor, new: Tensor) -> None:
        weight.grad = new
        kind([weight], lr=0.5, **options).step()

    return step


WRITES: dict[str, Write] = {
    "copy_": copied,
    "data.copy_": lambda weight, new: weight.data.copy_(new),
    "data =": in_place_of_its_data,
    "set_": in_other_memory,
    "swap_tensors": lambda weight, new: torch.utils.swap_tensors(weight, nn.Parameter(new)),
    "vector_to_parameters": lambda weight, new: nn.utils.vector_to_parameters(
        new.flatten(), [weight]
    ),
    "SGD": by(torch.optim.SGD),
    "foreach": by(torch.optim.AdamW, foreach=True),
    "fused": by(torch.optim.AdamW, fused=True),
    "MeZO": perturbed,
    "_foreach_copy_, as diffusers": lambda weight, new: torch._foreach_copy_([weight.data], [new]),
    "lerp_": lambda weight, new: weight.data.lerp_(new, 0.5),
}


def model(recipe: Recipe) -> nn.Module:
    """Two layers, whose gradients are summed as those of microbatches are."""
    torch.manual_seed(0)
    found = f4.convert(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)))
    for layer in found.modules():
        if isinstance(layer, PlannedLayer):
            layer.sum_gradients(True)
    gradients(found, X, recipe)
    return found


def evaluated(module: nn.Module, recipe: Recipe) -> Tensor:
    module.eval()
    with torch.no_grad(), autocast(recipe, step=0):
        y: Tensor = module(X)
    module.train()
    return y


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_within_a_step_a_pass_after_a_write_is_that_of_the_new_weights(
    recipe: Recipe, write: Write
) -> None:
    """In training after training, in evaluation after evaluation, and in each after the other."""
    found = model(recipe)
    for turn, trains in enumerate((True, False, False, True, True)):
        before = evaluated(found, recipe) if turn == 2 else None
        for number, layer in enumerate((found[0], found[2])):  # type: ignore[index]
            write(layer.weight, rand(*layer.weight.shape, seed=10 * turn + number))
        fresh = copy.deepcopy(found)
        if trains:
            assert same(gradients(found, X, recipe), gradients(fresh, X, recipe)), turn
        else:
            y = evaluated(found, recipe)
            assert torch.equal(y, evaluated(fresh, recipe)), turn
            assert before is None or not torch.equal(y, before)


def test_a_weight_that_is_computed_is_quantised_in_each_call() -> None:
    """Of spectral norm, whose iterations change it in training."""
    torch.manual_seed(0)
    found = f4.convert(nn.Sequential(nn.Linear(32, 32)))
    parametrizations.spectral_norm(found[0])
    constant = ConstantWeights()
    for _ in range(3):
        fresh = copy.deepcopy(found)
        y = gradients(found, X, NVFP4(), constant=constant)
        assert same(y, gradients(fresh, X, NVFP4()))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_input_that_is_written_within_a_region_is_quantised_anew(
    recipe: Recipe, requires_grad: bool
) -> None:
    """A buffer that holds one batch after the other."""
    layer = f4.convert(nn.Sequential(nn.Linear(32, 32)))[0]
    buffer = X.to(recipe.torch_dtype).requires_grad_(requires_grad)
    with autocast(recipe, step=0):
        first = layer(buffer)
        buffer.data.copy_(rand(32, 32, seed=1))
        y = layer(buffer)
        assert torch.equal(y, layer(buffer.detach().clone()))
    assert not torch.equal(y, first)


class TestCompiled:
    pytestmark = COMPILER

    @pytest.mark.parametrize("recipe", [NVFP4(), FP8Current()], ids=lambda recipe: recipe.name)
    def test_a_compiled_model_multiplies_the_new_weights(self, recipe: Recipe) -> None:
        found = model(recipe)
        compiled = torch.compile(found, backend="aot_eager")
        for seed in range(2):
            gradients(compiled, X, recipe)
            found[0].weight.data.copy_(rand(48, 32, seed=seed))  # type: ignore[index,union-attr]
            fresh = copy.deepcopy(found)
            assert same(gradients(compiled, X, recipe), gradients(fresh, X, recipe))
            found[0].weight.data.mul_(-1)  # type: ignore[index,union-attr]
            fresh = copy.deepcopy(found)
            assert torch.equal(evaluated(compiled, recipe), evaluated(fresh, recipe))
