"""Round scaled float32 values to the element grid: to nearest (ties to even), stochastically, or by
MS-EDEN.

The first two work on the position u = |t|/quantum (see `formats.element`), an exact float32.
Nearest: k = round_half_even(u). Stochastic, with 16 random bits r: k = floor(u) + [(r + 1/2) / 2^16
< u - floor(u)]. With the half, a value on the grid stays there for every r, and the probability of
rounding up equals the fraction to within 2^-17: no bias, as long as |t| <= max. Larger |t|
saturates, and that clipping is a bias: see `QuantSpec.guard`.

`stochastic_1` to `stochastic_15` have so many random bits, the upper ones of the sixteen, and add no
half: k = floor(u) + [floor((u - floor(u)) * 2^n) > r]. So tensor cores round that add n random bits
below the mantissa and cut it off (Blackwell has 8 for E2M1), and so does "StochasticFastest" of
gfloat, SRFF in "On Stochastic Rounding with Few Random Bits" (Fitzgibbon and Felix, arXiv
2504.20634). The probability of rounding up is floor(fraction * 2^n) / 2^n: values shrink by up to
half of 2^-n quanta on average.

`stochastic_8_midpoint` has eight and rounds up where fraction + (r + 1/2) / 2^8 >= 1, with the sum
in float32: gfloat's "StochasticFast", that of arXiv 2609.02846. The probability is the fraction
rounded to a multiple of 2^-8.

MS-EDEN (Quartet II, arXiv 2601.22813): unbiased NVFP4 with the randomness in the block scales, not
in the elements.

x is rotated by a random Hadamard transform in groups of n and rounded to nearest, q. Per group

    S = <x, x> / <x, q>

is the factor (EDEN's, arXiv 2108.08842) for which the part of S*q along x is x itself. The rest of
S*q is orthogonal to x and averages to zero over rotations. (Exactly so for uniformly random
rotations. Random signs leave a bias: 3e-6 of the energy of a Gaussian group; 1e-5 with one element
of 30 standard deviations, 7e-5 with two; 1.4e-3 with one of 100; measured over 3000 draws.) S
multiplies the block scales of its group, and the products are rounded stochastically to E4M3, which
keeps their expectation.

Elements rounded to nearest have half the squared error of stochastically rounded ones: 9.8e-3
instead of 18.8e-3 on N(0, 1), as in the authors' notebook. The paper's 9.4e-3 is not reached with
any constants that we tried. Elements alone, with block scales that are not rounded, leave 8.7e-3;
rounding the scales stochastically adds 1.0e-3. The sum is smallest, 9.7e-3, at `backward_range` =
1; the bound and the weights in S change it by less than 0.05e-3. Scales that are rounded to nearest
leave 9.1e-3, but shrink x by 0.4 %. A block scale needs room to grow by S, hence
`global_bound=256`.

Sums add the elements of a block, then the blocks of a group, in sequence, as the kernels do. They
run over the values themselves; the authors' kernels sum elements divided by their block scales,
which gives large blocks of a group less weight. A block whose scale rounds to zero uncorrected
(below 2^-19 of the amax) becomes zero, which is a bias.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4train.formats import E4M3, ElementFormat
from fp4train.formats.element import grid_code, grid_position, grid_value
from fp4train.formats.registry import Registry

RANDOM_BITS = 16
"""Random bits of an element."""


@dataclass(frozen=True, kw_only=True)
class Rounding(ABC):
    """How positions on the grid of an element format become integers.

    Args:
        name: value of `QuantSpec.rounding`.
        random: whether it takes 16 random bits for each element.
    """

    name: str
    random: bool = False

    @abstractmethod
    def integers(self, position: Tensor, bits: Tensor | None) -> Tensor:
        """Whole numbers, float32, one of the two neighbours of each position; NaN of NaN. It may
        overwrite the positions. `register` asks for this on a few of them.

        Args:
            position: u = |t| / quantum >= 0, float32, of any shape; it may hold NaN.
            bits: int32, 0…65535, of that shape; None where it is not `random`.
        """


@dataclass(frozen=True, kw_only=True)
class Nearest(Rounding):
    """To nearest, ties to even."""

    def integers(self, position: Tensor, bits: Tensor | None) -> Tensor:
        return position.round_()


@dataclass(frozen=True, kw_only=True)
class NearestAway(Rounding):
    """To nearest, ties away from zero."""

    def integers(self, position: Tensor, bits: Tensor | None) -> Tensor:
        floor = position.floor()
        return floor.add_(position.sub_(floor) >= 0.5)


@dataclass(frozen=True, kw_only=True)
class Stochastic(Rounding):
    """Up with a probability that is the fraction: see above."""

    random: bool = True

    def integers(self, position: Tensor, bits: Tensor | None) -> Tensor:
        if bits is None:
            raise ValueError(f"bits=None: rounding={self.name!r} takes random bits")
        floor = position.floor()
        threshold = bits.to(torch.float32).add_(0.5).mul_(2.0**-16)
        return floor.add_(threshold < position.sub_(floor))


@dataclass(frozen=True, kw_only=True)
class FewBits(Rounding):
    """Up with a probability that is the fraction cut off to `bits` bits: see above."""

    bits: int
    random: bool = True

    def integers(self, position: Tensor, bits: Tensor | None) -> Tensor:
        if bits is None:
            raise ValueError(f"bits=None: rounding={self.name!r} takes random bits")
        floor = position.floor()
        steps = position.sub_(floor).mul_(2.0**self.bits).floor_()
        return floor.add_(steps > bits >> (RANDOM_BITS - self.bits))


@dataclass(frozen=True, kw_only=True)
class Midpoint(FewBits):
    """Up with a probability that is the fraction rounded to `bits` bits: see above."""

    def integers(self, position: Tensor, bits: Tensor | None) -> Tensor:
        if bits is None:
            raise ValueError(f"bits=None: rounding={self.name!r} takes random bits")
        floor = position.floor()
        middle = (bits >> (RANDOM_BITS - self.bits)).to(torch.float32).add_(0.5)
        return floor.add_(position.sub_(floor).add_(middle.mul_(2.0**-self.bits)) >= 1.0)


@dataclass(frozen=True, kw_only=True)
class Eden(Nearest):
    """Elements to nearest; the random bits round their corrected block scales."""

    random: bool = True


NEAREST = Nearest(name="nearest")
NEAREST_AWAY = NearestAway(name="nearest_away")
STOCHASTIC = Stochastic(name="stochastic")
EDEN = Eden(name="eden")
FEW_BITS = tuple(FewBits(name=f"stochastic_{bits}", bits=bits) for bits in range(1, RANDOM_BITS))
MIDPOINT = Midpoint(name="stochastic_8_midpoint", bits=8)
ROUNDINGS = Registry[Rounding](
    "rounding", (NEAREST, STOCHASTIC, EDEN, NEAREST_AWAY, *FEW_BITS, MIDPOINT)
)
"""Roundings, those of plugins last."""


def _is_torchs_cast(rounding: Rounding) -> bool:
    """Whether torch's cast to a float8 dtype rounds so; a class of its own may round otherwise."""
    return type(rounding).integers is Nearest.integers


def round_to_values(
    t: Tensor, fmt: ElementFormat, bits: Tensor | None = None, rounding: Rounding | None = None
) -> Tensor:
    """Values on the grid of fmt (float32), saturating; the sign of zero is kept and NaN stays
    NaN.

    Args:
        bits: random bits 0…65535, int32, where the rounding takes them.
        rounding: None is stochastic where there are bits, else to nearest.
    """
    rounding = rounding or (NEAREST if bits is None else STOCHASTIC)
    if _is_torchs_cast(rounding) and fmt.float8 is not None:
        return t.clamp(-fmt.max, fmt.max).to(fmt.float8).to(torch.float32)
    position, exponent = grid_position(t.abs().clamp_(max=fmt.max), fmt)
    return grid_value(rounding.integers(position, bits), exponent, fmt).copysign_(t)


def round_to_codes(
    t: Tensor, fmt: ElementFormat, bits: Tensor | None = None, rounding: Rounding | None = None
) -> Tensor:
    """uint8 codes (one per byte), saturating. NaN gives `fmt.nan_code`: NaN in E4M3 and E5M2, else
    the largest value, whose scale is then NaN. Arguments as of `round_to_values`.
    """
    rounding = rounding or (NEAREST if bits is None else STOCHASTIC)
    if _is_torchs_cast(rounding) and fmt.float8 is not None:
        codes = t.clamp(-fmt.max, fmt.max).to(fmt.float8).view(torch.uint8)
    else:
        position, exponent = grid_position(torch.fmin(t.abs(), t.new_full((), fmt.max)), fmt)
        magnitude = grid_code(rounding.integers(position, bits), exponent, fmt)
        codes = (magnitude | (torch.signbit(t).to(torch.int32) << (fmt.bits - 1))).to(torch.uint8)
    return torch.where(t.isnan(), fmt.nan_code, codes).to(torch.uint8)


def corrected_scales(
    t: Tensor, scale: Tensor, fmt: ElementFormat, size: int, bits: Tensor
) -> Tensor:
    """Bytes of the corrected block scales [R, Cb], stochastically rounded E4M3.

    Args:
        t: the scaled elements [R, 1, Cb, bc], float32.
        scale: their block scales, decoded [R, Cb].
        size: size of a group, a multiple of bc.
        bits: random bits 0..65535 per block, int32 [R, Cb].
    """
    q = round_to_values(t, fmt)
    weight = scale.square()
    rows, blocks = scale.shape
    per_group = size // t.shape[3]

    def by_group(per_element: Tensor) -> Tensor:
        per_block = _in_sequence(per_element[:, 0]) * weight
        return _in_sequence(per_block.reshape(rows, blocks // per_group, per_group))

    energy = by_group(t * t)
    overlap = by_group(t * q)
    factor = torch.where(overlap == 0, 1.0, energy / overlap).repeat_interleave(per_group, dim=1)
    return round_to_codes(scale * factor, E4M3, bits)


def _in_sequence(x: Tensor) -> Tensor:
    """The sums over the last axis, first element first, as kernels add them."""
    total = x[..., 0].clone()
    for at in range(1, x.shape[-1]):
        total.add_(x[..., at])
    return total
