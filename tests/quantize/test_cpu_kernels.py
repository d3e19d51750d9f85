"""The CPU kernels against the readable reference, bit for bit, on drawn specs, shapes, strides and
values.
"""

from dataclasses import replace

import pytest
import torch
from cpu_kernels import (
    AGAIN,
    BLOCKWISE,
    CHOSEN,
    FP8,
    GROUPS,
    LAYOUTS,
    MXFP8,
    NVFP4,
    OUTER,
    STEP,
    TOKENS,
    TURNED,
    UE5M3,
    VALUES,
    assert_equals_reference,
    draw_layout,
    draw_values,
    every_machine,
)
from golden import load_golden
from hypothesis import given, settings, strategies as st
from lengths import long_but

from fp4train.formats import ELEMENT_FORMATS, ElementFormat
from fp4train.kernels import cpu as kernels
from fp4train.kernels.cpu import Machine
from fp4train.quantize import Hadamard, QuantSpec, register
from fp4train.quantize.spec import FORMULAS

OWN = tuple(
    ElementFormat(
        name=f"own_e{exponent}m{mantissa}{'_nan' * has_nan}",
        exponent_bits=exponent,
        mantissa_bits=mantissa,
        bias=bias,
        has_nan=has_nan,
    )
    for exponent, mantissa, bias, has_nan in (
        (1, 0, 1, False),
        (2, 0, -3, False),
        (3, 0, 3, False),
        (0, 3, 1, False),
        (1, 2, 0, True),
        (2, 2, 1, False),
        (4, 2, 7, True),
        (0, 7, 1, False),
        (1, 6, 0, False),
        (3, 4, 20, True),
        (5, 2, -10, False),
        (6, 1, 31, True),
    )
)
"""Formats of a user's own, of each width."""
INEXACT = (
    QuantSpec(scale="if4"),
    QuantSpec(scale="if4", global_scale="row"),
    QuantSpec(element="e4m3", global_scale=(64, None)),
)
"""Whose values under their block scales are no numbers of BF16, and have a factor beside them."""
SQUARE, ROWS = replace(NVFP4, block=(16, 16)), replace(NVFP4, global_scale="row")
OWN_NAMES = tuple(fmt.name for fmt in OWN)
REGISTERED = tuple(fmt.name for fmt in ELEMENT_FORMATS if ELEMENT_FORMATS.is_own(fmt.name))
ELEMENTS = (*REGISTERED, *OWN_NAMES)


@pytest.fixture(autouse=True)
def own_formats() -> None:
    register(*OWN)


@st.composite
def specs(draw: st.DrawFn) -> QuantSpec:
    rounding = draw(
        st.sampled_from(("nearest", "stochastic", "stochastic_8", "stochastic_8_midpoint"))
    )
    families = (
        "nvfp4",
        "ue5m3",
        "double block",
        "square tiles",
        "mx",
        "fp8 blocks",
        "fp8 whole",
        "four over six",
        "eden",
    )
    family = draw(st.sampled_from(families))
    if family == "four over six":
        block = draw(st.sampled_from(((1, 16), (16, 16), (1, 32), (16, 32))))
        return QuantSpec(
            four_over_six=draw(st.sampled_from(("mae", "mse"))),
            block=block,
            global_scale=draw(st.sampled_from(("tensor", "row"))) if block[0] == 1 else "tensor",
            global_bound=draw(st.sampled_from((448.0, 256.0))),
            hadamard=draw(hadamards("nearest")) if block[0] == 1 else None,
            requantises=draw(st.sampled_from((None, None, CHOSEN, NVFP4, *INEXACT))),
        )
    if family == "eden":
        size = draw(st.sampled_from((32, 64, 128)))
        return QuantSpec(
            rounding="eden",
            block=draw(st.sampled_from(((1, 16), (1, 32)))),
            global_scale=draw(st.sampled_from(("tensor", "row"))),
            global_bound=draw(st.sampled_from((448.0, 256.0))),
            guard=draw(st.sampled_from((1.0, 16 / 17, 1.01))),
            hadamard=Hadamard(size=size, signs="step"),
            requantises=draw(st.sampled_from((None, None, CHOSEN, NVFP4))),
        )
    if family == "ue5m3":
        block = draw(st.sampled_from(((1, 16), (16, 16), (1, 32), (2, 64), (1, 128))))
        under = (None, "tensor", "row", "block") if block[0] == 1 else (None, "tensor")
        global_scale = draw(st.sampled_from(under))
        return QuantSpec(
            element=draw(st.sampled_from(("e2m1", "e2m1", "e2m1", *ELEMENTS))),
            block=block,
            scale=draw(st.sampled_from(("ue5m3", "ue5m3_ieee"))),
            global_scale=global_scale,
            global_bound=draw(st.sampled_from((448, 61440))) if global_scale else 448,
            formula=draw(st.sampled_from(FORMULAS)),
            guard=draw(st.sampled_from((1.0, 16 / 17))),
            rounding=rounding,
            hadamard=draw(hadamards(rounding)) if block in ((1, 16), (1, 32)) else None,
            requantises=draw(st.sampled_from((None, None, UE5M3, NVFP4, FP8))),
        )
    if family == "double block":
        block = draw(st.sampled_from(((1, 16), (1, 16), (1, 32), (1, 64), (1, 128))))
        tiles = ((128, 128), (16, 128), (64, None), (3, None))
        return QuantSpec(
            element=draw(st.sampled_from(("e2m1", "e2m1", "e2m1", *ELEMENTS))),
            block=block,
            global_scale=draw(st.sampled_from(("block", "block", *tiles))),
            global_bound=draw(st.sampled_from((448.0, 256.0))),
            formula=draw(st.sampled_from(FORMULAS)),
            guard=draw(st.sampled_from((1.0, 16 / 17))),
            rounding=rounding,
            hadamard=draw(hadamards(rounding)) if block in ((1, 16), (1, 32)) else None,
            requantises=draw(
                st.sampled_from(
                    (None, None, OUTER, replace(OUTER, block=(1, 128), element="e4m3"), MXFP8)
                )
            ),
        )
    if family == "nvfp4":
        block = draw(st.sampled_from(((1, 16), (16, 16), (1, 32), (2, 64))))
        return QuantSpec(
            element=draw(st.sampled_from(("e2m1", "e2m1", "e2m1", "e4m3"))),
            block=block,
            global_scale=draw(st.sampled_from(("tensor", "row"))) if block[0] == 1 else "tensor",
            global_bound=draw(st.sampled_from((448.0, 256.0))),
            formula=draw(st.sampled_from(FORMULAS)),
            guard=draw(st.sampled_from((1.0, 16 / 17))),
            rounding=rounding,
            hadamard=draw(hadamards(rounding)) if block in ((1, 16), (1, 32)) else None,
        )
    if family == "square tiles":
        macro = draw(st.booleans())
        return QuantSpec(
            element=draw(st.sampled_from(("e2m1", "e4m3", "e2m3", "int4"))),
            block=(32, 32) if macro else draw(st.sampled_from(((16, 16), (2, 64)))),
            scale="e8m0" if macro else draw(st.sampled_from(("e4m3", "ue5m3"))),
            scale_rounding=draw(st.sampled_from(("even", "rceil"))) if macro else None,
            global_scale="macro" if macro else draw(st.sampled_from(((128, 128), (16, 128)))),
            rounding=rounding,
        )
    spec = QuantSpec(
        element=draw(st.sampled_from(ELEMENTS)), block=(1, 32), scale="e8m0", global_scale=None
    )
    if family == "mx":
        block = draw(st.sampled_from(((1, 32), (32, 32), (1, 16))))
        mode = draw(st.sampled_from(("floor", "rceil", "even", "ceil")))
        hadamard = draw(hadamards(rounding)) if block[0] == 1 else None
        guard = draw(st.sampled_from((1.0, 0.75, 0.9))) if mode in ("floor", "even") else 1.0
        plain = guard == 1.0 and (hadamard is None or hadamard.size >= block[1])
        return replace(
            spec,
            block=block,
            scale_rounding=mode,
            rounding=rounding,
            hadamard=hadamard,
            guard=guard,
            global_scale=draw(st.sampled_from((None, None, "macro"))) if plain else None,
        )
    blocks = ((1, 128), (128, 128)) if family == "fp8 blocks" else ((None, None), (1, None))
    scale = draw(st.sampled_from(("fp32", "pow2")))
    return replace(
        spec,
        block=draw(st.sampled_from(blocks)),
        scale=scale,
        scale_rounding=None,
        rounding=rounding,
    )


def hadamards(rounding: str) -> st.SearchStrategy[Hadamard | None]:
    drawn = () if rounding == "nearest" else (STEP,)
    larger = Hadamard(size=32, signs="random", seed=3), Hadamard(size=64), Hadamard(size=128)
    signed = Hadamard(signs="none"), Hadamard(signs="random", seed=3)
    return st.sampled_from((None, Hadamard(), *signed, *larger, *drawn))


@pytest.mark.parametrize("examples", long_but((100,), (100, 400)))
def test_kernels_equal_the_reference(examples: int) -> None:
    @settings(max_examples=examples, derandomize=True)
    @given(
        spec=specs(),
        rows=st.sampled_from((1, 2, 15, 16, 17, 40, 130)),
        cols=st.sampled_from((1, 2, 16, 31, 32, 48, 130, 256, 257, 520)),
        dtype=st.sampled_from((torch.bfloat16, torch.bfloat16, torch.float32, torch.float16)),
        values=st.sampled_from(VALUES),
        layout=st.sampled_from(LAYOUTS),
        isa=st.sampled_from(kernels.instruction_sets()),
        threads=st.sampled_from((1, 2, 3)),
        seed=st.integers(0, 99),
    )
    def draws(
        spec: QuantSpec,
        rows: int,
        cols: int,
        dtype: torch.dtype,
        values: str,
        layout: str,
        isa: str,
        threads: int,
        seed: int,
    ) -> None:
        x = draw_layout(layout, draw_values(values, rows, cols, seed).to(dtype))
        assert_equals_reference(x, spec, Machine(instruction_set=isa, threads=threads))

    draws()


@pytest.mark.parametrize("first", INEXACT, ids=str)
def test_what_is_requantised_is_rounded_once(first: QuantSpec) -> None:
    x = draw_values("outliers", 64, 256, 3)
    assert_equals_reference(x, replace(NVFP4, requantises=first), *every_machine())


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", [NVFP4, TOKENS, SQUARE, MXFP8, FP8, *BLOCKWISE], ids=str)
def test_every_instruction_set_has_every_path(
    spec: QuantSpec, dtype: torch.dtype, rounding: str
) -> None:
    """Larger than a tile in both directions, so that whole strips, tails and several threads' tiles
    all occur.
    """
    spec = replace(spec, rounding=rounding)
    x = draw_values("outliers", 140, 530, 1).to(dtype)
    for layout in ("rows", "transposed"):
        assert_equals_reference(draw_layout(layout, x), spec, *every_machine(threads=2))


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("nvfp4_reference", (NVFP4, TOKENS, SQUARE, ROWS, TURNED, AGAIN)),
        ("mx_reference", (MXFP8, *GROUPS)),
        ("fp8_reference", (FP8, *BLOCKWISE)),
    ],
)
def test_kernels_equal_the_reference_on_the_golden_inputs(
    name: str, specs: tuple[QuantSpec, ...]
) -> None:
    """The reference equals every byte of the golden outputs (tests/oracles), so the kernels do."""
    tensors, _ = load_golden(name)
    inputs = [tensor for key, tensor in tensors.items() if key.endswith(".x")]
    assert inputs
    for x in inputs:
        for spec in specs:
            assert_equals_reference(x, spec, *every_machine())
            assert_equals_reference(x.T, spec, *every_machine())
