"""Audits in a training loop that is not fp4train's.

with f4.audit(model) as report:
    loss = step(model)                # forward and backward
print(report)

The layers that `convert` made are observed, those in high precision too, and besides them torch's
nn.Linear (`audits.foreign`). Linear layers of other classes, as Transformer Engine's, are named in the
report.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from fp4train.audits.compare import compare_records
from fp4train.audits.exchange import exchange
from fp4train.audits.fault import Audited, Fault
from fp4train.audits.foreign import foreign_observers, linears
from fp4train.audits.observe import Observer
from fp4train.audits.recorder import CallRecorder
from fp4train.audits.settings import due, in_turn
from fp4train.nn.planned import PlannedLayer
from fp4train.text import first_line

_COUNT: Final = "_fp4train_audits"
"""The attribute of a model that counts its audits."""


@dataclass
class AuditReport:
    """The audits of the layers of a model, complete where the context of `audit` ends.

    Attributes:
        audits: result of each layer that was called; its `uncovered` says what was left out.
        uncovered: layer → why it was not audited, or not its backward pass.
    """

    audits: list[Audited] = field(default_factory=list)
    uncovered: dict[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> list[Fault]:
        """All faults, in the order of the layers."""
        return [fault for audited in self.audits for fault in audited.faults]

    def __str__(self) -> str:
        count = len(self.audits)
        lines = [f"{count} layers audited, {len(self.faults)} faults"]
        lines += [f"  {fault}" for fault in self.faults]
        lines += [f"  not covered: {name}: {reason}" for name, reason in self.uncovered.items()]
        lines += [
            f"  partly covered: {audited.layer}: {'; '.join(audited.uncovered)}"
            for audited in self.audits
            if audited.uncovered
        ]
        return "\n".join(lines)


@contextmanager
def audit(
    model: nn.Module,
    layers: Collection[str] | None = None,
    *,
    every: int | None = None,
    step: int | None = None,
) -> Iterator[AuditReport]:
    """Audit the passes of a model within the context: the first training call of each layer.

    Weights must not be updated within the context. Passes that run within it have the same bits as
    without it. Where tensor parallelism cuts layers all its ranks audit the same ones.

    Args:
        layers: names of the layers; None: all. Each keeps its tensors, and costs as much time as
            several steps of it: audit some in a step.

        every: audit one of them in turn in one of so many steps, and nothing in the others, as runs
            do; None: all of them now.
        step: number of this step, which chooses the layer, and the rows of large products; None:
            the number of audits of this model so far chooses the rows.

    Raises:
        ValueError: the model has no linear layer, or none of these names; `layers` is empty or no
            list; `every` is no number of steps, or comes without `step`.
    """
    planned: dict[str, PlannedLayer] = {}
    for path, module in model.named_modules():
        if isinstance(module, PlannedLayer):
            name = module.layer.name  # two parts that were converted apart may have equal ones
            planned[path if name in planned else name] = module
    report = AuditReport()
    layers = _layers_of(dict.fromkeys((*planned, *linears(model))), layers, every, step)
    if not layers:
        yield report
        return

    turn_of_rows = _audits_so_far(model) if step is None else step
    observers = {name: Observer(layer) for name, layer in planned.items() if name in layers}
    for name, observer in observers.items():
        planned[name].observer = observer
    foreign, report.uncovered = foreign_observers(model, layers)
    try:
        yield report
    except BaseException:
        for recorder in (*observers.values(), *foreign.values()):
            recorder.close()
        raise
    finally:
        for name in observers:
            planned[name].observer = None
        for foreign_observer in foreign.values():
            foreign_observer.remove()
    for name, observer in observers.items():
        exchange(planned[name], observer, turn=turn_of_rows)
        _add(name, observer, report, turn_of_rows)
    for name, foreign_observer in foreign.items():
        _add(name, foreign_observer, report, turn_of_rows)


def _layers_of(
    names: Collection[str], layers: Collection[str] | None, every: int | None, step: int | None
) -> Collection[str]:
    """The layers that are audited now, of those with these names.

    Raises:
        ValueError: see `audit`.
    """
    if not names:
        raise ValueError("audit: the model has no linear layer")
    if isinstance(layers, str) or (layers is not None and not layers):
        raise ValueError(f"audit: layers={layers!r} must be a list of names, or None for all")
    if unknown := sorted(set(layers or ()) - set(names)):
        raise ValueError(f"audit: the model has no layer {', '.join(unknown)}")
    listed = [name for name in names if layers is None or name in layers]
    if every is None:
        return listed
    if step is None or every < 1:
        raise ValueError(f"audit: every={every} must be at least 1, beside the number of the step")
    if not due(step, every):
        return []
    turn = in_turn(listed, listed[-1])
    return [turn[step // every % len(turn)]]


def _audits_so_far(model: nn.Module) -> int:
    """The number of audits of a model before this one, without a step; the model keeps it."""
    count: int = vars(model).get(_COUNT, 0)
    vars(model)[_COUNT] = count + 1
    return count


def _add(name: str, recorder: CallRecorder, report: AuditReport, step: int) -> None:
    """Add the audit of a layer to a report."""
    recorder.close()
    records = recorder.records
    try:
        audited = compare_records(name, recorder, step)
    except Exception as error:  # the loop goes on
        audited = Audited(layer=name, step=step, failures=(first_line(error),))
        records = []
    reasons = [f"its audit failed: {failure}" for failure in audited.failures]
    if records:
        report.audits.append(audited)
    elif recorder.ended or audited.failures:
        reasons += audited.uncovered
    else:
        reasons.append(
            "it was not called in training, or outside of f4.autocast, or by torch.compile in high "
            "precision"
        )
    if not all(record.complete for record in records):
        reasons.append("its backward pass was not seen")
    if reasons:
        report.uncovered[name] = "; ".join(reasons)
