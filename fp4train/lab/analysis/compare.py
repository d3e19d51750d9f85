"""Several runs side by side: a table, and a picture of their curves with the relative gap to the
first.

gap = loss / loss of the first - 1, at the last step that all runs have: of the validation losses
where all have some at a common step, otherwise of the smoothed training losses. That is the figure
in which the NVFP4 paper (arXiv:2509.25149, section 3) reports its validation losses: below 1 % of
FP8's for most of the run, about 1.5 % at its end. The training losses of two runs on the same data
carry the same noise, so the gap between them is far smoother than either.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fp4train.errors import UserError
from fp4train.lab.analysis.curves import curves
from fp4train.lab.analysis.figure import FIGURES, PICTURE, Draw, check_out, save, write
from fp4train.lab.analysis.groups import figures_of_groups, seed_groups, summarise
from fp4train.lab.analysis.history import (
    NOT_THE_SAME_RUN,
    History,
    common_step,
    common_window,
    names_of,
    read_history,
)
from fp4train.run.record.journal import flat
from fp4train.text import screen

OUTPUTS = (*FIGURES, ".csv", ".json")
DIFFERING = 12
"""Keys that are listed where configurations differ."""
ABSENT = "-"
"""The value of a key that a configuration does not have."""


class Comparison:
    """Runs side by side; the first is the reference.

    Args:
        names: names of the runs; those of other seeds may share one.
        quantised: the share of a run's multiply-adds that were quantised; None: not known.
    """

    def __init__(
        self,
        histories: Sequence[History],
        names: Sequence[str],
        quantised: Callable[[Path], float | None] = lambda run: None,
    ) -> None:
        self.histories = histories
        self.at = common_step(histories)
        """The loss that the gap is of, ``val/loss`` or ``train/loss``, and the step that it is
        at; None: the runs share none.
        """
        self.window = common_window(histories)
        """Steps over which the training losses of gaps and curves are smoothed at most."""
        losses = [math.nan] * len(histories)
        if self.at is not None:
            key, step = self.at
            series = [history.loss(key, self.window) for history in histories]
            losses = [float(losses.at(np.array([step]))[0]) for losses in series]
        self.losses = losses
        """That loss of each run, nats per token."""
        gaps = [
            loss / losses[0] - 1 if index and losses[0] else None
            for index, loss in enumerate(losses)
        ]
        self.groups = seed_groups(histories, names)
        """Runs that differ in run.seed only."""
        titles = list(names)
        for group in self.groups:
            if len({*group.names}) < len(group.names):
                for place, seed in zip(group.places, group.seeds, strict=True):
                    titles[place] = f"{names[place]}, seed {seed}"
        self.rows = [
            summarise(history, title, gap, quantised(history.path))
            for history, title, gap in zip(histories, titles, gaps, strict=True)
        ]
        self.means = figures_of_groups(self.groups, self.rows, losses)
        """The figures of each group."""
        configs = [history.configuration for history in histories]
        self.differing = differing_values(
            [flat(config or {}) for config in configs if all(configs)]
        )
        """The keys in which configurations differ, with the value of each run; empty where one is
        not known.
        """
        self.tokenizers_differ = any(key.startswith("data.tokenizer.") for key in self.differing)
        """Whether losses per token are of tokens of different kinds."""

    def render(self, width: int | None = None) -> str:
        """The tables as aligned text, in lines of `width` characters (None: of any), and the
        sentences below them.
        """
        return screen(
            __package__,
            "compare.txt",
            comparison=self,
            windows=[history.series("train/loss").last_window for history in self.histories],
            divergences=[
                (row.run, *_divergences(history))
                for history, row in zip(self.histories, self.rows, strict=True)
            ],
            differing=by_class(self.differing),
            most=DIFFERING,
            width=width,
        )

    def write(self, out: Path, width: float | None = None) -> Path:
        """Write `out`: a picture (.png, .svg, .pdf) of this width in inches, the table with a line
        per run (.csv), or everything (.json).

        Raises:
            UserError: the file cannot be written, or its name ends otherwise.
        """
        check_out(out, OUTPUTS)
        if out.suffix.lower() in FIGURES:
            save(self.picture(), width or PICTURE, out)
            return out
        rows = [asdict(row) for row in self.rows]
        if out.suffix.lower() == ".json":
            document = {
                "loss": self.at and self.at[0],
                "step": self.at and self.at[1],
                "differing": self.differing,
                "runs": rows,
                "means": [asdict(figures) for figures in self.means if self.several_seeds],
            }
            text = json.dumps(_strict(document), indent=1, ensure_ascii=False) + "\n"
        else:
            lines = io.StringIO()
            table = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
            text = lines.getvalue()
        write(out, text.encode())
        return out

    @property
    def several_seeds(self) -> bool:
        return len(self.groups) < len(self.histories)

    def picture(self) -> Draw:
        """Curves, gaps to the first, and the recipe of each run over the steps, runs that differ in
        their seed only averaged.
        """
        return curves(self.groups)


def labelled(histories: Sequence[History], labels: Sequence[str]) -> list[str]:
    """The names of runs: their folders', or `labels`, one for each run or for each group of seeds.

    Raises:
        UserError: there are more or fewer labels.
    """
    names = names_of(histories)
    if len(labels) in (0, len(histories)):
        return list(labels) or names
    groups = seed_groups(histories, names)
    if len(labels) != len(groups):
        raise UserError(
            f"labels= names {len(labels)} runs of {len(histories)}: give one for each run, or for "
            "each group of seeds"
        )
    for group, label in zip(groups, labels, strict=True):
        for place in group.places:
            names[place] = label
    return names


def compare(
    runs: Sequence[Path],
    quantised: Callable[[Path], float | None] = lambda run: None,
    labels: Sequence[str] = (),
    baseline: Path | None = None,
) -> Comparison:
    """Run directories side by side, called by the names of their folders.

    Args:
        labels: names in place of those, of each run or of each group of seeds.
        baseline: the one of `runs` that gaps are to; None: the first.

    Raises:
        UserError: one is no run directory or has no metrics yet, they share no step,
            or there are more or fewer labels.
    """
    histories = [read_history(Path(run)) for run in runs]
    names = labelled(histories, labels)
    reference = baseline or runs[0]
    named = zip(histories, names, strict=True)
    first_in_front = sorted(named, key=lambda run: not run[0].path.samefile(reference))
    ordered, ordered_names = zip(*first_in_front, strict=True)
    comparison = Comparison(ordered, ordered_names, quantised)
    if comparison.at is None:
        ranges = ", ".join(
            f"{name} {int(steps[0])} to {int(steps[-1])}"
            for name, history in zip(names, histories, strict=True)
            for steps in [history.series("train/loss").steps]
        )
        raise UserError(f"these runs have no step in common: {ranges}")
    return comparison


def _divergences(history: History) -> tuple[int | None, list[int]]:
    """The step of a divergence that a run ended in (None: in none), and the steps that it went back
    to.
    """
    setbacks = [
        event
        for event in history.events()
        if event.name in ("divergence", "divergence over", "rewind")
    ]
    back = [event.step for event in setbacks if event.name == "rewind"]
    if setbacks and setbacks[-1].name == "divergence":
        return setbacks[-1].step, back
    return None, back


def _cell(value: object) -> object:
    """A cell of a CSV file: a spreadsheet takes text that begins so for a formula, and runs it."""
    if isinstance(value, str) and value.lstrip().startswith(("=", "+", "-", "@")):
        return f"'{value}"
    return value


def _strict(node: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(node, dict):
        return {key: _strict(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_strict(value) for value in node]
    if isinstance(node, float) and not math.isfinite(node):
        return None
    return node


def differing_values(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key → the value of each run, for the keys in which they differ; those of the run itself are
    left out.

    Args:
        configs: full key → value of each run, with the defaults of its classes.
    """
    values_of = {
        key: [config.get(key, ABSENT) for config in configs]
        for key in dict.fromkeys(key for config in configs for key in config)
        if key.partition(".")[0] not in NOT_THE_SAME_RUN
    }
    return {
        key: values
        for key, values in values_of.items()
        if any(value != values[0] for value in values)
    }


def by_class(differing: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """`differing` with sections of several classes by their names or labels alone,
    recipe=NVFP4|BF16.
    """
    several = [key.removesuffix("._target_") for key in differing if key.endswith("._target_")]
    relabelled: dict[str, list[Any]] = {}
    for key, values in differing.items():
        section = next((name for name in several if key.startswith(f"{name}.")), None)
        if section is None:
            relabelled[key] = values
        elif key == f"{section}._target_":
            labels = differing.get(f"{section}.label", [ABSENT] * len(values))
            relabelled[section] = [
                str(kind).rpartition(".")[2] if label in (ABSENT, "") else label
                for kind, label in zip(values, labels, strict=True)
            ]
    return relabelled
