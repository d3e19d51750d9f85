"""How weights travel between shards: codes, values in the recipe's dtype, or float32 with a
reason.
"""

import pytest
import torch
from pretended import Machine

from fp4train.backends.te import translate
from fp4train.hardware import Device, find_gpu
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Current,
    FP8Delayed,
    Layer,
    LayerPlan,
    LayerPolicy,
    QuartetII,
    Recipe,
    TetraJetV2,
    WireForm,
    gather_mode,
    resolve,
    wire_form,
)
from fp4train.precision.report import gathers
from fp4train.quantize import Quantizer

CPU = Device.of(torch.device("cpu"))


def plan(
    recipe: Recipe, rows: int = 64, columns: int = 64, block: int | None = 0, parts: int = 1
) -> LayerPlan:
    """The plan of a layer, or of one of `parts` ranks' share of its out features."""
    layer = Layer(name="x", in_features=columns, out_features=rows, block=block, blocks=1)
    return resolve(layer.part("out", parts), recipe, None, "emulate", CPU)


def test_a_quantised_weight_travels_as_codes_of_both_forms() -> None:
    made = plan(MXFP8())
    form = wire_form(made, 2, "recipe")
    assert (form.forward, form.backward) == (
        made.sources["fprop", "w"].codes,
        made.sources["dgrad", "w"].codes,
    )
    assert form.forward != form.backward, "one spec, along two axes"
    half = plan(NVFP4().with_high_precision("fprop"))
    form = wire_form(half, 2, "recipe")
    assert form.forward is None and form.backward is not None and form.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("recipe", "bytes_"), [(QuartetII(), 0.5 + 1 / 16), (TetraJetV2(), 0.5 + 1 / 16 + 4 / 128)]
)
def test_a_weight_that_dgrad_requantises_travels_as_the_codes_of_fprop(
    recipe: Recipe, bytes_: float
) -> None:
    form = wire_form(plan(recipe, 256, 256), 2, "recipe")
    assert (
        form.forward is not None
        and form.backward == form.forward == plan(recipe).sources["fprop", "w"].codes
    )
    assert [
        form.bytes(256, 256, backward=back, repeats=True) / 256**2 for back in (False, True)
    ] == [bytes_, bytes_]
    later = wire_form(plan(recipe.with_high_precision("fprop"), 256, 256), 2, "recipe")
    assert (later.forward, later.backward, later.dtype) == (None, form.backward, torch.bfloat16)


@pytest.mark.parametrize("gpu", [None, "B200", "H100"])
def test_no_recipe_sends_more_than_bf16(recipes: dict[str, Recipe], gpu: str | None) -> None:
    """But FP32, whose weights are multiplied in float32."""
    device = CPU if gpu is None else Device.elsewhere(find_gpu(gpu))
    layer = Layer(name="x", in_features=512, out_features=512, block=0, blocks=1)
    most = {}
    for name, recipe in recipes.items():
        form = wire_form(resolve(layer, recipe, None, "auto", device), 2, "recipe")
        most[name] = max(
            form.bytes(512, 512, backward=backward) / 512**2 for backward in (False, True)
        )
    assert most.pop("fp32") == 4
    assert max(most.values()) <= 2


def on_te(recipe: Recipe, rows: int = 64, experts: int = 0) -> LayerPlan:
    layer = Layer(name="x", in_features=64, out_features=rows, block=0, blocks=1, experts=experts)
    return resolve(layer, recipe, None, "te", Device.elsewhere(find_gpu("B200")))


@pytest.mark.parametrize(
    "recipe", [NVFP4(), NVFP4().with_high_precision("fprop"), MXFP8(), FP8Current()], ids=str
)
def test_a_weight_of_transformer_engine_travels_as_one_of_other_backends(recipe: Recipe) -> None:
    made = on_te(recipe)
    assert made.layer_backend == "te" and wire_form(made, 2, "recipe") == wire_form(
        plan(recipe), 2, "recipe"
    )
    assert wire_form(made, 2, "recipe").coded
    cut = wire_form(on_te(NVFP4(), rows=96), 8, "recipe")
    assert cut == WireForm(why="a shard of 12 is not whole blocks of 16")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (
            on_te(FP8Delayed()),
            "Transformer Engine enters the amax of the weight into its history of delayed scaling",
        ),
        (
            on_te(MXFP8(), experts=4),
            "Transformer Engine's GroupedLinear quantises the weights itself",
        ),
    ],
)
def test_a_weight_that_transformer_engine_must_quantise_travels_in_bf16(
    made: LayerPlan, why: str
) -> None:
    assert made.layer_backend == "te"
    assert wire_form(made, 2, "recipe") == WireForm(dtype=torch.bfloat16, why=why, rounds=True)


def test_older_transformer_engines_take_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch).has_transformer_engine(2, 18)
    here = Device(type="cuda", capability=(10, 0), here=True)
    layer = Layer(name="x", in_features=64, out_features=64, block=0, blocks=1)
    reason = translate.why_values(MXFP8().table(), layer, here)
    assert reason is not None and reason.endswith(
        "takes no codes of a weight: 2.19 is the oldest that does"
    )
    assert translate.why_values(MXFP8().table(), layer, Device.elsewhere(find_gpu("B200"))) is None


def test_without_kernels_of_its_own_fp4train_leaves_weights_to_transformer_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The readable reference would take dozens of passes over each shard."""
    Machine(monkeypatch).has_transformer_engine(2, 20)
    monkeypatch.setattr(
        translate, "quantizer", lambda spec, device: Quantizer(spec, "Triton is not installed")
    )
    here = Device(type="cuda", capability=(10, 0), here=True)
    layer = Layer(name="x", in_features=64, out_features=64, block=0, blocks=1)
    assert "since no kernel of fp4train does (Triton is not installed)" in str(
        translate.why_values(NVFP4().table(), layer, here)
    )


def test_one_sentence_says_what_is_sent_how_many_bytes_and_why() -> None:
    start = "weights of the blocks are gathered from 2 shards "
    codes = start + "as codes and scales (0.504 B per weight), which keep the bits of one rank"
    assert gathers([plan(NVFP4())], 2, "recipe") == codes
    assert (
        gathers([plan(BF16())], 2, "recipe")
        == start + "in BF16 (2 B per weight), in which they are multiplied"
    )
    phase = plan(NVFP4().with_high_precision("fprop"))
    assert gathers([plan(NVFP4()), phase], 2, "recipe") == codes.replace("0.504", "0.504 or 2")
    asked = gathers([plan(NVFP4())], 2, "bf16")
    assert asked.startswith(
        start + "in BF16 (2 B per weight), because parallel.gather=bf16 asks for it; "
    )
    assert asked.endswith("so digits differ (parallel.gather=fp32 has its bits)")
    whole = start + "in float32 (4 B per weight), because "
    assert gathers([plan(NVFP4())], 2, "fp32") == whole + "parallel.gather=fp32 asks for it"
    assert (
        gathers([plan(NVFP4())], 2, "recipe", fully_gathered="train.compile")
        == whole + "train.compile takes plain weights"
    )
    assert (
        gathers([plan(NVFP4(), rows=65)], 2, "recipe")
        == whole + "65 rows do not divide over 2 shards"
    )
    assert gathers([plan(NVFP4()), plan(NVFP4(), block=None)], 2, "recipe") == codes, (
        "the head is outside the blocks"
    )


@pytest.mark.parametrize(
    ("made", "shards", "why"),
    [
        (plan(NVFP4()), 8, "a shard of 8 is not whole blocks of 16"),
        (plan(MXFP8()), 4, "a shard of 16 is not whole blocks of 32"),
        (plan(NVFP4(), parts=2), 4, "a shard of 8 is not whole blocks of 16"),
        (plan(NVFP4(), rows=65), 2, "65 rows do not divide over 2 shards"),
        (plan(BF16(), rows=65), 2, "65 rows do not divide over 2 shards"),
        (plan(NVFP4(), block=None), 2, None),
    ],
)
def test_what_cannot_travels_in_float32(made: LayerPlan, shards: int, why: str | None) -> None:
    assert wire_form(made, shards, "recipe") == WireForm(why=why)


def test_the_configuration_can_ask_for_values() -> None:
    assert wire_form(plan(NVFP4()), 2, "fp32") == WireForm()
    assert wire_form(plan(NVFP4()), 2, "bf16") == WireForm(dtype=torch.bfloat16, rounds=True)
    assert wire_form(plan(BF16()), 2, "recipe") == WireForm(dtype=torch.bfloat16)


def test_the_weight_of_a_part_whose_cut_divides_blocks_travels_in_bf16() -> None:
    """Of 8 input features per rank fprop cannot be quantised."""
    layer = plan(NVFP4(), columns=64).layer.part("in", 8)
    part = resolve(layer, NVFP4(), None, "emulate", CPU)
    assert part.layer.in_features == 8 and not part.fprop.operands.quantised
    assert wire_form(part, 2, "recipe").forward is None


def test_graphs_and_models_without_blocks_take_float32() -> None:
    assert [
        gather_mode("recipe", fully_gathered=c, blocks=b)
        for c, b in ((False, True), (True, True), (False, False))
    ] == ["recipe", "fp32", "fp32"]


def test_weights_that_travel_otherwise_are_named() -> None:
    policy = LayerPolicy(last=1)
    layers = [
        Layer(name=f"blocks.{n}.{name}", in_features=64, out_features=rows, block=n, blocks=2)
        for n in (0, 1)
        for name, rows in (("wq", 64), ("wk", 16))
    ]
    plans = [resolve(layer, NVFP4(), policy, "emulate", CPU) for layer in layers]
    assert gathers(plans, 2, "recipe") == (
        "weights of the blocks are gathered from 2 shards: block 1 in BF16 (2 B per weight), "
        "in which they are "
        "multiplied; wq of block 0 as codes and scales (0.504 B per weight), which keep the "
        "bits of one rank; wk of "
        "block 0 in float32 (4 B per weight), because a shard of 8 is not whole blocks of 16"
    )
