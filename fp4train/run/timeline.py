"""What a run does when: its recipe, its phases in the order of their steps, and its swaps; and the
plan that follows from them.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from fp4train.backends import LAYER_BACKENDS, LayerBackend, Table
from fp4train.config import Config
from fp4train.errors import UserError, user_errors
from fp4train.nn.planned import PlannedLayer
from fp4train.precision import GEMMS, LayerPolicy, Recipe, Swap, Timeline
from fp4train.precision.plan import Plan, PlannedStretch, make_plan
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


@dataclass
class Course:
    """What a run does in each of its steps, and the stretch that its layers run.

    Args:
        called: the layers that were called in the first step; None after it.
    """

    timeline: Timeline
    plan: Plan
    called: dict[object, bool] | None = field(default_factory=dict)
    _regions: list[tuple[LayerBackend, list[Table]]] = field(default_factory=list, init=False)
    _high: tuple[PlannedStretch, PlannedStretch] | None = field(default=None, init=False)
    """A stretch, and what `in_high_precision` gave for it."""

    def apply(
        self,
        stretch: PlannedStretch,
        layers: Iterable[PlannedLayer],
        policy: LayerPolicy,
        device: torch.device,
    ) -> None:
        """Give every layer what the plan says that it runs in `stretch`."""
        for module in layers:
            plan = stretch.layers[module.layer.name]
            module.apply_plan(plan, stretch.recipe, policy, device)
        self._regions = [
            (backend, tables)
            for name, backend in LAYER_BACKENDS.items()
            if (tables := stretch.tables(name))
        ]

    def in_high_precision(self, stretch: PlannedStretch) -> PlannedStretch:
        """`stretch` with all GEMMs in high precision, resolved when it is first asked for; itself
        if nothing of its recipe is quantised.
        """
        if not stretch.recipe.quantised:
            return stretch
        if self._high is None or self._high[0] is not stretch:
            recipe = stretch.recipe.with_high_precision(*GEMMS)
            timeline = Timeline(recipe=recipe, steps=stretch.stop)
            layers = [layer_plan.layer for layer_plan in stretch.layers.values()]
            plan = make_plan(
                layers,
                timeline,
                self.plan.policy,
                tokens=self.plan.tokens,
                device=self.plan.device,
            )
            self._high = stretch, plan.stretches[0]
        return self._high[1]

    def region(self, peers: ProcessGroup | None) -> AbstractContextManager[object]:
        """Context that the backends of the applied stretch need around the passes of a step, or one
        of an evaluation; within itself it does nothing.

        Args:
            peers: ranks that share the model (`World.peers`).
        """
        stack = ExitStack()
        for backend, tables in self._regions:
            stack.enter_context(backend.region(tables, peers))
        return stack
