"""Judgement of stochastically rounded values whose random bits are not known.

Every value must be one of the two neighbours of its element on the grid. With u the distance of the
element from the lower one, as a share of that between them, rounding up has the probability u:

    |Σ (up − u)| ≤ 4·sqrt(Σ u·(1 − u))

of all elements, and of those whose lower neighbour is 0, which counts the zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4train.quantize import Decoded, QuantSpec, RandomKey
from fp4train.quantize.reference import scale_tensor
from fp4train.quantize.rounding import round_to_values

SIGMAS = 4.0
_LOWER = (1 << 16) - 1
_UPPER = 0
"""Random bits with which every element is rounded down and up."""


@dataclass(frozen=True)
class RoundingJudgement:
    """How values lie between the neighbours of their elements.

    Args:
        strange: the values that are none of the two, bool [R, C].
        bias: Σ (up − u) in standard deviations.
        zeros: the same of the elements between 0 and the smallest value of the grid.
        undecided: Σ u·(1 − u), which is the number of elements whose direction chance decides.
    """

    strange: Tensor
    bias: float
    zeros: float
    undecided: float

    @property
    def neighbours(self) -> bool:
        """Whether each value is one of the two neighbours of its element."""
        return not bool(self.strange.any())

    @property
    def unbiased(self) -> bool:
        """Whether the values may be stochastically rounded ones."""
        return self.neighbours and abs(self.bias) <= SIGMAS and abs(self.zeros) <= SIGMAS


def rounding_of(
    values: Decoded, tensor: Tensor, spec: QuantSpec, key: RandomKey | None, amax: Tensor | None
) -> RoundingJudgement:
    """Judge the decoded values of `tensor` [R, C] under `spec`.

    Args:
        key: key of the signs of a transform that draws them.
    """
    scaled = scale_tensor(tensor, spec, amax, key)
    shape = scaled.t.shape
    rows, columns = values.values.shape
    lower, upper = (
        round_to_values(scaled.t, spec.format, torch.full(shape, bits, dtype=torch.int32))
        for bits in (_LOWER, _UPPER)
    )
    decode = scaled.decode[:, None, :, None]
    factor: Tensor | float = 1.0 if spec.has_outer_scale else decode

    def matrix(blocks: Tensor) -> Tensor:
        wide = blocks.reshape(shape[0] * shape[1], shape[2] * shape[3])
        return wide[:rows, :columns].float()

    low = matrix(lower * factor)
    high = matrix(upper * factor)
    value = values.values.float()
    is_up = (value == high) & (high != low)
    strange = (value != low) & (value != high)
    inside = scaled.t.abs().clamp(max=spec.format.max)
    gap = (upper - lower).abs()
    chance = torch.where(gap > 0, (inside - lower.abs()) / gap, 0.0)
    chance = matrix(chance).double()
    from_zero = matrix(lower) == 0
    return RoundingJudgement(
        strange,
        _sigmas(is_up, chance, torch.ones_like(from_zero)),
        _sigmas(is_up, chance, from_zero),
        float((chance * (1 - chance)).sum()),
    )


def _sigmas(is_up: Tensor, chance: Tensor, where: Tensor) -> float:
    """The excess of values rounded up, in standard deviations."""
    excess = ((is_up.double() - chance) * where).sum()
    deviation = (chance * (1 - chance) * where).sum().sqrt()
    if deviation == 0:
        return 0.0
    return float(excess / deviation)
