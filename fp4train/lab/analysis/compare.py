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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp4train import files
from fp4train.config.binding import complete, flattened
from fp4train.config.schema import Config
from fp4train.errors import UserError, reason, user_errors
from fp4train.lab.analysis.curves import INSIDE, Curve, Losses, RecipeRow, one_run, over_steps
from fp4train.lab.analysis.figure import FIGURES, PICTURE, Draw, check_out, save
from fp4train.lab.analysis.history import (
    NOT_THE_SAME_RUN,
    History,
    Series,
    common_step,
    configuration,
    names_of,
    read_history,
    seed_groups,
)
from fp4train.text import screen, table_width, tabulate

COMPARISON = "compare.png"
OUTPUTS = (*FIGURES, ".csv", ".json")
WITH_LEGEND = 11.5
"""Inches of the picture where the legend stands beside the panels."""
ABSENT = "-"
"""The value of a key that a configuration does not have."""
DIFFERING = 12
"""Keys that are listed where configurations differ."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run. Losses in nats per token; None where a run logged no such thing.

    Args:
        recipe: recipes in order of appearance.
        quantised: share of the linear layers' multiply-adds that were quantised, over the steps;
            None: not known.
        train_loss: smoothed loss at the run's last step.
        val_loss, best_val_loss: last and lowest validation loss, in high precision.
        gap: relative gap to the first run at `Comparison.step`; None for the first run.
        tokens_per_s: median over the run.
    """

    name: str
    recipe: str
    quantised: float | None
    steps: int
    train_loss: float
    val_loss: float | None
    best_val_loss: float | None
    gap: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class SeedMean:
    """Runs that differ in run.seed only.

    Args:
        runs, seeds: names of the runs and their seeds.
        train_loss, loss: mean and standard deviation (of the sample, n − 1) of the smoothed
            training loss at the end, and of the loss that gaps are of at `Comparison.step`; the
            deviation of a single run is None.
        gap: relative gap of the mean loss to that of the first run's group; None for that group.
    """

    name: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    train_loss: tuple[float, float | None]
    loss: tuple[float, float | None]
    gap: float | None


class Comparison:
    """Run directories side by side; the first is the reference.

    Args:
        quantised: the share of a run's multiply-adds that were quantised; None: not known.

    Raises:
        UserError: one is not a run directory or has no metrics yet, or they share no step.
    """

    def __init__(self, runs: Sequence[Path], quantised: Callable[[Path], float | None]) -> None:
        self.histories = histories = [read_history(Path(run)) for run in runs]
        self.key, self.step = common_step(histories)
        """The loss that the gap is of, ``val/loss`` or ``train/loss``, and the step that it is
        at.
        """
        losses = [_at(history, self.key, self.step) for history in histories]
        gaps = [
            loss / losses[0] - 1 if index and losses[0] else None
            for index, loss in enumerate(losses)
        ]
        self.rows = [
            _summary(history, name, gap, quantised(history.path))
            for history, name, gap in zip(histories, names_of(histories), gaps, strict=True)
        ]
        self.means = _means(histories, self.rows, losses)
        """Means of the seeds, one per group of runs, if any group has several."""
        self.differing = _differing([configuration(history) for history in histories])
        """The keys in which configurations differ, with the value of each run; empty where one is
        not known.
        """

    @property
    def averaged(self) -> str:
        """The steps that the training losses of the table are the means of, in words."""
        windows = [history.series("train/loss").last_window for history in self.histories]
        least = min(windows)
        most = max(windows)
        if most == 1:
            return "the last step"
        if least == most:
            return f"mean of the last {most} steps"
        return f"mean of the last {least} to {most} steps"

    def render(self, width: int | None = None) -> str:
        """The tables as aligned text, in lines of `width` characters (None: of any), and the
        sentences below them.
        """
        header = [
            "run",
            "recipe",
            "quantised",
            "steps",
            "train loss",
            "val loss",
            "best",
            "gap",
            "tokens/s",
        ]
        cells = [
            [
                row.name,
                row.recipe or "-",
                "nothing" if row.quantised == 0 else _number(row.quantised, ".0%"),
                str(row.steps),
                _number(row.train_loss, ".4f"),
                _number(row.val_loss, ".4f"),
                _number(row.best_val_loss, ".4f"),
                _number(row.gap, "+.2%"),
                _number(row.tokens_per_s, ",.0f"),
            ]
            for row in self.rows
        ]
        rows = [header, *cells]
        recipes: list[str] = []
        # the recipes then have lines of their own
        if width is not None and table_width(rows) > width:
            recipes = tabulate([row[:2] for row in rows], width=width)
            rows = [[row[0], *row[2:]] for row in rows]
        if self.key == "val/loss":
            of = "validation loss"
        else:
            of = "training loss"
        means = self._means_of(of, width) if self.means else []
        return screen(
            __package__,
            "compare.txt",
            comparison=self,
            of=of,
            table=tabulate(rows, right=range(1 if recipes else 2, len(header)), width=width),
            recipes=recipes,
            divergences=[
                (row.name, *_divergences(history))
                for history, row in zip(self.histories, self.rows, strict=True)
            ],
            differing=[
                f"{key}={'|'.join(map(str, values))}"
                for key, values in _by_class(self.differing).items()
            ],
            most=DIFFERING,
            means=means,
        )

    def _means_of(self, of: str, width: int | None) -> list[str]:
        header = ["mean over seeds", "seeds", "train loss", f"{of} at step {self.step}", "gap"]
        cells = [
            [
                mean.name,
                " ".join(map(str, mean.seeds)),
                _with_deviation(mean.train_loss),
                _with_deviation(mean.loss),
                _number(mean.gap, "+.2%"),
            ]
            for mean in self.means
        ]
        return tabulate([header, *cells], right=(len(header) - 1,), width=width)

    def write(self, out: Path, width: float | None = None) -> Path:
        """Write `out`: a picture (.png, .svg, .pdf) of this width in inches, the table with a line
        per run (.csv), or everything (.json).

        Raises:
            UserError: the file cannot be written, or its name ends otherwise.
        """
        check_out(out, OUTPUTS)
        if out.suffix.lower() in FIGURES:
            return self.draw(out, width)
        rows = [
            {"run": row.name, **{k: v for k, v in asdict(row).items() if k != "name"}}
            for row in self.rows
        ]
        if out.suffix.lower() == ".json":
            document = {
                "loss": self.key,
                "step": self.step,
                "differing": self.differing,
                "runs": rows,
                "means": [asdict(m) for m in self.means],
            }
            text = json.dumps(_strict(document), indent=1, ensure_ascii=False) + "\n"
        else:
            lines = io.StringIO()
            table = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
            text = lines.getvalue()
        with user_errors(OSError, before=f"{out} cannot be written: ", message=reason):
            files.write(out, text.encode(), sync=False)
        return out

    def draw(self, out: Path | None = None, width: float | None = None) -> Path:
        """Draw curves, gap and recipes; to compare.png in the first run directory, or to `out`.

        Raises:
            UserError: the file cannot be written.
        """
        if out is not None:
            path = Path(out)
        else:
            path = self.histories[0].path / COMPARISON
        default_width = PICTURE if len(self.rows) <= INSIDE else WITH_LEGEND
        with user_errors(OSError, before=f"{path} cannot be written: ", message=reason):
            save(self.picture(), width or default_width, path)
        return path

    def picture(self) -> Draw:
        """Curves, gaps to the first run, and the recipe of each run over the steps; of one run its
        own curves.
        """
        if len(self.histories) == 1:
            return one_run(self.histories[0])
        pairs = [
            (history.loss("train/loss"), history.loss("val/loss")) for history in self.histories
        ]
        train_reference, validation_reference = pairs[0]
        gaps = [
            [_gap(train, train_reference), _gap(validation, validation_reference)]
            for train, validation in pairs[1:]
        ]
        losses = [
            Losses(
                name=row.name,
                train=Curve.of(train),
                validation=Curve.of(validation),
                gaps=gaps_of_run,
            )
            for row, (train, validation), gaps_of_run in zip(
                self.rows, pairs, [[], *gaps], strict=True
            )
        ]
        rows = [
            RecipeRow(label=row.name, index=index, bands=history.bands(), done=row.steps)
            for index, (history, row) in enumerate(zip(self.histories, self.rows, strict=True))
        ]
        return over_steps(losses, rows, named=True)


def compare(
    runs: Sequence[Path], quantised: Callable[[Path], float | None] = lambda run: None
) -> Comparison:
    """`Comparison`, of one run at least."""
    if not runs:
        raise UserError("compare needs run directories: fp4train compare RUN RUN...")
    return Comparison(runs, quantised)


def _divergences(history: History) -> tuple[int | None, list[int]]:
    """The step of a divergence that a run ended in (None: in none), and the steps that it went back
    to.
    """
    setbacks = [
        event
        for event in history.events()
        if event.name in ("divergence", "divergence over", "rewind")
    ]
    back = [event.step - 1 for event in setbacks if event.name == "rewind"]
    if setbacks and setbacks[-1].name == "divergence":
        return setbacks[-1].step, back
    return None, back


def _summary(history: History, name: str, gap: float | None, quantised: float | None) -> RunSummary:
    validation = history.series("val/loss")
    speed = history.series("perf/tokens_per_s")
    finite = validation.values[np.isfinite(validation.values)]
    return RunSummary(
        name=name,
        recipe=" → ".join(recipe for *_, recipe in history.bands()),
        quantised=quantised,
        steps=history.last_step,
        train_loss=float(history.loss("train/loss").values[-1]),
        val_loss=float(validation.values[-1]) if len(validation) else None,
        best_val_loss=float(finite.min()) if len(finite) else None,
        gap=gap,
        tokens_per_s=float(np.median(speed.values)) if len(speed) else None,
    )


def _differing(configs: list[dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Key → the value of each run, for the keys in which they differ; those of the run itself are
    left out.

    A key that a configuration leaves to its class has the default of the class.
    """
    configurations = [config for config in configs if config is not None]
    if len(configurations) < len(configs):
        return {}
    keys = dict.fromkeys(key for config in configurations for key in _flat(config))
    flat = [_flat(_completed(config)) | _flat(config) for config in configurations]
    values_of = {key: [values.get(key, ABSENT) for values in flat] for key in keys}
    return {
        key: values
        for key, values in values_of.items()
        if any(value != values[0] for value in values)
    }


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Values by their full keys, without the sections in which runs of one configuration may
    differ.
    """
    return flattened({key: value for key, value in config.items() if key not in NOT_THE_SAME_RUN})


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of its classes; as it is where a class is not at hand, as
    of a plugin.
    """
    try:
        completed = complete(config, Config)
    except UserError:
        return config
    if isinstance(completed, dict):
        return dict(completed)
    return config


def _by_class(differing: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """`differing` with sections of several classes by their names or labels, recipe=NVFP4|BF16.

    Keys in such a section that some runs lack are left out where the others agree on them.
    """
    sections = {
        key.removesuffix("_target_"): values
        for key, values in differing.items()
        if key.endswith("._target_") and len(_present(values)) > 1
    }
    relabelled: dict[str, list[Any]] = {}
    for section, values in sections.items():
        labels = differing.get(f"{section}label", [ABSENT] * len(values))
        classes = [str(value).rpartition(".")[2] for value in values]
        relabelled[section.removesuffix(".")] = [
            name if label in (ABSENT, "") else label
            for name, label in zip(classes, labels, strict=True)
        ]
    for key, values in differing.items():
        named = key.endswith("._target_") or (
            f"{key.rpartition('.')[0]}.label" == key and key[:-5] in sections
        )
        agreed = ABSENT in values and len(_present(values)) < 2 and key.startswith(tuple(sections))
        if not named and not agreed:
            relabelled[key] = values
    return relabelled


def _present(values: list[Any]) -> list[Any]:
    """The different values among those that are there."""
    different: list[Any] = []
    for value in values:
        if value != ABSENT and value not in different:
            different.append(value)
    return different


def _means(histories: list[History], rows: list[RunSummary], losses: list[float]) -> list[SeedMean]:
    """One per group of seeds; none if all are single."""
    groups = seed_groups(histories)
    if all(len(group) < 2 for group in groups):
        return []
    means: list[SeedMean] = []
    for group in groups:
        members = list(group.values())
        loss = _mean([losses[i] for i in members])
        reference = means[0].loss[0] if means else 0.0
        means.append(
            SeedMean(
                name=rows[members[0]].name,
                runs=tuple(rows[i].name for i in members),
                seeds=tuple(group),
                train_loss=_mean([rows[i].train_loss for i in members]),
                loss=loss,
                gap=loss[0] / reference - 1 if reference else None,
            )
        )
    return means


def _mean(values: list[float]) -> tuple[float, float | None]:
    """Mean and standard deviation; a single value has no deviation."""
    if len(values) > 1:
        deviation = float(np.std(values, ddof=1))
    else:
        deviation = None
    return float(np.mean(values)), deviation


def _with_deviation(value: tuple[float, float | None]) -> str:
    mean, deviation = value
    return f"{mean:.4f} ± {_number(deviation, '.4f')}"


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


def _gap(series: Series, reference: Series) -> Curve:
    """The relative gap in per cent, at the steps that both have."""
    steps = np.intersect1d(series.steps, reference.steps)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Curve.of(
            Series(steps=steps, values=100 * (series.at(steps) / reference.at(steps) - 1))
        )


def _at(history: History, key: str, step: int) -> float:
    return float(history.loss(key).at(np.array([step]))[0])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
