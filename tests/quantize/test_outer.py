"""Scales above block scales: of tiles, of whole rows, and the mantissas of macro-blocks.

No public reference of tiles on a CPU was found: a tile is what the quantiser of a tensor makes of it alone, and that is
compared with Transformer Engine's. Macro-blocks and the guard of powers of two have ALTO's codes.
"""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from golden import REDUCED
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

from fp4train.backends.te.quantizers import family
from fp4train.formats import decode
from fp4train.kernels import cpu as kernels
from fp4train.quantize import (
    Hadamard,
    QuantSpec,
    RandomKey,
    amax_extent,
    divided_tensors,
    joined,
    macro_codes,
    packed_bytes,
    quantize,
    quantize_dequantize,
    quantizer,
    stacked,
    to_torch,
    turned,
    why_not_cut,
)
from fp4train.quantize.triton import why_not_spec

TILES = QuantSpec(global_scale=(128, 128))
SQUARE = replace(TILES, block=(16, 16))
ROWS = QuantSpec(global_scale=(256, None))
MACRO = QuantSpec(block=(1, 32), scale="e8m0", scale_rounding="even", global_scale="macro")
SQUARE_MACRO = replace(MACRO, block=(32, 32))
EVERY = (TILES, SQUARE, ROWS, MACRO, SQUARE_MACRO)
KEY = RandomKey(seed=3, step=7, layer=11, operand=4)
ALTO = load_file(REDUCED / "macro_blocks.safetensors")
every_spec = pytest.mark.parametrize("spec", EVERY, ids=str)


def sample(rows: int, cols: int, seed: int) -> torch.Tensor:
    """Heavy-tailed; rows and columns of other magnitudes, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(rows, cols, generator=generator)
    x = torch.randn(rows, cols, generator=generator) / uniform.clamp(min=1e-3)
    x *= torch.logspace(-4, 4, rows)[torch.randperm(rows, generator=generator), None]
    x[:, ::7] *= torch.logspace(-6, 6, len(range(0, cols, 7)), base=4)
    x[0] = 0.0
    return x


def decoded_by_hand(q: torch.Tensor, rows: int, cols: int) -> np.ndarray:
    """Codes, block scales and amaxes as float64 by their definitions alone."""
    spec = q.spec
    elements = decode(q.element_codes, spec.format)[:rows, :cols].double().numpy()
    extent_rows, extent_cols = spec.extent
    tall, wide = spec.block
    out = np.zeros((rows, cols))
    for row in range(rows):
        for col in range(cols):
            byte = int(q.scales[row // tall, col // wide])
            at = (row // extent_rows, col // extent_cols if extent_cols else 0)
            amax = np.float32(q.amax[at])
            if spec.scale == "e8m0":
                ratio = np.float32(6) / max(amax, np.float32(1e-12))
                mantissa = math.frexp(ratio)[0] * 2
                scale = 2.0 ** (byte - 127) / (math.floor(mantissa * 256) / 256)
            else:
                fraction, exponent = byte & 7, byte >> 3
                block_scale = (fraction / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
                scale = block_scale * amax / (448.0 * 6.0) if amax else 0.0
            out[row, col] = elements[row, col] * scale
    return out


@every_spec
@settings(max_examples=8, deadline=None)
@given(
    rows=st.sampled_from((1, 33, 130)),
    cols=st.sampled_from((2, 48, 131)),
    seed=st.integers(0, 1 << 20),
)
def test_values_are_those_of_an_independent_decode_and_near_x(
    spec: QuantSpec, rows: int, cols: int, seed: int
) -> None:
    x = sample(rows, cols, seed)
    q = quantize(x, spec)
    by_hand = torch.from_numpy(decoded_by_hand(q, rows, cols))
    torch.testing.assert_close(q.dequantize().double(), by_hand, rtol=3e-7, atol=1e-38)
    assert q.amax.shape == (
        -(-rows // spec.extent[0]),
        -(-cols // (spec.extent[1] or cols)),
    )
    largest = x.abs().max()
    assert (q.dequantize() - x).abs().max() <= largest / 4


@every_spec
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_values_equal_decoded_codes(spec: QuantSpec, rounding: str) -> None:
    spec = replace(spec, rounding=rounding)
    x = sample(200, 300, seed=2)
    values, q = quantize_dequantize(x, spec, key=KEY), quantize(x, spec, key=KEY)
    assert torch.equal(values.values, q.decoded().values)
    if spec.scaled_rows:
        assert values.values.dtype == torch.bfloat16 and values.scale.shape == (200, 1)
        assert torch.equal(values.scale, q.decoded().scale)
    else:
        assert values.values.dtype == torch.float32 and values.scale is None
    torch.testing.assert_close(values.tensor(torch.float32), q.dequantize(), rtol=2e-7, atol=0)


def test_stochastic_rounding_is_unbiased_under_every_scale_that_does_not_clip() -> None:
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    for spec in (replace(TILES, guard=16 / 17), replace(MACRO, scale_rounding="ceil")):
        spec = replace(spec, rounding="stochastic")
        draws = [quantize(x, spec, key=KEY.replace(step=step)).dequantize() for step in range(200)]
        shrinkage = (torch.stack(draws).mean(0) * x).sum() / x.square().sum() - 1
        assert abs(shrinkage.item()) < 1e-3


@settings(max_examples=20)
@given(st.integers(-30, 30), st.integers(0, 3), st.integers(0, 1 << 20))
def test_a_tile_is_quantised_by_itself(exponent: int, at: int, seed: int) -> None:
    """Scaling one by a power of two scales its values and no others."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(seed))
    row, col = 128 * (at // 2), 128 * (at % 2)
    where = slice(row, row + 128), slice(col, col + 128)
    for spec in (TILES, SQUARE, SQUARE_MACRO):
        y = quantize(x, spec).dequantize()
        scaled = x.clone()
        scaled[where] *= 2.0**exponent
        y[where] *= 2.0**exponent
        assert torch.equal(quantize(scaled, spec).dequantize(), y)


@every_spec
@pytest.mark.parametrize("columns", [False, True])
def test_shards_of_whole_extents_are_those_of_the_whole(spec: QuantSpec, columns: bool) -> None:
    x = sample(512, 512, seed=5)
    whole = quantize(x, spec)
    assert amax_extent(spec) is None
    if columns and spec.scaled_rows:
        assert "256 rows that share a scale" in str(why_not_cut(spec, 256, columns=True))
        return
    assert why_not_cut(spec, 256, columns=columns) is None
    parts = [quantize(part, spec) for part in x.split(256, dim=int(columns))]
    again = stacked(parts, columns=columns)
    assert torch.equal(again.dequantize(), whole.dequantize())
    pieces = [divided_tensors(part, columns=columns) for part in parts]
    tensors = [torch.cat(of_all) for of_all in zip(*pieces, strict=True)]
    arrived = joined(parts[0], tensors, 512, columns=columns).contiguous()
    assert torch.equal(arrived.dequantize(), whole.dequantize())
    if spec.extent[int(columns)] not in (1, None):
        assert "is not whole outer blocks" in str(why_not_cut(spec, 64, columns=columns))


def test_square_blocks_in_square_tiles_are_the_same_transposed() -> None:
    x = sample(224, 320, seed=6)
    for spec in (SQUARE, SQUARE_MACRO):
        assert spec.transposable
        q, of_transpose = turned(quantize(x, spec)), quantize(x.T, spec)
        assert torch.equal(q.dequantize(), of_transpose.dequantize())
        assert torch.equal(q.amax, of_transpose.amax)
    assert not replace(SQUARE, global_scale=(128, 256)).transposable


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(block=(16, 16)),
        QuantSpec(element="int4", block=(16, 16)),
        QuantSpec(block=(32, 32), scale="e8m0", global_scale=None),
        QuantSpec(element="e4m3", block=(128, 128), scale="fp32", global_scale=None),
        QuantSpec(element="e4m3", block=(None, None), scale="fp32", global_scale=None),
        QuantSpec(block=(None, None), scale="fp32", global_scale=None),
        SQUARE,
        SQUARE_MACRO,
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(40, 50), (33, 16), (1, 130), (7, 3)])
def test_codes_turned_are_those_of_the_transpose_where_sides_fill_no_blocks(
    spec: QuantSpec, shape: tuple[int, int]
) -> None:
    x = sample(*shape, seed=3)
    ours, theirs = turned(quantize(x, spec)), quantize(x.T, spec)
    assert ours.shape == theirs.shape
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.scales, theirs.scales)
    assert torch.equal(ours.dequantize(), theirs.dequantize())


@every_spec
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_what_shares_its_scale_and_no_other(
    spec: QuantSpec, bad: float
) -> None:
    x = torch.ones(300, 300)
    x[140, 130] = bad
    spoilt = quantize(x, spec).dequantize().isnan()
    rows, cols = spec.extent
    top, left = 140 // rows * rows, 130 // cols * cols if cols else 0
    expected = torch.zeros(300, 300, dtype=torch.bool)
    expected[top : top + rows, left : left + (cols or 300)] = True
    assert torch.equal(spoilt, expected)
    assert torch.equal(quantize_dequantize(x, spec).tensor(torch.float32).isnan(), expected)


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("form", ["1d", "2d"])
def test_macro_blocks_have_the_mantissas_scales_and_codes_of_alto(form: str, kernel: str) -> None:
    spec = MACRO if form == "1d" else SQUARE_MACRO
    q = quantize(ALTO["x"], spec, kernel=kernel)
    assert torch.equal(macro_codes(q.amax, spec), ALTO[f"{form}.mantissas"])
    assert torch.equal(q.codes, ALTO[f"{form}.codes"])
    # blocks of zeros have their smallest scale, which is 2^-126
    assert torch.equal(q.scales.clamp(min=1), ALTO[f"{form}.scales"].reshape(q.scales.shape))


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("form", ["1d", "2d"])
def test_elements_under_a_guard_have_the_scales_and_codes_of_alto(form: str, kernel: str) -> None:
    spec = replace(MACRO if form == "1d" else SQUARE_MACRO, global_scale=None, guard=0.75)
    q = quantize(ALTO["x"], spec, kernel=kernel)
    assert torch.equal(q.codes, ALTO[f"{form}.guarded_codes"])
    assert torch.equal(
        q.scales.clamp(min=1), ALTO[f"{form}.guarded_scales"].reshape(q.scales.shape)
    )


def test_bytes_count_a_float_per_tile_and_a_byte_per_mantissa() -> None:
    plain = packed_bytes(QuantSpec(), 256, 512)
    assert packed_bytes(TILES, 256, 512) == plain + 4 * 2 * 4
    assert packed_bytes(ROWS, 256, 512) == plain
    mx = packed_bytes(replace(MACRO, global_scale=None), 256, 512)
    assert packed_bytes(MACRO, 256, 512) == mx + 256 * 4
    assert packed_bytes(SQUARE_MACRO, 256, 512) - 2 * 4 == packed_bytes(
        replace(SQUARE_MACRO, global_scale=None), 256, 512
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_scale": (128,)}, "allowed are None, tensor, row, block, macro, or (rows, col"),
        ({"global_scale": (0, 128)}, "global_scale=(0, 128): allowed are"),
        ({"global_scale": (128, 12.5)}, "allowed are"),
        ({"global_scale": (1, 128)}, "use its name, 'block'"),
        ({"global_scale": (1, None)}, "use its name, 'row'"),
        ({"global_scale": (24, 128), "block": (16, 16)}, "does not divide 24 rows"),
        ({"global_scale": (128, 100)}, "does not divide an outer block of 100 columns"),
        ({"global_scale": (256, None), "block": (16, 16)}, "or 'tensor' for square blocks"),
        ({"global_scale": (128, 128), "four_over_six": "mse"}, "not per (128, 128)"),
        (
            {"global_scale": (128, 128), "scale": "e8m0", "block": (1, 32)},
            "scale='e8m0' spans the whole range; use None",
        ),
        ({"global_scale": "macro"}, "scale='e4m3' with guard=1.0: a mantissa lies above powers"),
        (
            {"global_scale": "macro", "scale": "e8m0", "block": (1, 32), "global_bound": 256},
            "global_bound=256: the mantissas of global_scale='macro' bound no block scales",
        ),
        (
            {"global_scale": None},
            "needs 'tensor', 'row', 'block' or a tile, (rows, columns)",
        ),
        (
            {"global_scale": "macro", "scale": "e8m0", "block": (1, 48)},
            "does not divide an outer block of 128",
        ),
        (
            {"global_scale": "macro", "scale": "fp32", "block": (1, None), "element": "e4m3"},
            "scale='fp32' with guard=1.0",
        ),
    ],
)
def test_specs_that_make_no_sense_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        QuantSpec(**options)


def test_kernels_and_others_refuse_by_name_what_they_do_not_know() -> None:
    for spec in EVERY:
        assert quantizer(spec, "cpu").kernel == "cpu" or kernels.unavailable()
        assert why_not_spec(spec) is None
        with pytest.raises(ValueError, match="one float32 scale per tensor or row"):
            to_torch(quantize(torch.ones(32, 128), spec))
        with pytest.raises(ValueError, match="no global scale to take it"):
            quantize(torch.ones(32, 128), spec, amax=torch.ones(1))
    uneven = replace(TILES, global_scale=(128, 64))
    if not kernels.unavailable():
        assert "tiles have 128 columns and a multiple of 16 rows" in str(
            quantizer(uneven, "cpu").why
        )
    with pytest.raises(ValueError, match="global scale, for each tensor or each row"):
        family(TILES)
    with pytest.raises(ValueError, match="TE has no E0M8 macro scales above those of e8m0"):
        family(replace(MACRO, element="e4m3"))


def test_hadamard_transforms_come_before_the_amax_of_a_tile() -> None:
    x = sample(130, 260, seed=3)
    for spec in (TILES, ROWS, MACRO):
        spec = replace(spec, hadamard=Hadamard(size=32))
        q = quantize(x, spec)
        assert q.restore().shape == x.shape
        assert ((q.restore() - x).norm() / x.norm()).item() < 0.2
