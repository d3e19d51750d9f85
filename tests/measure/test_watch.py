"""Statistics of a step: what is sampled is what the layers multiply, and the estimates are those of
the whole.
"""

import math
from collections.abc import Callable

import pytest
import torch
from error_metrics import measure
from torch import Tensor, nn

import fp4train as f4
from fp4train.measure import Measured, watch
from fp4train.measure.statistics import NAMES, RAW, sample
from fp4train.nn import Linear
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Current,
    FP8Delayed,
    FP8Row,
    LayerPolicy,
    QuartetII,
    Recipe,
)
from fp4train.quantize import RandomKey, quantize

KEY = RandomKey(seed=0, step=0, layer=0, operand=6)


def watched(
    model: nn.Module,
    x: Tensor,
    recipe: Recipe,
    policy: LayerPolicy | None = None,
    loss: Callable[[Tensor], Tensor] = torch.sum,
) -> Measured:
    layers = [(m.layer, m) for m in model.modules() if isinstance(m, Linear)]
    with watch(layers) as seen:
        with f4.autocast(recipe, policy=policy, seed=0, step=0):
            y = model(x)
        loss(y).backward()
    return seen.measure(f4.plan(model, recipe, policy).at(0).layers, KEY)


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8(), FP8Current(), FP8Row()], ids=lambda r: r.name)
def test_a_small_tensor_is_measured_whole_by_the_formulas_of_the_readable_metrics(
    recipe: Recipe,
) -> None:
    torch.manual_seed(0)
    model = f4.convert(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)))
    x = torch.randn(64, 32)
    found = watched(model, x, recipe)
    assert found.layers == ["0", "2"] and [
        NAMES[number] for layer, number in found.at if layer == 0
    ] == list(NAMES)
    table = recipe.table()
    for name, spec, tensor in (
        ("fprop.x", table["fprop"].first, x),
        ("wgrad.x", table["wgrad"].second, x.T),
    ):
        assert spec is not None
        row = found.values[found.at.index((0, NAMES.index(name)))]
        raw = dict(zip(RAW, row.tolist(), strict=True))
        expected = measure(tensor, spec, KEY if spec.random else None)
        assert raw["elements"] == x.numel()
        if spec.hadamard is None:
            assert raw["amax"] == expected.amax
        assert 10 * math.log10(raw["signal"] / raw["error"]) == pytest.approx(
            expected.sqnr_db, abs=1e-3
        )
        assert raw["lost"] / raw["nonzero"] == pytest.approx(expected.underflow)
        assert raw["clipped"] / raw["elements"] == pytest.approx(expected.saturation)
        assert raw["fourth"] / raw["variance"] ** 2 == pytest.approx(expected.kurtosis, rel=1e-5)
        q = quantize(tensor, spec)
        assert raw["scales"] == (q.scales.unique().numel() if q.scales.dtype == torch.uint8 else 0)
        assert (raw["smallest_scale"], raw["largest_scale"]) == (
            q.block_scales().min(),
            q.block_scales().max(),
        )


def test_a_sample_is_of_whole_groups_across_the_tensor_with_the_amax_of_all() -> None:
    x = torch.arange(4096.0)[:, None].expand(4096, 16).contiguous()
    found = sample(x)
    assert found.rows.shape == (256, 16) and found.amax == 4095
    assert found.rows[0, 0] == 0 and found.rows[128, 0] % 128 == 0 and found.rows[128, 0] > 2048
    assert torch.equal(sample(-x[:200]).rows, -x[:200]) and sample(-x[:200]).amax == 199


@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4().with_high_precision("fprop", "dgrad"),
        NVFP4(backward="dequantised"),
        FP8Row(backward="dequantised"),
    ],
    ids=lambda recipe: recipe.name,
)
def test_the_noise_of_a_gradient_is_that_of_all_tokens_scaled_from_a_sample(
    recipe: Recipe,
) -> None:
    """Of one layer: ‖dw in the recipe - dw in BF16‖, with dy the same in both."""
    torch.manual_seed(1)
    x = torch.randn(4096, 64)
    target = torch.randn(4096, 48)
    gradients = []
    noises = []
    for each in (recipe, BF16()):
        model = f4.convert(nn.Sequential(nn.Linear(64, 48, bias=False)))
        found = watched(model, x, each, loss=lambda y: (y * target).sum())
        gradients.append(next(model.parameters()).grad)
        noises += [noise * math.sqrt(4096 / found.tokens) for noise in found.noise.tolist()]
    assert gradients[0] is not None and gradients[1] is not None and len(noises) == 1
    assert noises[0] == pytest.approx((gradients[0] - gradients[1]).norm().item(), rel=0.1)


def test_layers_in_high_precision_are_not_measured_and_hooks_are_gone_afterwards() -> None:
    model = f4.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    assert watched(model, torch.randn(4, 16), NVFP4(), LayerPolicy(last=1)).layers == ["0"]
    found = watched(model, torch.randn(4, 16), BF16())
    assert found.layers == [] and found.values.shape == (0, len(RAW))
    assert all(not m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    "recipe", [FP8Delayed(), QuartetII(), NVFP4(row_scaled_activation=True)], ids=lambda r: r.name
)
def test_specs_that_take_an_amax_a_key_or_a_scale_for_each_row_are_measured(recipe: Recipe) -> None:
    torch.manual_seed(2)
    model = f4.convert(nn.Sequential(nn.Linear(128, 128)))
    found = watched(model, torch.randn(600, 128), recipe, loss=lambda y: y.square().sum())
    assert len(found.at) == 6 and found.values.isfinite().all()
    assert 0 < found.noise[0] < math.inf


def test_the_first_call_of_a_layer_is_measured_and_a_nan_is_seen_not_raised() -> None:
    model = f4.convert(nn.Sequential(nn.Linear(32, 32)))
    layers = [(m.layer, m) for m in model.modules() if isinstance(m, Linear)]
    nothing = torch.full((4, 32), math.nan)
    with watch(layers) as seen, f4.autocast(NVFP4()):
        (model(torch.ones(4, 32)).sum() + model(nothing).sum()).backward()
    first = seen.seen["0"].x
    assert first is not None and first.amax == 1
    assert watched(model, nothing, NVFP4()).values[0].isnan().any()
