"""Codes <-> values, against ml_dtypes and, of uniform grids, numpy: every code, every boundary,
random values.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from value_tables import value_table

from fp4train.formats import ELEMENT_FORMATS, ElementFormat, decode, encode, get_format

ORACLES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
STEPS = {"e1m2": 0.25, "int4": 1.0}
"""Uniform grid → the distance of its values."""
formats = pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda fmt: fmt.name)


def oracle_codes(x: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    clipped = np.clip(x, -fmt.max, fmt.max)
    if fmt.name not in STEPS:
        return clipped.astype(ORACLES[fmt.name]).view(np.uint8)
    signs = np.signbit(clipped).astype(np.uint8) << 3
    return np.rint(np.abs(clipped) / STEPS[fmt.name]).astype(np.uint8) | signs


def oracle_values(codes: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    if fmt.name not in STEPS:
        return codes.view(ORACLES[fmt.name]).astype(np.float32)
    signs = np.where(codes & 8, -1.0, 1.0)
    return np.copysign((codes & 7) * STEPS[fmt.name], signs).astype(np.float32)


@formats
def test_every_code_decodes_as_the_oracle_says(fmt: ElementFormat) -> None:
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    expected = oracle_values(codes, fmt)
    for dtype in (torch.float32, torch.bfloat16):
        values = decode(torch.from_numpy(codes), fmt, dtype).float().numpy()
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(
            np.signbit(values)[~np.isnan(values)], np.signbit(expected)[~np.isnan(values)]
        )
    np.testing.assert_array_equal(np.array(value_table(fmt), dtype=np.float32), expected)


@formats
def test_encode_inverts_decode_for_every_finite_code(fmt: ElementFormat) -> None:
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
    values = decode(codes, fmt)
    finite = values.isfinite()
    assert torch.equal(encode(values, fmt)[finite], codes[finite])


@formats
def test_every_tie_and_its_neighbours_round_to_even(fmt: ElementFormat) -> None:
    grid = np.unique([v for v in value_table(fmt) if math.isfinite(v)]).astype(np.float32)
    ties = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    around = np.concatenate(
        [
            ties,
            np.nextafter(ties, np.float32(np.inf)),
            np.nextafter(ties, np.float32(-np.inf)),
            grid,
        ]
    )
    np.testing.assert_array_equal(
        encode(torch.from_numpy(around), fmt).numpy(), oracle_codes(around, fmt)
    )


@pytest.mark.parametrize(
    "fmt",
    [
        pytest.param(fmt, marks=[pytest.mark.long] * (fmt.name not in ("e2m1", "e5m2")))
        for fmt in ELEMENT_FORMATS
    ],
    ids=lambda fmt: fmt.name,
)
@settings(max_examples=150)
@given(data=st.data())
def test_any_float32_encodes_as_the_oracle_says(fmt: ElementFormat, data: st.DataObject) -> None:
    values = st.one_of(
        st.floats(width=32, allow_nan=False), st.floats(-2 * fmt.max, 2 * fmt.max, width=32)
    )
    x = np.array(data.draw(st.lists(values, min_size=1, max_size=64)), dtype=np.float32)
    np.testing.assert_array_equal(encode(torch.from_numpy(x), fmt).numpy(), oracle_codes(x, fmt))


@formats
def test_every_bfloat16_encodes_as_the_oracle_says(fmt: ElementFormat) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    x = x[~x.isnan()]
    np.testing.assert_array_equal(encode(x, fmt).numpy(), oracle_codes(x.float().numpy(), fmt))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_without_saturation_overflow_is_nan_or_infinity_as_the_standard_says(name: str) -> None:
    fmt = get_format(name)
    x = np.array(
        [448, 464, 464.1, 57344, 61439, 61440, 1e9, np.inf, -np.inf, -1e9, 1.0], dtype=np.float32
    )
    ours = decode(encode(torch.from_numpy(x), fmt, saturate=False), fmt).numpy()
    np.testing.assert_array_equal(ours, x.astype(ORACLES[name]).astype(np.float32))


@formats
def test_nan_is_nan_where_the_format_has_one_and_the_largest_value_elsewhere(
    fmt: ElementFormat,
) -> None:
    value = decode(encode(torch.tensor([math.nan, -math.nan]), fmt), fmt)
    assert value.isnan().all() if fmt.has_nan else (value == fmt.max).all()


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_formats_without_overflow_codes_refuse_not_to_saturate(name: str) -> None:
    with pytest.raises(ValueError, match=r"saturate=False: e\dm\d"):
        encode(torch.zeros(1), get_format(name), saturate=False)


def test_an_unknown_format_names_the_near_miss() -> None:
    with pytest.raises(ValueError, match=r"'e4m4' is unknown; did you mean 'e4m3'\? \(known: e2m1"):
        get_format("e4m4")


def test_encode_keeps_the_shape_and_takes_strided_and_empty_tensors() -> None:
    x = torch.randn(6, 8, 4)
    assert torch.equal(
        encode(x.transpose(0, 2), get_format("e2m1")), encode(x, get_format("e2m1")).transpose(0, 2)
    )
    assert encode(torch.empty(0, 3), get_format("e4m3")).shape == (0, 3)
    assert encode(torch.tensor(1.0), get_format("e4m3")).shape == ()
