"""What Triton kernels are compiled for: constants of a spec, tiles, and the words that key random bits."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from fp4train.quantize.random import LANES, MASK, RandomKey
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import hadamard_signs

TILE: Final = 4096  # elements a program: 32 a thread
NAN_ABOVE: Final = {"e2m1": 0xFF, "e2m3": 0xFF, "e3m2": 0xFF, "e4m3": 0x7E, "e5m2": 0x7C}


def values_dtype(spec: QuantSpec) -> torch.dtype:
    return torch.bfloat16 if spec.exact_in_bf16 else torch.float32


def block_constants(spec: QuantSpec, dtype: torch.dtype) -> dict[str, Any]:
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


def rounding_constants(spec: QuantSpec) -> dict[str, Any]:
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


def hadamard_constants(spec: QuantSpec) -> dict[str, Any]:
    if spec.hadamard is None:
        return {"SIZE": 0, "NEGATIVE": 0, "FACTOR": 1.0}
    negative = sum(1 << i for i, sign in enumerate(hadamard_signs(spec.hadamard)) if sign < 0)
    return {"SIZE": spec.hadamard.size, "NEGATIVE": negative, "FACTOR": 1.0 / math.sqrt(spec.hadamard.size)}


def random_words(key: RandomKey | None) -> tuple[int | Tensor, ...]:
    """Key and counter words as int32 bit patterns, so that their size never changes a kernel's signature.

    The word of the step is a pointer where a CUDA graph is recorded: another signature.
    """
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
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    if key.counters is None:
        return tuple(signed)
    return (*signed[:2], key.counters[key.operand], *signed[3:])


def tile(groups: int, blocks: int) -> tuple[int, int]:
    """(rows, blocks a row) of a program of `blocks` blocks (a power of two), with few places beyond a row's end."""
    divisor = groups & -groups
    across = max(divisor, min(8, 1 << (groups - 1).bit_length()))
    across = min(across, blocks)
    return blocks // across, across


def column_tile(n: int, spec: QuantSpec) -> tuple[int, int, int]:
    """(blocks, rows, warps) of a program of the columns kernel: 32 bytes of codes a row; four or two rows a thread, two
    where the random words need the registers."""
    return (4, 128, 4) if n == 16 and spec.rounding == "nearest" else (4, 64, 4)


def interpreted() -> bool:
    """Whether Triton's CPU interpreter is on (TRITON_INTERPRET, read by Triton)."""
    import triton

    return bool(triton.knobs.runtime.interpret)
