"""Outlier channels: a few input channels of a layer that are multiplied apart, in another table than the rest.

A few channels of x are much larger than the others in nearly every token. In blocks of 16 they take the range from
their neighbours. They are multiplied apart (OutControl of TetraJet-v2, arXiv:2510.27527):

    y = x[:, rest]·w[:, rest]ᵀ + x[:, top]·w[:, top]ᵀ        both parts with operands of their own

and so in backward: dx and dw are made for each part, dbias once. Which channels are "top" is measured in the run: the
norm of each channel over the tokens of a step is summed over `steps` steps, and the channels with the largest sums are
taken. Until then, and in layers too narrow for it, all channels are multiplied together.

The authors' code sums the norms of single forward calls; here the norm is that of all tokens of the step, so that it
does not depend on how a batch is cut into microbatches and over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp4train.precision.recipe import Recipe

APART = "outlier channels are multiplied apart, which emulate and reference do"
"""Why other backends do not run a recipe that has them."""


@dataclass(frozen=True, kw_only=True)
class OutlierChannels:
    """Which input channels of a layer are multiplied apart, and in what.

    Args:
        recipe: their operands; its dtype and its GEMMs in high precision are those of the recipe that they belong to.
        share: of a layer's input channels, between 0 and 1; the number is rounded up to whole multiples.
        start: optimizer steps before the first one that is recorded.
        steps: recorded steps; the channels are chosen after the last one.
        multiple: what the number of channels is a multiple of. 32 is a block of MX; the authors' kernels need 128, and
            their simulations round to 1.
    """

    recipe: Recipe
    share: float = 0.1
    start: int = 500
    steps: int = 50
    multiple: int = 32

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float):
            raise TypeError(f"outliers.share={self.share!r} must be a number")
        if not 0 < self.share < 1:
            raise ValueError(f"outliers.share={self.share} must lie between 0 and 1: it is a share of the channels")
        for name, least in (("start", 0), ("steps", 1), ("multiple", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"outliers.{name}={value!r} must be a whole number")
            if value < least:
                raise ValueError(f"outliers.{name}={value} must be at least {least}")

    def count(self, in_features: int) -> int:
        """The number of outlier channels of a layer; 0 if it would have no other ones."""
        # The tolerance keeps 0.1 of 320 channels at 32, although the product may lie above it.
        count = math.ceil(self.share * in_features / self.multiple - 1e-9) * self.multiple
        return count if count < in_features else 0

    def __str__(self) -> str:
        return f"{self.share:.0%} in {self.recipe.name}"


def chosen_from(outliers: OutlierChannels, start: int, recorded: int) -> int:
    """The first step that has outlier channels, of steps from `start` on in a recipe with `outliers`.

    Args:
        recorded: steps that were recorded before.
    """
    missing = outliers.steps - recorded
    return start if missing <= 0 else max(start, outliers.start) + missing
