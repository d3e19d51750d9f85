"""What runs while a part is measured is what its name says, and nothing else."""

from pathlib import Path

import pytest
from subjects import subject_of

from fp4train.errors import UserError
from fp4train.lab.studies import RecipePart, RecipeParts
from fp4train.lab.studies.parts import EVERY_LAYER
from fp4train.precision import BF16, MXFP8, NVFP4, LayerPolicy, QuartetII, Recipe

OPERANDS = ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"]


def quantised(part: RecipePart) -> set[str]:
    """ "layer gemm.first" of everything that is quantised."""
    return {
        f"{name} {gemm.name}.{which}"
        for name, plan in part.stretch.layers.items()
        for gemm in plan.gemms
        for which in ("first", "second")
        if getattr(gemm.operands, which) is not None
    }


def parts_of(trained: Path, recipe: Recipe) -> tuple[RecipeParts, dict[str, RecipePart]]:
    parts = RecipeParts(subject_of(trained), recipe, repeats=4)
    return parts, {part.name: part for part in parts.all()}


def test_every_part_quantises_what_it_is_named_for(trained: Path) -> None:
    parts, found = parts_of(trained, NVFP4())
    whole = quantised(found["everything"])
    assert len(parts.layers) == 14 and "head" not in parts.layers
    assert (
        len(whole) == 14 * 6 and not quantised(found["nothing"]) and not quantised(parts.reference)
    )
    assert parts.operands == OPERANDS and parts.gemms == ["fprop", "dgrad", "wgrad"]
    assert quantised(found["gemm/dgrad"]) == {each for each in whole if " dgrad." in each}
    assert quantised(found["operand/fprop.w"]) == {
        each for each in whole if each.endswith("fprop.second")
    }
    assert quantised(found["operand/wgrad.dy"]) == {
        each for each in whole if each.endswith("wgrad.first")
    }
    layer = "blocks.1.mlp.up"
    assert quantised(found[f"layer/{layer}"]) == {
        each for each in whole if each.startswith(f"{layer} ")
    }
    assert quantised(found["policy of the run"]) == {
        each for each in whole if each.startswith("blocks.0")
    }
    assert len(found) == 3 + 3 + 6 + 14


def test_only_what_is_rounded_stochastically_is_repeated(trained: Path) -> None:
    _, found = parts_of(trained, NVFP4())
    repeated = {name for name, part in found.items() if part.repeats == 4}
    stochastic = {"gemm/dgrad", "gemm/wgrad", "operand/dgrad.dy", "operand/wgrad.dy"}
    assert repeated == {"everything", "policy of the run", *stochastic}
    assert {part.repeats for part in parts_of(trained, MXFP8())[1].values()} == {1}


def test_an_operand_alone_keeps_its_spec_but_for_the_transform(trained: Path) -> None:
    _, found = parts_of(trained, NVFP4())
    alone = found["operand/wgrad.x"].stretch.layers["blocks.0.mlp.up"].table["wgrad"].second
    together = found["gemm/wgrad"].stretch.layers["blocks.0.mlp.up"].table["wgrad"].second
    assert alone is not None and together is not None
    assert together.hadamard is not None and alone.hadamard is None
    assert (alone.element, alone.block, alone.rounding) == (
        together.element,
        together.block,
        together.rounding,
    )


def test_operands_of_ms_eden_are_measured_with_their_gemm(trained: Path) -> None:
    """Without a transform, which is that of both operands, there is no MS-EDEN."""
    parts, found = parts_of(trained, QuartetII())
    assert parts.gemms == ["fprop", "dgrad", "wgrad"]
    assert parts.operands == ["fprop.x", "fprop.w"]
    assert {name for name in found if name.startswith("gemm/")} == {
        "gemm/fprop",
        "gemm/dgrad",
        "gemm/wgrad",
    }


def test_an_operand_alone_is_dequantised_in_backward_where_the_recipe_does_so(
    trained: Path,
) -> None:
    """x of fprop alone, with the values of its codes in wgrad, is the operand of such a recipe."""
    _, found = parts_of(trained, NVFP4(backward="dequantised"))
    assert {name for name in found if name.startswith("operand/")} == {
        "operand/fprop.x",
        "operand/fprop.w",
    }
    tables = {
        name: found[f"operand/fprop.{name}"].stretch.layers["blocks.0.mlp.up"].table
        for name in ("x", "w")
    }
    assert (tables["x"].dgrad.dequantised, tables["x"].wgrad.dequantised) == (False, True)
    assert (tables["w"].dgrad.dequantised, tables["w"].wgrad.dequantised) == (True, False)


def test_what_the_recipe_leaves_in_high_precision_is_no_part(trained: Path) -> None:
    parts, found = parts_of(trained, NVFP4().with_high_precision("fprop"))
    assert parts.gemms == ["dgrad", "wgrad"] and "operand/fprop.x" not in found


def test_a_run_that_keeps_nothing_has_no_part_for_its_policy(trained: Path) -> None:
    subject = subject_of(trained, policy=EVERY_LAYER)
    assert "policy of the run" not in [
        part.name for part in RecipeParts(subject, NVFP4(), repeats=1).all()
    ]


def test_policies_of_one_name_have_keys_of_their_own(trained: Path) -> None:
    parts, _ = parts_of(trained, NVFP4())
    first, last = (
        parts.under(policy, "chosen policy")
        for policy in (LayerPolicy(first=1, last=0), LayerPolicy(last=1))
    )
    assert first.name == last.name and first.key != last.key


@pytest.mark.parametrize("recipe", [BF16(), NVFP4().with_high_precision("fprop", "dgrad", "wgrad")])
def test_a_recipe_that_quantises_nothing_is_refused(trained: Path, recipe: Recipe) -> None:
    with pytest.raises(
        UserError, match=r"quantises nothing: there is no part of it to measure.*recipe=nvfp4"
    ):
        RecipeParts(subject_of(trained), recipe, repeats=1)
