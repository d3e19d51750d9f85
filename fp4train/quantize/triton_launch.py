"""Launches of the Triton kernels: variants, tiles, sizes, and the memory of results.

All that a launch needs besides pointers and random words is a function of the spec, and of dtype,
shape, strides and device of x: a plan, which is worked out once per such kind of tensor. The global
amax (one read of x before the quantising one) and everything derived from it stay on the device:
nothing here waits for the GPU.
"""

import math
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fp4train.formats import AdaptiveScale, LevelledScale
from fp4train.quantize.launch import Launch as Launch
from fp4train.quantize.layout import TILED_DTYPES
from fp4train.quantize.quantized import operand_width
from fp4train.quantize.random import LANES
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.triton_variant import (
    Variant,
    of_elements,
    of_scales,
    of_transform,
    outer_extent,
    parts,
    unsigned_scale,
)

COLUMN_BLOCKS: Final = (16, 32)
TILE: Final = 4096  # elements per program: 32 per thread
WIDEST: Final = 128
"""Columns of a program that measures extents."""

Room = Callable[[], Tensor]
"""Makes the memory of one result."""


class QuantizePlan(NamedTuple):
    """Quantising one kind of tensor."""

    launch: Launch
    contiguous: bool
    """Whether x must be copied first."""
    transposed: bool
    """Whether the result is made transposed, and keeps the layout of a transposed view."""
    results: list[Room]
    """Codes or values, and scales."""


class AmaxPlan(NamedTuple):
    """The largest magnitude of one kind of tensor or of its rows."""

    launch: Launch
    turned: bool
    """Whether x is read as x.T."""
    contiguous: bool
    result: Room


class BothPlan(NamedTuple):
    """Quantising both forms of one kind of tensor."""

    amax: Launch | None
    """The kernel of both amaxes; None: those that are needed, if any, are that of x."""
    needs: tuple[bool, bool]
    """Whether each form needs an amax."""
    launch: Launch
    results: list[Room]
    """Codes or values, and scales of the row-wise form, and of the column-wise one; those of values
    are not written.
    """


def plan_quantize(
    spec: QuantSpec, x_RC: Tensor, values: bool, given: bool, tiled: bool
) -> QuantizePlan:
    """given: whether the amax of a float32 scale came from elsewhere. tiled: see `Variant`."""
    from fp4train.kernels.triton.quantize import quantize

    (height, block), (n_rows, n_cols) = spec.block, x_RC.shape
    n = block or LANES
    strided = _is_strided(x_RC)
    by_columns = needs_rows_in_threads(spec) or (strided and height == 1 and n in COLUMN_BLOCKS)
    contiguous = strided and not by_columns
    strides = (n_cols, 1) if contiguous else x_RC.stride()
    spanned = parts(spec)
    groups = _cdiv(n_cols, n * spanned) * spanned
    packed = spec.format.packed and not values
    warps = 4
    if by_columns:
        blocks, (tile_rows, tile_blocks) = "columns", column_tile(n, spec)
    elif height in (1, None):
        blocks = "rows"
        if block is None:
            blocks = "whole"
        elif packed and n == 16:
            blocks = "rows16"
        tile_rows, tile_blocks = tile(groups, TILE // n)
    else:
        blocks = "squares"
        tile_rows = n
        tile_blocks = max(1, TILE // (n * n))
        warps = 4 if n <= 64 else 8
    transposed = False
    words = torch.uint8
    per_word = 1
    scales: tuple[int, ...] = (_cdiv(n_rows, height or 1), groups)
    if block is None:
        scales = (n_rows if height == 1 else 1, 1)
    if values:
        # a transposed view keeps its layout: the GEMM takes either
        transposed = by_columns and strides[0] == 1
        width = operand_width(spec, n_cols)
        shape = (n_rows, width)
        stored = (width, 1)
        if transposed:
            shape = (width, n_rows)
            stored = (1, n_rows)
        if (height, block) == (None, None):
            scales = ()
    else:
        width = n_cols
        if block is not None:
            width = groups * n // 2 if packed else groups * n
        shape = (n_rows, width)
        # kernels that store 64 bits at a time
        wide = by_columns or (packed and spec.block == (1, 16))
        if wide:
            words = torch.int64
            per_word = 8
        elif packed:
            words = torch.int32
            per_word = 4
        stored = (shape[1] // per_word, 1)
    output = "values" if values else "packed" if packed else "codes"
    its = {"blocks": blocks, "output": output, "given": given, "tiled": tiled}
    if by_columns:
        its["height"] = height or 1
    variant = _quantizing(spec, x_RC.dtype, (tile_rows, tile_blocks), **its)
    tiles = _cdiv(groups, tile_blocks * spanned)
    strips = _cdiv(n_rows, tile_rows)
    sizes = (n_rows, n_cols, groups, strips if by_columns else tiles, *strides, *stored)
    dtypes = {} if values else {2: words}
    if isinstance(spec.scale_format, LevelledScale) and not values:
        dtypes[3] = torch.int32  # four bytes of a block
        scales = (scales[0], spec.scale_format.block_bytes * scales[1])
    launch = Launch(quantize, tiles * strips, sizes, {"V": variant}, warps, dtypes)
    rooms = _rooms(spec, shape, scales, x_RC, tiled)
    if values:
        rooms[0] = partial(torch.empty, shape, dtype=values_dtype(spec), device=x_RC.device)
    return QuantizePlan(launch, contiguous, transposed, rooms)


def _rooms(
    spec: QuantSpec, codes: tuple[int, int], scales: tuple[int, ...], x: Tensor, tiled: bool
) -> list[Room]:
    """Room for codes and scales of these shapes; tiles are filled up with zeros, and have torch's
    dtypes.
    """
    empty = partial(torch.empty, dtype=torch.uint8, device=x.device)
    if not tiled:  # numbers take torch less time than a tuple of them
        return [partial(empty, *codes), partial(empty, scales, dtype=spec.scale_format.dtype)]
    dtype = TILED_DTYPES[spec.scale]
    size = _cdiv(scales[0], 128) * _cdiv(scales[1], 4) * 512
    fills_tiles = scales[0] % 128 == scales[1] % 4 == 0
    room_for_codes = partial(empty, *codes, dtype=spec.format.dtype)
    if fills_tiles:
        return [room_for_codes, partial(empty, size, dtype=dtype)]
    return [room_for_codes, lambda: empty(size).zero_().view(dtype)]


def plan_both(
    row: QuantSpec,
    x_MK: Tensor,
    column: QuantSpec,
    tiled: tuple[bool, bool],
    codes: tuple[bool, bool] = (True, True),
) -> BothPlan | None:
    """Specs as `triton.pair` takes them; None: the rows of x are not contiguous. tiled: see
    `Variant`. codes: whether each form is made as codes, else as values.
    """
    from fp4train.kernels.triton.both import amax_both, quantize_both

    if x_MK.stride(1) != 1:
        return None
    tokens, features = x_MK.shape
    n = row.block[1] or LANES
    m = column.block[1] or LANES
    tile_rows, tile_blocks = place = column_tile(m, column)
    programs = _cdiv(features, tile_rows) * _cdiv(tokens, tile_blocks * m)
    groups = _cdiv(features, n), _cdiv(tokens, m)
    packed = [spec.format.packed for spec in (row, column)]
    if packed[0] and n == 16 and codes[0]:
        blocks = "rows16"
    else:
        blocks = "rows"
    its: list[dict[str, Any]] = []
    for pack, tile, coded in zip(packed, tiled, codes, strict=True):
        output = "packed" if pack else "codes"
        its.append({"output": output, "tiled": tile} if coded else {"output": "values"})
    by_rows = _quantizing(
        row, x_MK.dtype, (tile_blocks * m, tile_rows // n), blocks=blocks, **its[0]
    )
    by_columns = _quantizing(column, x_MK.dtype, place, blocks="columns", **its[1])
    warps = tile_rows * tile_blocks * m // 1024
    words = torch.uint8
    if blocks == "rows16":
        words = torch.int64
    elif packed[0]:
        words = torch.int32
    dtypes = {2: words} if codes[0] else {}
    if codes[1]:
        dtypes[4] = torch.int64
    launch = Launch(
        quantize_both,
        programs,
        (tokens, features, x_MK.stride(0)),
        {"R": by_rows, "C": by_columns},
        warps,
        dtypes,
    )
    needs = row.global_scale is not None, column.global_scale is not None
    measure = None
    if needs[1] and column.hadamard is not None:
        sizes = (features, tokens, _cdiv(features, tile_rows), 1, x_MK.stride(0))
        measure = Launch(
            amax_both, programs, sizes, {"V": amax_variant(column, place)}, dtypes={1: torch.int32}
        )
    rooms = _rooms(
        row, (tokens, groups[0] * n // (1 + packed[0])), (tokens, groups[0]), x_MK, tiled[0]
    )
    stored = (features, groups[1] * m // (1 + packed[1]))
    rooms += _rooms(column, stored, (features, groups[1]), x_MK, tiled[1])
    if not codes[0]:
        rooms[0] = partial(
            torch.empty, tokens, features, dtype=values_dtype(row), device=x_MK.device
        )
    if not codes[1]:  # as x lies
        width = operand_width(column, tokens)
        rooms[2] = partial(
            torch.empty, width, features, dtype=values_dtype(column), device=x_MK.device
        )
    return BothPlan(measure, needs, launch, rooms)


TURNED_TILE: Final = 64, 16
"""Tokens, and groups of eight features, of a program of `plan_turned`."""


def plan_turned(spec: QuantSpec, x_MK: Tensor, given: bool, enters: bool) -> QuantizePlan:
    """Codes by one float32 scale, and their transpose. given, enters: see `Variant`."""
    from fp4train.kernels.triton.both import quantize_turned

    tokens, features = x_MK.shape
    contiguous = _is_strided(x_MK)
    tile_rows, tile_blocks = TURNED_TILE
    programs = _cdiv(tokens, tile_rows) * _cdiv(features, LANES * tile_blocks)
    variant = _quantizing(
        spec, x_MK.dtype, TURNED_TILE, blocks="whole", output="codes", given=given, enters=enters
    )
    sizes = (tokens, features, features if contiguous else x_MK.stride(0))
    launch = Launch(quantize_turned, programs, sizes, {"V": variant}, 8, {5: torch.int32})
    rooms = _rooms(spec, (tokens, features), (1, 1), x_MK, False)
    rooms.insert(1, partial(torch.empty, features, tokens, dtype=torch.uint8, device=x_MK.device))
    return QuantizePlan(launch, contiguous, False, rooms)


def plan_decode(spec: QuantSpec, codes: Tensor, groups: int, width: int) -> Launch:
    """Decoding codes, as the kernel reads them, of `groups` blocks per row to `width` columns."""
    from fp4train.kernels.triton.quantize import decode_blocks

    n = spec.block[1] or LANES
    tile_rows, tile_blocks = place = tile(groups, TILE // n)
    fields = of_elements(spec) | {"rounding": "nearest", "random_bits": 0}
    scale = spec.scale
    if spec.outer is not None:
        scale = "fp32"  # those of blocks, times those above
    elif spec.scale_format.element is not None:
        scale = "unsigned"
        fields |= unsigned_scale(spec)
    fields["nan_above"] = spec.format.last_number_code
    variant = _variant(n, place, **fields, height=spec.block[0] or 1, scale=scale)
    tiles = _cdiv(groups, tile_blocks)
    sizes = (codes.shape[0], groups, tiles, width, codes.stride(0), width)
    return Launch(decode_blocks, _cdiv(codes.shape[0], tile_rows) * tiles, sizes, {"V": variant})


def plan_amax(spec: QuantSpec, x_RC: Tensor, per_row: bool) -> AmaxPlan:
    from fp4train.kernels.triton.columns import amax_columns
    from fp4train.kernels.triton.quantize import amax_rows, amax_tensor

    rows, cols = x_RC.shape
    shape = (rows, 1) if per_row else ()
    result = partial(torch.zeros, shape, dtype=torch.float32, device=x_RC.device)
    bits = {1: torch.int32}
    if spec.hadamard is not None:
        n = spec.block[1] or 16
        tile_rows, tile_blocks = place = column_tile(n, spec)
        fields = of_transform(spec) | {"outer": "row" if per_row else "tensor"}
        variant = _variant(n, place, **fields)
        tiles = _cdiv(rows, tile_rows)
        programs = tiles * _cdiv(cols, n * variant.parts * tile_blocks)
        launch = Launch(
            amax_columns, programs, (rows, cols, tiles, *x_RC.stride()), {"V": variant}, dtypes=bits
        )
        return AmaxPlan(launch, False, False, result)
    if per_row:
        tile_rows, tile_cols = (4, 1024) if x_RC.stride(1) == 1 else (64, 64)
        constants = {"ROWS": tile_rows, "COLS": tile_cols}
        launch = Launch(
            amax_rows, _cdiv(rows, tile_rows), (rows, cols, *x_RC.stride()), constants, dtypes=bits
        )
        return AmaxPlan(launch, False, False, result)
    turned = x_RC.stride(0) == 1 and rows > 1
    if turned:
        x_RC = x_RC.T
    contiguous = _is_strided(x_RC)
    rows, cols = x_RC.shape
    tile_cols = min(1024, max(64, 1 << (cols - 1).bit_length()))
    tile_rows = 8192 // tile_cols
    tiles = _cdiv(cols, tile_cols)
    strips = _cdiv(rows, tile_rows)
    steps = max(1, tiles * strips // (32 * processors(x_RC.device)))
    sizes = (rows, cols, cols if contiguous else x_RC.stride(0), tiles, steps)
    constants = {"ROWS": tile_rows, "COLS": tile_cols}
    launch = Launch(amax_tensor, tiles * _cdiv(strips, steps), sizes, constants, 8, bits)
    return AmaxPlan(launch, turned, contiguous, result)


def plan_extents(spec: QuantSpec, x_RC: Tensor) -> AmaxPlan:
    """The largest magnitudes of what shares a scale above those of blocks."""
    from fp4train.kernels.triton.columns import amax_columns
    from fp4train.kernels.triton.extents import amax_extents

    assert spec.extent is not None
    rows, cols = x_RC.shape
    height, width = spec.extent
    shape = (_cdiv(rows, height), _cdiv(cols, width or cols))
    result = partial(torch.zeros, shape, dtype=torch.float32, device=x_RC.device)
    bits = {1: torch.int32}
    if spec.hadamard is not None:
        n = spec.block[1] or LANES
        tile_rows, tile_blocks = column_tile(n, spec)
        spanned = n * parts(spec)
        tile_blocks = _divisor(width or 0, spanned * tile_blocks) // spanned
        place = tile_rows, tile_blocks
        variant = _variant(n, place, **of_transform(spec), **outer_extent(spec))
        tiles = _cdiv(rows, tile_rows)
        programs = tiles * _cdiv(cols, spanned * tile_blocks)
        sizes = (rows, cols, tiles, *x_RC.stride())
        launch = Launch(amax_columns, programs, sizes, {"V": variant}, dtypes=bits)
        return AmaxPlan(launch, False, False, result)
    tile_cols = _divisor(width or 0, WIDEST)
    tile_rows = TILE // tile_cols
    if height % tile_rows and height > 1:
        tile_rows = max(_divisor(height, tile_rows), 16)
    tiles = _cdiv(cols, tile_cols)
    constants = {"ROWS": tile_rows, "COLS": tile_cols, "HEIGHT": height, "WIDTH": width or 0}
    sizes = (rows, cols, *x_RC.stride(), tiles)
    launch = Launch(amax_extents, tiles * _cdiv(rows, tile_rows), sizes, constants, dtypes=bits)
    return AmaxPlan(launch, False, False, result)


def _divisor(size: int, most: int) -> int:
    """The largest power of two up to `most`, itself one, that divides a size."""
    return math.gcd(size, most)


def _variant(n: int, place: tuple[int, int], **its: Any) -> Variant:
    """A variant of blocks of `n` columns; place: rows, and blocks of each, of a program."""
    return Variant(n=n, tile_rows=place[0], tile_blocks=place[1], hardware=not interpreted(), **its)


def amax_variant(column: QuantSpec, place: tuple[int, int]) -> Variant:
    """The variant of the kernel that measures the amaxes of both forms, of column-wise blocks by
    `column`.
    """
    return _variant(column.block[1] or LANES, place, **of_transform(column))


def _quantizing(spec: QuantSpec, dtype: torch.dtype, place: tuple[int, int], **its: Any) -> Variant:
    """A variant that quantises x of `dtype`."""
    return _variant(
        spec.block[1] or LANES,
        place,
        **(of_elements(spec) | of_transform(spec) | of_scales(spec, dtype)),
        **its,
    )


def values_dtype(spec: QuantSpec) -> torch.dtype:
    if spec.exact_in_bf16:
        return torch.bfloat16
    return torch.float32


def tile(groups: int, blocks: int) -> tuple[int, int]:
    """(rows, blocks per row) of a program of `blocks` blocks (a power of two), with few places
    beyond a row's end.
    """
    divisor = groups & -groups
    across = max(divisor, min(8, 1 << (groups - 1).bit_length()))
    across = min(across, blocks)
    return blocks // across, across


def needs_rows_in_threads(spec: QuantSpec) -> bool:
    """Whether a thread needs all elements of a row of a block, wherever they lie: to transform
    them, or to sum their errors in order.
    """
    fmt = spec.scale_format
    return spec.hadamard is not None or isinstance(fmt, AdaptiveScale | LevelledScale)


def column_tile(n: int, spec: QuantSpec) -> tuple[int, int]:
    """(rows, blocks per row) of a program of the columns kernels: 32 bytes of codes per row; four
    or two rows per thread, two where the random words need the registers. A row of 64 elements, of
    blocks that a transform spans, or one of which two grids are tried, per thread.
    """
    if n == 64 or parts(spec) > 1:
        return (128, 1)
    if isinstance(spec.scale_format, AdaptiveScale):
        return (64, 2)
    if n == 16 and not spec.random:
        return (128, 4)
    return (64, 4)


def interpreted() -> bool:
    """Whether Triton's CPU interpreter is on (TRITON_INTERPRET, read by Triton, which is not
    imported without need).
    """
    if "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _is_strided(x_RC: Tensor) -> bool:
    """Whether the elements of a row do not follow each other."""
    return x_RC.stride(1) != 1 and x_RC.shape[1] != 1


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4
