"""Block scales that are more than one number: HiF4's three levels, and IF4's choice of a grid.

HiF4 ("HiFloat4 Format for Language Model Inference", arXiv 2602.11287; in training, 2604.08826): 64
elements share 32 bits,

    byte 0     E6M2, the scale s of all 64: 2^(E - 48) (1 + M/4), no sign, no zero, 255 is NaN
    byte 1     bit i: whether the elements 8i to 8i + 7 are scaled by 2
    byte 2, 3  bit i of the 16: whether the elements 4i to 4i + 3 are scaled by 2 once more

and an element is E1M2: multiples of 1/4 up to 7/4. So the largest value is 7 s. The arithmetic is the
authors' (github.com/global-computing-consortium/HiFloat4, `quant_hifx`), float32 with roundings to
BF16 where they have them:

    s = E6M2(BF16(amax_64 * BF16(1/7))), from 2^-48 to 49152       r = BF16(1 / s)
    halved_8 = amax_8 * r >= 4      halved_4 = amax_4 * r / 2^halved_8 >= 2
    t = x * r / 2^(halved_8 + halved_4)

IF4 ("Adaptive Block-Scaled Data Types", arXiv 2603.28765): the sign bit of an E4M3 block scale says
whether the elements of the block are integers from -7 to 7 times 6/7, in place of E2M1.
`quantize.scaling.choose_grids` chooses.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4train.formats.element import E1M2, E2M1, E4M3, INT4, ElementFormat
from fp4train.formats.scale import ScaleFormat, e4m3_decode, e4m3_encode

E6M2_NAN = 255
E6M2_BIAS = 48
SMALLEST = 2.0**-E6M2_BIAS
LARGEST = 1.5 * 2.0**15
SIGN = 0x80


@dataclass(frozen=True, kw_only=True)
class LevelledScale(ScaleFormat):
    """HiF4: a scale per 64 columns, and one-bit exponents of each eight and of each four."""

    columns: int = 64
    group: int = 4

    @property
    def block_bytes(self) -> int:
        """Bytes of the scales of a block."""
        return 4

    @property
    def takes_global(self) -> bool:
        return False

    def why_not(self, spec: Any) -> str | None:
        """None for E1M2 elements in blocks of 64."""
        if spec.format == E1M2 and spec.block == (1, self.columns):
            return None
        return (
            f"its levels are those of E1M2 elements in blocks of 64, not of {spec.element} in "
            f"{spec.block}: use element='e1m2' and block=(1, {self.columns})"
        )

    def of_blocks(self, x_blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes [R, 4 Cb] of blocks of 64, float32 [R, 1, Cb, 64], and the factors [R, 16 Cb] that
        scale each four elements to the grid.
        """
        rows, _, blocks, _ = x_blocks.shape
        amax_4 = x_blocks.reshape(rows, blocks, 8, 2, 4).abs().amax(dim=4)
        amax_8 = amax_4.amax(dim=3)
        seventh = torch.tensor(1.0 / 7.0).bfloat16().item()
        target_scale = (amax_8.amax(dim=2) * seventh).bfloat16().float()
        scale = e6m2_encode(target_scale)
        inverse = e6m2_decode(scale).reciprocal().bfloat16().float()[:, :, None]
        halved_8 = amax_8 * inverse >= 4.0
        doubled = torch.where(halved_8, 0.5, 1.0)
        halved_4 = amax_4 * inverse[..., None] * doubled[..., None] >= 2.0
        factors = inverse[..., None] * doubled[..., None] * torch.where(halved_4, 0.5, 1.0)
        exponents = torch.cat((halved_8, halved_4.flatten(2)), dim=2)
        stored = torch.cat((scale[..., None], _packed_bits(exponents)), dim=2)
        return stored.reshape(rows, 4 * blocks), factors.reshape(rows, 16 * blocks)

    def factors(self, stored: Tensor) -> Tensor:
        """The factor of each four elements, float32 [R, 16 Cb], of bytes [R, 4 Cb]. Exact."""
        rows, size = stored.shape
        levels = stored.reshape(rows, size // 4, 4)
        bits = _bits(levels[..., 1:])
        halved_8 = bits[..., :8].repeat_interleave(2, dim=2)
        exponents = (halved_8 + bits[..., 8:]).float()
        scales = e6m2_decode(levels[..., :1]) * exponents.exp2()
        return scales.reshape(rows, 4 * size)


@dataclass(frozen=True, kw_only=True)
class AdaptiveScale(ScaleFormat):
    """IF4: an E4M3 scale whose sign bit says that the elements of its block are integers."""

    other: ElementFormat = INT4

    def why_not(self, spec: Any) -> str | None:
        """None for E2M1 elements under a scale of the tensor or row, of which each block has its
        own grid.
        """
        if spec.format != E2M1:
            return f"it chooses between integers and E2M1, not {spec.element}: use element='e2m1'"
        if spec.global_scale not in ("tensor", "row"):
            return "its error is that under one scale per tensor or row: use global_scale='tensor'"
        if spec.four_over_six is not None:
            return (
                f"a block chooses its grid, and four_over_six={spec.four_over_six!r} its scale: "
                "use scale='e4m3' or four_over_six=None"
            )
        return None

    @property
    def step(self) -> float:
        """The value of the integer 1: the largest ones are those of E2M1."""
        return E2M1.max / self.other.max

    def exact_in_bf16(self, element: ElementFormat) -> bool:
        """No: 6/7 is not."""
        return False

    def marked(self, stored: Tensor) -> Tensor:
        """Whether the block of each byte holds integers."""
        return stored >= SIGN


def e6m2_encode(x: Tensor) -> Tensor:
    """Bytes of the nearest E6M2 value, ties to even, from 2^-48 to 49152; NaN and infinity give
    255. x float32 and >= 0.
    """
    bits = x.clamp(min=SMALLEST, max=LARGEST).view(torch.int32)
    half = 0xFFFFF + ((bits >> 21) & 1)
    codes = ((bits + half) >> 21) - ((127 - E6M2_BIAS) << 2)
    return torch.where(x.isfinite(), codes, E6M2_NAN).to(torch.uint8)


def e6m2_decode(codes: Tensor) -> Tensor:
    """Float32 value 2^(E - 48) (1 + M/4) of each byte; NaN for 255. Exact."""
    code = codes.to(torch.int32)
    values = ((code + ((127 - E6M2_BIAS) << 2)) << 21).view(torch.float32)
    return torch.where(code == E6M2_NAN, torch.nan, values)


def _packed_bits(bits: Tensor) -> Tensor:
    """Bytes [..., n] of bits [..., 8 n], the first bit the lowest."""
    weights = 1 << torch.arange(8, device=bits.device)
    octets = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 8, 8)
    return (octets * weights).sum(dim=-1).to(torch.uint8)


def _bits(octets: Tensor) -> Tensor:
    """Bits [..., 8 n], 0 and 1, of bytes [..., n]."""
    return (octets[..., None] >> torch.arange(8, device=octets.device) & 1).flatten(-2)


def _magnitude(codes: Tensor) -> Tensor:
    return e4m3_decode(codes & (SIGN - 1))


HIF4_SCALE = LevelledScale(
    name="hif4",
    dtype=torch.uint8,
    mantissa_bits=2,
    smallest=SMALLEST,
    smallest_normal=SMALLEST,
    max=LARGEST,
    encode=e6m2_encode,
    decode=e6m2_decode,
)
IF4_SCALE = AdaptiveScale(
    name="if4",
    dtype=torch.uint8,
    mantissa_bits=3,
    smallest=E4M3.smallest_subnormal,
    smallest_normal=E4M3.smallest_normal,
    max=E4M3.max,
    needs_global=True,
    encode=e4m3_encode,
    decode=_magnitude,
    element=E4M3,
)
