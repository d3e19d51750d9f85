"""Sub-byte codes in bytes.

FP4: two codes per byte, the first in the low nibble (the order of TE, cuBLAS and torch's `float4_e2m1fn_x2`). FP6: four
    codes in three bytes, little-endian bit order: code i fills bits 6i..6i+5 of the 24. Unpacked FP6 is one code
    per byte.
"""

import torch
from torch import Tensor


def pack_fp4(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [..., C] -> bytes [..., C/2]. C must be even."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: {codes.shape[-1]} columns cannot be packed two per byte; the last axis must be even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Bytes [..., C/2] -> uint8 codes 0..15 [..., C]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_fp6(codes: Tensor) -> Tensor:
    """uint8 codes 0..63 [..., C] -> bytes [..., 3C/4]. C must be a multiple of 4."""
    if codes.shape[-1] % 4:
        raise ValueError(f"codes: {codes.shape[-1]} columns cannot be packed; the last axis must be a multiple of 4")
    a, b, c, d = (codes[..., i::4] for i in range(4))
    return torch.stack((a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)), dim=-1).flatten(-2)


def unpack_fp6(packed: Tensor) -> Tensor:
    """Bytes [..., 3C/4] -> uint8 codes 0..63 [..., C]."""
    if packed.shape[-1] % 3:
        raise ValueError(f"packed: {packed.shape[-1]} bytes are no whole groups; the last axis must be a multiple of 3")
    x, y, z = (packed[..., i::3] for i in range(3))
    codes = (x & 63, (x >> 6) | ((y & 15) << 2), (y >> 4) | ((z & 3) << 4), z >> 2)
    return torch.stack(codes, dim=-1).flatten(-2)
