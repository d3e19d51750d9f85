"""torch.compile around fp4train's layers: whole graphs, the bits of eager mode, no stale graph is
reused.
"""

from __future__ import annotations

import copy

import pytest
import torch
from compiled_layers import MARKS, POLICY, graphs, llama, pair, same, step, tokens
from linear_layers import own_channels
from torch import Tensor, nn

import fp4train as f4
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Delayed,
    LayerPolicy,
    OutlierChannels,
    Recipe,
    autocast,
)

pytestmark = MARKS


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_model_is_one_graph_with_the_bits_of_eager_mode_in_every_recipe(
    backend: str,
) -> None:
    model = llama()
    data = tokens()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    dequantised = NVFP4(backward="dequantised")
    wgrad_in_bf16 = NVFP4().with_high_precision("wgrad")
    recipes = (None, NVFP4(), MXFP8(), dequantised, BF16(), wgrad_in_bf16, None)
    for at, recipe in enumerate(recipes):
        policy = None if recipe is None else POLICY
        ours = step(compiled, model, recipe, *data, at=at, policy=policy)
        assert same(ours, step(model, model, recipe, *data, at=at, policy=policy)), recipe


def test_high_precision_alone_rounds_dw_of_a_microbatch() -> None:
    """In eager mode both are float32."""
    torch.manual_seed(0)
    layers = f4.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)))
    for layer in layers:
        layer.sum_gradients(True)  # type: ignore[operator]
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    x = torch.randn(32, 32)
    rounded = []
    for model in (layers, compiled):
        layers.zero_grad()
        with autocast(NVFP4(), policy=LayerPolicy(keep=("1",))):
            model(x).square().sum().backward()
        gradients = [layer.weight.grad for layer in layers]
        rounded.append([torch.equal(dw, dw.bfloat16().float()) for dw in gradients])  # type: ignore[arg-type, union-attr]
    assert rounded == [[False, False], [False, True]]


def test_a_change_of_recipe_step_or_seed_compiles_nothing_as_long_as_the_routes_stay() -> None:
    model = llama()
    data = tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    step(compiled, model, NVFP4(), *data, policy=POLICY)
    assert graphs() == 1
    for at, recipe in enumerate((NVFP4(), MXFP8(), NVFP4(stochastic_rounding=False)), start=1):
        step(compiled, model, recipe, *data, at=at, policy=POLICY)
    assert graphs() == 1
    step(compiled, model, BF16(), *data, policy=POLICY)
    assert graphs() == 2, (
        "layers that quantise nothing are torch's own again, for the compiler to fuse"
    )


def test_blocks_that_are_alike_share_a_graph() -> None:
    model = llama()
    data = tokens()
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="eager")
    for at in range(2):
        step(model, model, NVFP4(), *data, at=at, policy=POLICY)
    assert graphs() == 2, "one for quantised blocks, one for the block that the policy keeps"


@pytest.mark.long
def test_a_mixer_that_other_code_watches_is_called_in_a_compiled_block() -> None:
    model = llama()
    block = model.blocks[0]  # type: ignore[index]
    shapes: list[torch.Size] = []
    block.attention.register_forward_hook(lambda module, given, y: shapes.append(y.shape))
    block.compile(backend="eager")
    step(model, model, NVFP4(), *tokens(), policy=POLICY)
    assert len(shapes) == 1


@pytest.mark.parametrize("recipe", [FP8Delayed(), NVFP4()], ids=lambda r: r.name)
def test_calls_without_a_step_count_as_in_eager_mode(recipe: Recipe) -> None:
    """Delayed amaxes enter the history once per call, and stochastic bits differ between calls."""
    x = torch.randn(24, 16)
    results = []
    for compile_it in (False, True):
        torch.manual_seed(1)
        model = f4.convert(pair(bias=False))
        module = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
        found = [step(module, model, recipe, x * scale, at=None) for scale in (1.0, 3.0, 0.5)]
        with torch.no_grad(), autocast(recipe):
            found.append((module(x),))
        results.append(found)
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.long
def test_autocast_entered_inside_of_the_compiled_function_breaks_the_graph_and_not_the_numbers() -> (
    None
):
    model = f4.convert(pair())
    x = torch.randn(8, 16)

    def inside(x: Tensor) -> Tensor:
        with autocast(NVFP4(), step=3, token_offset=0, seed=5):
            return model(x)

    expected = step(model, model, NVFP4(), x, at=3)
    model.zero_grad()
    y = torch.compile(inside, backend="aot_eager")(x)
    y.square().sum().backward()
    assert same((y.detach(), *(p.grad for p in model.parameters())), expected)  # type: ignore[misc]


def test_torchs_autocast_decides_the_output_dtype_as_in_eager_mode() -> None:
    model = f4.convert(pair())
    x = torch.randn(8, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run(module: nn.Module) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(module, model, NVFP4(), x)

    expected = run(model)
    assert expected[0].dtype == torch.bfloat16
    assert same(run(compiled), expected)


@pytest.mark.long
def test_other_batch_sizes_and_frozen_parameters_keep_their_bits() -> None:
    model = f4.convert(pair())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (8, 5, 40, 1):
        x = torch.randn(rows, 16, requires_grad=True)
        assert same(step(compiled, model, NVFP4(), x), step(model, model, NVFP4(), x)), rows
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    assert same(step(compiled, model, NVFP4(), x), step(model, model, NVFP4(), x))


def test_torchs_autocast_does_not_reach_into_the_gemms() -> None:
    model = f4.convert(pair())
    x = torch.randn(8, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run(module: nn.Module) -> tuple[Tensor, ...]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16), autocast(NVFP4(), step=0, token_offset=0):
            y = module(x)
            y.float().square().sum().backward()  # inside the context, which is wrong usage
        return (y.detach(), *(p.grad.clone() for p in model.parameters()))  # type: ignore[union-attr]

    assert same(run(compiled), run(model))


def test_settings_changed_after_compiling_are_seen() -> None:
    model = f4.convert(pair())
    x = torch.randn(32, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    step(compiled, model, NVFP4(), x)
    f4.convert(model, backend="reference")
    assert same(step(compiled, model, NVFP4(), x), step(model, model, NVFP4(), x))


def test_layers_that_record_or_split_outlier_channels_run_outside_with_the_same_bits() -> None:
    recipe = NVFP4(outliers=OutlierChannels(recipe=MXFP8(), start=1, steps=1))
    eager = f4.convert(nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)))
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager")
    for at in range(4):
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(at))
        found = []
        for module, model in ((eager, eager), (compiled, other)):
            model.zero_grad()
            with autocast(recipe, step=at):
                y = module(x)
            y.sum().backward()
            found.append(
                [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            )
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), at
        layers = [m for model in (eager, other) for m in model if isinstance(m, f4.nn.Linear)]
        assert [len(own_channels(m)) < m.in_features for m in layers] == [at >= 2] * 4, at
