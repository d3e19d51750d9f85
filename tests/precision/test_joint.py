"""Which products of layers that read one x are one: what the plan decides of every recipe, and the reasons it shows."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fp4train as f4
from fp4train.config import RECIPES, Config, composition, to_config
from fp4train.hardware import Device, find_gpu
from fp4train.models.llama import Llama
from fp4train.nn.executors import executor_class
from fp4train.nn.executors.joint import JointGemms
from fp4train.nn.executors.stacked import JointBackend
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.precision import MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed, LayerPolicy, Recipe
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import find_layers
from fp4train.precision.phases import Timeline
from fp4train.precision.plan import make_plan
from fp4train.run.build import build_model, build_plan, build_timeline

ALL = ("fprop", "dgrad", "wgrad")
W, DY, ROWS = "its whole tensor (w)", "its whole tensor (dy)", "its whole rows (dy)"
BITS = "each layer rounds x by random bits of its own"
HISTORIES, CHANNELS = "each layer has its own amax histories", "its outlier channels are quantised apart"
OUTCOMES = {
    **dict.fromkeys(
        ("bf16", "fp16", "fp32", "fp8_block", "mxfp4", "mxfp6", "mxfp8", "mxfp8_hybrid"), (None, None, None)
    ),
    **dict.fromkeys(("nvfp4", "nvfp4_1d_weights", "nvfp4_four_over_six", "nvfp4_plain"), (W, DY, DY)),
    **dict.fromkeys(("nvfp4_without_hadamard", "nvfp4_without_stochastic", "fp8_current"), (W, DY, DY)),
    "nvfp4_ue5m3": (None, None, None),
    "nvfp4_unbiased": (W, DY, DY),
    "bf16_forward_nvfp4_backward": (None, DY, DY),
    "nvfp4_forward_mxfp8_backward": (W, None, None),
    "fp8_row": (None, ROWS, None),
    "fp8_delayed": (HISTORIES, HISTORIES, HISTORIES),
    "quartet_ii": (BITS, BITS, BITS),
    "tetrajet_v2": (BITS, BITS, BITS),
    "tetrajet_v2_outliers": (CHANNELS, CHANNELS, CHANNELS),
}
"""Recipe → for fprop, dgrad and wgrad None, where one product is made, or the reason why not."""


def plans(
    recipe: Recipe,
    policy: LayerPolicy | None = None,
    device: Device | None = None,
    *,
    hidden: int = 256,
    joint: bool = True,
) -> dict[str, LayerPlan]:
    model = Llama(width=128, layers=2, heads=2, kv_heads=1, hidden=hidden).build(vocab_size=64, seq_len=16)
    device, timeline = device or Device(type="cpu"), Timeline(recipe=recipe, steps=1)
    layers = find_layers(model).values()
    made = make_plan(layers, timeline, policy, tokens=16, device=device, joint=joint)
    return {name.removeprefix("blocks.0."): each for name, each in made.stretches[0].layers.items()}


def composed(*words: str) -> Config:
    return to_config(composition.compose([*words, "run.name=x", "phases=none"]))


def test_every_recipe_has_its_outcome_in_the_table() -> None:
    assert set(OUTCOMES) == {Path(each).stem for each in RECIPES.glob("*.yaml")}


@pytest.mark.parametrize("recipe", OUTCOMES)
def test_a_recipe_multiplies_as_one_what_no_scale_spans(recipe: str) -> None:
    sizes = ["model.width=256", "model.layers=1", "model.hidden=256", "policy=all"]
    config = composed(f"recipe={recipe}", "train.joint_products=true", *sizes)
    model = build_model(config, 257, torch.device("meta"))
    plan = build_plan(config, find_layers(model), build_timeline(config), Device(type="cpu"))
    layers = plan.stretches[0].layers
    for name, title in (("attention.wk", "wq, wk, wv"), ("mlp.gate", "gate, up")):
        found = layers[f"blocks.0.{name}"]
        for gemm, reason in zip(found.gemms, OUTCOMES[recipe], strict=True):
            how = "one product" if reason is None else "a product each, because "
            assert f"; {title}: {how}" in gemm.why and (reason or "") in gemm.why, gemm.why
            assert gemm.joint is (reason is None)
        joint = any(reason is None for reason in OUTCOMES[recipe])
        assert (executor_class(found) is JointGemms) is found.joint is joint
    alone = layers["blocks.0.mlp.down"]
    assert not alone.joint and "product" not in alone.fprop.why


@pytest.mark.parametrize(
    "recipe", [NVFP4(fused_scales=True), FP8Current(fused_scales=True)], ids=lambda each: each.name
)
def test_weights_that_share_their_scale_are_one_in_fprop(recipe: Recipe) -> None:
    assert [gemm.joint for gemm in plans(recipe)["attention.wq"].gemms] == [True, False, False]


def test_by_default_every_layer_has_products_of_its_own() -> None:
    found = plans(MXFP8(), joint=False)
    assert not any(gemm.joint or "product" in gemm.why for each in found.values() for gemm in each.gemms)
    assert composed().train.joint_products is False


def test_blocks_that_cross_the_border_of_a_layer_keep_products_apart() -> None:
    """48 out features are no whole blocks of 32 along them, which only dgrad has."""
    gate = plans(MXFP8(), hidden=48)["mlp.gate"]
    assert [gemm.joint for gemm in gate.gemms] == [True, False, True]
    assert gate.dgrad.why.endswith("gate, up: a product each, because a shard of 48 is not whole blocks of 32 (dy)")
    square = plans(FP8Block(), hidden=192)["mlp.gate"]
    assert [gemm.joint for gemm in square.gemms] == [False, False, True]
    assert square.fprop.why.endswith("because a shard of 192 is not whole blocks of 128 (w)")


def test_a_layer_that_a_policy_keeps_is_apart_and_the_others_are_one_product() -> None:
    found = plans(MXFP8(), LayerPolicy(last=0, keep=["attention.wk", "mlp.up"]))
    assert found["attention.wq"].fprop.why.endswith("; wq, wv: one product") and not found["attention.wk"].joint
    assert not found["mlp.gate"].joint and "product" not in found["mlp.gate"].fprop.why, "it is the only one"
    kept = plans(MXFP8(), LayerPolicy(last=0, keep=["attention"]))["attention.wv"]
    assert kept.joint and not kept.quantised, "all are kept alike"


def test_layers_on_transformer_engine_are_one_where_all_three_gemms_can_be() -> None:
    hopper, blackwell = (Device.elsewhere(find_gpu(name)) for name in ("H100", "B200"))
    for recipe, device in ((FP8Block(), hopper), (MXFP8(), blackwell)):
        gate = plans(recipe, device=device)["mlp.gate"]
        assert gate.layer_backend == "te" and executor_class(gate) is JointBackend
        assert all(gemm.joint and gemm.why.endswith("; gate, up: one product") for gemm in gate.gemms)
    for recipe, device, reason in (
        (FP8Block(), hopper, "a shard of 64 is not whole blocks of 128 (w)"),
        (NVFP4(), blackwell, "each has a scale of its whole tensor (w)"),
        (FP8Delayed(), hopper, "each layer has its own amax histories"),
    ):
        found = plans(recipe, device=device)["attention.wq"]
        assert found.layer_backend == "te" and executor_class(found) is BackendLayer
        title = "wq, wk, wv: a product each, because"
        assert all(gemm.why.endswith(f"; {title} {reason}") for gemm in found.gemms), found.fprop.why


def test_layers_on_transformer_engine_are_apart_where_weights_have_memory_of_their_own() -> None:
    words = ("recipe=mxfp8", "train.joint_products=true", "policy=all")
    for word, ranks, reason in (
        ("run.seed=1", 2, "FSDP gathers each weight into memory of its own"),
        ("train.cuda_graph=block", 1, "graphs of blocks copy each weight to where they read it"),
    ):
        config = composed(*words, word)
        layers = find_layers(build_model(config, 257, torch.device("meta")))
        plan = build_plan(config, layers, build_timeline(config), Device.elsewhere(find_gpu("B200")), ranks)
        why = plan.stretches[0].layers["blocks.0.attention.wq"].wgrad.why
        assert why.endswith(f"because Transformer Engine takes one weight, and {reason}")


def test_layers_of_several_backends_are_apart() -> None:
    blackwell = Device.elsewhere(find_gpu("B200"))
    model = nn.Module()
    model.a, model.b, model.fp4train_fused = nn.Linear(64, 64), nn.Linear(64, 48), (("a", "b"),)
    options = {"tokens": 32, "device": blackwell, "backend": {"a": "native", "b": "emulate"}, "joint": True}
    found = make_plan(find_layers(model).values(), Timeline(recipe=MXFP8(), steps=1), None, **options)
    assert found.stretches[0].layers["a"].fprop.why.endswith("a product each, because they run on native, emulate")


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("train.compile=true", "train.compile has an operator per layer"),
        ("parallel.tp=2", "tensor parallelism cuts them"),
    ],
)
def test_what_needs_a_layer_by_itself_says_so_in_the_plan(word: str, reason: str) -> None:
    config = composed("recipe=bf16", "train.joint_products=true", word)
    layers = find_layers(build_model(config, 257, torch.device("meta")))
    plan = build_plan(config, layers, build_timeline(config), Device(type="cpu"))
    wq = plan.stretches[0].layers["blocks.0.attention.wq"]
    assert not wq.joint and wq.fprop.why.endswith(f"wq, wk, wv: a product each, because {reason}")


def test_autocast_resolves_no_joint_products() -> None:
    """They are a run's: other loops may call layers in any way."""
    model = f4.convert(Llama(width=64, layers=1, heads=2, kv_heads=1, hidden=64).build(vocab_size=64, seq_len=16))
    wq = model.get_submodule("blocks.0.attention.wq")
    with f4.autocast(MXFP8()):
        executor, _ = wq.executor_now(torch.device("cpu"), torch.float32)
    assert executor.plan.quantised and not executor.plan.joint
