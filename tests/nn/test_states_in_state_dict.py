"""Histories of delayed scaling in the state dict of a model in somebody else's loop, by torch's and
safetensors' own tools.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import fp4train as f4
from fp4train.integrations import Precision
from fp4train.precision import NVFP4, FP8Delayed, Recipe

Saved = dict[str, Any]


def converted() -> nn.Module:
    torch.manual_seed(0)
    return f4.convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))


def train(model: nn.Module, recipe: Recipe, steps: range) -> list[float]:
    """The norm of the first layer's gradient in each step, without an optimizer."""
    norms = []
    for step in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        with f4.autocast(recipe, step=step):
            # small, so that gradients are zero at the scale of a history that knows nothing
            (1e-3 * (model(x) - x.flip(1)).square().mean()).backward()
        weight = model[0].weight  # type: ignore[index]
        norms.append(float(weight.grad.norm()))
        model.zero_grad()
    return norms


def by_torch(state: Saved, folder: Path) -> Saved:
    torch.save(state, folder / "a.pt")
    loaded: Saved = torch.load(folder / "a.pt", weights_only=True)
    return loaded


def by_safetensors(state: Saved, folder: Path) -> Saved:
    safetensors.torch.save_file(state, folder / "a.safetensors")
    return safetensors.torch.load_file(folder / "a.safetensors")


@pytest.mark.parametrize("through", [by_torch, by_safetensors])
def test_a_resumed_loop_has_the_gradients_of_the_uninterrupted_one(
    through: Callable[[Saved, Path], Saved], tmp_path: Path
) -> None:
    recipe = FP8Delayed()
    model = converted()
    train(model, recipe, range(5))
    state = through(model.state_dict(), tmp_path)
    resumed = converted()
    resumed.load_state_dict(state)
    assert train(resumed, recipe, range(5, 8)) == train(model, recipe, range(5, 8))


def test_a_loop_that_goes_on_without_them_is_told(caplog: pytest.LogCaptureFixture) -> None:
    recipe = FP8Delayed()
    model = converted()
    train(model, recipe, range(5))
    state = {name: part for name, part in model.state_dict().items() if "_extra" not in name}
    forgetful = converted()
    forgetful.load_state_dict(state)
    assert not caplog.messages
    assert train(forgetful, recipe, range(5, 6)) == [0.0]
    (said,) = caplog.messages
    assert "begins after step 0 without amaxes of earlier steps" in said


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_carry_them(tmp_path: Path) -> None:
    recipe = FP8Delayed()
    model, resumed = converted(), converted()
    train(model, recipe, range(5))
    train(resumed, recipe, range(9, 10))  # its histories are replaced
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "saved")
    state = get_model_state_dict(resumed)
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    set_model_state_dict(resumed, state)
    assert train(resumed, recipe, range(5, 8)) == train(model, recipe, range(5, 8))


def test_a_strict_load_of_weights_alone_into_a_model_with_histories_says_what_is_missing() -> None:
    model = converted()
    weights = copy.deepcopy(model.state_dict())
    train(model, FP8Delayed(), range(2))
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\._extra_state", "2\._extra_state"'):
        model.load_state_dict(weights)
    assert model.load_state_dict(weights, strict=False).unexpected_keys == []


def test_a_damaged_state_is_named_with_its_layer() -> None:
    model = converted()
    train(model, FP8Delayed(), range(2))
    state = model.state_dict()
    state["2._extra_state"] = state["2._extra_state"][:-3]
    with pytest.raises(RuntimeError, match=r"2\._extra_state is damaged: "):
        model.load_state_dict(state)


def test_no_other_recipe_adds_a_key_nor_does_an_attached_precision() -> None:
    model = converted()
    names = set(model.state_dict())
    assert not any("_extra_state" in name for name in names)
    train(model, NVFP4(), range(2))
    assert set(model.state_dict()) == names

    attached = converted()
    precision = Precision(FP8Delayed(), policy=None)
    precision.attach(attached, steps=2)
    attached(torch.randn(16, 32)).sum().backward()
    assert set(attached.state_dict()) == names and precision.state_dict()["layers"]
