"""Recipe changes over a run: phases, which are configured, and swaps, which are requested during
the run.

Low-precision training leaves a loss gap. A return to high precision late in training closes most of
it: with only the forward GEMM in BF16 during the cooldown, the paper's gap fell from 1.5 % to 0.5
%, for 6 % of the compute (arXiv:2509.25149, appendix D). A phase changes the recipe, or single
GEMMs of it, from a given step on. A swap replaces the recipe that the phases modify.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp4train.backends.table import GEMMS
from fp4train.precision.recipe import OutlierChannels, Recipe, why_not_shared
from fp4train.precision.recipes import Mixed

MOST_PHASES = 256
MOST_SWAPS = 1000
"""Most stretches of a run: each is planned for every layer."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Run `recipe` from `start` on, in all GEMMs or in some.

    Args:
        start: a step (integer), a share of the run (float in [0, 1]), or "cooldown": the first
            step of the schedule's cooldown.
        recipe: the recipe from then on.
        gemms: only these GEMMs change to `recipe`; the others stay as they are. None: all three.
            With a recipe that quantises nothing, these GEMMs run in high precision, in the dtype of
            the run.
    """

    start: int | float | str
    recipe: Recipe
    gemms: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"recipe={self.recipe!r} must be a recipe, for instance BF16()")
        if isinstance(self.start, str):
            if self.start != "cooldown":
                raise ValueError(
                    f"start={self.start!r} must be a step, a share of the run, or 'cooldown'"
                )
        elif (
            isinstance(self.start, bool)
            or self.start < 0
            or (isinstance(self.start, float) and self.start > 1)
        ):
            raise ValueError(
                f"start={self.start!r} must be a step ≥ 0, a share between 0.0 and 1.0, or "
                "'cooldown'"
            )
        if self.gemms is not None:
            wrong = [g for g in self.gemms if g not in GEMMS]
            if wrong or not self.gemms:
                raise ValueError(
                    f"gemms={list(self.gemms)!r}: name some of {', '.join(GEMMS)}, or leave "
                    "it out for all"
                )
            object.__setattr__(self, "gemms", tuple(g for g in GEMMS if g in self.gemms))

    def step(self, steps: int, cooldown: int | None) -> int | None:
        """The first step of this phase in a run of `steps` steps; None if the schedule lacks the
        cooldown it needs.
        """
        if isinstance(self.start, str):
            return cooldown
        if isinstance(self.start, int):
            return self.start
        return round(self.start * steps)

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe after this phase, applied to the previous `recipe`."""
        if self.gemms is None:
            return self.recipe
        return in_gemms(self.gemms, recipe, self.recipe)


def in_gemms(gemms: Sequence[str], recipe: Recipe, other: Recipe) -> Recipe:
    """`recipe`, with `gemms` in `other` instead; if that quantises nothing, they run in the dtype
    of `recipe`.

    What belongs to the layer stays, as its outlier channels. Fused scales end where the weights of
    fprop have no scale to share any more.

    Raises:
        ValueError: something else that belongs to the layer cannot stay.
    """
    if not other.quantised:
        if recipe.quantised:
            return recipe.with_high_precision(*gemms)
        return recipe
    parts: dict[str, Any] = {
        gemm: other if gemm in gemms else _part(recipe, gemm) for gemm in GEMMS
    }
    kept = tuple(gemm for gemm in recipe.high_precision if gemm not in gemms)
    weights = parts["fprop"].table()["fprop"].second
    fused_scales = recipe.fused_scales and why_not_shared(weights) is None
    try:
        if not isinstance(recipe, Mixed):
            return Mixed(
                **parts, dtype=recipe.dtype, high_precision=kept, fused_scales=fused_scales
            )
        return replace(
            recipe,
            **parts,
            label="",  # it names another mixture
            high_precision=kept,
            fused_scales=fused_scales,
            outliers=_outliers(recipe),
            backward="quantised",
        )
    except ValueError as error:
        raise ValueError(
            f"{'+'.join(gemms)} in {other.name} cannot be combined with {recipe.name} in the other "
            f"GEMMs ({error})"
        ) from error


def _part(recipe: Recipe, gemm: str) -> Recipe:
    """The recipe of one GEMM, without the exceptions in `high_precision`, and without fused scales,
    which belong to the layer.
    """
    if not isinstance(recipe, Mixed):
        return replace(recipe, high_precision=(), fused_scales=False)
    if recipe.backward != "quantised" and gemm != "fprop":
        return replace(recipe.fprop, high_precision=(), backward=recipe.backward)
    part: Recipe = getattr(recipe, gemm)
    return part


def _outliers(recipe: Recipe) -> OutlierChannels | None:
    """The outlier channels of `recipe`, whose own recipe names the backward pass that they have."""
    apart = recipe.of_outliers()
    if recipe.outliers is None or apart is None:
        return None
    outlier_recipe = replace(recipe.outliers.recipe, backward=apart.backward)
    return replace(recipe.outliers, recipe=outlier_recipe)


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Replace the run's recipe by `recipe` from `step` on; `name` is the requested name
    ("mxfp8").
    """

    step: int
    recipe: Recipe
    name: str


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps [start, stop) of a run in which `recipe` is in force, and the reason.

    split: whether the channels that the recipe multiplies apart are chosen; None: it has none.
    """

    start: int
    stop: int
    recipe: Recipe
    reason: str
    split: bool | None = None

    @property
    def note(self) -> str:
        """Words on what the recipe does in these steps, behind the reason in a plan; "": the same
        in all steps.
        """
        words = {
            True: "; outlier channels are multiplied apart",
            False: "; outlier channels not chosen yet",
        }
        if self.split is not None:
            return words[self.split]
        return ""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Recipe, phases and swaps of a run of `steps` steps; `cooldown` is the first step of the
    schedule's cooldown.
    """

    recipe: Recipe
    steps: int
    cooldown: int | None = None
    phases: Sequence[Phase] = ()
    swaps: Sequence[Swap] = ()

    def __post_init__(self) -> None:
        if len(self.phases) > MOST_PHASES or len(self.swaps) > MOST_SWAPS:
            raise ValueError(
                f"{len(self.phases)} phases and {len(self.swaps)} swaps: a run has at most "
                f"{MOST_PHASES} and "
                f"{MOST_SWAPS}; leave some out"
            )
        if any(swap.step < 0 for swap in self.swaps):
            raise ValueError(f"swaps at steps {[s.step for s in self.swaps]}: steps count from 0")
        object.__setattr__(self, "swaps", tuple(sorted(self.swaps, key=lambda swap: swap.step)))
        starts = [
            s for s in (p.step(self.steps, self.cooldown) for p in self.phases) if s is not None
        ]
        if starts != sorted(starts):
            raise ValueError(f"phases start at steps {starts}: put them in order")
        changes = [p.recipe for p in self.phases if p.gemms is None] + [
            s.recipe for s in self.swaps
        ]
        for recipe in changes:
            if recipe.dtype != self.recipe.dtype and "float16" in (recipe.dtype, self.recipe.dtype):
                raise ValueError(
                    "a float16 run has a loss scale and stays float16, and no other run becomes "
                    f"one: {recipe.name} in a phase or swap has dtype={recipe.dtype}, "
                    f"{self.recipe.name} of the run has dtype={self.recipe.dtype}; give the phase "
                    "or swap a recipe of that dtype, or leave it out"
                )
        self.stretches()  # refuses now a phase that cannot be combined with the recipe before it

    def recipe_at(self, step: int) -> Recipe:
        """The recipe in force at `step` (steps count from 0)."""
        return self._at(step)[0]

    def _at(self, step: int) -> tuple[Recipe, str]:
        recipe = self.recipe
        reason = "recipe"
        swapped = -1
        for swap in self.swaps:
            if swap.step <= step:
                recipe = swap.recipe
                reason = f"swap at step {swap.step}"
                swapped = swap.step
        for phase in self.phases:
            start = phase.step(self.steps, self.cooldown)
            # A swap after a phase of the whole recipe replaces that phase; phases of single GEMMs
            # modify any recipe.
            if (
                start is not None
                and start <= step
                and not (phase.gemms is None and start <= swapped)
            ):
                if phase.gemms:
                    what = "+".join(phase.gemms)
                else:
                    what = "all GEMMs"
                try:
                    changed = phase.apply(recipe)
                except ValueError as error:
                    raise ValueError(
                        f"phase {phase.start}, after {reason}: {error}: give the phase a recipe of "
                        "all three GEMMs (gemms=null), or leave it out; phases=none leaves out all, "
                        "also with resume=RUN"
                    ) from error
                if changed != recipe:
                    reason = f"phase {phase.start}: {what} in {phase.recipe.name}"
                    if phase.gemms and recipe.fused_scales and not changed.fused_scales:
                        reason += ", without fused scales"
                    recipe = changed
        return recipe, reason

    def stretches(self) -> list[Stretch]:
        """The run, split where its recipe changes, and where the channels are chosen that it
        multiplies apart.
        """
        starts = {0, *(s.step for s in self.swaps)}
        starts |= {
            s for s in (p.step(self.steps, self.cooldown) for p in self.phases) if s is not None
        }
        cuts = sorted(s for s in starts if s < max(self.steps, 1))
        stretches: list[Stretch] = []
        for start, stop in zip(cuts, [*cuts[1:], self.steps], strict=True):
            recipe, reason = self._at(start)
            if stretches and stretches[-1].recipe == recipe:
                stretches[-1] = replace(stretches[-1], stop=stop)
            else:
                stretches.append(Stretch(start=start, stop=stop, recipe=recipe, reason=reason))
        return list(_split(stretches))

    def with_swap(self, swap: Swap) -> Timeline:
        """This timeline with one more swap; a later request for the same step replaces the earlier
        one.
        """
        other_swaps = [s for s in self.swaps if s.step != swap.step]
        return replace(self, swaps=(*other_swaps, swap))


def _split(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """`stretches`, cut where the channels that their recipes multiply apart are chosen, as layers
    do.
    """
    recorded = 0
    for stretch in stretches:
        outliers = stretch.recipe.outliers
        if outliers is None or not stretch.recipe.quantised:
            yield stretch
            continue
        split_step, recorded = outliers.split_from(stretch.start, stretch.stop, recorded)
        if split_step > stretch.start:
            yield replace(stretch, stop=min(split_step, stretch.stop), split=False)
        if split_step < stretch.stop:
            yield replace(stretch, start=split_step, split=True)
