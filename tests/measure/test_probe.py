"""Error metrics in a run: the measured tensors are those that the layers multiply."""

import torch
from torch import nn

import fp4train as f4
from fp4train.measure.metrics import measure
from fp4train.measure.probe import probe
from fp4train.nn import Linear
from fp4train.precision import BF16, NVFP4, LayerPolicy
from fp4train.quantize import RandomKey

KEY = RandomKey(seed=0, step=0, layer=0, operand=0)


def watched(
    model: nn.Module, x: torch.Tensor, recipe: f4.precision.Recipe, policy: LayerPolicy | None
) -> dict[str, float]:
    layers = [(m.layer, m) for m in model.modules() if isinstance(m, Linear)]
    with probe(layers) as seen:
        with f4.autocast(recipe, policy=policy):
            y = model(x)
        y.square().sum().backward()
    return seen.measure(f4.plan(model, recipe, policy).at(0).layers, key=KEY)


def test_every_quantised_operand_is_measured_with_its_own_spec() -> None:
    torch.manual_seed(0)
    model = f4.convert(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)))
    x = torch.randn(64, 32)
    found = watched(model, x, NVFP4(), None)
    assert {key.split("/")[2] for key in found} == {
        "fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x",
    }  # fmt: skip
    spec = NVFP4().table()["fprop"].first
    assert spec is not None
    expected = dict(measure(x, spec))
    assert {k.rsplit("/", 1)[1]: v for k, v in found.items() if k.startswith("error/0/fprop.x/")} == {
        k: float(v) for k, v in expected.items()
    }


def test_layers_in_high_precision_are_not_measured_and_hooks_are_gone_afterwards() -> None:
    model = f4.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    found = watched(model, torch.randn(4, 16), NVFP4(), LayerPolicy(last=1))
    assert {key.split("/")[1] for key in found} == {"0"}
    assert watched(model, torch.randn(4, 16), BF16(), None) == {}
    assert all(not m._forward_hooks for m in model.modules())
