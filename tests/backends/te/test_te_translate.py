"""Every recipe against TE's real recipe classes (the pure-Python wheel): exact, or a reason why TE
cannot.
"""

import dataclasses
import importlib
import importlib.metadata
import subprocess
import sys
import types

import pytest

from fp4train.backends import Operands, choose
from fp4train.backends.te import (
    QuantizerFactory,
    availability,
    to_te,
    translate,
    why_not,
    why_not_device,
)
from fp4train.hardware import Device
from fp4train.precision import Layer, Recipe
from fp4train.precision.recipes import (
    BF16,
    FP16,
    FP32,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    Custom,
    FP8Block,
    FP8Current,
    FP8Delayed,
    FP8Row,
    Mixed,
)
from fp4train.quantize import Hadamard, QuantSpec

pytest.importorskip("pydantic")
if availability.version() is None:
    pytest.skip("the transformer_engine wheel is not installed", allow_module_level=True)
recipes = availability.recipe_module()

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


@pytest.mark.parametrize(
    "recipe", [BF16(), FP16(), FP32(), NVFP4().with_high_precision("fprop", "dgrad", "wgrad")]
)
def test_a_recipe_that_quantises_nothing_needs_no_te(recipe: Recipe) -> None:
    assert to_te(recipe.table()) is None
    assert why_not(recipe.table(), shape(17, 3), Device(type="cuda")) is None


@pytest.mark.parametrize(
    ("recipe", "changed"),
    [
        (NVFP4(), {}),
        (NVFP4(hadamard=False), {"disable_rht": True}),
        (NVFP4(stochastic_rounding=False), {"disable_stochastic_rounding": True}),
        (NVFP4(two_d_weights=False), {"disable_2d_quantization": True}),
        (
            NVFP4(four_over_six="weights"),
            {"nvfp4_4over6": "weights", "nvfp4_4over6_e4m3_use_256": "weights"},
        ),
        (
            NVFP4(four_over_six="weights", four_over_six_bound="none", four_over_six_error="mse"),
            {
                "nvfp4_4over6": "weights",
                "nvfp4_4over6_e4m3_use_256": "none",
                "nvfp4_4over6_err_mode": "MSE",
            },
        ),
        (NVFP4(four_over_six="all", hadamard=False), {"nvfp4_4over6": "all", "disable_rht": True}),
        (
            NVFP4(four_over_six="activations", hadamard=False),
            {
                "nvfp4_4over6": "activations",
                "nvfp4_4over6_e4m3_use_256": "activations",
                "disable_rht": True,
            },
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_nvfp4_every_switch(recipe: Recipe, changed: dict[str, object]) -> None:
    made = to_te(recipe.table())
    assert type(made) is recipes.NVFP4BlockScaling
    assert {name: getattr(made, name) for name in SWITCHES} == SWITCHES | changed


def test_mxfp8() -> None:
    made = to_te(MXFP8().table())
    assert type(made) is recipes.MXFP8BlockScaling
    assert (made.fp8_format, made.enable_2d_quantization) == (recipes.Format.E4M3, False)
    made = to_te(MXFP8(element="hybrid", two_d_weights=True).table())
    assert (made.fp8_format, made.enable_2d_quantization) == (recipes.Format.HYBRID, True)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", [FP8Current, FP8Block])
def test_power_of_two_scales_reach_the_attributes_that_te_reads(
    kind: type[Recipe], power_of_two: bool
) -> None:
    made = to_te(kind(power_of_two=power_of_two).table())
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        assert getattr(made, name).power_2_scale is power_of_two


def test_fp8_formats_and_blocks() -> None:
    assert to_te(FP8Current().table()).fp8_format == recipes.Format.HYBRID
    assert to_te(FP8Current(element="e4m3").table()).fp8_format == recipes.Format.E4M3
    block = to_te(FP8Block(element="hybrid").table())
    assert type(block) is recipes.Float8BlockScaling
    assert block.fp8_format == recipes.Format.HYBRID
    assert (block.x_block_scaling_dim, block.w_block_scaling_dim, block.grad_block_scaling_dim) == (
        1,
        2,
        1,
    )


@pytest.mark.parametrize(
    ("accumulator", "split"), [("auto", False), ("fast", False), ("exact", True)]
)
def test_the_accumulator_of_fprop_reaches_te(accumulator: str, split: bool) -> None:
    made = to_te(FP8Current(accumulator=accumulator).table())
    assert type(made) is recipes.Float8CurrentScaling
    kinds = (made.fp8_gemm_fprop, made.fp8_gemm_dgrad, made.fp8_gemm_wgrad)
    assert [kind.use_split_accumulator for kind in kinds] == [split, True, True]


def test_an_accumulator_that_te_does_not_choose_is_refused() -> None:
    assert to_te(FP8Delayed(accumulator="fast").table())
    partly = FP8Current(accumulator="exact").with_high_precision("wgrad")
    for recipe in (FP8Delayed(accumulator="exact"), partly):
        with pytest.raises(ValueError, match="fprop: TE has accumulator='exact' for FP8Current"):
            to_te(recipe.table())


def test_delayed_scaling() -> None:
    made = to_te(FP8Delayed(element="e4m3", history=16, algorithm="most_recent", margin=1).table())
    assert type(made) is recipes.DelayedScaling
    assert (made.fp8_format, made.amax_history_len) == (recipes.Format.E4M3, 16)
    assert (made.amax_compute_algo, made.margin) == ("most_recent", 1)


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
        NVFP4().with_high_precision("dgrad"),
        NVFP4().with_high_precision("wgrad"),
        Mixed(fprop=NVFP4(row_scaled_activation=True), dgrad=NVFP4(), wgrad=NVFP4()),
        MXFP8().with_high_precision("fprop"),
        MXFP8().with_high_precision("dgrad", "wgrad"),
        NVFP4(row_scaled_activation=True).with_high_precision("dgrad", "wgrad"),
        Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8()),
        Mixed(fprop=MXFP8(), dgrad=NVFP4(), wgrad=NVFP4()),
    ],
    ids=lambda recipe: recipe.name,
)
def test_single_gemms_in_another_precision_need_a_custom_recipe(recipe: Recipe) -> None:
    made = to_te(recipe.table())
    assert type(made) is recipes.CustomRecipe
    assert made.backward_override is None
    assert made.qfactory == QuantizerFactory.of(recipe.table())


def test_a_table_is_recognised_whatever_recipe_wrote_it() -> None:
    custom = Custom(label="mine", **NVFP4().table())
    assert type(to_te(custom.table())) is recipes.NVFP4BlockScaling


def _with(gemm: str, **operands: QuantSpec | None) -> Recipe:
    table = dict(NVFP4().table())
    return Custom(label="mine", **(table | {gemm: dataclasses.replace(table[gemm], **operands)}))


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        (NVFP4(), recipes.NVFP4BlockScaling),
        (NVFP4(four_over_six="all", hadamard=False), recipes.NVFP4BlockScaling),
        (MXFP8(element="hybrid"), recipes.MXFP8BlockScaling),
        (FP8Current(), recipes.Float8CurrentScaling),
        (FP8Block(), recipes.Float8BlockScaling),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_a_dequantised_backward_is_tes_override(recipe: Recipe, kind: type) -> None:
    """With the fprop of the same recipe; only what quantises dy may differ, which nothing reads."""
    made = to_te(dataclasses.replace(recipe, backward="dequantised").table())
    quantised = to_te(recipe.table())
    assert type(made) is kind
    assert (made.backward_override, quantised.backward_override) == ("dequantized", None)
    of_fprop = ("disable_2d_quantization", "nvfp4_4over6", "nvfp4_4over6_e4m3_use_256")
    of_fprop += ("enable_2d_quantization", "x_block_scaling_dim", "w_block_scaling_dim")
    of_fprop += ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight")
    for name in of_fprop:
        assert getattr(made, name, None) == getattr(quantised, name, None), name


NVFP4_X = QuantSpec()
TRANSFORMED = QuantSpec(hadamard=Hadamard())
LONG = QuantSpec(hadamard=Hadamard(size=32))
BY_ROW = QuantSpec(global_scale="row")
E5M2 = QuantSpec(element="e5m2", block=(1, 32), scale="e8m0", global_scale=None)
BLOCK_2D = QuantSpec(element="e4m3", block=(128, 128), scale="fp32", global_scale=None)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (MXFP6(), ["fprop x", "E2M3", "backend=emulate"]),
        (MXFP4(), ["fprop x", "E2M1, 1×32", "backend=emulate"]),
        (FP8Row(), ["fprop x", "row", "backend=emulate"]),
        (MXFP8(scale_rounding="floor"), ["fprop x", "scale_rounding=rceil", "not by floor"]),
        (NVFP4(guard=16 / 17), ["dgrad dy", "guard=0.9412"]),
        (NVFP4(formula="te2.13"), ["formula=te2.14", "not te2.13"]),
        (NVFP4(dtype="float16"), ["fprop x", "no float16 output", "recipe.dtype=bfloat16"]),
        (
            NVFP4(dtype="float16", hadamard=False),
            ["fprop x", "no float16 output", "backend=emulate"],
        ),
        (NVFP4(dtype="float32"), ["wgrad dy", "BF16", "float32"]),
        (FP8Delayed().with_high_precision("fprop"), ["delayed scaling", "FP8Current"]),
        (_with("fprop", first=None), ["fprop", "w is quantised and x is not"]),
        (_with("dgrad", second=None), ["dgrad", "dy is quantised and w is not"]),
        (_with("fprop", first=E5M2), ["fprop", "x is mxfp8 and w is nvfp4"]),
        (_with("fprop", first=TRANSFORMED, second=TRANSFORMED), ["fprop x", "wgrad operands only"]),
        (_with("wgrad", first=BY_ROW, second=BY_ROW), ["wgrad dy", "row-wise"]),
        (NVFP4(row_scaled_activation=True), ["wgrad x", "no Hadamard transform"]),
        (NVFP4(row_scaled_activation=True, hadamard=False), ["wgrad x", "in fprop alone"]),
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
        (MXFP4(backward="dequantised"), ["fprop x", "E2M1, 1×32", "backend=emulate"]),
        (
            Custom(fprop=Operands(first=NVFP4_X, second=NVFP4_X), wgrad=Operands(dequantised=True)),
            ["wgrad: x", "for x and w together", "backend=emulate"],
        ),
        (Custom(fprop=Operands(first=E5M2, second=E5M2)), ["E5M2"]),
        (Custom(fprop=Operands(first=BLOCK_2D, second=BLOCK_2D)), ["128×128"]),
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
    for module in (availability, translate):
        monkeypatch.setattr(module, "version", lambda: found)
    with pytest.raises(ValueError, match=word):
        to_te(recipe.table())


def test_the_metadata_of_the_package_are_read_once_in_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take about a millisecond, and each call of a layer asks for TE's modules, which asks for
    its version.
    """
    reads = []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: reads.append(name) or "2.20.2")
    availability.version.cache_clear()
    try:
        for _ in range(3):
            availability.recipe_module()
        assert reads == ["transformer_engine"]
    finally:
        availability.version.cache_clear()


def test_a_field_that_an_older_te_lacks_matters_only_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclasses.dataclass
    class Older:
        disable_rht: bool = False

    assert translate._make(Older, disable_rht=True, backward_override=None) == Older(
        disable_rht=True
    )
    with pytest.raises(ValueError, match=r"no Older\(backward_override='high_precision'\)"):
        translate._make(Older, backward_override="high_precision")


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


@pytest.mark.parametrize(
    ("capability", "runs"), [((8, 9), False), ((9, 0), False), ((10, 0), True), ((12, 0), False)]
)
@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("gemms", [("fprop",), ("fprop", "dgrad")])
def test_fp8_per_tensor_for_backward_alone_runs_where_columns_can_be_multiplied(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    runs: bool,
    here: bool,
    gemms: tuple[str, ...],
) -> None:
    device = dataclasses.replace(gpu(monkeypatch, capability, "a GPU"), here=here)
    table = FP8Current().with_high_precision(*gemms).table()
    reason = why_not(table, shape(64, 64), device)
    assert (reason is None) is runs
    if not runs:
        assert "input to FP8 per tensor for backward only where forward quantises it alike" in str(
            reason
        )
        assert choose(table, shape(64, 64), "auto", device)["wgrad"].backend == "native"
        with pytest.raises(ValueError, match="backend=te cannot run"):
            choose(table, shape(64, 64), "te", device)
    assert why_not(FP8Current().table(), shape(64, 64), device) is None
    assert (
        why_not(FP8Current().with_high_precision("dgrad", "wgrad").table(), shape(64, 64), device)
        is None
    )


def test_rtx_blackwell_runs_plain_nvfp4_only(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (12, 0), "NVIDIA GeForce RTX 5090")
    assert "recipe.hadamard=false" in str(why_not_device(NVFP4().table(), device))
    assert why_not_device(NVFP4(hadamard=False, stochastic_rounding=False).table(), device) is None


GPUS = [
    ((9, 0), "H200"),
    ((10, 0), "B200"),
    ((12, 0), "RTX 5090"),
    ((8, 0), "A100"),
    ((8, 9), "L40"),
]


@pytest.mark.parametrize("capability", GPUS, ids=str)
@pytest.mark.parametrize(
    "recipe", [NVFP4(), MXFP8(), FP8Current(), FP8Block(), FP8Block(power_of_two=False)], ids=str
)
def test_a_gpu_elsewhere_gets_the_answer_that_it_gives_itself(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, capability: tuple[tuple[int, int], str]
) -> None:
    here = gpu(monkeypatch, *capability)
    elsewhere = Device(type="cuda", name=here.name, capability=here.capability, here=False)
    found = [why_not(recipe.table(), shape(64, 64), device) is None for device in (here, elsewhere)]
    assert found[0] == found[1]


def test_an_installed_te_that_does_not_load_is_a_reason_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> None:
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    device = Device(type="cuda", name="NVIDIA B200", capability=(10, 0))
    assert "does not load: libcudnn.so.9" in str(why_not_device(NVFP4().table(), device))
