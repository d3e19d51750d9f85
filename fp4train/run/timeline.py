"""What a run does when: its recipe, its phases in the order of their steps, and its swaps."""

from pathlib import Path
from typing import Any

from fp4train.config import Config
from fp4train.errors import UserError, user_errors
from fp4train.precision import Recipe, Swap, Timeline
from fp4train.run.record.journal import read_swaps


def build_timeline(config: Config, directory: Path | None = None) -> Timeline:
    """Recipe, phases in the order of their steps, and what was swapped before.

    Raises:
        UserError: they do not go together, or backward would take values of codes that fprop has
            not.
    """
    _check_backward(config.recipe)
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


def _check_backward(recipe: Recipe) -> None:
    """Refuse a dequantised backward whose fprop the configuration itself leaves in high precision:
    nothing would be quantised. (A phase may do so: backward is plain then.)
    """
    if recipe.backward != "quantised" and "fprop" in recipe.high_precision:
        raise UserError(
            f"recipe.backward={recipe.backward} takes the values of the codes that fprop "
            "multiplies, and "
            "recipe.high_precision leaves fprop without: take fprop out of recipe.high_precision, "
            "or recipe.backward=quantised"
        )


def with_swap(timeline: Timeline, swap: Swap) -> Timeline:
    """`timeline` with one more swap.

    Raises:
        UserError: it does not go with the rest.
    """
    with user_errors(ValueError):
        return timeline.with_swap(swap)
