"""Packing, scale bytes, and the table of formats."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4train.formats import (
    E4M3,
    decode,
    e4m3_decode,
    e4m3_encode,
    e8m0_decode,
    e8m0_encode,
    formats_table,
    pack_fp4,
    unpack_fp4,
)


def test_fp4_pairs_pack_with_the_first_in_the_low_nibble() -> None:
    every_pair = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    packed = pack_fp4(every_pair)
    assert packed.shape == (256, 1)
    assert torch.equal(packed[:, 0], every_pair[:, 0] + 16 * every_pair[:, 1])
    assert torch.equal(unpack_fp4(packed), every_pair)


def test_packing_refuses_columns_that_fill_no_byte() -> None:
    with pytest.raises(ValueError, match="3 columns"):
        pack_fp4(torch.zeros(2, 3, dtype=torch.uint8))


def test_every_e8m0_byte_decodes_as_in_ml_dtypes_and_encodes_back() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = e8m0_decode(torch.from_numpy(codes))
    np.testing.assert_array_equal(
        values.numpy(), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    )
    assert torch.equal(e8m0_encode(values), torch.from_numpy(codes))


def test_e8m0_rounds_up_exactly_even_next_to_powers_of_two_where_log2_fails() -> None:
    powers = e8m0_decode(torch.arange(1, 254, dtype=torch.uint8))
    above = powers.nextafter(torch.tensor(torch.inf))
    below = powers.nextafter(torch.tensor(0.0))
    assert torch.equal(e8m0_encode(above), torch.arange(2, 255, dtype=torch.uint8))
    assert torch.equal(e8m0_encode(below), torch.arange(1, 254, dtype=torch.uint8))
    special = torch.tensor(
        [0.0, 2.0**-149, 2.0**-127, torch.finfo(torch.float32).max, math.inf, math.nan]
    )
    assert e8m0_encode(special).tolist() == [0, 0, 0, 254, 255, 255]


def test_e4m3_scales_are_the_elements_with_saturation_and_nan() -> None:
    codes = torch.arange(128, dtype=torch.uint8)
    assert torch.equal(e4m3_encode(e4m3_decode(codes)), codes)
    assert torch.equal(e4m3_decode(codes[:-1]), decode(codes[:-1], E4M3))
    assert e4m3_encode(torch.tensor([449.0, 1e30, math.inf, math.nan, -math.nan])).tolist() == [
        126,
        126,
        126,
        127,
        127,
    ]


@pytest.mark.parametrize(
    ("name", "bits", "largest", "smallest", "binades"),
    [
        ("e2m1", 4, 6.0, 0.5, 3.6),
        ("e2m3", 6, 7.5, 0.125, 5.9),
        ("e3m2", 6, 28.0, 0.0625, 8.8),
        ("e4m3", 8, 448.0, 2.0**-9, 17.8),
        ("e5m2", 8, 57344.0, 2.0**-16, 31.8),
        ("e8m0", 8, 2.0**127, 2.0**-127, 254.0),
        ("ue5m3", 8, 114688.0, 2.0**-17, 33.8),
        ("ue5m3_ieee", 8, 61440.0, 2.0**-17, 32.9),
        ("fp16", 16, 65504.0, 2.0**-24, 40.0),
        ("bf16", 16, torch.finfo(torch.bfloat16).max, 2.0**-133, 261.0),
        ("fp32", 32, torch.finfo(torch.float32).max, 2.0**-149, 277.0),
    ],
)
def test_the_formats_table_states_the_published_ranges(
    name: str, bits: int, largest: float, smallest: float, binades: float
) -> None:
    (row,) = [row for row in formats_table() if row.name == name]
    assert (row.bits, row.largest, row.smallest) == (bits, largest, smallest)
    assert row.binades == pytest.approx(binades, abs=0.05)
