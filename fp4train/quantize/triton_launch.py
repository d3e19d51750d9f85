"""Launches of the Triton kernels: tiles, constants and the memory of results, worked out once per kind of tensor.

What a launch needs besides pointers and random words is a function of the spec, and of dtype, shape, strides and device
of x. A `Launches` keeps it by these, so that a call costs little Python before Triton's own launcher. The global amax
(one read of x before the quantising one) and everything derived from it stay on the device: nothing here waits for the
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partialmethod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fp4train.quantize.quantized import Decoded, Quantized, operand_width
from fp4train.quantize.random import LANES, RandomKey
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.triton_constants import (
    NAN_ABOVE,
    TILE,
    block_constants,
    column_tile,
    hadamard_constants,
    interpreted,
    random_words,
    rounding_constants,
    tile,
    values_dtype,
)

COLUMN_BLOCKS: Final = (16, 32)
SCALE_DTYPES: Final = {"e4m3": torch.uint8, "e8m0": torch.uint8, "fp32": torch.float32, "pow2": torch.float32}
MOST_KINDS: Final = 512
"""Kinds of tensors that one spec remembers; a run has some dozens, unless its shapes change from step to step."""

_HERE: Final = nullcontext()

Kind = tuple[object, ...]
"""What of a tensor decides a launch: dtype, shape, strides and device, and what is asked for."""


class Launch(NamedTuple):
    """One kernel, all but its pointers and random words."""

    kernel: Callable[..., Any]
    programs: int
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    warps: int = 4

    def __call__(self, *pointers: Tensor, words: tuple[int | Tensor, ...] = ()) -> None:
        _launch(self.kernel, self.programs, (*pointers, *self.sizes, *words), self.constants, warps=self.warps)


class _Blocks(NamedTuple):
    """Quantising (1, N) or (N, N) blocks of one kind of tensor."""

    launch: Launch
    contiguous: bool
    """Whether x must be copied first."""
    shape: tuple[int, int]
    transposed: bool
    """Whether `shape` is that of the transposed result, which keeps the layout of a transposed view."""
    dtype: torch.dtype
    words: torch.dtype | None
    """As which the kernel stores codes several at a time; None: as they are."""
    scales: tuple[int, int]


class _Whole(NamedTuple):
    """Quantising with one scale per tensor or row."""

    launch: Launch
    dtype: torch.dtype
    scales: tuple[int, ...]
    contiguous: bool
    """Whether x must be copied first."""


class _Amax(NamedTuple):
    """The largest magnitude of a tensor or of its rows."""

    launch: Launch
    turned: bool
    """Whether x is read as x.T."""
    contiguous: bool
    results: tuple[int, ...]


class Launches:
    """All that one spec launches. Results are those of `quantize.reference` to the bit."""

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec
        self.whole = spec.block[1] is None
        self.per_row = spec.block[0] == 1 if self.whole else spec.global_scale == "row"
        self.outer = spec.global_scale is not None
        self.scale_dtype = SCALE_DTYPES[spec.scale]
        self._kinds: dict[Kind, Any] = {}

    def _known(self, what: str, x_RC: Tensor, values: bool) -> Any:
        """What the method `what` makes of such a tensor."""
        kind = (what, values, x_RC.dtype, x_RC.shape, x_RC.stride(), x_RC.device)
        found = self._kinds.get(kind)
        if found is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
            found = self._kinds[kind] = getattr(self, what)(x_RC, values)
        return found

    def codes(self, x_RC: Tensor, key: RandomKey | None, amax: Tensor | None) -> Quantized:
        """Codes and scales."""
        shape = (x_RC.shape[0], x_RC.shape[1])
        with _on(x_RC):
            if self.whole:
                codes, inverse, whole = self._quantize_whole(x_RC, key, amax, values=False)
                return Quantized(self.spec, shape, codes, inverse, whole)
            codes, scales, used, _ = self._quantize_blocks(x_RC, key, amax, values=False)
            return Quantized(self.spec, shape, codes, scales, used)

    def values(self, x_RC: Tensor, key: RandomKey | None, amax: Tensor | None) -> Decoded:
        """`codes(...).decoded()` to the bit, fused: 2 bytes an element read, 2 written (BF16)."""
        spec = self.spec
        with _on(x_RC):
            if self.whole:
                values, scale, _ = self._quantize_whole(x_RC, key, amax, values=True)
                return Decoded(values, scale, spec.transposable)
            values, _, _, decode = self._quantize_blocks(x_RC, key, amax, values=True)
            return Decoded(values, decode, spec.transposable)

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit in one kernel, for (1, N) and (N, N) blocks: what backward decodes."""
        from fp4train.kernels.triton.decode import decode_blocks

        spec = self.spec
        rows, groups, n = quantized.codes.shape[0], quantized.scales.shape[1], spec.block[1]
        assert n is not None
        codes = quantized.codes.view(torch.int32) if spec.element == "e2m1" else quantized.codes
        width = operand_width(spec, quantized.shape[1])
        out = torch.empty(rows, width, dtype=values_dtype(spec), device=codes.device)
        kind = (decode_blocks, rows, groups, width, codes.stride(0))
        launch = self._kinds.get(kind)
        if launch is None:
            fmt = spec.format
            tile_rows, tile_blocks = tile(groups, TILE // n)
            tiles = _cdiv(groups, tile_blocks)
            constants = {
                "SCALE": spec.scale,
                "MANTISSA": fmt.mantissa_bits,
                "MIN_EXPONENT": fmt.min_exponent,
                "CODE_BITS": fmt.bits - 1,
                "NAN_ABOVE": NAN_ABOVE[fmt.name],
                "N": n,
                "HEIGHT": spec.block[0],
                "ROWS": tile_rows,
                "BLOCKS": tile_blocks,
                "HARDWARE": not interpreted(),
            }
            sizes = (rows, groups, tiles, width, codes.stride(0), out.stride(0))
            launch = self._kinds[kind] = Launch(decode_blocks, _cdiv(rows, tile_rows) * tiles, sizes, constants)
        with _on(codes):
            launch(codes, quantized.scales, out)
        return Decoded(out, quantized.global_decode(), spec.transposable)

    def amax(self, x_RC: Tensor, *, per_row: bool = False) -> Tensor:
        """Largest magnitude of x after the Hadamard transform: float32 0-d, or [R, 1]. NaN if x holds one."""
        kind: _Amax = self._known("_amax_by_row" if per_row else "_amax_of_all", x_RC, False)
        out = torch.zeros(kind.results, dtype=torch.float32, device=x_RC.device)
        if kind.turned:
            x_RC = x_RC.T
        kind.launch(x_RC.contiguous() if kind.contiguous else x_RC, out.view(torch.int32))
        return out

    # -- per call -----------------------------------------------------------------------------------------------------

    def _quantize_blocks(
        self, x_RC: Tensor, key: RandomKey | None, amax: Tensor | None, *, values: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(codes or values, stored scales, amax, S_dec) of (1, N) and (N, N) blocks."""
        kind: _Blocks = self._known("_blocks", x_RC, values)
        if kind.contiguous:
            x_RC = x_RC.contiguous()
        device = x_RC.device
        decode = None
        if self.outer:
            amax = self._shaped(x_RC, amax)
            decode = torch.empty_like(amax)
        out = torch.empty(kind.shape, dtype=kind.dtype, device=device)
        if kind.transposed:
            out = out.T
        words = out if kind.words is None else out.view(kind.words)
        scales = torch.empty(kind.scales, dtype=self.scale_dtype, device=device)
        used = amax if self.outer else None
        pointers = (x_RC, x_RC if used is None else used, words, scales, scales if decode is None else decode)
        kind.launch(*pointers, words=random_words(key))
        return out, scales, used, decode

    def _quantize_whole(
        self, x_RC: Tensor, key: RandomKey | None, amax: Tensor | None, *, values: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(codes [R, C] and scale_inv [R, 1] or [1, 1], or values and scale_inv [R, 1] or 0-d; amax) of one scale a
        tensor or a row."""
        kind: _Whole = self._known("_whole_measured" if amax is None else "_whole_given", x_RC, values)
        amax = self._shaped(x_RC, amax)
        if kind.contiguous:
            x_RC = x_RC.contiguous()
        device = x_RC.device
        out = torch.empty(x_RC.shape, dtype=kind.dtype, device=device)
        inverse = torch.empty(kind.scales, dtype=torch.float32, device=device)
        kind.launch(x_RC, amax, out, inverse, words=random_words(key))
        return out, inverse, amax

    def _shaped(self, x_RC: Tensor, amax: Tensor | None) -> Tensor:
        """The amax as `Quantized` holds it: 0-d, or [R, 1]."""
        if amax is None:
            return self.amax(x_RC, per_row=self.per_row)
        amax = amax.to(torch.float32)
        return (amax.reshape(-1, 1) if self.per_row else amax.reshape(())).contiguous()

    # -- once per kind of tensor --------------------------------------------------------------------------------------

    def _blocks(self, x_RC: Tensor, values: bool) -> _Blocks:
        spec = self.spec
        n = spec.block[1] or 16
        strided = spec.block[0] == 1 and n in COLUMN_BLOCKS and x_RC.stride(1) != 1 and x_RC.shape[1] > 1
        by_columns = strided or spec.hadamard is not None
        rows, cols = x_RC.shape
        contiguous = not by_columns and _is_strided(x_RC)
        strides = (cols, 1) if contiguous else x_RC.stride()
        groups = _cdiv(cols, n)
        width = operand_width(spec, cols)
        packed = spec.element == "e2m1" and not values
        transposed, words, ratio = False, None, 1
        if values:
            # a transposed view keeps its layout: the GEMM takes either
            transposed = by_columns and strides[0] == 1
            shape = (width, rows) if transposed else (rows, width)
            stored = (1, rows) if transposed else (width, 1)
        else:
            shape = (rows, groups * n // 2 if packed else groups * n)
            wide = by_columns or (packed and spec.block == (1, 16))  # kernels that store 64 bits at a time
            words, ratio = (torch.int64, 8) if wide else (torch.int32, 4) if packed else (None, 1)
            stored = (shape[1] // ratio, 1)
        scales = (_cdiv(rows, spec.block[0] or 1), groups)
        constants = block_constants(spec, x_RC.dtype) | rounding_constants(spec)
        constants |= {
            "N": n,
            "OUTPUT": "values" if values else "packed" if packed else "codes",
            "HARDWARE": not interpreted(),
        }
        launch = self._blocks_launch(n, (rows, cols, groups, width), strides, stored, constants, by_columns, packed)
        dtype = values_dtype(spec) if values else torch.uint8
        return _Blocks(launch, contiguous, shape, transposed, dtype, words, scales)

    def _blocks_launch(
        self,
        n: int,
        extents: tuple[int, int, int, int],
        strides: tuple[int, ...],
        stored: tuple[int, int],
        constants: dict[str, Any],
        by_columns: bool,
        packed: bool,
    ) -> Launch:
        spec = self.spec
        rows, cols, groups, width = extents
        if by_columns:
            from fp4train.kernels.triton.columns import quantize_columns

            tile_blocks, tile_rows, warps = column_tile(n, spec)
            tiles = _cdiv(rows, tile_rows)
            constants |= {"ROWS": tile_rows, "BLOCKS": tile_blocks} | hadamard_constants(spec)
            sizes = (rows, cols, groups, tiles, width, *strides, *stored)
            return Launch(quantize_columns, tiles * _cdiv(groups, tile_blocks), sizes, constants, warps)
        if spec.block[0] == 1:
            from fp4train.kernels.triton.rows import quantize_rows
            from fp4train.kernels.triton.rows16 import quantize_rows16

            kernel = quantize_rows16 if packed and n == 16 else quantize_rows
            tile_rows, tile_blocks = tile(groups, TILE // n)
            tiles = _cdiv(groups, tile_blocks)
            constants |= {"ROWS": tile_rows, "BLOCKS": tile_blocks}
            sizes = (rows, cols, groups, tiles, width, strides[0], stored[0])
            return Launch(kernel, _cdiv(rows, tile_rows) * tiles, sizes, constants)
        from fp4train.kernels.triton.squares import quantize_squares

        tile_blocks = max(1, TILE // (n * n))
        tiles = _cdiv(groups, tile_blocks)
        constants |= {"BLOCKS": tile_blocks}
        sizes = (rows, cols, groups, tiles, width, strides[0], stored[0])
        return Launch(quantize_squares, _cdiv(rows, n) * tiles, sizes, constants, 4 if n <= 64 else 8)

    def _whole(self, x_RC: Tensor, values: bool, *, given: bool) -> _Whole:
        from fp4train.kernels.triton.whole import quantize_whole

        spec = self.spec
        rows, cols = x_RC.shape
        contiguous = _is_strided(x_RC)
        groups = _cdiv(cols, LANES)
        tile_rows, tile_groups = tile(groups, TILE // LANES)
        tiles = _cdiv(groups, tile_groups)
        constants = rounding_constants(spec) | {
            "POW2": spec.scale == "pow2",
            "PER_ROW": self.per_row,
            "GIVEN": given,
            "INVERSE_MARGIN": 2.0 ** -(spec.delayed.margin if spec.delayed else 0),
            "IF_INFINITE": torch.finfo(x_RC.dtype).max,
            "ROWS": tile_rows,
            "GROUPS": tile_groups,
            "OUTPUT": "values" if values else "codes",
            "HARDWARE": not interpreted(),
        }
        sizes = (rows, cols, tiles, cols, cols if contiguous else x_RC.stride(0), cols)
        launch = Launch(quantize_whole, _cdiv(rows, tile_rows) * tiles, sizes, constants)
        scales = () if values and not self.per_row else (rows if self.per_row else 1, 1)
        return _Whole(launch, torch.bfloat16 if values else torch.uint8, scales, contiguous)

    _whole_given, _whole_measured = partialmethod(_whole, given=True), partialmethod(_whole, given=False)

    def _amax_by_row(self, x_RC: Tensor, _: bool) -> _Amax:
        from fp4train.kernels.triton.amax import amax_rows

        if self.spec.hadamard is not None:
            return self._amax_transformed(x_RC, per_row=True)
        rows, cols = x_RC.shape
        tile_rows, tile_cols = (4, 1024) if x_RC.stride(1) == 1 else (64, 64)
        constants = {"ROWS": tile_rows, "COLS": tile_cols}
        launch = Launch(amax_rows, _cdiv(rows, tile_rows), (rows, cols, *x_RC.stride()), constants)
        return _Amax(launch, turned=False, contiguous=False, results=(rows, 1))

    def _amax_of_all(self, x_RC: Tensor, _: bool) -> _Amax:
        from fp4train.kernels.triton.amax import amax_tensor

        if self.spec.hadamard is not None:
            return self._amax_transformed(x_RC, per_row=False)
        turned = x_RC.stride(0) == 1 and x_RC.shape[0] > 1
        if turned:
            x_RC = x_RC.T
        contiguous = _is_strided(x_RC)
        rows, cols = x_RC.shape
        tile_cols = min(1024, max(64, 1 << (cols - 1).bit_length()))
        tile_rows = 8192 // tile_cols
        tiles, strips = _cdiv(cols, tile_cols), _cdiv(rows, tile_rows)
        steps = max(1, tiles * strips // (32 * _processors(x_RC.device)))
        sizes = (rows, cols, cols if contiguous else x_RC.stride(0), tiles, steps)
        constants = {"ROWS": tile_rows, "COLS": tile_cols}
        launch = Launch(amax_tensor, tiles * _cdiv(strips, steps), sizes, constants, 8)
        return _Amax(launch, turned, contiguous, results=())

    def _amax_transformed(self, x_RC: Tensor, *, per_row: bool) -> _Amax:
        from fp4train.kernels.triton.amax import amax_hadamard

        rows, cols = x_RC.shape
        n = self.spec.block[1] or 16
        tile_blocks, tile_rows, warps = column_tile(n, self.spec)
        tiles = _cdiv(rows, tile_rows)
        constants = {
            "N": n,
            "BLOCKS": tile_blocks,
            "ROWS": tile_rows,
            "PER_ROW": per_row,
            "HARDWARE": not interpreted(),
        }
        programs = tiles * _cdiv(_cdiv(cols, n), tile_blocks)
        sizes = (rows, cols, *x_RC.stride(), tiles)
        launch = Launch(amax_hadamard, programs, sizes, constants | hadamard_constants(self.spec), warps)
        return _Amax(launch, turned=False, contiguous=False, results=(rows, 1) if per_row else ())


def _on(x: Tensor) -> AbstractContextManager[object]:
    """x's GPU as the current one, which costs some microseconds where it is not."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return _HERE


def _is_strided(x_RC: Tensor) -> bool:
    """Whether the elements of a row do not follow each other."""
    return x_RC.stride(1) != 1 and x_RC.shape[1] != 1


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _launch(
    kernel: Callable[..., Any], programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], *, warps: int = 4
) -> None:
    """Without contraction: a * b + c must round twice, as it does in torch."""
    kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)  # type: ignore[index]
