"""How weights travel between shards: codes, values in the recipe's dtype, or float32 with a reason."""

import pytest
import torch

from fp4train.hardware import Device
from fp4train.precision import BF16, MXFP8, NVFP4, Recipe
from fp4train.precision.gather import WireForm, effective, wire_form
from fp4train.precision.layers import Layer
from fp4train.precision.plan import LayerPlan, part_of, resolve

CPU = Device.of(torch.device("cpu"))


def plan(recipe: Recipe, rows: int = 64, columns: int = 64, block: int | None = 0) -> LayerPlan:
    layer = Layer(name="x", in_features=columns, out_features=rows, block=block, blocks=1)
    return resolve(layer, recipe, None, "emulate", CPU)


def test_a_quantised_weight_travels_as_codes_of_both_forms() -> None:
    made = plan(MXFP8())
    assert wire_form(made, 2, "recipe")[:2] == (made.fprop.operands.second, made.dgrad.operands.second)
    half = plan(NVFP4().with_high_precision("fprop"))
    form = wire_form(half, 2, "recipe")
    assert form.row is None and form.column is not None and form.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("made", "shards", "why"),
    [
        (plan(NVFP4()), 8, "a shard of 8 is not whole blocks of 16"),
        (plan(MXFP8()), 4, "a shard of 16 is not whole blocks of 32"),
        (part_of(plan(NVFP4()), "out", 2), 4, "a shard of 8 is not whole blocks of 16"),
        (plan(NVFP4(), rows=65), 2, "65 rows do not divide over 2 shards"),
        (plan(BF16(), rows=65), 2, "65 rows do not divide over 2 shards"),
        (plan(NVFP4(), block=None), 2, None),
    ],
)
def test_what_cannot_travels_in_float32(made: LayerPlan, shards: int, why: str | None) -> None:
    assert wire_form(made, shards, "recipe") == WireForm(why=why)


def test_the_configuration_can_ask_for_values() -> None:
    assert wire_form(plan(NVFP4()), 2, "fp32") == WireForm()
    assert wire_form(plan(NVFP4()), 2, "bf16") == WireForm(dtype=torch.bfloat16)
    assert wire_form(plan(BF16()), 2, "recipe") == WireForm(dtype=torch.bfloat16)


def test_a_part_whose_cut_divides_blocks_is_what_a_run_resolves() -> None:
    """Of 8 input features per rank fprop cannot be quantised, and its weight travels in BF16 for it."""
    whole = plan(NVFP4(), columns=64)
    part = part_of(whole, "in", 8)
    assert part == resolve(part.layer, NVFP4(), None, "emulate", CPU)
    assert part.layer.in_features == 8 and not part.fprop.operands.quantised
    assert wire_form(part, 2, "recipe").row is None


def test_graphs_and_models_without_blocks_take_float32() -> None:
    assert [effective("recipe", compiled=c, blocks=b) for c, b in ((False, True), (True, True), (False, False))] == [
        *("recipe", "fp32", "fp32")
    ]
