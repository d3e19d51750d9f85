"""The factor of the loss in formats whose gradients underflow."""

from dataclasses import dataclass

from fp4train.text import check_least

SMALLEST_LOSS_SCALE = 2.0**-24
"""Lower limit of the scale: gradients that are not finite here will not become finite at a smaller
one.
"""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2), for formats whose gradients
    underflow.

    The loss is multiplied by the scale before backward and gradients are divided by it. A step
    whose gradients are not finite is skipped and the scale multiplied by `backoff`; after
    `interval` good steps it is multiplied by `growth`. With growth=1 it only comes back to `initial`
    then: scales that saturate instead of overflowing (UE5M3) say nothing of one that is too large.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def update(self, scale: float, good_steps: int, finite: bool) -> tuple[float, int]:
        """(scale, good steps in a row) after a step whose gradients were finite or not."""
        if not finite:
            return max(scale * self.backoff, SMALLEST_LOSS_SCALE), 0
        good_steps += 1
        if good_steps == self.interval:
            if self.growth == 1:
                grown = self.initial
            else:
                grown = scale * self.growth
            return (grown, 0)
        return (scale, good_steps)

    def __post_init__(self) -> None:
        if not self.initial > 0:
            raise ValueError(f"initial={self.initial} must be > 0")
        if not self.growth >= 1:
            raise ValueError(f"growth={self.growth} must be >= 1")
        if not 0 < self.backoff < 1:
            raise ValueError(f"backoff={self.backoff} must lie between 0 and 1")
        check_least(self, "", "interval")
