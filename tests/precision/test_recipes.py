"""Recipes: the table of six operands matches the documentation, and each option changes the right
operands.
"""

import dataclasses
import inspect
import re

import pytest
import torch
from configured import config_of
from covering import COVERING, parts
from omegaconf import OmegaConf

from fp4train.config import RECIPES, bind
from fp4train.kernels import cpu
from fp4train.precision import (
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
    LossScaling,
    Mixed,
    Operands,
    OutlierChannels,
    Recipe,
    recipes,
)
from fp4train.quantize import Delayed, Hadamard, QuantSpec, Rotation, quantizer

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
PUT_TOGETHER: list[Recipe] = [
    Mixed(fprop=NVFP4()),
    Custom(fprop=Operands(first=QuantSpec(), second=QuantSpec())),
]
ALL = [
    *(
        kind()
        for kind in vars(recipes).values()
        if inspect.isclass(kind) and not any(type(recipe) is kind for recipe in PUT_TOGETHER)
    ),
    *PUT_TOGETHER,
]
"""Each recipe class, with its defaults where it has some."""

SLOTS = {
    ("fprop", "x"): lambda t: t["fprop"].first,
    ("fprop", "w"): lambda t: t["fprop"].second,
    ("dgrad", "dy"): lambda t: t["dgrad"].first,
    ("dgrad", "w"): lambda t: t["dgrad"].second,
    ("wgrad", "dy"): lambda t: t["wgrad"].first,
    ("wgrad", "x"): lambda t: t["wgrad"].second,
}


def changes(a: Recipe, b: Recipe) -> dict[tuple[str, str], set[str]]:
    """Decoded → the fields of its spec that differ between two recipes."""
    found = {}
    for slot, pick in SLOTS.items():
        one = pick(a.table())
        other = pick(b.table())
        if one != other:
            found[slot] = {
                f.name
                for f in dataclasses.fields(QuantSpec)
                if f.init and getattr(one, f.name) != getattr(other, f.name)
            }
    return found


def from_file(name: str, *overrides: str) -> Recipe:
    return config_of(f"recipe={name}", *overrides).recipe


def test_the_printed_table_of_nvfp4_is_that_of_the_design() -> None:
    lines = [re.split(r" {2,}", line) for line in str(NVFP4()).splitlines()]
    assert lines[0] == ["NVFP4"]
    header = lines[1]
    rows = [dict(zip(header, line, strict=True)) for line in lines[3:]]
    found = {(r["GEMM"], r["operand"]): (r["block"], r["rounding"], r["Hadamard"]) for r in rows}
    assert found == {
        ("fprop", "x"): ("1×16", "nearest", "no"),
        ("fprop", "w"): ("16×16", "nearest", "no"),
        ("dgrad", "w"): ("16×16", "nearest", "no"),
        ("dgrad", "dy"): ("1×16", "stochastic", "no"),
        ("wgrad", "x"): ("1×16 along tokens", "nearest", "16, signed"),
        ("wgrad", "dy"): ("1×16 along tokens", "stochastic", "16, signed"),
    }


DY = {("dgrad", "dy"), ("wgrad", "dy")}
X = {("fprop", "x"), ("wgrad", "x")}
W = {("fprop", "w"), ("dgrad", "w")}
WGRAD = {("wgrad", "dy"), ("wgrad", "x")}
EVERY = set(SLOTS)


@pytest.mark.parametrize(
    ("changed", "slots", "fields"),
    [
        (NVFP4(hadamard=False), WGRAD, {"hadamard"}),
        (NVFP4(stochastic_rounding=False), DY, {"rounding"}),
        (NVFP4(two_d_weights=False), W, {"block"}),
        (NVFP4(row_scaled_activation=True), X, {"global_scale"}),
        (NVFP4(four_over_six="weights"), W, {"four_over_six", "global_bound"}),
        (NVFP4(four_over_six="weights", four_over_six_bound="none"), W, {"four_over_six"}),
        (NVFP4(formula="te2.13"), EVERY, {"formula"}),
        (NVFP4(guard=16 / 17), DY, {"guard"}),
        (NVFP4().with_high_precision("fprop"), None, None),
    ],
)
def test_each_switch_of_nvfp4_changes_its_operands_and_no_others(
    changed: Recipe, slots: set[tuple[str, str]] | None, fields: set[str] | None
) -> None:
    if slots is None:
        assert dict(changed.table()) == {**NVFP4().table(), "fprop": Operands()}
        return
    found = changes(NVFP4(), changed)
    assert set(found) == slots
    assert all(f == fields for f in found.values())


def test_four_over_six_of_activations_leaves_stochastic_gradients_alone() -> None:
    plain = NVFP4(hadamard=False)
    found = changes(plain, NVFP4(hadamard=False, four_over_six="all"))
    assert set(found) == X | W
    nearest = changes(
        NVFP4(hadamard=False, stochastic_rounding=False),
        NVFP4(
            hadamard=False,
            stochastic_rounding=False,
            four_over_six="activations",
            four_over_six_bound="weights",
        ),
    )
    assert set(nearest) == X | DY
    assert all(f == {"four_over_six"} for f in nearest.values())


@pytest.mark.parametrize(
    ("plain", "changed", "slots", "fields"),
    [
        (MXFP8(), MXFP8(element="hybrid"), DY, {"element"}),
        (MXFP8(), MXFP8(scale_rounding="floor"), EVERY, {"scale_rounding"}),
        (MXFP8(), MXFP8(two_d_weights=True), W, {"block"}),
        (MXFP6(), MXFP6(element="e3m2"), X | W, {"element"}),
        (MXFP6(), MXFP6(gradient_element="e2m3"), DY, {"element"}),
        (MXFP4(), MXFP4(hadamard=False), WGRAD, {"hadamard"}),
        (
            MXFP4(scale_rounding="rceil"),
            MXFP4(scale_rounding="rceil", stochastic_rounding=False),
            DY,
            {"rounding"},
        ),
        (FP8Current(), FP8Current(element="e4m3"), DY, {"element"}),
        (FP8Current(), FP8Current(power_of_two=True), EVERY, {"scale"}),
        (
            FP8Delayed(),
            FP8Delayed(history=7, algorithm="most_recent", margin=1),
            EVERY,
            {"delayed"},
        ),
        (FP8Block(), FP8Block(power_of_two=False), EVERY, {"scale"}),
        (FP8Block(), FP8Block(element="hybrid"), DY, {"element"}),
    ],
)
def test_each_switch_of_the_other_recipes_changes_its_operands_and_no_others(
    plain: Recipe, changed: Recipe, slots: set[tuple[str, str]], fields: set[str]
) -> None:
    found = changes(plain, changed)
    assert set(found) == slots
    assert all(f == fields for f in found.values())


def test_delayed_scaling_carries_its_constants_into_the_specs() -> None:
    spec = FP8Delayed(history=7, algorithm="most_recent", margin=1).table()["dgrad"].first
    assert spec == QuantSpec(
        element="e5m2",
        block=(None, None),
        scale="fp32",
        global_scale=None,
        delayed=Delayed(history=7, algorithm="most_recent", margin=1),
    )


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
def test_high_precision_takes_gemms_out_whatever_the_recipe(recipe: Recipe) -> None:
    changed = recipe.with_high_precision("wgrad").with_high_precision("fprop", "wgrad")
    assert changed.high_precision == ("fprop", "wgrad")
    assert changed == recipe.with_high_precision("wgrad", "fprop"), (
        "the order of the words means nothing"
    )
    assert hash(changed) == hash(recipe.with_high_precision("wgrad", "fprop"))
    assert dict(changed.table()) == {
        "fprop": Operands(),
        "dgrad": recipe.table()["dgrad"],
        "wgrad": Operands(),
    }
    assert type(changed) is type(recipe)
    assert not recipe.with_high_precision("fprop", "dgrad", "wgrad").quantised


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
def test_recipes_compare_by_value_and_print(recipe: Recipe) -> None:
    assert recipe == dataclasses.replace(recipe)
    assert len({recipe, dataclasses.replace(recipe)}) == 1
    assert str(recipe).splitlines()[0] == recipe.name
    assert len(str(recipe).splitlines()) == 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BF16(dtype="bf16"), "dtype='bf16'.*bfloat16"),
        (
            lambda: NVFP4(high_precision=("forward",)),
            "high_precision='forward'.*fprop, dgrad, wgrad",
        ),
        (lambda: NVFP4(high_precision="fpropp"), "high_precision='fpropp'"),
        (lambda: NVFP4(four_over_six="x"), "four_over_six='x'.*weights"),
        (lambda: NVFP4(four_over_six_error="abs"), "four_over_six_error='abs'.*mae"),
        (lambda: NVFP4(four_over_six_bound=256), "four_over_six_bound=256"),
        (lambda: NVFP4(four_over_six="all"), "four_over_six='all' with hadamard=True"),
        (lambda: NVFP4(formula="te2"), "formula='te2'.*te2.14"),
        (lambda: NVFP4(guard=2.0), "guard=2.0"),
        (lambda: NVFP4(guard=16 / 17, stochastic_rounding=False), "guard=.*stochastic_rounding"),
        (lambda: MXFP8(element="e5m2"), "element='e5m2'.*hybrid"),
        (lambda: MXFP8(scale_rounding="up"), "scale_rounding='up'.*rceil"),
        (lambda: MXFP6(element="e4m3"), "element='e4m3'.*e2m3"),
        (lambda: MXFP6(gradient_element="e2m1"), "gradient_element='e2m1'"),
        (lambda: FP8Current(element="e5m2"), "element='e5m2'"),
        (lambda: FP8Delayed(history=0), "history=0"),
        (lambda: FP8Delayed(algorithm="mean"), "algorithm='mean'.*most_recent"),
        (
            lambda: Mixed(fprop=FP8Delayed(history=2), wgrad=FP8Delayed(history=5)),
            r"wgrad, x: delayed=.*history=5.*, and delayed=.*history=2.* in fprop",
        ),
        (lambda: FP8Block(element="e3m2"), "element='e3m2'"),
        (lambda: Mixed(fprop=FP32()), "dtype='bfloat16'.*float32"),
        (lambda: LossScaling(initial=0), "initial=0"),
        (lambda: LossScaling(growth=0.5), "growth=0.5"),
        (lambda: LossScaling(backoff=1), "backoff=1"),
        (lambda: LossScaling(interval=0), "interval=0"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_hadamard_transform_on_one_operand_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wgrad: hadamard=.* of dy differs from hadamard=.* of x"):
        Custom(wgrad=Operands(first=QuantSpec(hadamard=Hadamard()), second=QuantSpec()))


def test_high_precision_may_be_one_word() -> None:
    assert NVFP4(high_precision="fprop") == NVFP4().with_high_precision("fprop")  # type: ignore[arg-type]


def test_every_recipe_file_builds_and_shows_all_switches(recipes: dict[str, Recipe]) -> None:
    assert sorted(recipes) == NAMES
    of_every_recipe = {field.name for field in dataclasses.fields(Recipe)}
    for name, recipe in recipes.items():
        text = (RECIPES / f"{name}.yaml").read_text()
        if "defaults:" in text or "high_precision" in text:
            continue  # it builds on another one, or is about one switch
        own = {field.name for field in dataclasses.fields(recipe)} - of_every_recipe - {"label"}
        assert {field for field in own if f"{field}:" in text} == own, name


def test_the_recipes_that_stand_for_all_have_every_part(recipes: dict[str, Recipe]) -> None:
    """Else a recipe with the missing part belongs to `COVERING`."""
    covered = {part for name in COVERING for part in parts(recipes[name])}
    missing = {
        name: set(parts(recipe)) - covered
        for name, recipe in recipes.items()
        if set(parts(recipe)) - covered
    }
    assert missing == {}


@pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
def test_every_recipe_file_has_kernels_for_all_its_operands_on_a_cpu(
    recipes: dict[str, Recipe],
) -> None:
    inner = [recipe.outliers.recipe for recipe in recipes.values() if recipe.outliers is not None]
    specs = {spec for recipe in (*recipes.values(), *inner) for spec in recipe.table().specs()}
    assert {spec: why for spec in specs if (why := quantizer(spec, "cpu").why)} == {}


def test_a_recipe_file_can_be_changed_on_the_command_line() -> None:
    assert from_file("nvfp4", "recipe.hadamard=false", "+recipe.high_precision=[fprop]") == NVFP4(
        hadamard=False, high_precision=("fprop",)
    )


def test_recipe_files_stand_for_what_they_are_called() -> None:
    assert from_file("nvfp4") == NVFP4()
    assert from_file("mxfp8_hybrid") == MXFP8(element="hybrid")
    assert from_file("nvfp4_unbiased") == NVFP4(guard=16 / 17)
    assert from_file("bf16_forward_nvfp4_backward") == NVFP4().with_high_precision("fprop")
    assert from_file("nvfp4_forward_mxfp8_backward") == Mixed(
        fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8()
    )
    assert from_file("nvfp4_plain") == NVFP4(
        hadamard=False, stochastic_rounding=False, two_d_weights=False
    )


def test_names_fit_a_legend_and_differ(recipes: dict[str, Recipe]) -> None:
    variants = [
        *recipes.values(),
        NVFP4().with_high_precision("fprop", "wgrad"),
        NVFP4(hadamard=False),
        FP16(scaling=LossScaling(interval=10)),
        NVFP4(dtype="float32"),
        Mixed(fprop=NVFP4(), high_precision=("dgrad",)),
    ]
    names = [recipe.name for recipe in variants]
    assert len(set(names)) == len(set(variants))
    assert max(map(len, names)) <= 80
    assert NVFP4().name == "NVFP4"
    assert NVFP4(guard=16 / 17).name == "NVFP4(guard=0.941176)"
    assert NVFP4().with_high_precision("fprop").name == "NVFP4 with fprop in BF16"
    mixed = Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8(), high_precision=("fprop",))
    assert mixed.name == "Mixed(NVFP4/MXFP8/MXFP8) with fprop in BF16"
    assert dataclasses.replace(mixed, label="house").name == "house with fprop in BF16"


def test_a_mixed_recipe_takes_each_gemm_from_its_part() -> None:
    mixed = Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=FP8Row())
    assert dict(mixed.table()) == {
        "fprop": NVFP4().table()["fprop"],
        "dgrad": MXFP8().table()["dgrad"],
        "wgrad": FP8Row().table()["wgrad"],
    }
    assert not Mixed().quantised


def test_a_custom_table_can_be_spelled_out_in_yaml() -> None:
    text = """
    _target_: fp4train.precision.Custom
    label: FP4 weights
    fprop:
      _target_: fp4train.precision.Operands
      second: {_target_: fp4train.quantize.QuantSpec, block: [16, 16]}
    wgrad:
      _target_: fp4train.precision.Operands
      first:
        _target_: fp4train.quantize.QuantSpec
        element: e5m2
        block: [null, null]
        scale: fp32
        global_scale: null
    """
    recipe = bind(OmegaConf.to_container(OmegaConf.create(text)), Recipe, "recipe")
    assert recipe == Custom(
        label="FP4 weights",
        fprop=Operands(second=QuantSpec(block=(16, 16))),
        wgrad=Operands(
            first=QuantSpec(element="e5m2", block=(None, None), scale="fp32", global_scale=None)
        ),
    )
    assert recipe.name == "FP4 weights"


@pytest.mark.parametrize(
    "transform",
    [Rotation(kind="dct"), Rotation(kind="orthogonal", size=32), Hadamard(signs="none")],
)
def test_every_transform_can_be_printed(transform) -> None:
    spec = QuantSpec(hadamard=transform)
    line = str(Custom(wgrad=Operands(first=spec, second=spec))).splitlines()[-1]
    assert str(transform.size) in line


def test_fp16_activations_bring_loss_scaling_and_others_do_not() -> None:
    own = LossScaling(initial=8.0)
    assert FP16(scaling=own).loss_scaling == own
    assert FP16(scaling=own).with_high_precision("fprop").loss_scaling == own
    assert NVFP4(dtype="float16").loss_scaling == LossScaling(), (
        "its gradients underflow as FP16's do"
    )
    assert (
        Mixed(
            fprop=MXFP8(dtype="float16"), dgrad=FP16(scaling=own), wgrad=FP16(), dtype="float16"
        ).loss_scaling
        == own
    )
    assert BF16().loss_scaling is None
    assert FP32().torch_dtype == torch.float32


def test_a_custom_table_has_a_loss_scale_where_it_asks_for_one() -> None:
    own = LossScaling(initial=8.0)
    assert Custom(scaling=own).loss_scaling == own and Custom().loss_scaling is None
    assert Custom(dtype="float16").loss_scaling == LossScaling()
    assert Mixed(fprop=BF16(), dgrad=Custom(scaling=own), wgrad=BF16()).loss_scaling == own


def test_a_loss_scaling_is_taken_from_a_part_however_deep_it_is() -> None:
    stated = LossScaling(initial=8.0)
    inner = Mixed(fprop=NVFP4(), dgrad=Custom(scaling=stated), wgrad=BF16())
    assert Mixed(fprop=BF16(), dgrad=inner, wgrad=BF16()).loss_scaling == stated
    assert Mixed(fprop=Mixed(dgrad=inner)).loss_scaling == stated
    assert Mixed(fprop=Mixed()).loss_scaling is None
    apart = OutlierChannels(recipe=Custom(scaling=stated))
    assert NVFP4(outliers=apart).loss_scaling == stated
    in_fp16 = {gemm: MXFP8(dtype="float16") for gemm in ("fprop", "dgrad", "wgrad")}
    nested = Mixed(**{**in_fp16, "fprop": Mixed(**in_fp16, dtype="float16")}, dtype="float16")
    assert nested.loss_scaling == LossScaling()


def test_the_loss_scale_backs_off_and_grows() -> None:
    scaling = LossScaling(initial=8.0, interval=3)
    assert scaling.update(8.0, 2, finite=False) == (4.0, 0)
    assert scaling.update(8.0, 0, finite=True) == (8.0, 1)
    assert scaling.update(8.0, 2, finite=True) == (16.0, 0)
    assert scaling.update(2.0**-24, 0, finite=False) == (2.0**-24, 0), "it never reaches zero"
    stays = LossScaling(initial=8.0, interval=3, growth=1)
    assert stays.update(2.0, 2, finite=True) == (8.0, 0), "it comes back after it backed off"
