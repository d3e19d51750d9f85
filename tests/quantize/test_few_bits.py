"""Stochastic rounding with few random bits: against gfloat, and the biases of arXiv 2504.20634."""

import json

import numpy as np
import pytest
import torch
from cpu_kernels import assert_equals_reference, draw_values, every_machine
from golden import REDUCED
from lengths import long_but
from torch import Tensor

from fp4train.formats import E2M1, E4M3, E5M2, ElementFormat, get_format
from fp4train.quantize import (
    FEW_BITS,
    ROUNDINGS,
    Hadamard,
    QuantSpec,
    RandomKey,
    quantize,
    random_bits,
    round_to_values,
)

CASES = json.loads((REDUCED / "few_bits.json").read_text())["cases"]
MIDDLES = json.loads((REDUCED / "midpoint.json").read_text())["cases"]
MIDPOINT = ROUNDINGS.get("stochastic_8_midpoint")


def floats(digits: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(digits), dtype=np.float32).copy())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['element']}-{case['bits']}")
def test_few_bits_round_as_gfloat_rounds_with_the_complement_of_the_bits(case: dict) -> None:
    """gfloat rounds up where fraction and bits carry, this program where the bits lie below the
    fraction.
    """
    bits = case["bits"]
    ours = (1 << bits) - 1 - torch.tensor(case["drawn"], dtype=torch.int32)
    lower = torch.randint(0, 1 << 16 - bits, ours.shape, dtype=torch.int32)
    rounding = ROUNDINGS.get(f"stochastic_{bits}")
    rounded = round_to_values(
        floats(case["values"]), get_format(case["element"]), (ours << 16 - bits) | lower, rounding
    )
    assert torch.equal(rounded, floats(case["rounded"]))


@pytest.mark.parametrize("case", MIDDLES, ids=lambda case: case["element"])
def test_midpoints_round_as_gfloats_stochastic_fast(case: dict) -> None:
    drawn = torch.tensor(case["drawn"], dtype=torch.int32) << 8
    lower = torch.randint(0, 256, drawn.shape, dtype=torch.int32)
    fmt = get_format(case["element"])
    rounded = round_to_values(floats(case["values"]), fmt, drawn | lower, MIDPOINT)
    assert torch.equal(rounded, floats(case["rounded"]))


DRAWN = np.arange(256, dtype=np.int32)
MIDPOINTS = (2 * DRAWN + 1).astype(np.float32) * np.float32(2.0**-9)
EDGES = np.float32(1) - MIDPOINTS
FRACTIONS = np.concatenate([EDGES, np.nextafter(EDGES, EDGES - 1), np.nextafter(EDGES, EDGES + 1)])
"""Where each of the 256 numbers begins to round up, and beside that."""


def test_midpoints_round_up_where_the_authors_sum_reaches_one() -> None:
    """delta + (2 r + 1) / 512 >= 1 in float32 (github.com/MrHuff/ue5m3-fp4, formats.py at 59868e7):
    for floor(256 delta + 1/2) of the 256 r.
    """
    values = torch.from_numpy(FRACTIONS)[:, None].expand(-1, 256) / 2  # E2M1 has halves below 1
    up = round_to_values(values, E2M1, torch.from_numpy(DRAWN << 8).expand(768, -1), MIDPOINT) > 0
    expected = torch.from_numpy(FRACTIONS[:, None] + MIDPOINTS >= 1)
    assert torch.equal(up, expected)
    assert torch.equal(up[:256].sum(1), torch.floor(torch.from_numpy(EDGES) * 256 + 0.5).long())


def test_kernels_add_as_the_reference_where_a_sum_rounds_to_one() -> None:
    x = torch.from_numpy(FRACTIONS).expand(256, -1).clone() / 2
    x[:, ::16] = 6.0  # which makes the scale 1
    spec = QuantSpec(scale="e8m0", global_scale=None, block=(1, 16), rounding=MIDPOINT.name)
    assert_equals_reference(x, spec, *every_machine())
    assert_equals_reference(x.T.contiguous().T, spec, *every_machine())


def mean_bias(fmt: ElementFormat, bits: int, dtype: torch.dtype) -> float:
    """The mean of rounded minus exact values, in quanta, over all numbers of `dtype` from 1 to the
    next number of the format and all random bits.
    """
    steps = round(2.0**-fmt.mantissa_bits / torch.finfo(dtype).eps)
    x = 1 + torch.arange(steps, dtype=torch.float32) * torch.finfo(dtype).eps
    drawn = torch.arange(1 << bits, dtype=torch.int32) << 16 - bits
    values = x[:, None].expand(-1, len(drawn))
    randoms = drawn[None].expand(len(x), -1)
    rounded = round_to_values(values, fmt, randoms, ROUNDINGS.get(f"stochastic_{bits}"))
    quantum = 2.0**-fmt.mantissa_bits
    return ((rounded - values).double() / quantum).mean().item()


def test_biases_are_the_published_ones() -> None:
    assert mean_bias(E5M2, 3, torch.bfloat16) == pytest.approx(-0.047, abs=5e-4)
    assert mean_bias(E2M1, 2, torch.float16) == pytest.approx(-0.124, abs=5e-4)


@pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_a_bias_is_half_a_step_of_the_bits_less_half_a_step_of_the_input(
    fmt: ElementFormat, dtype: torch.dtype, bits: int
) -> None:
    beyond = round(-np.log2(torch.finfo(dtype).eps)) - fmt.mantissa_bits
    expected = min(0.0, 2.0 ** -(beyond + 1) - 2.0 ** -(bits + 1))
    assert mean_bias(fmt, bits, dtype) == pytest.approx(expected, abs=1e-12)


def test_bits_are_the_upper_ones_of_the_sixteen_that_the_key_draws() -> None:
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 0.4 + 0.05
    x[:, 0] = 6.0
    spec = QuantSpec(element="int4", block=(1, 64), scale="e8m0", global_scale=None)
    key = RandomKey(seed=1, step=2, layer=3, operand=4)
    for rounding in FEW_BITS:
        quantised = quantize(x, QuantSpec(**_fields(spec), rounding=rounding.name), key=key)
        fraction = x / quantised.block_scales()
        drawn = random_bits(key, 64, 64) >> 16 - rounding.bits
        up = (fraction * 2.0**rounding.bits).floor() > drawn
        assert torch.equal(quantised.element_codes[:, 1:], up[:, 1:].to(torch.uint8))


def _fields(spec: QuantSpec) -> dict:
    return {name: getattr(spec, name) for name in ("element", "block", "scale", "global_scale")}


def test_a_number_on_the_grid_stays_there_for_every_bit() -> None:
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for rounding in (*FEW_BITS, MIDPOINT):
        for drawn in (0, 65535):
            bits = torch.full(grid.shape, drawn, dtype=torch.int32)
            assert torch.equal(round_to_values(grid, E2M1, bits, rounding), grid)


@pytest.mark.parametrize(
    "rounding",
    long_but(
        ["stochastic_8", MIDPOINT.name],
        ["stochastic_1", "stochastic_8", "stochastic_15", MIDPOINT.name],
    ),
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block": (16, 16)},
        {"hadamard": Hadamard()},
        {"hadamard": Hadamard(size=64, signs="step")},
        {"global_scale": "block"},
        {"element": "e4m3", "block": (1, 32), "scale": "e8m0", "global_scale": None},
        {"element": "e5m2", "block": (None, None), "scale": "fp32", "global_scale": None},
    ],
    ids=str,
)
def test_kernels_equal_the_reference(fields: dict, rounding: str) -> None:
    """Both axes of x, a tile and more of each; ties lie on the thresholds."""
    spec = QuantSpec(**fields, rounding=rounding)
    for kind, dtype in (
        ("normal", torch.bfloat16),
        ("ties", torch.bfloat16),
        ("normal", torch.float32),
    ):
        x = draw_values(kind, 140, 290, 1).to(dtype)
        assert_equals_reference(x, spec, *every_machine(threads=2))
        assert_equals_reference(x.T.contiguous().T, spec, *every_machine())
