"""`torch.nn.functional.scaled_mm` and `scaled_grouped_mm` as a CPU can run them: every call is
checked as a GPU checks it, recorded and computed.

The checks are torch's own for CUDA: its registration for shapes without memory, which takes the
scales' sizes, strides, dtypes and swizzles. The product is computed in float64 from nothing but
what the call was given, so that a wrong layout gives wrong numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._meta_registrations import _check_scaled_mm_sizes_v2, _meta_grouped_mm_common
from torch.nn.functional import ScalingType, SwizzleType

from fp4train.formats import decode, get_format, get_scale_format, unpack_fp4
from fp4train.quantize import unswizzle_scales

ELEMENTS = {torch.float4_e2m1fn_x2: "e2m1", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
BLOCKS = {ScalingType.BlockWise1x16: ("e4m3", 16), ScalingType.BlockWise1x32: ("e8m0", 32)}


@dataclass(frozen=True)
class Recorded:
    """One call: dtypes of A and B, [M, N, K], scaling of both, dtype of the product."""

    dtypes: tuple[torch.dtype, torch.dtype]
    extents: tuple[int, int, int]
    scalings: tuple[tuple[ScalingType, ...], tuple[ScalingType, ...]]
    out_dtype: torch.dtype


def values(data: Tensor, scales: list[Tensor], scaling: list[ScalingType]) -> Tensor:
    """The operand [rows, K] that codes and scales stand for, in float64 (scaled_mm's rows are those
    of A and of Bᵀ).
    """
    codes = data.view(torch.uint8)
    codes = unpack_fp4(codes) if data.dtype == torch.float4_e2m1fn_x2 else codes
    rows, width = codes.shape
    found = decode(codes, get_format(ELEMENTS[data.dtype])).double()
    if scaling[0] in BLOCKS:
        name, block = BLOCKS[scaling[0]]
        plain = unswizzle_scales(scales[0].view(torch.uint8), rows, width // block)
        found *= get_scale_format(name).decode(plain).double().repeat_interleave(block, dim=1)
    elif scaling[0] == ScalingType.TensorWise:
        found *= scales[0].double()
    elif scaling[0] == ScalingType.BlockWise1x128:
        found *= scales[0].double().repeat_interleave(128, dim=1)
    else:
        assert scaling[0] == ScalingType.BlockWise128x128
        square = scales[0].T[:, : width // 128].double()
        found *= square.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    return found * scales[1].double() if len(scales) > 1 else found


class Recorder:
    """Stands in for `scaled_mm`; `calls` has what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[Recorded] = []

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: list[Tensor],
        scaling_a: list[ScalingType],
        scale_b: list[Tensor],
        scaling_b: list[ScalingType],
        swizzle_a: list[SwizzleType],
        swizzle_b: list[SwizzleType],
        *,
        bias: Tensor | None,
        output_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        assert not use_fast_accum
        check(a, b, scale_a, scaling_a, scale_b, scaling_b, output_dtype, swizzle_a, swizzle_b)
        if bias is not None:
            assert bias.dtype == output_dtype and bias.shape == b.shape[1:]
        x = values(a, scale_a, scaling_a)
        w = values(b.T, scale_b, scaling_b)
        self.calls.append(
            Recorded(
                (a.dtype, b.dtype),
                (len(x), len(w), x.shape[1]),
                (tuple(scaling_a), tuple(scaling_b)),
                output_dtype,
            )
        )
        product = x @ w.T
        return (product if bias is None else product + bias).to(output_dtype)


def check(a: Tensor, b: Tensor, *arguments: Any) -> None:
    """torch's checks of a call on CUDA, and what cuBLAS needs beyond them: 16 bytes in every
    contiguous extent.
    """
    scale_a, scaling_a, scale_b, scaling_b, out_dtype, swizzle_a, swizzle_b = arguments
    with patch("torch._meta_registrations.device_hint", lambda tensor: "cuda"):
        _check_scaled_mm_sizes_v2(
            a,
            b,
            scale_a,
            [s.value for s in scaling_a],
            scale_b,
            [s.value for s in scaling_b],
            None,
            out_dtype,
            [s.value for s in swizzle_a],
            [s.value for s in swizzle_b],
        )
    for data, scales, scaling, swizzle in (
        (a, scale_a, scaling_a, swizzle_a),
        (b.T, scale_b, scaling_b, swizzle_b),
    ):
        assert data.is_contiguous()
        assert data.shape[0] % 16 == data.shape[1] % 16 == 0
        assert all(each.data_ptr() % 16 == 0 for each in (data, scales[0]))
        assert len(scales) == len(scaling) == len(swizzle)
        if scaling[0] in BLOCKS:
            assert scales[0].is_contiguous()
            assert swizzle[0] == SwizzleType.SWIZZLE_32_4_4
        assert all(each.numel() == 1 and each.dtype == torch.float32 for each in scales[1:])


@dataclass(frozen=True)
class RecordedGroup:
    """One call for a group: dtypes of A and B, rows of each member of A, [N, K] of B, scaling of
    both.
    """

    dtypes: tuple[torch.dtype, torch.dtype]
    rows: tuple[int, ...]
    extents: tuple[int, int]
    scalings: tuple[tuple[ScalingType, ...], tuple[ScalingType, ...]]


class GroupRecorder:
    """Stands in for `scaled_grouped_mm` of A [M, K] and B [E, N, K]; `calls` has what it was asked
    for.

    Its checks are those of `_scaled_grouped_mm_cuda_v2`, `_check_scales_fp8_rowwise` and
    `_check_scales_blocked` in aten/src/ATen/native/cuda/GroupedBlas.cpp, and torch's registration
    for shapes without memory, for the formats that it knows. Where the scales of a member begin is
    what torch's test_mxfp8_scaled_grouped_mm_2d_3d lays out: tiles of each member by themselves,
    one member after the other; it takes members of multiples of 32 rows.
    """

    def __init__(self) -> None:
        self.calls: list[RecordedGroup] = []

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: list[Tensor],
        scaling_a: list[ScalingType],
        scale_b: list[Tensor],
        scaling_b: list[ScalingType],
        swizzle_a: list[SwizzleType],
        swizzle_b: list[SwizzleType],
        *,
        offs: Tensor,
        output_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        data = b.transpose(-2, -1)
        groups = b.shape[0]
        scales_of = list(zip(*scale_b, strict=True))
        assert a.is_contiguous() and data.is_contiguous() and scaling_a == scaling_b
        assert (
            a.shape[1] == data.shape[2]
            and a.shape[1] % 16 == data.shape[1] % 16 == data.shape[2] % 16 == 0
        )
        assert offs.dim() == 1 and offs.dtype == torch.int32 and len(offs) == groups
        assert output_dtype == torch.bfloat16 and not use_fast_accum
        assert all(each.data_ptr() % 16 == 0 for each in (a, data, *scale_a[:1], *scale_b[:1]))
        if a.dtype == torch.float8_e4m3fn:
            _meta_grouped_mm_common(a, b, scale_a[0], scale_b[0], offs=offs, out_dtype=output_dtype)
        ends = offs.tolist()
        starts = [0, *ends[:-1]]
        found = []
        seen = 0
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if scaling_a == [ScalingType.RowWise]:
                assert swizzle_a == swizzle_b == [SwizzleType.NO_SWIZZLE]
                assert scale_a[0].shape == (a.shape[0],) and scale_b[0].shape == data.shape[:2]
                x = (
                    decode(a[start:end].view(torch.uint8), get_format("e4m3")).double()
                    * scale_a[0][start:end, None]
                )
                w = (
                    decode(data[number].view(torch.uint8), get_format("e4m3")).double()
                    * scale_b[0][number][:, None]
                )
            else:
                block = BLOCKS[scaling_a[0]][1]
                columns = a.shape[1] * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1) // block
                columns += -columns % 4
                height = end - start
                size = (end - start + -(end - start) % 128) * columns
                assert (
                    height % 32 == 0 and swizzle_a[0] == swizzle_b[0] == SwizzleType.SWIZZLE_32_4_4
                )
                assert scale_a[0].dim() == 2 and scale_a[0].shape[0] >= a.shape[0]
                assert scale_b[0].shape == (
                    groups,
                    (data.shape[1] + -data.shape[1] % 128) * columns,
                )
                assert all(
                    each.shape == (groups,) and each.dtype == torch.float32
                    for each in scale_a[1:] + scale_b[1:]
                )
                own = scale_a[0].view(torch.uint8).flatten()[seen : seen + size]
                x = values(a[start:end], [own, *(each[number] for each in scale_a[1:])], scaling_a)
                w = values(data[number], list(scales_of[number]), scaling_b)
                seen += size
            found.append((x @ w.T).to(output_dtype))
        assert seen in (0, scale_a[0].numel())
        rows = tuple(end - start for start, end in zip(starts, ends, strict=True))
        extents = data.shape[1], data.shape[2]
        self.calls.append(
            RecordedGroup((a.dtype, b.dtype), rows, extents, (tuple(scaling_a), tuple(scaling_b)))
        )
        return torch.cat(found)


def record(patch: pytest.MonkeyPatch) -> tuple[Recorder, GroupRecorder]:
    """What stands in for torch's scaled products, of one pair and of a group, until the patch is
    undone.
    """
    single = Recorder()
    group = GroupRecorder()
    patch.setattr(torch.nn.functional, "scaled_mm", single)
    patch.setattr(torch.nn.functional, "scaled_grouped_mm", group)
    return single, group
