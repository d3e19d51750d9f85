"""Scale formats: E8M0 and E4M3 bytes, one a block.

E8M0 (OCP MX v1.0, section 5.4.1) is a bare exponent: byte b means 2^(b-127), 255 is NaN; no zero, no sign. 2^-127 is a
float32 subnormal, 2^127 its largest power of two. E4M3 scales are the element format's non-negative half.
"""

import math

import torch
from torch import Tensor

E8M0_BIAS = 127
E8M0_NAN = 255


def e8m0_decode(codes: Tensor) -> Tensor:
    """Float32 value 2^(b-127) of each uint8 byte b; NaN for 255. Exact."""
    table = torch.tensor([math.ldexp(1.0, b - E8M0_BIAS) for b in range(E8M0_NAN)] + [math.nan], device=codes.device)
    return table[codes.to(torch.int32)]


def e8m0_encode(x: Tensor) -> Tensor:
    """Bytes of the smallest power of two >= x (round up, as PTX `cvt.rp.satfinite.ue8m0x2.f32`), x float32 and >= 0.

    0 and everything up to 2^-127 give 0; above 2^127 saturates at 254; NaN and infinity give 255 (they are never
    hidden).
    """
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    # Subnormals: up to 2^-127 (half of the smallest normal) is byte 0, the rest byte 1.
    mantissa = bits & 0x7FFFFF
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return torch.where(x.isfinite(), (exponent + up).clamp_(max=254), E8M0_NAN).to(torch.uint8)


def e4m3_encode(x: Tensor) -> Tensor:
    """Bytes of the nearest E4M3 value, ties to even, saturating at 448; NaN gives 0x7f. x float32 and >= 0."""
    return x.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8) & 0x7F


def e4m3_decode(codes: Tensor) -> Tensor:
    """Float32 value of each E4M3 byte. Exact."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
