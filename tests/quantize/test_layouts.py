"""Hardware layouts: the 128x4 swizzle, torch's dtypes, and back."""

import re

import pytest
import torch

from fp4train.backends import cpu_multiplies_rows
from fp4train.quantize import (
    QuantSpec,
    quantize,
    swizzle_scales,
    to_torch,
    unswizzle_scales,
)

MX = {"block": (1, 32), "scale": "e8m0", "global_scale": None}


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 4), (130, 5), (300, 17), (64, 6)])
def test_each_scale_lies_at_its_published_offset(rows: int, cols: int) -> None:
    scales = torch.randint(
        1, 256, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    flat = swizzle_scales(scales)
    tiles = -(-cols // 4)
    assert flat.numel() == -(-rows // 128) * tiles * 512
    for r in range(rows):
        for c in range(cols):
            offset = (
                ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            )
            assert flat[offset] == scales[r, c]
    assert (flat != 0).sum() == rows * cols, "the padding is zero"
    assert torch.equal(unswizzle_scales(flat, rows, cols), scales)


def test_swizzle_agrees_with_torchao() -> None:
    blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    scales = torch.randint(
        0, 256, (200, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(swizzle_scales(scales), blocked(scales).flatten())


def test_unswizzling_the_wrong_size_says_what_it_wants() -> None:
    with pytest.raises(
        ValueError, match=re.escape("flat has 512 scales: [130, 5] swizzled has 2048")
    ):
        unswizzle_scales(torch.zeros(512), 130, 5)


@pytest.mark.parametrize(
    ("spec", "data", "scales"),
    [
        (QuantSpec(), torch.float4_e2m1fn_x2, torch.float8_e4m3fn),
        (QuantSpec(block=(16, 16)), torch.float4_e2m1fn_x2, torch.float8_e4m3fn),
        (QuantSpec(global_scale="row"), torch.float4_e2m1fn_x2, torch.float8_e4m3fn),
        (QuantSpec(**MX), torch.float4_e2m1fn_x2, torch.float8_e8m0fnu),
        (QuantSpec(element="e4m3", **MX), torch.float8_e4m3fn, torch.float8_e8m0fnu),
        (
            QuantSpec(element="e5m2", **MX | {"block": (32, 32)}),
            torch.float8_e5m2,
            torch.float8_e8m0fnu,
        ),
        (
            QuantSpec(element="e4m3", block=(None, None), scale="fp32", global_scale=None),
            torch.float8_e4m3fn,
            None,
        ),
        (
            QuantSpec(element="e4m3", block=(1, None), scale="fp32", global_scale=None),
            torch.float8_e4m3fn,
            None,
        ),
    ],
)
@pytest.mark.parametrize("shape", [(150, 96), (40, 50)])
def test_torch_dtypes_and_back(
    spec: QuantSpec, data: torch.dtype, scales: torch.dtype | None, shape
) -> None:
    q = quantize(
        torch.randn(shape, generator=torch.Generator().manual_seed(2)), spec, kernel="reference"
    )
    operand = to_torch(q)
    assert operand.codes.dtype == data
    assert operand.scales.dtype == (scales or torch.float32)
    assert torch.equal(operand.codes.view(torch.uint8), q.codes)
    assert torch.equal(operand.block_scales(), q.block_scales())
    assert torch.equal(operand.dequantize(), q.dequantize())
    assert to_torch(operand).scales is operand.scales or scales is None


def test_two_dimensional_blocks_repeat_their_scales_for_the_hardware() -> None:
    q = quantize(
        torch.randn(64, 64, generator=torch.Generator().manual_seed(3)), QuantSpec(block=(16, 16))
    )
    rows = unswizzle_scales(to_torch(q).scales.view(torch.uint8), 64, 4)
    assert torch.equal(rows, q.scales.repeat_interleave(16, dim=0))


def test_fp6_has_no_torch_dtype_and_says_so() -> None:
    with pytest.raises(
        ValueError, match="element='e3m2' has no torch dtype; allowed: e2m1, e4m3, e5m2"
    ):
        to_torch(quantize(torch.zeros(2, 32), QuantSpec(element="e3m2", **MX)))


@pytest.mark.skipif(not cpu_multiplies_rows(), reason="this torch multiplies no rows on CPUs")
def test_scaled_mm_multiplies_our_rowwise_fp8_as_emulation_does() -> None:
    spec = QuantSpec(element="e4m3", block=(1, None), scale="fp32", global_scale=None)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(32, 64, generator=generator)
    w = torch.randn(48, 64, generator=generator)
    a = quantize(x, spec, kernel="reference")
    b = quantize(w, spec, kernel="reference")
    ta = to_torch(a)
    tb = to_torch(b)
    y = torch._scaled_mm(
        ta.codes, tb.codes.T, scale_a=ta.scales, scale_b=tb.scales.T, out_dtype=torch.float32
    )
    torch.testing.assert_close(y, a.dequantize() @ b.dequantize().T, rtol=1e-4, atol=1e-4)
