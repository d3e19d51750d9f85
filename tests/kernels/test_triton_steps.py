"""Specs that the Triton kernels quantise in steps: what a recipe quantises twice, and transforms that
no kernel makes, have the bits of the reference in the interpreter.
"""

import pytest
from interpreted import interpreted
from needs_triton import needs_triton

from fp4train.quantize import Hadamard, QuantSpec
from fp4train.quantize.triton_limits import why_not_spec
from fp4train.quantize.triton_steps import why_not_steps

CASES = """
import torch
from dataclasses import replace
from configured import recipe_named
from gpu_cases import IN_STEPS, Case, content
from gpu_kernels import check
from fp4train.quantize import Hadamard, QuantSpec, RandomKey, Rotation, quantizer
from fp4train.quantize.triton_limits import why_not_spec

KEY = RandomKey(seed=2**63 + 5, step=77, layer=9, operand=3, row_offset=5, col_offset=16)
recipes = ("mxfp4_backward", "tetrajet_v2", "tetrajet_v2_outliers")
specs = []
for name in recipes:
    recipe = recipe_named(name)
    specs += recipe.table().specs()
    if recipe.outliers is not None:
        specs += recipe.of_outliers().table().specs()
specs += [
    *IN_STEPS.values(),
    QuantSpec(hadamard=Hadamard(size=64, signs="none")),
    QuantSpec(hadamard=Rotation(kind="dct", size=32)),
    QuantSpec(requantises=QuantSpec(block=(16, 16)), hadamard=Hadamard()),
]
stepped = [spec for spec in dict.fromkeys(specs) if why_not_spec(spec) is not None]
for number, spec in enumerate(stepped):
    assert quantizer(spec, "cpu", "triton").kernel == "triton"
    for kind, (rows, cols) in (("wide", (33, 70)), ("nan", (17, 128))):
        for turned in (False, True):
            x = content(kind, rows, cols, number).bfloat16()
            x = x.T.contiguous().T if turned else x
            case = Case(str(spec), x, spec, KEY if spec.random else None, None)
            assert check(case, "cpu") == {}, (spec, kind, turned, check(case, "cpu"))
print(len(stepped))
"""


@pytest.mark.long
@needs_triton
def test_specs_in_steps_have_the_bits_of_the_reference_in_the_interpreter() -> None:
    """Codes, scales, amaxes, values and decoded values, of x and of a transposed view."""
    run = interpreted("-c", CASES)
    assert run.stdout.strip().isdigit() and int(run.stdout) >= 6, run.stdout + run.stderr


def test_specs_that_no_steps_lead_to_say_why() -> None:
    chooses = QuantSpec(four_over_six="mse", global_bound=256)
    for spec in (chooses, QuantSpec(requantises=chooses)):
        assert "four_over_six='mse' has no Triton kernel" in str(why_not_steps(spec))
    turned = QuantSpec(requantises=QuantSpec(hadamard=Hadamard()))
    assert "no step undoes the transform" in str(why_not_steps(turned))
    of_rows = QuantSpec(
        element="e4m3",
        block=(1, 64),
        scale="fp32",
        global_scale=None,
        hadamard=Hadamard(size=64),
    )
    assert why_not_steps(of_rows) == why_not_spec(of_rows) is not None
