"""The model card of an export: how the model was trained, by steps and by layers, and the losses
that it reaches.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fp4train import __version__
from fp4train.audits.fault import AUDIT, AUDIT_FAULT
from fp4train.exchange.stored import StoredModel
from fp4train.files import Folder
from fp4train.run.record.inbox import EVALUATION
from fp4train.run.record.journal import read_journal, stretches
from fp4train.sealed import changed_since
from fp4train.text import counted, printable, screen
from fp4train.track.config import METRICS
from fp4train.track.metrics import LIMIT, parse_line
from fp4train.track.series import Series

_log = logging.getLogger(__name__)

_TRAINING = "train/loss"
LOSSES = {
    "val/loss": "validation, high precision",
    "val/loss_recipe": "validation, in the recipe",
    _TRAINING: "training",
}
"""Losses of a card, in nats per token: key of the metrics → name."""
_WORDS = (b'"val/loss"', b'"train/loss"', EVALUATION.encode(), f'"{AUDIT}'.encode())
"""Words of the lines that a card reads."""


@dataclass(frozen=True, kw_only=True)
class RecordedResults:
    """What a run's metrics say up to a checkpoint.

    Args:
        evaluated: last line of each recipe that has a validation loss; its training loss is the
            mean that a run is compared by (`fp4train.track.series`).
        window: number of steps that the newest training loss is the mean of.
        tasks: last results of each task and recipe at the checkpoint's step (`fp4train eval`).
        damaged: number of lines that cannot be read.
        audits: number of audits of layers.
        layers: number of layers that were audited.
        faults: number of faults that audits found.
    """

    evaluated: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    damaged: int
    window: int = 1
    audits: int = 0
    layers: int = 0
    faults: int = 0

    @property
    def audited(self) -> str:
        """A sentence about the audits of the run; empty: there were none."""
        faults = counted(self.faults, "fault")
        if not self.audits:
            return f"Audits of the run's state found {faults}." if self.faults else ""
        return (
            f"{counted(self.audits, 'audit')} of a live layer against the readable reference "
            f"found {faults}. Audited layers: {self.layers}."
        )

    @property
    def notes(self) -> list[str]:
        """A sentence where lines are damaged, whose results are then missing."""
        if not self.damaged:
            return []
        if self.damaged == 1:
            lines = f"1 line of {METRICS} is damaged: what it says"
        else:
            lines = f"{self.damaged:,} lines of {METRICS} are damaged: what they say"
        return [f"{lines} is not in the model card."]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What an export says of itself beside what all of them say.

    Args:
        origin: one or more sentences on how the weights became what the folder holds.
        layout: the word of `to=`.
        in_transformers: whether transformers loads its weights as those of the model.
        config, record: entries of its `config.json` and `fp4train.json`.
        notes: differences from the run, a sentence each.
        tokenizer: the class of transformers that reads its tokenizer; empty: there is none.
    """

    origin: str
    layout: str
    in_transformers: bool
    config: Mapping[str, Any]
    record: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    tokenizer: str = ""


def model_card(model: StoredModel, results: RecordedResults, described: Description) -> str:
    """The text of the folder's README.md (card.md).

    Args:
        results: losses and results of the run.
    """
    step = model.saved.step
    records = read_journal(model.run)
    ran = [
        replace(stretch, stop=min(stretch.stop, step))
        for stretch in stretches(records)
        if stretch.start < step
    ]
    text = screen(
        __package__,
        "card.md",
        inline=_inline,
        tags=[
            "fp4train",
            *dict.fromkeys(re.sub(r"[^a-z0-9]+", "-", stretch.recipe.lower()) for stretch in ran),
        ],
        run=model.run.resolve().name,
        kind=type(model.config.model).__name__,
        model=model,
        step=step,
        train=model.config.train,
        described=described,
        doubt=model.saved.doubt,
        losses=LOSSES,
        evaluated=results.evaluated,
        window=results.window,
        damaged=results.damaged,
        audited=results.audited,
        tasks=[(line.get("task"), line.get("recipe"), _results(line)) for line in results.tasks],
        ran=ran,
        plan="\n\n".join(stretch.render(full=False) for stretch in ran).replace("```", "'''"),
        environment=next(
            (r.values["environment"] for r in reversed(records) if "environment" in r.values), None
        ),
        version=__version__,
    )
    return f"{text}\n"


def _results(line: Mapping[str, Any]) -> str:
    values = {
        key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")
    }
    return ", ".join(
        f"{key} {value:.6g}" for key, value in values.items() if isinstance(value, int | float)
    )


def measured(model: StoredModel) -> RecordedResults:
    """The measured losses and results, from the metrics up to the checkpoint's step."""
    evaluated: dict[Any, dict[str, Any]] = {}
    tasks: dict[tuple[Any, Any], dict[str, Any]] = {}
    training: dict[int, float] = {}
    damaged = 0
    counts = dict.fromkeys((AUDIT, AUDIT_FAULT), 0)
    layers: set[str] = set()
    with suppress(FileNotFoundError), Folder.open(model.run) as folder:
        if changed := changed_since(folder, METRICS, model.saved.state.get("metrics"), LIMIT):
            _log.warning(
                "%s %s since the checkpoint: the model card may lack losses",
                model.run / METRICS,
                changed,
            )
        for raw in folder.lines(METRICS, LIMIT):
            if not raw.startswith(b"{") or not raw.endswith((b"}\n", b"}")):
                damaged += raw.endswith(b"\n")  # else it is the last one, and being written
                continue
            if not any(word in raw for word in _WORDS):
                continue
            try:
                line = parse_line(raw)
                if line["step"] > model.saved.step:
                    continue
                if isinstance(loss := line.get(_TRAINING), int | float):
                    training[line["step"]] = float(loss)
                if line.get("event") == EVALUATION and line["step"] == model.saved.step:
                    tasks[line.get("task"), line.get("recipe")] = line
                elif line.get("event") in counts:
                    counts[line["event"]] += 1 + int(line.get("more", 0))
                    if line["event"] == AUDIT:
                        layers.add(str(line.get("layer")))
                elif "val/loss" in line:
                    evaluated.pop(recipe := line.get("precision/recipe"), None)
                    evaluated[recipe] = line
            except (ValueError, RecursionError, LookupError, TypeError):
                damaged += 1
    losses = Series.by_step(training)
    means = dict(zip(sorted(training), losses.smoothed().values.tolist(), strict=True))
    for line in evaluated.values():
        if line["step"] in means:
            line[_TRAINING] = means[line["step"]]
    return RecordedResults(
        evaluated=list(evaluated.values()),
        window=losses.last_window,
        tasks=list(tasks.values()),
        damaged=damaged,
        audits=counts[AUDIT],
        layers=len(layers),
        faults=counts[AUDIT_FAULT],
    )


def _inline(text: object) -> str:
    """Text of a run directory in a line of Markdown: nothing in it ends a cell or opens a tag."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", printable(str(text), kept=""))
