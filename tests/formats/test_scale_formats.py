"""Properties of every scale format: encode and decode are inverse, nearest or one-sided, monotone,
and keep NaN.
"""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from value_tables import value_table

from fp4train.formats import (
    E2M1,
    E4M3,
    ELEMENT_FORMATS,
    SCALE_FORMATS,
    AdaptiveScale,
    ScaleFormat,
    get_scale_format,
)

formats = pytest.mark.parametrize("fmt", SCALE_FORMATS, ids=lambda fmt: fmt.name)
byte_formats = pytest.mark.parametrize(
    "fmt", [f for f in SCALE_FORMATS if f.is_byte], ids=lambda fmt: fmt.name
)


def values_of(fmt: ScaleFormat) -> torch.Tensor:
    """All finite values of a byte format, in order of the codes."""
    values = fmt.decode(
        torch.arange(128 if fmt.name in ("e4m3", "if4") else 256, dtype=torch.uint8)
    )
    reserved = values.isnan()
    assert reserved.sum() == (8 if fmt.name == "ue5m3_ieee" else 1) and reserved[-1]
    return values[~reserved]


@byte_formats
def test_every_byte_decodes_to_a_value_that_encodes_back(fmt: ScaleFormat) -> None:
    values = values_of(fmt)
    assert fmt.decode(fmt.encode(torch.tensor([math.nan]))).isnan()
    assert fmt.encode(values).tolist() == list(range(len(values)))
    assert (values.diff() > 0).all(), "larger codes are larger values"
    assert values[-1].item() == fmt.max
    assert values[values > 0][0].item() == fmt.smallest


def test_ue5m3_has_the_published_values() -> None:
    """Bias 15, a NaN but no infinity: 1.75 * 2^16 at the top; the positive half of E5M2 with a
    third mantissa bit.
    """
    fmt = get_scale_format("ue5m3")
    codes = torch.tensor([0, 1, 7, 8, 15 * 8, 15 * 8 + 1, 253, 254], dtype=torch.uint8)
    expected = [0.0, 2.0**-17, 7 * 2.0**-17, 2.0**-14, 1.0, 1.125, 106496.0, 114688.0]
    assert fmt.decode(codes).tolist() == expected
    e5m2 = torch.tensor(value_table(next(f for f in ELEMENT_FORMATS if f.name == "e5m2"))[:124])
    assert torch.equal(fmt.decode(2 * torch.arange(124, dtype=torch.uint8)), e5m2)


def test_the_codebooks_of_ue5m3_agree_up_to_the_reserved_exponent() -> None:
    ours, ieee = (get_scale_format(name) for name in ("ue5m3", "ue5m3_ieee"))
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(ieee.decode(codes)[:248], ours.decode(codes)[:248])
    assert ieee.decode(codes)[248:].isnan().all()
    assert (ieee.max, ours.max, ieee.smallest) == (61440.0, 114688.0, 2.0**-17)
    assert ieee.encode(torch.tensor([61441.0, 65536.0, 1e30, math.inf])).tolist() == 4 * [247]


@pytest.mark.parametrize("name", ["ue5m3", "ue5m3_ieee"])
@settings(max_examples=300)
@given(x=st.floats(0, 2.0**17, width=32))
def test_ue5m3_rounds_to_nearest_and_ties_to_even(name: str, x: float) -> None:
    fmt = get_scale_format(name)
    x = min(x, fmt.max)
    values = values_of(fmt).double()
    distances = (values - x).abs()
    (code,) = fmt.encode(torch.tensor([x])).tolist()
    assert distances[code] == distances.min()
    assert code % 2 == 0 or (distances == distances.min()).sum() == 1


def test_ue5m3_saturates() -> None:
    assert get_scale_format("ue5m3").encode(torch.tensor([114689.0, 1e30, math.inf])).tolist() == [
        254,
        254,
        254,
    ]


def test_float_scales_are_stored_as_they_are_or_rounded_down_to_a_power_of_two() -> None:
    x = torch.tensor([0.0, 0.75, 1.0, 3.9, 2.0**127, math.nan])
    fp32, pow2 = (get_scale_format(name) for name in ("fp32", "pow2"))
    torch.testing.assert_close(fp32.decode(fp32.encode(x)), x, rtol=0, atol=0, equal_nan=True)
    expected = torch.tensor([0.0, 0.5, 1.0, 2.0, 2.0**127, math.nan])
    torch.testing.assert_close(
        pow2.decode(pow2.encode(x)), expected, rtol=0, atol=0, equal_nan=True
    )


@formats
@pytest.mark.parametrize("element", ELEMENT_FORMATS, ids=lambda fmt: fmt.name)
def test_exact_in_bf16_says_what_multiplying_every_pair_shows(fmt: ScaleFormat, element) -> None:
    """Significands only: a power of two less on either side changes no mantissa bit."""
    elements = torch.tensor(value_table(element))
    elements = elements[elements.isfinite()]
    if fmt.is_byte:
        scales = values_of(fmt)
        scales = scales[(scales >= fmt.smallest_normal) & (scales.log2().abs() < 60)]
    else:
        scales = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1.0
        scales = fmt.encode(scales)
    if isinstance(fmt, AdaptiveScale):  # elements may also be integers times its step
        elements = torch.tensor(value_table(fmt.other)) * fmt.step
    products = elements[:, None] * scales
    assert torch.equal(products.bfloat16().float(), products) == fmt.exact_in_bf16(element)


def test_formats_used_in_training_are_exact_in_bf16() -> None:
    assert get_scale_format("e4m3").exact_in_bf16(E2M1) and get_scale_format("e4m3").exact_in_bf16(
        E4M3
    )
    assert not get_scale_format("fp32").exact_in_bf16(E2M1)


def test_an_unknown_scale_format_names_the_near_miss() -> None:
    with pytest.raises(
        ValueError,
        match=r"scale format 'ue5m2' is unknown; did you mean 'ue5m3'\? \(known: e4m3, e8m0",
    ):
        get_scale_format("ue5m2")
