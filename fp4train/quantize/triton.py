"""Quantising on NVIDIA GPUs with fp4train's Triton kernels: which spec goes to which kernel, with which tiles.

| spec | kernel |
|---|---|
| (1, N) blocks, columns contiguous | rows: 16 bytes a thread and load |
| (1, 16) or (1, 32) along a strided axis (x.T), or with a Hadamard transform | columns: no transposed copy |
| (N, N) blocks | squares |
| one scale a tensor or a row | whole |

Other strides are copied once. The global amax (one read of x before the quantising one) and everything derived from
it stay on the device: nothing here waits for the GPU. Equal to `quantize.reference` to the bit. Triton is imported
on first use.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from fp4train.quantize.quantized import Decoded, Quantized, operand_width
from fp4train.quantize.quantizer import Quantizer, check_input
from fp4train.quantize.random import LANES, MASK, RandomKey
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard, hadamard_signs

ROW_BLOCKS: Final = (16, 32, 64, 128)
COLUMN_BLOCKS: Final = (16, 32)
TILE: Final = 4096  # elements a program: 32 a thread
LARGEST_EXTENT: Final = 2**31 - 2**12


_SCALE_DTYPES: Final = {"e4m3": torch.uint8, "e8m0": torch.uint8, "fp32": torch.float32, "pow2": torch.float32}
_NAN_ABOVE: Final = {"e2m1": 0xFF, "e2m3": 0xFF, "e3m2": 0xFF, "e4m3": 0x7E, "e5m2": 0x7C}
_KNOWN: Final[dict[str, tuple[object, ...]]] = {
    "element": tuple(_NAN_ABOVE),
    "scale": tuple(_SCALE_DTYPES),
    "scale_rounding": (None, "rceil", "floor", "even", "ceil"),
    "formula": ("te2.14", "te2.13"),
    "rounding": ("nearest", "stochastic"),
    "global_scale": (None, "tensor", "row"),
    "four_over_six": (None,),
}
"""What the kernels know of each field of a spec that names something; anything else has no kernel."""


def why_not(spec: QuantSpec, device_type: str) -> str | None:
    """Why these kernels cannot quantise by spec there, in words; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'fp4train[triton]')"
    if device_type != "cuda" and not _interpreted():
        return f"x is on {device_type}, Triton kernels run on CUDA devices"
    if device_type == "cuda" and torch.version.hip is not None:
        return "the Triton kernels are for NVIDIA GPUs"
    return why_not_spec(spec)


def why_not_spec(spec: QuantSpec) -> str | None:
    """Why there is no kernel for the spec, whatever the device; None if there is one."""
    for field, known in _KNOWN.items():
        if (value := getattr(spec, field)) not in known:
            return f"{field}={value!r} has no Triton kernel (known: {', '.join(map(str, known))})"
    rows, cols = spec.block
    if cols is None:
        if spec.scale not in ("fp32", "pow2") or spec.hadamard is not None or spec.element == "e2m1":
            what = f"scale={spec.scale!r}, element={spec.element!r}, hadamard={spec.hadamard!r}"
            return f"block={spec.block!r} with {what} has no Triton kernel"
        return None
    if cols not in ROW_BLOCKS or rows not in (1, cols):
        return f"block={spec.block!r}: the kernels take 1xN and NxN, N = 16, 32, 64 or 128"
    if spec.hadamard is not None and not isinstance(spec.hadamard, Hadamard):
        return f"hadamard={spec.hadamard!r} has no Triton kernel"
    if spec.hadamard is not None and (rows != 1 or cols not in COLUMN_BLOCKS or spec.hadamard.size > cols):
        size = spec.hadamard.size
        return f"hadamard size {size} with block={spec.block!r}: the kernels take sizes up to a 1x16 or 1x32 block"
    return None


def why_not_tensor(x: Tensor) -> str | None:
    """Why the kernels cannot read x, whatever the spec; None if they can."""
    if x.numel() == 0:
        return "x is empty"
    if max(x.shape) > LARGEST_EXTENT:
        return f"x.shape={tuple(x.shape)}: rows and columns must stay below 2**31"
    if x.is_cuda and _capability(x.device) < (8, 0):
        return f"compute capability {_capability(x.device)} of {x.device} is below 8.0"
    return None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def make(spec: QuantSpec) -> TritonQuantizer:
    """The quantizer of a spec that `why_not` has nothing against."""
    return TritonQuantizer(spec)


class TritonQuantizer(Quantizer):
    """See `Quantizer`. What the kernels cannot read, an empty tensor above all, is left to the reference."""

    kernel = "triton"

    def codes(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Quantized:
        """Codes and scales of x."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        if why_not_tensor(x_RC) is not None:
            return super().codes(x_RC, key, amax)
        return quantize(x_RC, self.spec, key=key, amax=amax)

    def values(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Decoded:
        """`codes(...).decoded()` to the bit, fused."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        if why_not_tensor(x_RC) is not None:
            return super().values(x_RC, key, amax)
        return quantize_dequantize(x_RC, self.spec, key=key, amax=amax)

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit; one kernel for (1, N) and (N, N) blocks."""
        if quantized.spec is not self.spec:
            self._check_spec(quantized)
        if self.spec.block[1] is None or 0 in quantized.shape:
            return super().decode(quantized)
        return decode(quantized)


def quantize(x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None) -> Quantized:
    """Codes and scales; see `fp4train.quantize.quantize`."""
    with torch.cuda.device_of(x_RC):  # type: ignore[no-untyped-call]
        if spec.block[1] is None:
            codes, inverse, whole = _quantize_whole(x_RC, spec, key, amax, values=False)
            return Quantized(spec, _shape(x_RC), codes, inverse.reshape(-1, 1), whole)
        codes, scales, used, _ = _quantize_blocks(x_RC, spec, key, amax, values=False)
        return Quantized(spec, _shape(x_RC), codes, scales, used)


def quantize_dequantize(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None
) -> Decoded:
    """`quantize(...).decoded()` to the bit, fused: 2 bytes an element read, 2 written (BF16)."""
    with torch.cuda.device_of(x_RC):  # type: ignore[no-untyped-call]
        if spec.block[1] is None:
            values, inverse, _ = _quantize_whole(x_RC, spec, key, amax, values=True)
            scale = inverse.reshape(()) if spec.block[0] is None else inverse.reshape(-1, 1)
            return Decoded(values, scale, spec.transposable)
        values, _, _, decode = _quantize_blocks(x_RC, spec, key, amax, values=True)
        return Decoded(values, decode, spec.transposable)


def decode(quantized: Quantized) -> Decoded:
    """`quantized.decoded()` to the bit in one kernel, for (1, N) and (N, N) blocks: what backward decodes."""
    spec = quantized.spec
    if spec.block[1] not in ROW_BLOCKS or spec.block[0] not in (1, spec.block[1]):
        raise ValueError(f"block={spec.block!r}: the Triton decoder takes 1xN and NxN, N = 16, 32, 64 or 128")
    from fp4train.kernels.triton.decode import decode_blocks

    rows, groups, n = quantized.codes.shape[0], quantized.scales.shape[1], spec.block[1]
    codes = quantized.codes.view(torch.int32) if spec.element == "e2m1" else quantized.codes
    width = operand_width(spec, quantized.shape[1])
    out = torch.empty(rows, width, dtype=_values_dtype(spec), device=codes.device)
    fmt = spec.format
    tile_rows, tile_blocks = _tile(groups, TILE // n)
    tiles = _cdiv(groups, tile_blocks)
    with torch.cuda.device_of(codes):  # type: ignore[no-untyped-call]
        _launch(
            decode_blocks,
            _cdiv(rows, tile_rows) * tiles,
            (codes, quantized.scales, out, rows, groups, tiles, width, codes.stride(0), out.stride(0)),
            {
                "SCALE": spec.scale,
                "MANTISSA": fmt.mantissa_bits,
                "MIN_EXPONENT": fmt.min_exponent,
                "CODE_BITS": fmt.bits - 1,
                "NAN_ABOVE": _NAN_ABOVE[fmt.name],
                "N": n,
                "HEIGHT": spec.block[0],
                "ROWS": tile_rows,
                "BLOCKS": tile_blocks,
                "HARDWARE": not _interpreted(),
            },
        )
    return Decoded(out, quantized.global_decode(), spec.transposable)


def tensor_amax(x_RC: Tensor, spec: QuantSpec, *, per_row: bool = False) -> Tensor:
    """Largest magnitude of x after the spec's Hadamard transform: float32 0-d, or [R, 1]. NaN if x holds one."""
    from fp4train.kernels.triton import amax as kernels

    rows, cols = x_RC.shape
    out = torch.zeros(rows if per_row else 1, dtype=torch.int32, device=x_RC.device)
    if spec.hadamard is not None:
        n = spec.block[1] or 16
        tile_blocks, tile_rows, warps = _column_tile(n, spec)
        tiles = _cdiv(rows, tile_rows)
        constants = {
            "N": n,
            "BLOCKS": tile_blocks,
            "ROWS": tile_rows,
            "PER_ROW": per_row,
            "HARDWARE": not _interpreted(),
        }
        programs = tiles * _cdiv(_cdiv(cols, n), tile_blocks)
        arguments: tuple[Any, ...] = (x_RC, out, rows, cols, *x_RC.stride(), tiles)
        _launch(kernels.amax_hadamard, programs, arguments, constants | _hadamard_constants(spec), warps=warps)
    elif per_row:
        tile_rows, tile_cols = (4, 1024) if x_RC.stride(1) == 1 else (64, 64)
        arguments = (x_RC, out, rows, cols, *x_RC.stride())
        _launch(kernels.amax_rows, _cdiv(rows, tile_rows), arguments, {"ROWS": tile_rows, "COLS": tile_cols})
    else:
        x_RC = _unit_columns(x_RC.T if x_RC.stride(0) == 1 and rows > 1 else x_RC)
        rows, cols = x_RC.shape
        tile_cols = min(1024, max(64, 1 << (cols - 1).bit_length()))
        tile_rows = 8192 // tile_cols
        tiles, strips = _cdiv(cols, tile_cols), _cdiv(rows, tile_rows)
        steps = max(1, tiles * strips // (32 * _processors(x_RC)))
        arguments = (x_RC, out, rows, cols, x_RC.stride(0), tiles, steps)
        constants = {"ROWS": tile_rows, "COLS": tile_cols}
        _launch(kernels.amax_tensor, tiles * _cdiv(strips, steps), arguments, constants, warps=8)
    out = out.view(torch.float32)
    return out.reshape(-1, 1) if per_row else out.reshape(())


def _quantize_blocks(
    x_RC: Tensor, spec: QuantSpec, key: RandomKey | None, amax: Tensor | None, *, values: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(codes or values, stored scales, amax, S_dec) of (1, N) and (N, N) blocks."""
    n = spec.block[1] or 16
    strided = spec.block[0] == 1 and n in COLUMN_BLOCKS and x_RC.stride(1) != 1 and x_RC.shape[1] > 1
    by_columns = strided or spec.hadamard is not None
    if not by_columns:
        x_RC = _unit_columns(x_RC)
    rows, cols = x_RC.shape
    groups = _cdiv(cols, n)
    amax, decode = _global_amax(x_RC, spec, amax)
    width = operand_width(spec, cols)
    packed = spec.element == "e2m1" and not values
    if values:
        # a transposed view keeps its layout: the GEMM takes either
        shape = (width, rows) if by_columns and x_RC.stride(0) == 1 else (rows, width)
        out = torch.empty(shape, dtype=_values_dtype(spec), device=x_RC.device)
        out = out.T if shape[0] != rows or (by_columns and x_RC.stride(0) == 1) else out
        words = out
    else:
        out = torch.empty(rows, groups * n // 2 if packed else groups * n, dtype=torch.uint8, device=x_RC.device)
        wide = by_columns or (packed and spec.block == (1, 16))  # kernels that store 64 bits at a time
        words = out.view(torch.int64) if wide else out.view(torch.int32) if packed else out
    scales = torch.empty(_cdiv(rows, spec.block[0] or 1), groups, dtype=_SCALE_DTYPES[spec.scale], device=x_RC.device)
    pointers = (x_RC, x_RC if amax is None else amax, words, scales, scales if decode is None else decode)
    constants = _block_constants(spec, x_RC.dtype) | _rounding_constants(spec)
    constants |= {
        "N": n,
        "OUTPUT": "values" if values else "packed" if packed else "codes",
        "HARDWARE": not _interpreted(),
    }
    random = _random_words(key)
    if by_columns:
        from fp4train.kernels.triton.columns import quantize_columns

        tile_blocks, tile_rows, warps = _column_tile(n, spec)
        tiles = _cdiv(rows, tile_rows)
        constants |= {"ROWS": tile_rows, "BLOCKS": tile_blocks} | _hadamard_constants(spec)
        sizes = (rows, cols, groups, tiles, width, *x_RC.stride(), *words.stride())
        _launch(
            quantize_columns, tiles * _cdiv(groups, tile_blocks), (*pointers, *sizes, *random), constants, warps=warps
        )
    elif spec.block[0] == 1:
        from fp4train.kernels.triton.rows import quantize_rows
        from fp4train.kernels.triton.rows16 import quantize_rows16

        kernel = quantize_rows16 if packed and n == 16 else quantize_rows
        tile_rows, tile_blocks = _tile(groups, TILE // n)
        tiles = _cdiv(groups, tile_blocks)
        constants |= {"ROWS": tile_rows, "BLOCKS": tile_blocks}
        sizes = (rows, cols, groups, tiles, width, x_RC.stride(0), words.stride(0))
        _launch(kernel, _cdiv(rows, tile_rows) * tiles, (*pointers, *sizes, *random), constants)
    else:
        from fp4train.kernels.triton.squares import quantize_squares

        tile_blocks = max(1, TILE // (n * n))
        tiles = _cdiv(groups, tile_blocks)
        constants |= {"BLOCKS": tile_blocks}
        sizes = (rows, cols, groups, tiles, width, x_RC.stride(0), words.stride(0))
        warps = 4 if n <= 64 else 8
        _launch(quantize_squares, scales.shape[0] * tiles, (*pointers, *sizes, *random), constants, warps=warps)
    if decode is not None:
        decode = decode.reshape(-1, 1) if spec.global_scale == "row" else decode.reshape(())
    return out, scales, amax, decode


def _quantize_whole(
    x_RC: Tensor, spec: QuantSpec, key: RandomKey | None, amax: Tensor | None, *, values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes or values, scale_inv [1] or [R], amax) of one scale a tensor or a row."""
    from fp4train.kernels.triton.whole import quantize_whole

    per_row = spec.block[0] == 1
    given = amax is not None
    amax = tensor_amax(x_RC, spec, per_row=per_row) if amax is None else amax.to(torch.float32)
    amax = amax.reshape(-1, 1) if per_row else amax.reshape(())
    x_RC = _unit_columns(x_RC)
    rows, cols = x_RC.shape
    out = torch.empty(rows, cols, dtype=torch.bfloat16 if values else torch.uint8, device=x_RC.device)
    inverse = torch.empty(rows if per_row else 1, dtype=torch.float32, device=x_RC.device)
    groups = _cdiv(cols, LANES)
    tile_rows, tile_groups = _tile(groups, TILE // LANES)
    tiles = _cdiv(groups, tile_groups)
    constants = _rounding_constants(spec) | {
        "POW2": spec.scale == "pow2",
        "PER_ROW": per_row,
        "GIVEN": given,
        "INVERSE_MARGIN": 2.0 ** -(spec.delayed.margin if spec.delayed else 0),
        "IF_INFINITE": torch.finfo(x_RC.dtype).max,
        "ROWS": tile_rows,
        "GROUPS": tile_groups,
        "OUTPUT": "values" if values else "codes",
        "HARDWARE": not _interpreted(),
    }
    sizes = (rows, cols, tiles, cols, x_RC.stride(0), out.stride(0))
    arguments = (x_RC, amax.contiguous(), out, inverse, *sizes, *_random_words(key))
    _launch(quantize_whole, _cdiv(rows, tile_rows) * tiles, arguments, constants)
    return out, inverse, amax


def _global_amax(x_RC: Tensor, spec: QuantSpec, amax: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(amax as `Quantized` holds it, room for S_dec); (None, None) without a global scale."""
    if spec.global_scale is None:
        return None, None
    per_row = spec.global_scale == "row"
    amax = tensor_amax(x_RC, spec, per_row=per_row) if amax is None else amax.to(torch.float32)
    amax = amax.reshape(-1, 1) if per_row else amax.reshape(())
    return amax.contiguous(), torch.empty(amax.numel(), dtype=torch.float32, device=x_RC.device)


def _block_constants(spec: QuantSpec, dtype: torch.dtype) -> dict[str, Any]:
    """What the scales of a block depend on, as the kernels name it."""
    fmt = spec.format
    scale = spec.scale
    if scale == "e8m0":
        scale = f"e8m0_{spec.scale_rounding}"
    elif scale == "e4m3" and spec.formula == "te2.13":
        scale = "e4m3_te2.13"
    # float32 arithmetic, as in quantize.scaling
    bound = torch.tensor(spec.global_bound * fmt.max * spec.guard, dtype=torch.float32)
    largest = torch.tensor(fmt.max * spec.guard, dtype=torch.float32)
    return {
        "SCALE": scale,
        "GLOBAL": spec.global_scale or "none",
        "BOUND": bound.item(),
        "RANGE": largest.item(),
        "INVERSE_RANGE": largest.reciprocal().item(),
        "IF_INFINITE": torch.finfo(dtype).max,
        "MAX_EXPONENT": fmt.max_exponent,
        "SIGNED_ZERO": spec.scale != "e4m3",
    }


def _rounding_constants(spec: QuantSpec) -> dict[str, Any]:
    fmt = spec.format
    return {
        "MANTISSA": fmt.mantissa_bits,
        "MIN_EXPONENT": fmt.min_exponent,
        "CODE_BITS": fmt.bits - 1,
        "MAX": fmt.max,
        "NAN_CODE": fmt.nan_code,
        "NAN_VALUE": {"e4m3": 480.0, "e5m2": 114688.0}.get(fmt.name, fmt.max),  # which would have the NaN's code
        "STOCHASTIC": spec.rounding == "stochastic",
    }


def _hadamard_constants(spec: QuantSpec) -> dict[str, Any]:
    if spec.hadamard is None:
        return {"SIZE": 0, "NEGATIVE": 0, "FACTOR": 1.0}
    negative = sum(1 << i for i, sign in enumerate(hadamard_signs(spec.hadamard)) if sign < 0)
    return {"SIZE": spec.hadamard.size, "NEGATIVE": negative, "FACTOR": 1.0 / math.sqrt(spec.hadamard.size)}


def _random_words(key: RandomKey | None) -> tuple[int, ...]:
    """Key and counter words as int32 bit patterns, so that their size never changes a kernel's signature."""
    if key is None:
        return (0,) * 6
    counter2 = (key.step * 8 + key.operand) & MASK
    words = (
        key.seed & MASK,
        key.seed >> 32,
        counter2,
        key.layer,
        key.col_offset // LANES & MASK,
        key.row_offset & MASK,
    )
    return tuple(word - (1 << 32) if word >> 31 else word for word in words)


def _tile(groups: int, blocks: int) -> tuple[int, int]:
    """(rows, blocks a row) of a program of `blocks` blocks (a power of two), with few places beyond a row's end."""
    divisor = groups & -groups
    across = max(divisor, min(8, 1 << (groups - 1).bit_length()))
    across = min(across, blocks)
    return blocks // across, across


def _column_tile(n: int, spec: QuantSpec) -> tuple[int, int, int]:
    """(blocks, rows, warps) of a program of the columns kernel: 32 bytes of codes a row; four or two rows a thread, two
    where the random words need the registers."""
    return (4, 128, 4) if n == 16 and spec.rounding == "nearest" else (4, 64, 4)


def _values_dtype(spec: QuantSpec) -> torch.dtype:
    return torch.bfloat16 if spec.exact_in_bf16 else torch.float32


def _unit_columns(x_RC: Tensor) -> Tensor:
    return x_RC if x_RC.stride(1) == 1 or x_RC.shape[1] == 1 else x_RC.contiguous()


def _shape(x_RC: Tensor) -> tuple[int, int]:
    return x_RC.shape[0], x_RC.shape[1]


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def _interpreted() -> bool:
    """Whether Triton's CPU interpreter is on (TRITON_INTERPRET, read by Triton)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _launch(
    kernel: Callable[..., Any], programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], *, warps: int = 4
) -> None:
    """Without contraction: a * b + c must round twice, as it does in torch."""
    kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)  # type: ignore[index]
