"""`fp4train check`: all layers of a run at a checkpoint, audited in one step on its next batch.

The step is computed as the run would compute it, a group of layers observed at a time, and nothing
is updated. Layers alternate between the first two microbatches: what is wrong in all but the first
one, as random bits that begin anew, shows in the second.
"""

import itertools
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fp4train.audits.fault import Audited, Fault
from fp4train.audits.observe import Observer
from fp4train.audits.start import check_plan
from fp4train.lab.studies import Subject
from fp4train.nn.planned import PlannedLayer
from fp4train.run.bits import seed_model
from fp4train.run.host import free_memory
from fp4train.run.run import Run
from fp4train.run.state.numbers import begin_loss_scale
from fp4train.run.step import eagerly, microbatch_share, step_rows, train_losses
from fp4train.run.supervise.audit_report import needed
from fp4train.run.supervise.planned_calls import PlannedCalls, weight_of
from fp4train.shards import local
from fp4train.text import first_line

LAYERS = 16
"""Most layers whose tensors are kept at the same time."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `fp4train check` found.

    Args:
        audits: result of each layer of which GEMMs were compared, or that has a fault.
        uncovered: layer or trial → why it was not audited, or what of it was not.
        plan: faults of kernels and layers on small random tensors.
        failed: names of `uncovered` whose audit failed.
    """

    audits: Sequence[Audited]
    uncovered: dict[str, str]
    plan: Sequence[Fault]
    failed: Sequence[str] = ()

    @property
    def faults(self) -> list[Fault]:
        """All faults, those of the plan first."""
        return [*self.plan, *(fault for audited in self.audits for fault in audited.faults)]

    @property
    def complete(self) -> bool:
        """Whether GEMMs were compared, and no audit failed."""
        return any(audited.gemms for audited in self.audits) and not self.failed


def check(subject: Subject) -> Checked:
    """Audit all layers of a subject in the step that it would do next."""
    run = subject.run
    stretch = run.course.plan.at(run.step)
    run.apply(stretch)
    begin_loss_scale(run, stretch.recipe)
    count = _layers_at_once(run)
    results = [
        result
        for start in range(0, len(run.planned_layers), count)
        for result in _audited(run, run.planned_layers[start : start + count])
    ]
    untried: dict[str, str] = {}

    @contextmanager
    def noting(trial: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            untried[trial] = f"its audit failed: {first_line(error)}"

    faults = list(check_plan(run.course.plan, noting))
    uncovered = {result.layer: "; ".join(result.left_out) for result in results if result.left_out}
    return Checked(
        audits=[result for result in results if result.gemms or result.faults],
        uncovered={**uncovered, **untried},
        plan=faults,
        failed=[*(result.layer for result in results if result.failures), *untried],
    )


def _layers_at_once(run: Run) -> int:
    """Layers whose tensors main memory has room for, up to `LAYERS`; at least 1."""
    free = free_memory()
    if free is None:
        return LAYERS
    tokens = run.microbatch_rows * run.config.train.seq_len
    largest = max((needed(layer, tokens) for layer in run.planned_layers), default=1)
    return max(1, min(LAYERS, free // largest))


def _audited(run: Run, layers: Sequence[PlannedLayer]) -> Iterator[Audited]:
    """The audits of these layers in the coming step, by the run's plan."""
    planned = PlannedCalls(run)
    observers = {}
    for number, layer in enumerate(layers):
        microbatch = number % min(2, planned.microbatches)
        if planned.takes_first(layer, run.step):
            microbatch = 0
        observers[layer] = layer.observer = Observer(layer, microbatch)
    learned: Set[PlannedLayer] = set()
    try:
        learned = _compute(run, 1 + max(observer.number for observer in observers.values()))
    finally:
        for layer, observer in observers.items():
            layer.observer = None
            observer.close()
    for layer, observer in observers.items():
        result = Audited(layer=layer.layer.name, step=run.step)
        try:
            weight = weight_of(layer, divided=False)
            compared = planned.compare(layer, observer, run.step, weight, learned=layer in learned)
            yield compared or replace(result, uncovered=("none of its experts had a token",))
        except Exception as error:  # the others are compared
            yield replace(result, failures=(first_line(error),))


def _compute(run: Run, microbatches: int) -> Set[PlannedLayer]:
    """Compute so many microbatches of the coming step, and update nothing; gives the layers whose
    weights have a gradient.
    """
    recipe = run.course.plan.at(run.step).recipe
    scaling = run.scaling()
    seed_model(run)
    with eagerly(run):
        losses = train_losses(
            run, recipe, step_rows(run), run.loss_scale.value * microbatch_share(run)
        )
        for _ in itertools.islice(losses, microbatches):
            pass
        del losses
    learned = {
        layer
        for layer in run.planned_layers
        if layer.weight.grad is not None and local(layer.weight.grad).any()
    }
    run.optimizer.zero_grad(set_to_none=True)
    run.load_scaling(scaling)
    return learned
