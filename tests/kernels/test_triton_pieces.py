"""What research recipes add to the Triton kernels: the bits of the reference in the interpreter,
for formats by their fields; compiled for Hopper and Blackwell.
"""

import dataclasses
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from gpu_cases import PIECES
from interpreted import interpreted
from needs_triton import needs_triton

from fp4train.formats import ELEMENT_FORMATS, SCALE_FORMATS, ElementFormat, ScaleFormat
from fp4train.quantize import QuantSpec, RandomKey, TritonQuantizer, has_pair_kernel, register
from fp4train.quantize.triton_limits import why_not_spec

KEY = RandomKey(seed=1, step=7, layer=5, operand=3)

CASES = """
import sys
import torch
from dataclasses import replace
from hypothesis import given, settings, strategies as st
from gpu_cases import PIECES, Case, content
from gpu_kernels import check
from fp4train.formats import ElementFormat, ScaleFormat
from fp4train.quantize import Delayed, Hadamard, QuantSpec, RandomKey, register
from fp4train.quantize.triton import why_not_spec

KEY = RandomKey(seed=2**63 + 5, step=77, layer=9, operand=3, row_offset=5, col_offset=16)
FORMATS = [
    ElementFormat(name="e0m3", exponent_bits=0, mantissa_bits=3, bias=0),
    ElementFormat(name="e3m0", exponent_bits=3, mantissa_bits=0, bias=3),
    ElementFormat(name="e1m0", exponent_bits=1, mantissa_bits=0, bias=0),
    ElementFormat(name="e4m0", exponent_bits=4, mantissa_bits=0, bias=6, has_nan=True),
    ElementFormat(name="e3m1", exponent_bits=3, mantissa_bits=1, bias=-4),
    ElementFormat(
        name="e5m1", exponent_bits=5, mantissa_bits=1, bias=15, has_nan=True, has_inf=True
    ),
    ElementFormat(name="e1m5", exponent_bits=1, mantissa_bits=5, bias=40),
]
SCALES = [
    ScaleFormat.unsigned(name="ue4m4", exponent_bits=4, mantissa_bits=4, bias=7, needs_global=True),
    ScaleFormat.unsigned(
        name="ue6m2", exponent_bits=6, mantissa_bits=2, bias=40, needs_global=False, ieee=True
    ),
]
register(*FORMATS, *SCALES)
FEW_BITS = ("stochastic_1", "stochastic_8", "stochastic_15")
ROUNDINGS = ("nearest", "nearest_away", "stochastic", *FEW_BITS, "stochastic_8_midpoint")
KINDS = ("wide", "normal", "nan", "inf", "huge", "tiny", "grid")
VIEWS = {
    "rows": lambda x: x,
    "columns": lambda x: x.T.contiguous().T,
    "strided": lambda x: x[:, ::2],
}
ELEMENTS = ("e2m1", "e4m3", "e1m2", "int4", *(fmt.name for fmt in FORMATS))


@st.composite
def specs(draw):
    scale = draw(st.sampled_from(("e8m0", "ue5m3", "ue5m3_ieee", "ue6m2", "ue4m4", "e4m3", "fp32")))
    block = draw(st.sampled_from(((1, 16), (1, 32), (1, 64), (16, 16), (32, 32))))
    fields = {"element": draw(st.sampled_from(ELEMENTS)), "scale": scale, "block": block}
    fields |= {"rounding": draw(st.sampled_from(ROUNDINGS)), "global_scale": None}
    tiles = [
        tile
        for tile in ((128, 128), (32, 64), (96, 96))
        if tile[0] % block[0] == tile[1] % block[1] == 0
    ]
    wide = ((256, None), (24, None), "row", "block") if block[0] == 1 else ()
    if scale == "e8m0":
        fields["scale_rounding"] = draw(st.sampled_from(("rceil", "floor", "even", "ceil")))
        fields["global_scale"] = draw(st.sampled_from((None, "macro")))
        if fields["global_scale"] is None and fields["scale_rounding"] in ("floor", "even"):
            fields["guard"] = draw(st.sampled_from((1.0, 0.75)))
    elif scale != "fp32":
        fields["global_scale"] = draw(st.sampled_from(("tensor", *tiles, *wide)))
        fields["formula"] = draw(st.sampled_from(("te2.14", "te2.13")))
        fields["guard"] = draw(st.sampled_from((1.0, 16 / 17)))
        if scale.startswith("ue") and scale != "ue4m4" and draw(st.booleans()):
            fields["global_scale"] = None
        if scale.startswith("ue5") and fields["global_scale"] is not None:
            fields["global_bound"] = draw(st.sampled_from((448.0, 57344.0)))
    if block[0] == 1 and block[1] < 64 and draw(st.booleans()):
        drawn = fields["global_scale"] is None and fields["rounding"].startswith("stochastic")
        signs = draw(st.sampled_from(("fixed", "none", "step" if drawn else "random")))
        size = draw(st.sampled_from((16, 32)))
        fields["hadamard"] = Hadamard(size=size, signs=signs)
    if fields["global_scale"] not in (None, "macro") and fields["element"] == "e1m5":
        fields["element"] = "e2m1"
    return QuantSpec(**fields)


def compare(spec, kind, view, dtype, rows, cols, seed):
    assert why_not_spec(spec) is None, why_not_spec(spec)
    wide = 2 * cols if view == "strided" else cols
    x = VIEWS[view](content(kind, rows, wide, seed).to(dtype))
    amax = torch.tensor(3.0) if spec.earlier_amax else None
    case = Case(str(spec), x, spec, KEY if spec.random else None, amax)
    assert check(case, "cpu") == {}, (spec, kind, view, dtype, rows, cols, seed, check(case, "cpu"))


sizes = st.integers(1, 150), st.integers(1, 290)
others = (st.sampled_from(KINDS), st.sampled_from(sorted(VIEWS)))
dtypes = st.sampled_from((torch.bfloat16, torch.float32, torch.float16))
"""

DRAWN = """
count = 0


@settings(max_examples={examples}, derandomize=True, deadline=None, database=None)
@given(st.tuples(specs(), *others, dtypes, *sizes, st.integers(0, 1 << 20)))
def draw(case):
    global count
    count += 1
    compare(*case)


draw()
print(count)
"""

NAMED = """
numbers = [number for number in range(len(PIECES)) if bool(number % 5) is {others}]
for number in numbers:
    spec = list(PIECES.values())[number]
    kind = KINDS[2 * number % len(KINDS)]
    shape = (40, 272) if number % 2 else (35, 140)
    compare(spec, kind, ("rows", "columns")[number % 2], torch.bfloat16, *shape, number)
print(*numbers)
"""

POWERS_OF_TWO = """
for rounding in ("rceil", "floor", "even", "ceil"):
    for macro in (None, "macro"):
        for block, hadamard in (((1, 32), None), ((32, 32), None), ((1, 32), Hadamard(size=32))):
            spec = QuantSpec(
                block=block,
                scale="e8m0",
                scale_rounding=rounding,
                global_scale=macro,
                hadamard=hadamard,
            )
            compare(spec, "normal", "rows", torch.bfloat16, 33, 70, 1)
print("equal")
"""

SMALL_ELEMENTS = """
assert "below 1" in why_not_spec(QuantSpec(element="e1m5"))
for scale in ("e8m0", "ue5m3"):
    spec = QuantSpec(element="e1m5", block=(1, 32), scale=scale, global_scale=None)
    for kind in ("huge", "tiny", "normal"):
        compare(spec, kind, "rows", torch.float32, 33, 70, 1)
print("equal")
"""


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize("cases", [POWERS_OF_TWO, SMALL_ELEMENTS], ids=["roundings", "elements"])
def test_scales_have_the_bits_of_the_reference_in_the_interpreter(cases: str) -> None:
    """All roundings to powers of two with and without macro-blocks; elements far below 1."""
    run = interpreted("-c", CASES + cases)
    assert run.stdout.strip() == "equal", run.stdout + run.stderr


def test_scales_of_a_plugin_that_round_in_their_own_way_have_no_kernel() -> None:
    def rounds_up(x: torch.Tensor) -> torch.Tensor:
        return SCALE_FORMATS.get("ue5m3").encode(x * 1.01)

    ue5m3 = SCALE_FORMATS.get("ue5m3")
    upward = dataclasses.replace(ue5m3, name="upward", encode=rounds_up)
    assert ue5m3.rounds_to_nearest and not upward.rounds_to_nearest
    assert SCALE_FORMATS.get("e4m3").rounds_to_nearest
    assert not SCALE_FORMATS.get("e8m0").rounds_to_nearest


@needs_triton
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.long)])
def test_each_piece_has_the_bits_of_the_reference_in_the_interpreter(others: bool) -> None:
    """Codes, scales, amaxes, values and decoded values, of x or of a transposed view; of each fifth
    piece, and of the others.
    """
    run = interpreted("-c", CASES + NAMED.replace("{others}", str(others)))
    numbers = [number for number in range(len(PIECES)) if bool(number % 5) is others]
    assert run.stdout.split() == [str(number) for number in numbers], run.stdout + run.stderr


@pytest.mark.long
@needs_triton
def test_pieces_go_together_in_any_way_in_the_interpreter() -> None:
    """Elements and scales by their fields, with roundings, guards, extents, kinds of numbers and
    strides as they are drawn.
    """
    run = interpreted("-c", CASES + DRAWN.format(examples=60))
    assert run.stdout.strip().isdigit() and int(run.stdout) >= 60, run.stdout + run.stderr


PAIRS = """
from gpu_cases import KEY as ROW_KEY
from gpu_kernels import check_both, check_values
mx = {"block": (1, 32), "scale": "e8m0", "global_scale": None}
few = QuantSpec(scale="ue5m3", global_scale=None, rounding="stochastic_3")
away = QuantSpec(rounding="nearest_away")
guarded = QuantSpec(**mx, scale_rounding="even", guard=0.75)
fp8 = QuantSpec(
    element="e4m3", block=(None, None), scale="fp32", global_scale=None, rounding="nearest_away"
)
pairs = (
    (few, replace(few, hadamard=Hadamard())),
    (guarded, replace(guarded, hadamard=Hadamard(size=32))),
    (few, replace(few, hadamard=Hadamard(signs="step"))),
    (replace(few, rounding="nearest_away"), replace(away, hadamard=Hadamard())),
    (fp8, fp8),
)
for number, (row, column) in enumerate(pairs):
    x = content(("wide", "nan", "grid", "normal")[number % 4], 33, 80, number).bfloat16()
    case = Case("", x, row, ROW_KEY, None, column)
    different = check_both(case, x, None, column)
    assert not different, (row, different)
    if row.block[1]:
        different = check_values(case, x, None, column)
        assert not different, (row, different)
print(len(pairs))
"""


@needs_triton
def test_one_kernel_makes_both_forms_with_the_bits_of_the_reference_in_the_interpreter() -> None:
    run = interpreted("-c", CASES + PAIRS)
    assert run.stdout.strip() == "5", run.stdout + run.stderr


def test_extents_and_guards_decide_which_specs_have_one_kernel_for_both_forms() -> None:
    for name, alone in (("tiles", True), ("whole rows", True), ("away from zero", False)):
        assert has_pair_kernel(PIECES[name], PIECES[name]) is not alone, name


def test_formats_of_plugins_have_kernels_by_their_fields_and_others_say_why_not() -> None:
    element = ElementFormat(name="mine", exponent_bits=3, mantissa_bits=2, bias=5)
    scale = ScaleFormat.unsigned(
        name="mine_too", exponent_bits=6, mantissa_bits=2, bias=-33, needs_global=False
    )
    register(element, scale)
    try:
        assert why_not_spec(QuantSpec(element="mine")) is None
        assert "scale='mine_too' has no Triton kernel" in str(
            why_not_spec(QuantSpec(scale="mine_too", global_scale=None))
        )
    finally:
        ELEMENT_FORMATS.remove(element.name)
        SCALE_FORMATS.remove(scale.name)


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize(("name", "capability"), [("tiles", 100), ("if4 of weights", 90)])
def test_pieces_compile_without_spills_and_keep_subnormals_and_ieee_division(
    name: str, capability: int, triton_cache: Path
) -> None:
    from compile_triton import compile_launch, launches_of, resources

    x = torch.zeros(256, 1024, dtype=torch.bfloat16)
    amax = torch.ones(()) if PIECES[name].earlier_amax else None
    quantizer = TritonQuantizer(PIECES[name])
    for launch in launches_of(partial(quantizer.codes, x, KEY, amax)):
        compiled = compile_launch(launch, capability)
        used = resources(compiled.asm["cubin"], triton_cache)
        assert used["STACK"] == used["LOCAL"] == 0, used
        ptx = compiled.asm["ptx"]
        assert not re.search(r"\.ftz|div\.(full|approx)|(rcp|sqrt)\.approx", ptx)
