"""Launches of the Triton kernels: variants, tiles, sizes, and the memory of results.

All that a launch needs besides pointers and random words is a function of the spec, and of dtype,
shape, strides and device of x: a plan, which is worked out once per such kind of tensor. The global
amax (one read of x before the quantising one) and everything derived from it stay on the device:
nothing here waits for the GPU.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4train.formats import LevelledScale
from fp4train.quantize.launch import Launch as Launch
from fp4train.quantize.layout import TILED_DTYPES
from fp4train.quantize.quantized import operand_width
from fp4train.quantize.random import LANES
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.triton_blocks import (
    TILE,
    Blocks,
    ByColumns,
    blocks_of,
    cdiv,
    column_tile,
    rows_of,
    tile,
)
from fp4train.quantize.triton_variant import (
    OuterExtent,
    Variant,
    of_elements,
    of_scales,
    of_transform,
    other_grid,
    outer_extent,
    parts,
    scales_of_codes,
)

WIDEST = 128
"""Columns of a program that measures extents."""
WORDS: Mapping[int, torch.dtype] = {1: torch.uint8, 4: torch.int32, 8: torch.int64}
"""Bytes of a word of codes → dtype in which the kernels store it."""

Room = Callable[[], Tensor]
"""Makes the memory of one result."""


ZEROS = 1024
"""Results that one fill serves."""
_zeros: dict[tuple[torch.device, object], Iterator[Tensor]] = {}


def eight_zeros(device: torch.device) -> Tensor:
    """Eight float32 zeros that nobody else has, of a fill for many; of one for these alone where a
    CUDA graph is captured, which must fill them again whenever it is replayed.
    """
    stream = None
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(8, dtype=torch.float32, device=device)
        stream = torch.cuda.current_stream(device)
    eight = next(_zeros.get((device, stream), iter(())), None)
    if eight is None:
        with torch.inference_mode(False):  # autograd may save them
            rows = torch.zeros(ZEROS, 8, dtype=torch.float32, device=device).unbind()
        # `.data` has a version of its own: that of one row must not change with another's
        unused = iter([row.data for row in rows])
        _zeros[device, stream] = unused
        eight = next(unused)
    return eight


def one_zero(device: torch.device) -> Tensor:
    """A 0-d zero, as `eight_zeros`, which begins at a multiple of 16 bytes as torch's memory does."""
    return eight_zeros(device)[0]


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


class _Output(NamedTuple):
    """What a launch of the kernel that quantises writes.

    kind: "codes", "packed" or "values" (`Variant.output`).
    strides: of the codes, in words, or of the values.
    dtypes: see `Launch`.
    """

    kind: str
    strides: tuple[int, int]
    dtypes: dict[int, torch.dtype]
    transposed: bool
    rooms: list[Room]


def plan_quantize(
    spec: QuantSpec, x_RC: Tensor, values: bool, given: bool, tiled: bool, factor: bool
) -> QuantizePlan:
    """given: whether the amax of a float32 scale came from elsewhere. tiled, factor: see `Variant`."""
    from fp4train.kernels.triton.quantize import quantize

    rows, columns = x_RC.shape
    strided = _is_strided(x_RC)
    blocks = blocks_of(spec, strided=strided, codes=not values)
    contiguous = strided and not blocks.strided
    strides = (columns, 1) if contiguous else x_RC.stride()
    groups = blocks.groups(columns)
    tile_rows, tile_blocks = place = blocks.tile(groups)
    if values:
        output = _values_of(blocks, x_RC, transposed=blocks.strided and strides[0] == 1)
    else:
        output = _codes_of(blocks, x_RC, groups, tiled)
    variant = _quantizing(
        spec,
        x_RC.dtype,
        place,
        blocks=blocks.name,
        output=output.kind,
        height=blocks.height,
        given=given,
        tiled=tiled,
        factor=factor,
    )
    tiles = cdiv(groups, tile_blocks * parts(spec))
    strips = cdiv(rows, tile_rows)
    across = strips if blocks.strided else tiles
    sizes = (rows, columns, groups, across, *strides, *output.strides)
    constants = {"V": variant}
    launch = Launch(quantize, tiles * strips, sizes, constants, blocks.warps, output.dtypes)
    return QuantizePlan(launch, contiguous, output.transposed, output.rooms)


def _codes_of(blocks: Blocks, x_RC: Tensor, groups: int, tiled: bool) -> _Output:
    """Codes and scales."""
    rows, columns = x_RC.shape
    spec = blocks.spec
    width = blocks.row_bytes(columns, groups)
    scales = blocks.scales(rows, groups)
    dtypes = {2: WORDS[blocks.word_bytes]}
    if isinstance(spec.scale_format, LevelledScale):
        dtypes[3] = torch.int32  # four bytes of a block
        scales = (scales[0], spec.scale_format.block_bytes * scales[1])
    rooms = _rooms(spec, (rows, width), scales, x_RC, tiled)
    kind = "packed" if spec.format.packed else "codes"
    return _Output(kind, (width // blocks.word_bytes, 1), dtypes, False, rooms)


def _values_of(blocks: Blocks, x_RC: Tensor, *, transposed: bool) -> _Output:
    """Values, and the scale of the tensor or of its rows. A transposed view keeps its layout: the
    GEMM takes either.
    """
    rows, columns = x_RC.shape
    spec = blocks.spec
    width = operand_width(spec, columns)
    shape = (width, rows) if transposed else (rows, width)
    strides = (1, rows) if transposed else (width, 1)
    scales: tuple[int, ...] = ()
    if spec.block != (None, None):
        scales = blocks.scales(rows, blocks.groups(columns))
    _, room_for_scales = _rooms(spec, shape, scales, x_RC, False)
    room = partial(torch.empty, shape, dtype=values_dtype(spec), device=x_RC.device)
    return _Output("values", strides, {}, transposed, [room, room_for_scales])


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
    size = cdiv(scales[0], 128) * cdiv(scales[1], 4) * 512
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
    factor: bool = False,
) -> BothPlan | None:
    """Specs as `triton.pair` takes them; None: the rows of x are not contiguous. tiled, factor: see
    `Variant`. codes: whether each form is made as codes, else as values.
    """
    from fp4train.kernels.triton.both import amax_both, quantize_both

    if x_MK.stride(1) != 1:
        return None
    tokens, features = x_MK.shape
    by_rows = rows_of(row, codes=codes[0])
    by_columns = ByColumns(column)
    tile_rows, tile_blocks = place = by_columns.tile(0)
    tokens_of_tile = tile_blocks * by_columns.n
    programs = cdiv(features, tile_rows) * cdiv(tokens, tokens_of_tile)
    turned_place = tokens_of_tile, tile_rows // by_rows.n
    outputs: list[dict[str, Any]] = []
    for spec, in_tiles, coded in zip((row, column), tiled, codes, strict=True):
        if coded:
            kind = "packed" if spec.format.packed else "codes"
            outputs.append({"output": kind, "tiled": in_tiles})
        else:
            outputs.append({"output": "values", "factor": factor})
    variants = {
        "R": _quantizing(row, x_MK.dtype, turned_place, blocks=by_rows.name, **outputs[0]),
        "C": _quantizing(column, x_MK.dtype, place, blocks=by_columns.name, **outputs[1]),
    }
    dtypes = {2: WORDS[by_rows.word_bytes]} if codes[0] else {}
    if codes[1]:
        dtypes[4] = WORDS[by_columns.word_bytes]
    sizes = (tokens, features, x_MK.stride(0))
    warps = tile_rows * tokens_of_tile // 1024
    launch = Launch(quantize_both, programs, sizes, variants, warps, dtypes)
    needs = row.global_scale is not None, column.global_scale is not None
    measure = None
    if needs[1] and column.hadamard is not None:
        amax_sizes = (features, tokens, cdiv(features, tile_rows), 1, x_MK.stride(0))
        constants = {"V": amax_variant(column, place)}
        measure = Launch(amax_both, programs, amax_sizes, constants, dtypes={1: torch.int32})
    rooms = _rooms_of_form(by_rows, x_MK, codes[0], tiled[0])
    rooms += _rooms_of_form(by_columns, x_MK.T, codes[1], tiled[1])
    return BothPlan(measure, needs, launch, rooms)


def _rooms_of_form(blocks: Blocks, x_RC: Tensor, codes: bool, tiled: bool) -> list[Room]:
    """Room for one of both forms of a tensor: for codes and scales of x; for values, as x lies."""
    rows, columns = x_RC.shape
    groups = blocks.groups(columns)
    shape = (rows, blocks.row_bytes(columns, groups))
    rooms = _rooms(blocks.spec, shape, (rows, groups), x_RC, tiled)
    if not codes:
        width = operand_width(blocks.spec, columns) if blocks.strided else columns
        lying = (width, rows) if blocks.strided else (rows, width)
        rooms[0] = partial(torch.empty, *lying, dtype=values_dtype(blocks.spec), device=x_RC.device)
    return rooms


TURNED_TILE = 64, 16
"""Tokens, and groups of eight features, of a program of `plan_turned`."""


def plan_turned(spec: QuantSpec, x_MK: Tensor, given: bool, enters: bool) -> QuantizePlan:
    """Codes by one float32 scale, and their transpose. given, enters: see `Variant`."""
    from fp4train.kernels.triton.both import quantize_turned

    tokens, features = x_MK.shape
    contiguous = _is_strided(x_MK)
    tile_rows, tile_blocks = TURNED_TILE
    programs = cdiv(tokens, tile_rows) * cdiv(features, LANES * tile_blocks)
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
    variant = _variant(
        n,
        place,
        height=spec.block[0] or 1,
        element=replace(
            of_elements(spec),
            rounding="nearest",
            random_bits=0,
            nan_above=spec.format.last_number_code,
        ),
        scale=scales_of_codes(spec),
    )
    tiles = cdiv(groups, tile_blocks)
    sizes = (codes.shape[0], groups, tiles, width, codes.stride(0), width)
    return Launch(decode_blocks, cdiv(codes.shape[0], tile_rows) * tiles, sizes, {"V": variant})


def plan_amax(spec: QuantSpec, x_RC: Tensor, per_row: bool) -> AmaxPlan:
    from fp4train.kernels.triton.columns import amax_columns
    from fp4train.kernels.triton.quantize import amax_rows, amax_tensor

    rows, cols = x_RC.shape
    result = partial(one_zero, x_RC.device)
    if per_row:
        result = partial(torch.zeros, (rows, 1), dtype=torch.float32, device=x_RC.device)
    bits = {1: torch.int32}
    if spec.hadamard is not None:
        n = spec.block[1] or 16
        tile_rows, tile_blocks = place = column_tile(n, spec)
        outer = OuterExtent(kind="row" if per_row else "tensor")
        variant = _variant(n, place, transform=of_transform(spec), outer=outer)
        tiles = cdiv(rows, tile_rows)
        programs = tiles * cdiv(cols, n * variant.transform.parts * tile_blocks)
        launch = Launch(
            amax_columns, programs, (rows, cols, tiles, *x_RC.stride()), {"V": variant}, dtypes=bits
        )
        return AmaxPlan(launch, False, False, result)
    if per_row:
        tile_rows, tile_cols = (4, 1024) if x_RC.stride(1) == 1 else (64, 64)
        constants = {"ROWS": tile_rows, "COLS": tile_cols}
        launch = Launch(
            amax_rows, cdiv(rows, tile_rows), (rows, cols, *x_RC.stride()), constants, dtypes=bits
        )
        return AmaxPlan(launch, False, False, result)
    turned = x_RC.stride(0) == 1 and rows > 1
    if turned:
        x_RC = x_RC.T
    contiguous = _is_strided(x_RC)
    rows, cols = x_RC.shape
    tile_cols = min(1024, max(64, 1 << (cols - 1).bit_length()))
    tile_rows = 8192 // tile_cols
    tiles = cdiv(cols, tile_cols)
    strips = cdiv(rows, tile_rows)
    steps = max(1, tiles * strips // (32 * processors(x_RC.device)))
    sizes = (rows, cols, cols if contiguous else x_RC.stride(0), tiles, steps)
    constants = {"ROWS": tile_rows, "COLS": tile_cols}
    launch = Launch(amax_tensor, tiles * cdiv(strips, steps), sizes, constants, 8, bits)
    return AmaxPlan(launch, turned, contiguous, result)


def plan_extents(spec: QuantSpec, x_RC: Tensor) -> AmaxPlan:
    """The largest magnitudes of what shares a scale above those of blocks."""
    from fp4train.kernels.triton.columns import amax_columns
    from fp4train.kernels.triton.extents import amax_extents

    assert spec.extent is not None
    rows, cols = x_RC.shape
    height, width = spec.extent
    shape = (cdiv(rows, height), cdiv(cols, width or cols))
    result = partial(torch.zeros, shape, dtype=torch.float32, device=x_RC.device)
    bits = {1: torch.int32}
    if spec.hadamard is not None:
        n = spec.block[1] or LANES
        tile_rows, tile_blocks = column_tile(n, spec)
        spanned = n * parts(spec)
        tile_blocks = _divisor(width or 0, spanned * tile_blocks) // spanned
        place = tile_rows, tile_blocks
        variant = _variant(n, place, transform=of_transform(spec), outer=outer_extent(spec))
        tiles = cdiv(rows, tile_rows)
        programs = tiles * cdiv(cols, spanned * tile_blocks)
        sizes = (rows, cols, tiles, *x_RC.stride())
        launch = Launch(amax_columns, programs, sizes, {"V": variant}, dtypes=bits)
        return AmaxPlan(launch, False, False, result)
    tile_cols = _divisor(width or 0, WIDEST)
    tile_rows = TILE // tile_cols
    if height % tile_rows and height > 1:
        tile_rows = max(_divisor(height, tile_rows), 16)
    tiles = cdiv(cols, tile_cols)
    constants = {"ROWS": tile_rows, "COLS": tile_cols, "HEIGHT": height, "WIDTH": width or 0}
    sizes = (rows, cols, *x_RC.stride(), tiles)
    launch = Launch(amax_extents, tiles * cdiv(rows, tile_rows), sizes, constants, dtypes=bits)
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
    return _variant(column.block[1] or LANES, place, transform=of_transform(column))


def _quantizing(spec: QuantSpec, dtype: torch.dtype, place: tuple[int, int], **its: Any) -> Variant:
    """A variant that quantises x of `dtype`."""
    return _variant(
        spec.block[1] or LANES,
        place,
        element=of_elements(spec),
        scale=of_scales(spec, dtype),
        integers=other_grid(spec),
        outer=outer_extent(spec),
        transform=of_transform(spec),
        **its,
    )


def values_dtype(spec: QuantSpec) -> torch.dtype:
    if spec.exact_in_bf16:
        return torch.bfloat16
    return torch.float32


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


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4
