"""Weights that share one global scale: which layers, what the plan shows, and what is refused."""

from typing import Any

import pytest
from torch import nn

import fp4train as f4
from fp4train.backends import LAYER_BACKENDS
from fp4train.hardware import Device, find_gpu
from fp4train.models.llama import Llama
from fp4train.parameters import ParameterSpec
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Current,
    FP8Delayed,
    LayerPlan,
    LayerPolicy,
    Mixed,
    OutlierChannels,
    Recipe,
    Residual,
    find_layers,
    fused_note,
    resolve,
)
from fp4train.precision.plan import plan


def llama() -> nn.Module:
    return Llama(width=32, layers=2, heads=2, kv_heads=1, hidden=64).build(
        vocab_size=64, seq_len=16
    )


def test_llama_says_which_layers_serving_software_multiplies_as_one() -> None:
    found = find_layers(llama())
    assert found["blocks.1.attention.wk"].fused == tuple(
        f"blocks.1.attention.w{each}" for each in "qkv"
    )
    assert found["blocks.0.mlp.up"].fused == ("blocks.0.mlp.gate", "blocks.0.mlp.up")
    assert found["blocks.0.mlp.down"].fused == found["blocks.0.attention.wo"].fused == ()


def test_the_plan_names_the_gemms_whose_weights_share_a_scale() -> None:
    shown = {
        (row.layer.name, row.gemm): row.why for row in plan(llama(), NVFP4(fused_scales=True)).rows
    }
    sharing = {key for key, why in shown.items() if "share a scale" in why}
    assert sharing == {
        (f"blocks.{block}.{layer}", gemm)
        for block in (0, 1)
        for layer in ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up")
        for gemm in ("fprop", "dgrad")
    }
    assert shown["blocks.0.mlp.gate", "fprop"].endswith("; gate, up share a scale")


def test_the_plan_names_the_layers_that_quantise_one_x_and_not_those_that_a_policy_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(LAYER_BACKENDS["te"]), "shares_input", lambda *_: True)
    layers = find_layers(llama())
    hopper = Device.elsewhere(find_gpu("H100"))

    def resolved(policy: LayerPolicy | None, name: str) -> LayerPlan:
        return resolve(layers[f"blocks.0.{name}"], FP8Current(), policy, "auto", hopper)

    whole = resolved(None, "attention.wk")
    assert "; wq, wk, wv share one quantised x" in whole.fprop.why and len(whole.readers) == 3
    policy = LayerPolicy(last=0, keep=["attention.wk", "up:wgrad"])
    divided = resolved(policy, "attention.wq")
    assert "; wq, wv share one quantised x" in divided.fprop.why
    assert divided.readers == ("blocks.0.attention.wq", "blocks.0.attention.wv")
    assert "quantised x" not in resolved(policy, "attention.wk").fprop.why
    assert "quantised x" not in resolved(policy, "mlp.gate").fprop.why, (
        "up keeps x in high precision for wgrad"
    )


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8()], ids=lambda recipe: recipe.name)
def test_by_default_no_layer_shares_a_scale(recipe: Recipe) -> None:
    assert not any("share" in row.why for row in plan(llama(), recipe).rows)
    layer = find_layers(llama())["blocks.0.mlp.up"]
    assert fused_note(layer, recipe, "fprop") == ""


def test_transformer_engine_is_refused_by_name_and_passed_over_by_auto() -> None:
    """It takes the amax of each weight itself."""
    hopper = Device.elsewhere(find_gpu("H100"))
    recipe = FP8Current(fused_scales=True)
    layers = find_layers(llama())
    layer = layers["blocks.0.mlp.up"]
    assert resolve(layers["blocks.0.mlp.down"], recipe, None, "auto", hopper).layer_backend == "te"
    assert resolve(layer, recipe, None, "auto", hopper).fprop.backend == "native"
    with pytest.raises(
        ValueError, match=r"backend=te cannot run .*fused scales take that of several weights"
    ):
        resolve(layer, recipe, None, "te", hopper)


@pytest.mark.parametrize(
    ("keep", "why"),
    [("attention.wv", "policy.keep=attention.wv"), ("gate:fprop", "policy.keep=gate:fprop")],
)
def test_a_policy_that_divides_a_group_is_refused(keep: str, why: str) -> None:
    with pytest.raises(
        ValueError, match=rf"share one scale, and fprop quantises .*{why}.*fused_scales=false"
    ):
        plan(llama(), NVFP4(fused_scales=True), LayerPolicy(last=0, keep=[keep]))


def test_a_policy_may_keep_whole_groups() -> None:
    made = plan(llama(), NVFP4(fused_scales=True), LayerPolicy(last=1, keep=["gate", "up"]))
    sharing = {row.layer.name for row in made.rows if "share a scale" in row.why}
    assert sharing == {f"blocks.0.attention.w{each}" for each in "qkv"}


def test_a_model_that_names_no_groups_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.raises(
        ValueError, match="which layers share a scale: say it in fp4train_parameters"
    ):
        plan(model, NVFP4(fused_scales=True))
    model.fp4train_parameters = lambda: [
        ParameterSpec(name=f"{n}.weight", fused="both") for n in (0, 1)
    ]
    assert plan(model, NVFP4(fused_scales=True)).stretches[0].layers["1"].fused == ("0", "1")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            [ParameterSpec(name="2.weight", fused="both")],
            r"2.weight with fused='both' is in no linear layer",
        ),
        (
            [ParameterSpec(name="3.weight", fused="both")],
            r"of Sequential names '3.weight', which is no parameter of",
        ),
        (
            ["0.weight"],
            r"fp4train_parameters of Sequential gives a str; it must give ParameterSpec",
        ),
    ],
)
def test_groups_that_are_none_are_refused(specs: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.RMSNorm(32))
    model.fp4train_parameters = lambda: specs
    with pytest.raises((TypeError, ValueError), match=message):
        f4.convert(model)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: MXFP8(fused_scales=True), "MXFP8 has no scale of a whole weight"),
        (lambda: BF16(fused_scales=True), "BF16 quantises no weight in fprop"),
        (lambda: FP8Delayed(fused_scales=True), "a history of its own"),
        (
            lambda: NVFP4(
                fused_scales=True, hadamard=False, outliers=OutlierChannels(recipe=MXFP8())
            ),
            "quantises the outlier channels of each weight apart",
        ),
    ],
)
def test_recipes_without_a_scale_to_share_are_refused(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"{why}.*recipe.fused_scales=false"):
        make()


def test_the_recipe_is_named_by_it_and_keeps_it_in_its_variants() -> None:
    recipe = NVFP4(fused_scales=True)
    assert recipe.name == "NVFP4 with fused scales"
    assert recipe.with_high_precision("fprop").name == "NVFP4 with fused scales and fprop in BF16"
    mixed = Mixed(fprop=recipe, dgrad=MXFP8(), wgrad=MXFP8())
    assert mixed.fused_scales and mixed == Mixed(
        fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8(), fused_scales=True
    )
    kept = LayerPolicy(last=0, keep=["gate:dgrad", "up:dgrad"], recipe_for_kept=MXFP8())
    layers = plan(llama(), recipe, kept).stretches[0].layers
    assert (
        layers["blocks.0.mlp.up"].fused
        and layers["blocks.0.mlp.up"].dgrad.operands.second.scale == "e8m0"
    )


def test_gemms_that_a_policy_keeps_in_a_recipe_without_such_a_scale_run_and_the_plan_says_so() -> (
    None
):
    keep = ["gate:fprop", "up:fprop"]
    kept = LayerPolicy(last=0, keep=keep, recipe_for_kept=MXFP8())
    recipe = Mixed(fprop=NVFP4(), dgrad=NVFP4(), wgrad=NVFP4(), fused_scales=True)
    resolved = plan(llama(), recipe, kept)
    up = resolved.stretches[0].layers["blocks.0.mlp.up"]
    assert up.fused == () and up.dgrad.operands.second == NVFP4().table()["dgrad"].second
    assert up.dgrad.why.endswith("; a scale of its own") and "scale" not in up.fprop.why
    residual = Mixed(fprop=NVFP4(), residual=Residual())
    kept = LayerPolicy(last=0, keep=["gate:wgrad"], recipe_for_kept=NVFP4(backward="dequantised"))
    with pytest.raises(
        ValueError, match=r"policy.keep: blocks.0.mlp.gate: wgrad in NVFP4 with.*ke"
    ):
        plan(llama(), residual, kept)
