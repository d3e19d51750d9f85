"""The pictures of studies, drawn from their results: damage by part and what sparing layers buys;
gaps of a ranking.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4train.lab.analysis import Draw, figure as look
from fp4train.lab.analysis.figure import Panel
from fp4train.lab.analysis.heatmap import heat_map
from fp4train.lab.intervals import Estimate
from fp4train.lab.studies.parts import LAYER
from fp4train.lab.studies.results import CandidateResult, RankResult, SensitivityResult
from fp4train.text import counted, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPAN = 1e-3
"""The least damage on the scale of a map, as a share of the largest."""
VERDICTS = {
    "different": (look.VALIDATION, "told apart from the reference"),
    "here": ("#e8a33d", "told apart on these checkpoints alone"),
    "alike": (look.IN_RECIPE, "alike: the difference is smaller than the margin"),
}
"""The colour of a verdict, and what it means."""
OPEN = (look.TRAIN, "not told apart")
HIGH = "#b9bec6"
CHECKPOINT: Any = {"ls": "", "marker": "|", "ms": 9, "color": look.INK}
REFERENCE: Any = {"ls": "", "marker": "D", "ms": 6, "color": look.INK}
"""The marks of a gap at one checkpoint, and of the reference."""
CANDIDATE = 34
ABOVE = 24
"""Characters of a line of a candidate's name, and of a name above its gap."""


def sensitivity(study: SensitivityResult) -> Draw:
    """Damage of every layer alone, and what sparing layers buys."""
    points = Panel(
        title="nMSE left: points predicted, diamond measured",
        height=2.0,
        paint=lambda axes: _points(axes, study),
    )
    title = f"{study.name}, step {study.step}: {study.recipe}, nMSE of the gradient above the floor"
    return look.picture([[_damage(study)], [points]], title)


def _damage(study: SensitivityResult) -> Panel:
    """Blocks × the layers of a block."""
    damage = {
        _block_and_rest(part.what): part.nmse.mean - study.floor for part in study.of_kind(LAYER)
    }
    rows = list(dict.fromkeys(row for row, _ in damage))
    columns = list(dict.fromkeys(column for _, column in damage))
    values = np.full((len(rows), len(columns)), np.nan)
    for (row, column), value in damage.items():
        values[rows.index(row), columns.index(column)] = value
    largest = max([1e-12, *values[np.isfinite(values)].tolist()])
    scale = {"cmap": "YlOrRd", "norm": "log", "vmin": largest * SPAN, "vmax": largest}
    shown = np.clip(values, largest * SPAN, None)
    return heat_map("one layer at a time", shown, rows, columns, scale, label="")


def _block_and_rest(layer: str) -> tuple[str, str]:
    """ "blocks.0.mlp.up" → "blocks.0", "mlp.up"; a layer outside of blocks is a row of its own."""
    match = re.fullmatch(r"(.*?\.\d+)\.(.+)", layer)
    return (match[1], match[2]) if match else (layer, "all")


def _points(axes: Axes, study: SensitivityResult) -> None:
    *costs, cost = (100 * point.macs for point in (*study.pareto, study.policy))
    axes.set_xlabel("multiply-adds kept in high precision, %")
    nmse = [point.nmse for point in study.pareto]
    axes.plot(costs, nmse, color=look.TRAIN, lw=1.4, marker="o", ms=3)
    measured = study.policy.measured.nmse
    half = measured.half_width() or 0.0
    shape: Any = {"color": look.VALIDATION, "marker": "D", "ms": 4, "capsize": 3}
    axes.errorbar([cost], [measured.mean], yerr=[half], **shape)
    look.few_ticks(axes, 5)
    axes.set_ylim(bottom=0)


def ranking(study: RankResult) -> Draw:
    """A row per candidate: the gap in the recipe with its 95 % interval (thick) and the interval
    that holds together with those of all other pairs (thin); a tick for each of several
    checkpoints; below, in grey, the gap in high precision; behind them the floor of the noise.
    """
    shown = [candidate for candidate in study.results if not candidate.diverged]
    forks = f"{counted(study.forks, 'fork')} of {counted(study.steps, 'step')}"
    panel = Panel(
        title=f"gap to {study.reference}: {forks} {study.where}",
        height=0.9 + 0.42 * len(shown),
        paint=lambda axes: _gaps(axes, study, shown),
    )
    return look.picture([[panel]])


def _gaps(axes: Axes, study: RankResult, shown: Sequence[CandidateResult]) -> None:
    floor = study.floor and study.floor.interval()
    if floor:
        far = max(map(abs, floor))
        meaning = "floor of the noise, |FP32 − BF16|"
        axes.axvspan(-far, far, color=look.LINE, alpha=0.4, zorder=0, lw=0, label=meaning)
    axes.axvline(0, color=look.QUIET, lw=1.0, zorder=1)
    narrow = look.inches_wide(axes) < look.NARROW
    beside: Any = {"va": "center", "fontsize": 7.5, "annotation_clip": False}
    beside["xycoords"] = ("axes fraction", "data")
    for row, candidate in enumerate(shown):
        if narrow:
            axes.annotate(shortened(candidate.name, ABOVE), (0, row - 0.3), **beside)
        if candidate.gap is None:
            axes.plot([0], [row], label="the reference", **REFERENCE)
            continue
        colour, verdict = VERDICTS.get(candidate.verdict or "", OPEN)
        _gap(axes, row, candidate.gap, 6.0, color=colour, label=f"gap, 95% interval: {verdict}")
        if candidate.simultaneous is not None:
            together: Any = {"lw": 0.9, "zorder": 1, "label": "95% interval of all pairs together"}
            axes.plot(candidate.simultaneous, [row, row], color=colour, **together)
        if candidate.gap_high is not None:
            _gap(axes, row + 0.26, candidate.gap_high, 3.5, color=HIGH, label="in high precision")
        if len(candidate.gaps) > 1:
            rows = [row] * len(candidate.gaps)
            axes.plot(candidate.gaps, rows, label="one checkpoint", **CHECKPOINT)
        numbers = f"{candidate.gap.show('+.5f', ' ± –')}  {candidate.group or ''}"
        if narrow:
            axes.annotate(numbers, (1, row - 0.3), ha="right", **beside)
        else:
            axes.annotate(numbers, (1.01, row), **beside)
    axes.margins(x=0.1)
    names = ["" if narrow else look.name_lines(c.name, CANDIDATE) for c in shown]
    look.name_rows(axes, names, ticks=7)
    axes.set_xlabel("nats per token")


def _gap(axes: Axes, row: float, gap: Estimate, size: float, **shape: Any) -> None:
    """A gap as a dot of so many points, on its interval."""
    ends = gap.interval() or (gap.mean, gap.mean)
    axes.plot(ends, [row, row], lw=size / 2.2, solid_capstyle="butt", **shape)
    axes.plot([gap.mean], [row], marker="o", ms=size, mec="white", mew=0.6, color=shape["color"])
