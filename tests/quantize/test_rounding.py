"""Rounding to the grid: against brute force, and stochastic rounding for every possible value of
its random bits.
"""

import pytest
import torch
from value_tables import value_table

from fp4train.formats import ELEMENT_FORMATS, ElementFormat, decode, encode
from fp4train.quantize import (
    QuantSpec,
    RandomKey,
    quantize,
    quantize_dequantize,
    round_to_codes,
    round_to_values,
)

formats = pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda fmt: fmt.name)


def magnitudes(fmt: ElementFormat) -> torch.Tensor:
    return torch.tensor(sorted({abs(v) for v in value_table(fmt) if abs(v) <= fmt.max}))


@formats
def test_values_and_codes_agree_to_the_bit(fmt: ElementFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * fmt.max / 2
    x[:4] = torch.tensor([0.0, -0.0, 1e30, -1e-30])
    bits = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, generator=generator)
    for chosen in (None, bits):
        values = round_to_values(x, fmt, chosen)
        codes = round_to_codes(x, fmt, chosen)
        assert torch.equal(values.view(torch.int32), decode(codes, fmt).view(torch.int32))
    assert torch.equal(round_to_codes(x, fmt), encode(x, fmt))


@formats
def test_stochastic_rounding_takes_the_upper_neighbour_as_often_as_the_fraction_says(
    fmt: ElementFormat,
) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    grid = magnitudes(fmt)
    for low, high in [
        (grid[0], grid[1]),
        (grid[1], grid[2]),
        (grid[-3], grid[-2]),
        (grid[-2], grid[-1]),
    ]:
        for fraction in (0.0, 2.0**-16, 0.25, 0.5, 0.7001, 1 - 2.0**-16):
            x = (low + (high - low) * fraction).float()
            exact = ((x - low) / (high - low)).item()
            rounded = round_to_values(-x.expand(1 << 16), fmt, every)
            assert set(rounded.tolist()) <= {-low.item(), -high.item()}
            share = (rounded == -high).double().mean().item()
            assert abs(share - exact) <= 2.0**-17


@formats
def test_what_lies_on_the_grid_stays_there_for_every_bit(fmt: ElementFormat) -> None:
    grid = magnitudes(fmt)
    for bits in (0, 1, 32768, 65535):
        chosen = torch.full(grid.shape, bits, dtype=torch.int32)
        assert torch.equal(round_to_values(grid, fmt, chosen), grid)


@formats
def test_stochastic_rounding_saturates(fmt: ElementFormat) -> None:
    x = torch.tensor([fmt.max * 1.01, fmt.max * 100, float("inf")])
    assert (round_to_values(x, fmt, torch.full((3,), 65535, dtype=torch.int32)) == fmt.max).all()


def test_stochastic_rounding_is_reproducible_and_the_same_for_any_sharding() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    spec = QuantSpec(rounding="stochastic")
    key = RandomKey(seed=5, step=6, layer=7, operand=0)
    whole = quantize(x, spec, key=key, kernel="reference")
    assert torch.equal(whole.codes, quantize(x, spec, key=key, kernel="reference").codes)
    corner_key = key.replace(row_offset=16, col_offset=32)
    corner = quantize(x[16:, 32:], spec, key=corner_key, amax=whole.amax, kernel="reference")
    assert torch.equal(corner.codes, whole.codes[16:, 16:])
    assert torch.equal(corner.scales, whole.scales[16:, 2:])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block": (16, 16)},
        {"global_scale": "row"},
        {"formula": "te2.13"},
        {"element": "e4m3"},
        {"element": "e3m2", "block": (1, 32), "scale": "e8m0", "global_scale": None},
        {"block": (32, 32), "scale": "e8m0", "global_scale": None},
        {"element": "e4m3", "block": (1, None), "scale": "fp32", "global_scale": None},
        {"element": "e5m2", "block": (None, None), "scale": "pow2", "global_scale": None},
        {"element": "e4m3", "block": (128, 128), "scale": "fp32", "global_scale": None},
        {"block": (1, 64), "scale": "fp32", "global_scale": None},
    ],
)
def test_each_value_is_a_neighbour_on_its_blocks_grid(fields: dict, rounding: str) -> None:
    """Brute force: no other value that the block can hold lies nearer (nearest), or strictly
    between (stochastic).
    """
    x = torch.randn(40, 72, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 2, 72)
    spec = QuantSpec(rounding=rounding, **fields)
    key = RandomKey(seed=1, step=1, layer=1, operand=1)
    q = quantize(x, spec, key=key, kernel="reference")
    y = q.dequantize()
    rows = spec.block[0] or 40
    cols = spec.block[1] or 72
    scales = q.block_scales().repeat_interleave(rows, 0)[:40].repeat_interleave(cols, 1)[:, :72]
    scales = scales if (outer := q.global_decode()) is None else scales * outer
    grid = magnitudes(spec.format)[None, None, :] * scales[..., None]
    distance = (grid - x.abs()[..., None]).abs()
    slack = 1e-6 * x.abs()
    if rounding == "nearest":
        assert ((y - x).abs() <= distance.amin(-1) + slack).all()
    else:
        between = (grid > torch.minimum(x.abs(), y.abs())[..., None] + slack[..., None]) & (
            grid < torch.maximum(x.abs(), y.abs())[..., None] - slack[..., None]
        )
        assert not between.any()
    assert ((y == 0) | (y.sign() == x.sign())).all()
    fused = quantize_dequantize(x, spec, key=key, kernel="reference")
    assert torch.equal(fused.values, q.decoded().values)
    product = fused.values.float() if fused.scale is None else fused.values.float() * fused.scale
    torch.testing.assert_close(product, y, rtol=1e-6, atol=0)
