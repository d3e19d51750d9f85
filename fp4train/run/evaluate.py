"""Validation: the same sequences in high precision and in the recipe, each once and by one rank.

Both are applied plans: that of the stretch, and that of its GEMMs in high precision, which the run
resolves once.
"""

import logging
import math
from collections.abc import Iterable, Mapping

import torch

from fp4train.data.passes import Passes
from fp4train.data.stream import Stream
from fp4train.parallel.weights import replaced
from fp4train.precision import Recipe
from fp4train.precision.plan import PlannedStretch
from fp4train.precision.settings import ConstantWeights
from fp4train.run.finite import first_non_finite
from fp4train.run.queued import Values
from fp4train.run.run import Run
from fp4train.run.step import losses, microbatch
from fp4train.run.supervise.guard import NonFiniteError

_log = logging.getLogger(__name__)


def evaluate(run: Run, stretch: PlannedStretch) -> Values:
    """Validation loss in high precision and, beside it, in the recipe of `stretch`; of the weights,
    and of what the run keeps beside them as weights. Of each part of a mixture that in high
    precision.
    """
    parts = run.data.validation_parts
    high, in_recipe, *of_parts = _means(run, stretch, parts.values())
    _log.info("step %d: validation loss %.4f, in the recipe %.4f", run.step, high, in_recipe)
    values: Values = {"val/loss": high, "val/loss_recipe": in_recipe}
    values |= {f"val/loss/{name}": loss for name, loss in zip(parts, of_parts, strict=True)}
    for state in run.states:
        if (weights := state.weights()) is None:
            continue
        with replaced(run.model, weights):
            high, in_recipe = _means(run, stretch)
        values |= {f"val/loss_{state.key}": high, f"val/loss_{state.key}_recipe": in_recipe}
    return values


def _means(run: Run, stretch: PlannedStretch, parts: Iterable[Stream] = ()) -> list[float]:
    """The mean losses of `microbatch_losses`."""
    return [sum(losses) / len(losses) for losses in microbatch_losses(run, stretch, parts)]


def microbatch_losses(
    run: Run, stretch: PlannedStretch, parts: Iterable[Stream] = ()
) -> list[list[float]]:
    """The loss of each pass over the validation sequences, times its weight (`Passes.weight`), in
    high precision, in the recipe of `stretch`, whose plan the layers have afterwards, and in high
    precision on each of `parts`.
    """
    high = run.course.in_high_precision(stretch)
    validation = run.data.validation
    run.model.eval()
    with torch.no_grad():
        run.apply(high)
        in_high, *of_parts = (_losses(run, high.recipe, rows) for rows in (validation, *parts))
        in_recipe = in_high
        if high is not stretch:
            run.apply(stretch)
            in_recipe = _losses(run, stretch.recipe, validation)
    run.model.train()
    return [in_high, in_recipe, *of_parts]


def check_evaluation(run: Run, values: Mapping[str, float | str], recipe: str) -> None:
    """Raises NonFiniteError where a validation loss is not finite."""
    for key, what in (
        ("val/loss", "the validation loss"),
        ("val/loss_recipe", "the validation loss in the recipe"),
    ):
        if not math.isfinite(value := float(values[key])):
            named = {f"weight {name}": p for name, p in run.model.named_parameters()}
            where = run.world.first(first_non_finite(named)) or "no weight: the evaluation itself"
            raise NonFiniteError(run.step, what, value, where, recipe, of_state=True)


def _losses(run: Run, recipe: Recipe, stream: Stream) -> list[float]:
    """The weighted losses of all passes over `stream`, each computed by one rank, or by the ranks
    that share its sequences.

    In one order on every rank, so that their sum does not depend on how many there are. A rank that
    has no pass left repeats one, so that all take part in what the ranks do together.
    """
    batches = run.config.eval.batches
    passes = Passes(loader=stream, rows=run.microbatch_rows, batches=batches)
    count = len(passes.parts)
    mesh = run.world.mesh
    own_losses = torch.zeros(math.ceil(count / mesh.data) * mesh.data, device=run.device)
    own_numbers = range(run.world.data_rank, len(own_losses), mesh.data)
    # no rank is left alone in a pass by another that cannot read its rows
    with run.world.same_outcome():
        weights = [passes.weight(number % count) for number in own_numbers]
        rows = [passes.read(number % count) for number in own_numbers]
    constant = ConstantWeights()
    computed = losses(run, (microbatch(run, recipe, part, constant=constant) for part in rows))
    for number, weight, loss in zip(own_numbers, weights, computed, strict=False):
        own_losses[number] = loss * (weight / mesh.context)
    weighted: list[float] = run.world.summed(own_losses)[:count].tolist()
    return weighted
