"""Learning-rate schedules: factors of the peak rate as a function of the step.

    WSD       warm-up, stable, cooldown (arXiv:2404.06395, arXiv:2405.18392)
    Cosine    warm-up, then half a cosine down to the floor (arXiv:1608.03983)
    Constant  warm-up, then the peak

Steps count from 0. Warm-up and cooldown are shares of the run (floats) or steps (integers).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fp4train.text import check_choice

_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "1-sqrt": lambda t: 1 - math.sqrt(t),
}


def _steps(name: str, value: int | float, steps: int) -> int:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not value >= 0 or (isinstance(value, float) and value > 1):
        raise ValueError(
            f"schedule.{name}={value!r} must be a number of steps (integer) or a share "
            "between 0.0 and 1.0"
        )
    if isinstance(value, int):
        return min(value, steps)
    return round(value * steps)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base: linear warm-up to the peak, then `after_warmup`.

    Args:
        warmup: share of the run or number of steps.
        floor: smallest factor, reached at the end of the decay.
    """

    warmup: int | float = 0.05
    floor: float = 0.0

    def __post_init__(self) -> None:
        _steps("warmup", self.warmup, 1)
        if not 0 <= self.floor <= 1:
            raise ValueError(f"schedule.floor={self.floor} must lie between 0 and 1")

    def cooldown_start(self, steps: int) -> int | None:
        """The first step of the cooldown in a run of `steps`, or None if the schedule has none."""
        return None

    def problems(self, steps: int) -> list[str]:
        """Sentences about the parts of the schedule for which a run of `steps` is too short."""
        warmup = _steps("warmup", self.warmup, steps)
        if warmup and warmup >= steps:
            return [
                f"schedule.warmup={self.warmup} takes all {steps} steps: the peak rate holds "
                "for none after it"
            ]
        return []

    def after_warmup(self, step: int, warmup: int, steps: int) -> float:
        return 1.0

    def factor(self, step: int, steps: int) -> float:
        """The factor of the peak learning rate at `step` of `steps`."""
        warmup = _steps("warmup", self.warmup, steps)
        if step < warmup:
            return (step + 1) / warmup
        return self.after_warmup(step, warmup, steps)


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Warm-up, then the peak until the end."""


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Warm-up, then half a cosine down to the floor."""

    def after_warmup(self, step: int, warmup: int, steps: int) -> float:
        t = (step - warmup) / max(1, steps - warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * t))


@dataclass(frozen=True, kw_only=True)
class WSD(Schedule):
    """Warm-up, stable, cooldown.

    Args:
        cooldown: share of the run or number of steps.
        decay: shape of the cooldown: "linear", "cosine" or "1-sqrt".
    """

    cooldown: int | float = 0.2
    decay: str = "1-sqrt"

    def __post_init__(self) -> None:
        super().__post_init__()
        _steps("cooldown", self.cooldown, 1)
        check_choice("schedule.decay", self.decay, _DECAYS)

    def cooldown_start(self, steps: int) -> int:
        warmup = _steps("warmup", self.warmup, steps)
        cooldown = _steps("cooldown", self.cooldown, steps)
        return max(steps - cooldown, warmup)

    def problems(self, steps: int) -> list[str]:
        warmup = _steps("warmup", self.warmup, steps)
        cooldown = _steps("cooldown", self.cooldown, steps)
        problems = super().problems(steps)
        if cooldown and steps > 1 and cooldown >= steps:
            problems.append(
                f"schedule.cooldown={self.cooldown} takes all {steps} steps: no step is at "
                "the peak rate"
            )
        elif warmup < steps < warmup + cooldown:
            problems.append(
                f"schedule.warmup={self.warmup} and schedule.cooldown={self.cooldown} overlap "
                f"in {steps} steps: the cooldown begins at step {warmup}, where the warm-up ends"
            )
        return problems

    def after_warmup(self, step: int, warmup: int, steps: int) -> float:
        start = self.cooldown_start(steps)
        if step < start:
            return 1.0
        # The floor is reached one step after the last, so that no step has a learning rate of zero.
        t = (step - start + 1) / (steps - start + 1)
        return self.floor + (1 - self.floor) * _DECAYS[self.decay](t)
