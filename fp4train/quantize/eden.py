"""MS-EDEN (Quartet II, arXiv 2601.22813): unbiased NVFP4 with the randomness in the block scales, not in the elements.

x is rotated by a random Hadamard transform in groups of n and rounded to nearest, q. Per group

    S = <x, x> / <x, q>

is the factor (EDEN's, arXiv 2108.08842) for which the part of S*q along x is x itself. The rest of S*q is orthogonal to
x and averages to zero over rotations. (Exactly so for uniformly random rotations. Random signs leave a bias: 3e-6 of
the energy of a Gaussian group, 1e-5 to 1.4e-3 where one or two outliers of 30 to 100 standard deviations dominate it;
docs/numerics.md has the measurement.) S multiplies the block scales of its group, and
the products are rounded stochastically to E4M3, which keeps their expectation.

Elements rounded to nearest have half the squared error of stochastically rounded ones: 9.8e-3 instead of 18.8e-3 on
N(0, 1), as in the authors' notebook; docs/numerics.md says why not the 9.4e-3 of the paper. A block scale needs room to
grow by S, hence `global_bound=256`.

Sums run over the values themselves; the authors' kernels sum elements divided by their block scales, which gives large
blocks of a group less weight. A block whose scale rounds to zero uncorrected (below 2^-19 of the amax) becomes
zero, which is a bias.
"""

import torch
from torch import Tensor

from fp4train.formats import E4M3, ElementFormat
from fp4train.formats.grid import grid_code, grid_position
from fp4train.quantize.rounding import round_position, round_to_values


def corrected_scales(t: Tensor, scale: Tensor, fmt: ElementFormat, size: int, bits: Tensor) -> Tensor:
    """Bytes of the corrected block scales [R, Cb], stochastically rounded E4M3.

    t: the scaled elements [R, 1, Cb, bc], float32. scale: their block scales, decoded [R, Cb]. size: of a group, a
    multiple of bc. bits: random bits 0..65535 per block, int32 [R, Cb].
    """
    q = round_to_values(t, fmt)
    weight = scale.square()
    rows, blocks = scale.shape
    per_group = size // t.shape[3]

    def by_group(per_element: Tensor) -> Tensor:
        per_block = per_element.sum(dim=(1, 3)) * weight
        return per_block.reshape(rows, blocks // per_group, per_group).sum(dim=2)

    energy, overlap = by_group(t * t), by_group(t * q)
    factor = torch.where(overlap == 0, 1.0, energy / overlap).repeat_interleave(per_group, dim=1)
    return stochastic_e4m3(scale * factor, bits)


def stochastic_e4m3(x: Tensor, bits: Tensor) -> Tensor:
    """E4M3 bytes of x (float32, >= 0), rounded up with the probability of its distance to the value below; saturates
    at 448, NaN gives 0x7f. bits: int32 0..65535, the shape of x."""
    position, exponent = grid_position(torch.fmin(x, x.new_full((), E4M3.max)), E4M3)
    codes = grid_code(round_position(position, bits), exponent, E4M3)
    return torch.where(x.isnan(), E4M3.nan_code, codes).to(torch.uint8)
