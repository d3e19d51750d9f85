"""Every recipe against TE's real recipe classes (the pure-Python wheel): exact, or a reason why TE
cannot.
"""

import dataclasses
import importlib
import operator
import subprocess
import sys
import types
from typing import Any

import pytest
from pretended import Machine

from fp4train.backends import Operands
from fp4train.backends.te import (
    QuantizerFactory,
    availability,
    to_te,
    why_not,
    why_not_device,
)
from fp4train.hardware import Device
from fp4train.precision import Layer, Recipe, resolve
from fp4train.precision.recipes import (
    BF16,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    Custom,
    FP8Block,
    FP8Current,
    FP8Delayed,
    Mixed,
)
from fp4train.quantize import Hadamard, QuantSpec

pytest.importorskip("pydantic")
if availability.version() is None:
    pytest.skip("the transformer_engine wheel is not installed", allow_module_level=True)
recipes = availability.recipe_module()


@pytest.mark.parametrize("recipe", [BF16(), NVFP4().with_high_precision("fprop", "dgrad", "wgrad")])
def test_a_recipe_that_quantises_nothing_needs_no_te(recipe: Recipe) -> None:
    assert to_te(recipe.table()) is None
    assert why_not(recipe.table(), shape(17, 3), Device(type="cuda")) is None


def settings(te_recipe: object, expected: dict[str, object]) -> dict[str, object]:
    return {name: operator.attrgetter(name)(te_recipe) for name in expected}


SWITCHES = {
    "disable_rht": False,
    "disable_stochastic_rounding": False,
    "disable_2d_quantization": False,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
    "nvfp4_4over6_e4m3_use_256": "all",
    "nvfp4_4over6_err_mode": "MAE",
    "backward_override": None,
}
OF_6 = "nvfp4_4over6"
BOUND = "nvfp4_4over6_e4m3_use_256"


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {}),
        ({"hadamard": False}, {"disable_rht": True}),
        ({"stochastic_rounding": False}, {"disable_stochastic_rounding": True}),
        ({"two_d_weights": False}, {"disable_2d_quantization": True}),
        ({"four_over_six": "weights"}, {OF_6: "weights", BOUND: "weights"}),
        (
            {
                "four_over_six": "weights",
                "four_over_six_bound": "none",
                "four_over_six_error": "mse",
            },
            {OF_6: "weights", BOUND: "none", "nvfp4_4over6_err_mode": "MSE"},
        ),
        ({"four_over_six": "all", "hadamard": False}, {OF_6: "all", "disable_rht": True}),
    ],
)
def test_nvfp4_every_switch(options: dict[str, Any], changed: dict[str, object]) -> None:
    te_recipe = to_te(NVFP4(**options).table())
    assert type(te_recipe) is recipes.NVFP4BlockScaling
    assert settings(te_recipe, SWITCHES) == SWITCHES | changed


HYBRID = recipes.Format.HYBRID
E4M3 = recipes.Format.E4M3
BLOCK_DIMS = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
SCALES = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
SPLITS = [f"fp8_gemm_{gemm}.use_split_accumulator" for gemm in ("fprop", "dgrad", "wgrad")]


def scales(power_of_two: bool) -> dict[str, object]:
    return {f"{name}.power_2_scale": power_of_two for name in SCALES}


@pytest.mark.parametrize(
    ("recipe", "kind", "expected"),
    [
        (MXFP8(), "MXFP8BlockScaling", {"fp8_format": E4M3, "enable_2d_quantization": False}),
        (
            MXFP8(element="hybrid", two_d_weights=True),
            "MXFP8BlockScaling",
            {"fp8_format": HYBRID, "enable_2d_quantization": True},
        ),
        (FP8Current(), "Float8CurrentScaling", {"fp8_format": HYBRID, **scales(False)}),
        (FP8Current(element="e4m3"), "Float8CurrentScaling", {"fp8_format": E4M3}),
        (FP8Current(power_of_two=True), "Float8CurrentScaling", scales(True)),
        *(
            (
                FP8Current(accumulator=accumulator),
                "Float8CurrentScaling",
                dict(zip(SPLITS, (split, True, True), strict=True)),
            )
            for accumulator, split in (("auto", False), ("fast", False), ("exact", True))
        ),
        (FP8Block(), "Float8BlockScaling", {"fp8_format": E4M3, **scales(True)}),
        (FP8Block(power_of_two=False), "Float8BlockScaling", scales(False)),
        (
            FP8Block(element="hybrid"),
            "Float8BlockScaling",
            {"fp8_format": HYBRID, **dict(zip(BLOCK_DIMS, (1, 2, 1), strict=True))},
        ),
        (
            FP8Delayed(element="e4m3", history=16, algorithm="most_recent", margin=1),
            "DelayedScaling",
            {
                "fp8_format": E4M3,
                "amax_history_len": 16,
                "amax_compute_algo": "most_recent",
                "margin": 1,
            },
        ),
        (Custom(label="mine", **NVFP4().table()), "NVFP4BlockScaling", SWITCHES),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_a_recipe_becomes_the_class_of_te_with_its_settings(
    recipe: Recipe, kind: str, expected: dict[str, object]
) -> None:
    te_recipe = to_te(recipe.table())
    assert type(te_recipe) is getattr(recipes, kind)
    assert settings(te_recipe, expected) == expected


def test_an_accumulator_that_te_does_not_choose_is_refused() -> None:
    assert to_te(FP8Delayed(accumulator="fast").table())
    partly = FP8Current(accumulator="exact").with_high_precision("wgrad")
    for recipe in (FP8Delayed(accumulator="exact"), partly):
        with pytest.raises(ValueError, match="fprop: TE has accumulator='exact' for FP8Current"):
            to_te(recipe.table())


@pytest.mark.long
def test_tes_environment_variables_change_nothing() -> None:
    program = (
        "from fp4train.backends.te import to_te; from fp4train.precision.recipes import *; "
        "r = to_te(NVFP4().table()); assert not r.disable_rht and r.backward_override is None, r; "
        "assert to_te(FP8Block().table()).fp8_quant_fwd_inp.power_2_scale"
    )
    environment = {
        "NVTE_NVFP4_DISABLE_RHT": "1",
        "NVTE_BACKWARD_OVERRIDE": "dequantized",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        "PATH": "/usr/bin:/bin",
    }
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4().with_high_precision("fprop"),
        NVFP4().with_high_precision("wgrad"),
        Mixed(fprop=NVFP4(row_scaled_activation=True), dgrad=NVFP4(), wgrad=NVFP4()),
        MXFP8().with_high_precision("dgrad", "wgrad"),
        Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8()),
    ],
    ids=lambda recipe: recipe.name,
)
def test_single_gemms_in_another_precision_need_a_custom_recipe(recipe: Recipe) -> None:
    te_recipe = to_te(recipe.table())
    assert type(te_recipe) is recipes.CustomRecipe
    assert te_recipe.backward_override is None
    assert te_recipe.qfactory == QuantizerFactory.of(recipe.table())


def _with(gemm: str, **operands: QuantSpec | None) -> Recipe:
    table = dict(NVFP4().table())
    return Custom(label="mine", **(table | {gemm: dataclasses.replace(table[gemm], **operands)}))


@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4(),
        NVFP4(four_over_six="all", hadamard=False),
        MXFP8(element="hybrid"),
        FP8Current(),
        FP8Block(),
    ],
    ids=lambda recipe: recipe.name,
)
def test_a_dequantised_backward_is_tes_override_with_the_same_fprop(recipe: Recipe) -> None:
    dequantised = to_te(dataclasses.replace(recipe, backward="dequantised").table())
    quantised = to_te(recipe.table())
    assert type(dequantised) is type(quantised)
    assert (dequantised.backward_override, quantised.backward_override) == ("dequantized", None)
    of_fprop = ("disable_2d_quantization", OF_6, BOUND, "enable_2d_quantization", *SCALES[:2])
    for name in (*of_fprop, *BLOCK_DIMS[:2]):
        assert getattr(dequantised, name, None) == getattr(quantised, name, None), name


NVFP4_X = QuantSpec()
TRANSFORMED = QuantSpec(hadamard=Hadamard())
LONG = QuantSpec(hadamard=Hadamard(size=32))
BY_ROW = QuantSpec(global_scale="row")
E5M2 = QuantSpec(element="e5m2", block=(1, 32), scale="e8m0", global_scale=None)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (MXFP6(), ["fprop x", "E2M3", "backend=emulate"]),
        (MXFP4(), ["fprop x", "E2M1, 1×32", "backend=emulate"]),
        (MXFP8(scale_rounding="floor"), ["fprop x", "scale_rounding=rceil", "not by floor"]),
        (NVFP4(guard=16 / 17), ["dgrad dy", "guard=0.9412"]),
        (NVFP4(formula="te2.13"), ["formula=te2.14", "not te2.13"]),
        (NVFP4(dtype="float16"), ["fprop x", "no float16 output", "recipe.dtype=bfloat16"]),
        (NVFP4(dtype="float32"), ["wgrad dy", "BF16", "float32"]),
        (FP8Delayed().with_high_precision("fprop"), ["delayed scaling", "FP8Current"]),
        (_with("fprop", first=None), ["fprop", "w is quantised and x is not"]),
        (_with("fprop", first=E5M2), ["fprop", "x is mxfp8 and w is nvfp4"]),
        (_with("fprop", first=TRANSFORMED, second=TRANSFORMED), ["fprop x", "wgrad operands only"]),
        (_with("wgrad", first=BY_ROW, second=BY_ROW), ["wgrad dy", "row-wise"]),
        (NVFP4(row_scaled_activation=True), ["wgrad x", "no Hadamard transform"]),
        (_with("wgrad", first=LONG, second=LONG), ["wgrad dy", "size 16"]),
        (
            _with(
                "dgrad", first=dataclasses.replace(NVFP4_X, block=(16, 16), rounding="stochastic")
            ),
            ["dgrad dy", "16×16 blocks are rounded to nearest"],
        ),
        (FP8Delayed(backward="dequantised"), ["dgrad: w", "delayed scaling", "FP8Current"]),
        (
            NVFP4(row_scaled_activation=True, backward="dequantised"),
            ["dgrad: w", "none has this fprop", "backend=emulate"],
        ),
        (
            Custom(fprop=Operands(first=NVFP4_X, second=NVFP4_X), wgrad=Operands(dequantised=True)),
            ["wgrad: x", "for x and w together", "backend=emulate"],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_what_te_cannot_express_is_refused_by_operand_and_with_what_to_do(
    recipe: Recipe, words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        to_te(recipe.table())
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("found", "recipe", "word"),
    [
        ((2, 18, 0), NVFP4().with_high_precision("fprop"), "2.19"),
        ((2, 19, 0), NVFP4(backward="dequantised"), "2.20"),
        ((2, 13, 0), NVFP4(), "formula=te2.13"),
        ((2, 8, 0), NVFP4(), "too old"),
        (None, NVFP4(), "not installed"),
    ],
)
def test_an_older_te_is_refused_where_it_would_compute_something_else(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, ...] | None, recipe: Recipe, word: str
) -> None:
    Machine(monkeypatch).has_transformer_engine(*(found or ()))
    with pytest.raises(ValueError, match=word):
        to_te(recipe.table())


def shape(in_features: int, out_features: int) -> Layer:
    return Layer(name="up", in_features=in_features, out_features=out_features, block=0, blocks=1)


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str) -> Device:
    """A GPU that TE answers for as it would: by capability."""

    def check(least: tuple[int, int], most: tuple[int, int] = (99, 0)) -> object:
        available = least <= capability < most
        reason = (
            ""
            if available
            else f"Device compute capability {least[0]}.{least[1]} or higher required."
        )
        return lambda return_reason=False: (available, reason) if return_reason else available

    te = types.SimpleNamespace(
        is_fp8_available=check((8, 9)),
        is_mxfp8_available=check((10, 0), (12, 0)),
        is_nvfp4_available=check((10, 0)),
        is_fp8_block_scaling_available=check((9, 0)),
    )
    monkeypatch.setattr(availability, "pytorch_module", lambda: te)
    return Device(type="cuda", name=name, capability=capability)


def test_without_a_gpu_the_reason_says_so() -> None:
    assert (
        why_not_device(NVFP4().table(), Device(type="cpu"))
        == "Transformer Engine needs an NVIDIA GPU, not cpu"
    )
    assert "torch sees none" in str(why_not_device(NVFP4().table(), Device(type="cuda")))


def test_hopper_runs_fp8_and_is_pointed_at_it_for_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (9, 0), "NVIDIA H200")
    reason = why_not_device(NVFP4().table(), device)
    assert reason is not None
    for word in ("NVIDIA H200", "9.0", "10.0 or higher", "recipe=fp8_current"):
        assert word in reason
    assert why_not(FP8Current().table(), shape(64, 64), device) is None
    assert why_not_device(MXFP8().table(), device) is not None


def test_blackwell_runs_nvfp4_and_names_the_size_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = gpu(monkeypatch, (10, 0), "NVIDIA B200")
    for recipe in (NVFP4(), NVFP4().with_high_precision("fprop"), MXFP8()):
        assert why_not(recipe.table(), shape(64, 96), device) is None
        assert "out_features divisible by 32, not 40" in str(
            why_not(recipe.table(), shape(64, 40), device)
        )
    assert "power_of_two=true" in str(why_not_device(FP8Block(power_of_two=False).table(), device))
    assert "E2M3" in str(why_not(MXFP6().table(), shape(64, 64), device))


@pytest.mark.parametrize(("capability", "runs"), [((9, 0), False), ((10, 0), True)])
@pytest.mark.parametrize("here", [True, False])
def test_fp8_per_tensor_for_backward_alone_runs_where_columns_can_be_multiplied(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool, here: bool
) -> None:
    device = dataclasses.replace(gpu(monkeypatch, capability, "a GPU"), here=here)
    backward = FP8Current().with_high_precision("fprop")
    if runs:
        assert resolve(shape(64, 64), backward, None, "te", device).wgrad.backend == "te"
    else:
        assert resolve(shape(64, 64), backward, None, "auto", device).wgrad.backend == "native"
        with pytest.raises(ValueError, match="FP8 per tensor for backward only where forward"):
            resolve(shape(64, 64), backward, None, "te", device)
    forward = FP8Current().with_high_precision("dgrad", "wgrad")
    assert resolve(shape(64, 64), forward, None, "te", device).fprop.backend == "te"


def test_rtx_blackwell_runs_plain_nvfp4_only(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (12, 0), "NVIDIA GeForce RTX 5090")
    assert "recipe.hadamard=false" in str(why_not_device(NVFP4().table(), device))
    assert why_not_device(NVFP4(hadamard=False, stochastic_rounding=False).table(), device) is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_a_gpu_elsewhere_gets_the_answer_that_it_gives_itself(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    here = gpu(monkeypatch, capability, "a GPU")
    elsewhere = dataclasses.replace(here, here=False)
    for recipe in (NVFP4(), MXFP8(), FP8Current(), FP8Block(), FP8Block(power_of_two=False)):
        answers = [why_not(recipe.table(), shape(64, 64), gpu) for gpu in (here, elsewhere)]
        assert (answers[0] is None) == (answers[1] is None), recipe


def test_an_installed_te_that_does_not_load_is_a_reason_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> None:
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    device = Device(type="cuda", name="NVIDIA B200", capability=(10, 0))
    assert "does not load: libcudnn.so.9" in str(why_not_device(NVFP4().table(), device))
