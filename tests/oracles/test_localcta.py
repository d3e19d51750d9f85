"""CTA-local NVFP4 (arXiv 2610.00053) as its kernels compute it: github.com/MrHuff/mfu-fp4-training,
commit 1f7b1b1, fp4_runtime/TK_quantisation/nvfp4_CTA_local_v4.

Written here from fused_localcta_quantize.cuh (`compute_localcta_encode_scaling_factor_FP4`,
`localcta_compute_scale_and_coeff`, `weight_2d_scaling`) and tk_quantize.cu (`finalize_row_sc_kernel`,
`localcta_outer_sg_ratio`, `rescale_weight_2d_row_sc_kernel`), in float32; ml_dtypes casts. Their
numerator is 448 (configs/paper/env/localcta_v4_row_sr.env); x and dy of that route are
decode-centric, weights and the dgrad of the route by operands encode-centric
(mixed_mxfp4_localcta.cuh).
"""

from dataclasses import replace
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from configured import recipe_named

from fp4train.formats import decode
from fp4train.quantize import QuantSpec, RandomKey, quantize, quantize_dequantize

LARGEST = np.finfo(np.float32).max
CHUNK = 128


class LocalCta(NamedTuple):
    """values: E2M1 [R, C]; scales: E4M3, one per block; outer: float32, of 256 rows or the matrix."""

    values: np.ndarray
    scales: np.ndarray
    outer: np.ndarray


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.minimum(x, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def e2m1(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)


@np.errstate(divide="ignore", over="ignore")
def quantised_chunk(x: np.ndarray, tall: int, encodes: bool) -> tuple[np.ndarray, np.ndarray]:
    """E2M1 values and block scales of 128×128 elements, in blocks of `tall` rows and 16 columns."""
    one = np.float32(1)
    amax = np.abs(x).max()
    s_enc = np.minimum(np.float32(448) / amax, LARGEST) if amax else one
    blocks = x.reshape(CHUNK // tall, tall, CHUNK // 16, 16)
    amax_b = np.abs(blocks).max(axis=(1, 3))
    if encodes:
        multiplier = e4m3(np.minimum(np.float32(6) / (amax_b * s_enc), LARGEST))
        factor = multiplier * s_enc
        scales = e4m3(one / multiplier)
    else:
        scales = e4m3(np.minimum(amax_b / np.float32(6) * s_enc, LARGEST))
        factor = np.minimum(one / (scales * (one / s_enc)), LARGEST)
    return e2m1(blocks * factor[:, None, :, None]).reshape(x.shape), scales


def local_cta(x: np.ndarray, *, weight: bool, encodes: bool) -> LocalCta:
    tall = 16 if weight else 1
    down, across = x.shape[0] // CHUNK, x.shape[1] // CHUNK
    values = np.zeros_like(x)
    scales = np.zeros((x.shape[0] // tall, x.shape[1] // 16), np.float32)
    places = [(i, j) for i in range(down) for j in range(across)]
    chunk_scales = np.zeros((down, across), np.float32)
    for i, j in places:
        here = np.s_[i * CHUNK : (i + 1) * CHUNK, j * CHUNK : (j + 1) * CHUNK]
        of_blocks = np.s_[i * CHUNK // tall : (i + 1) * CHUNK // tall, j * 8 : (j + 1) * 8]
        values[here], scales[of_blocks] = quantised_chunk(x[here], tall, encodes)
        chunk_scales[i, j] = np.abs(x[here]).max() / np.float32(448)
    if weight:
        outer = np.full(down, chunk_scales.max())
    else:
        outer = np.repeat([chunk_scales[i : i + 2].max() for i in range(0, down, 2)], 2)[:down]
    for i, j in places:
        of_blocks = np.s_[i * CHUNK // tall : (i + 1) * CHUNK // tall, j * 8 : (j + 1) * 8]
        ratio = chunk_scales[i, j] / outer[i] if outer[i] else np.float32(0)
        rescaled = e4m3(scales[of_blocks] * ratio)
        if weight:
            vanishes = (scales[of_blocks] > 0) & (ratio > 0) & (rescaled == 0)
            rescaled[vanishes] = 2.0**-9
        scales[of_blocks] = rescaled
    return LocalCta(values, scales, outer[:1] if weight else outer.repeat(CHUNK)[: x.shape[0]])


def sample(rows: int, columns: int) -> torch.Tensor:
    """BF16 with chunks of many magnitudes, large and small values, zeros in blocks and chunks."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    chunks = torch.logspace(-4, 1, rows * columns // CHUNK**2)
    chunks = chunks[torch.randperm(len(chunks), generator=generator)]
    x *= chunks.reshape(rows // CHUNK, -1).repeat_interleave(CHUNK, 0).repeat_interleave(CHUNK, 1)
    x[:, ::64] *= 6
    x[:, ::48] *= 1e-6
    x[:16, :64] = 0
    x[:CHUNK, -CHUNK:] = 0
    return x.bfloat16()


CASES = {
    "x of mfu_localcta": ("mfu_localcta", "fprop", "first", False, False),
    "x along tokens": ("mfu_localcta", "wgrad", "second", False, False),
    "dy along tokens": ("mfu_localcta", "wgrad", "first", False, False),
    "dy of mfu_localcta": ("mfu_localcta", "dgrad", "first", False, False),
    "w of mfu_localcta": ("mfu_localcta", "fprop", "second", True, True),
    "dy of mfu_operands": ("mfu_operands", "dgrad", "first", False, True),
    "w of mfu_operands": ("mfu_operands", "dgrad", "second", True, True),
}


def case_of(name: str) -> tuple[QuantSpec, bool, bool]:
    """How an operand of a recipe is quantised; whether as a weight, and encode-centric."""
    recipe, gemm, operand, weight, encodes = CASES[name]
    return getattr(recipe_named(recipe).table()[gemm], operand), weight, encodes


every_case = pytest.mark.parametrize("case", CASES)


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@every_case
def test_operands_of_recipes_are_those_of_the_authors_kernels(case: str, kernel: str) -> None:
    """The outer scale is 1 / (448 / amax) here, amax / 448 there: a unit in the last place apart."""
    spec, weight, encodes = case_of(case)
    x = sample(640, 384)
    expected = local_cta(x.float().numpy(), weight=weight, encodes=encodes)
    q = quantize(x, replace(spec, rounding="nearest"), kernel=kernel)
    assert np.array_equal(decode(q.element_codes, spec.format).numpy(), expected.values)
    assert np.array_equal(q.block_scales().numpy(), expected.scales)
    outer = q.global_decode().reshape(-1).numpy()
    np.testing.assert_allclose(outer, expected.outer, rtol=1.2e-7)
    assert len(np.unique(expected.scales)) > 40


@every_case
def test_stochastic_codes_are_neighbours_under_the_same_scales(case: str) -> None:
    spec, weight, encodes = case_of(case)
    x = sample(256, 256)
    expected = local_cta(x.float().numpy(), weight=weight, encodes=encodes)
    key = RandomKey(seed=1, step=2, layer=3, operand=4) if spec.random else None
    q = quantize(x, spec, key=key)
    assert np.array_equal(q.block_scales().numpy(), expected.scales)
    difference = decode(q.element_codes, spec.format).numpy() - expected.values
    assert np.abs(difference).max() == (2 if spec.random else 0)


def test_values_are_the_same_whether_codes_were_made_and_whoever_reads_them() -> None:
    for spec, *_ in map(case_of, CASES):
        nearest = replace(spec, rounding="nearest")
        x = sample(256, 384)[:200, :300]
        read = [quantize(x, nearest, kernel=kernel).decoded() for kernel in ("reference", "cpu")]
        for kernel in ("reference", "cpu"):
            made = quantize_dequantize(x, nearest, kernel=kernel)
            for other in read:
                assert torch.equal(made.values, other.values)
                assert torch.equal(made.scale, other.scale)
