"""What a run does when: its recipe, its phases in the order of their steps, and its swaps."""

from pathlib import Path
from typing import Any

from fp4train.config import Config
from fp4train.errors import user_errors
from fp4train.precision import Swap, Timeline
from fp4train.run.record.journal import read_swaps


def build_timeline(config: Config, directory: Path | None = None) -> Timeline:
    """Recipe, phases in the order of their steps, and what was swapped before."""
    steps = config.train.steps
    cooldown = config.schedule.cooldown_start(steps)

    def order(phase: Any) -> int:
        step = phase.step(steps, cooldown)
        return steps if step is None else step

    with user_errors(ValueError):
        return Timeline(
            recipe=config.recipe,
            steps=steps,
            cooldown=cooldown,
            phases=tuple(sorted(config.phases.values(), key=order)),
            swaps=tuple(read_swaps(directory)) if directory else (),
        )


def with_swap(timeline: Timeline, swap: Swap) -> Timeline:
    """`timeline` with one more swap.

    Raises:
        UserError: it does not go with the rest.
    """
    with user_errors(ValueError):
        return timeline.with_swap(swap)
