"""RUN/…/rank.png: the gap of every candidate with its intervals, from the best to the worst."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fp4train.lab.analysis.curves import INK, QUIET, new_figure, plain, shortened, style
from fp4train.lab.studies.ranking import Ranking
from fp4train.lab.studies.ranking_text import show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

APART, HERE, ALIKE, OPEN, HIGH = "#d9541e", "#e8a33d", "#1a936f", "#2f6db3", "#b9bec6"
LABEL = 34
"""Characters of a candidate's name."""


def picture(ranking: Ranking) -> Figure:
    """A row per candidate: the gap in the recipe with its 95 % interval (thick) and the interval that holds together
    with those of all other pairs (thin); a tick for each of several checkpoints; forks that spike; below, in grey, the
    gap in high precision."""
    from matplotlib.ticker import MaxNLocator

    ranked = ranking.ranked
    figure = new_figure(9.0, 1.9 + 0.42 * len(ranked))
    axes = figure.subplots()
    colours = {"apart": APART, "here": HERE, "alike": ALIKE, "open": OPEN}
    ends = [0.0]
    for row, entry in enumerate(ranked):
        pair = ranking.against_reference(entry)
        if pair is None:
            axes.plot([0], [row], marker="D", markersize=6, color=INK)
            continue
        colour = colours[pair.verdict]
        gaps = (ranking.gap(entry, "high"), row + 0.26, HIGH, 3.5), (ranking.gap(entry), row, colour, 6.0)
        for found, at, tone, size in gaps:
            low, high = found.interval() or (found.mean, found.mean)
            axes.plot([low, high], [at, at], color=tone, linewidth=size / 2.2, solid_capstyle="butt")
            axes.plot([found.mean], [at], marker="o", markersize=size, color=tone, mec="white", mew=0.6)
            ends += [low, high]
        low, high = pair.together if pair.first == ranking.reference.name else (-pair.together[1], -pair.together[0])
        if math.isfinite(low):
            axes.plot([low, high], [row, row], color=colour, linewidth=0.9, alpha=0.8, zorder=1)
        if len(ranking.bases) > 1:
            each = [at.mean for at in ranking.by_base(entry)]
            axes.plot(each, [row] * len(each), linestyle="", marker="|", markersize=9, color=INK)
            ends += each
        spikes = [f"spikes at {ranking.place(spike.fork)}" for spike in ranking.spikes if spike.entry is entry]
        axes.annotate(
            "\n".join([f"{plain(show(ranking.gap(entry)))}  {ranking.groups[entry.name]}", *map(plain, spikes[:2])]),
            (1.01, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=7.5,
            color=INK,
            annotation_clip=False,
        )
    width = max(ends) - min(ends) or 1e-3
    axes.set_xlim(min(ends) - 0.25 * width, max(ends) + 0.25 * width)
    if ranking.floor is not None and (floor := ranking.floor.interval()) is not None:
        reach = max(map(abs, floor))
        axes.axvspan(-reach, reach, color="#e9ebee", zorder=0, linewidth=0)
    axes.axvline(0, color=QUIET, linewidth=1.0, zorder=1)
    first = ranking.bases[0]
    rate = f"rate {first.settings.lr:.3g} → 0" if first.settings.schedule == "linear" else "own schedule"
    where = (
        f"from step {first.step}, {rate}" if len(ranking.bases) == 1 else f"at each of {len(ranking.bases)} checkpoints"
    )
    style(
        axes,
        f"gap to {plain(shortened(ranking.reference.name, LABEL))} (nats per token): {ranking.per_base} forks of "
        f"{first.settings.steps} steps {where}",
    )
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color="#c9cdd3", linewidth=0.6, alpha=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.set_yticks(range(len(ranked)), [plain(shortened(entry.name, LABEL)) for entry in ranked], fontsize=8)
    axes.set_ylim(len(ranked) - 0.4, -0.6)
    axes.set_xlabel(
        "thick: 95 % interval of this gap alone; thin: of all pairs together; grey below: evaluated in high precision\n"
        "from the reference: orange: told apart, yellow: on these checkpoints, blue: not, green: alike; "
        "band: |FP32 − BF16|; |: each checkpoint",
        fontsize=7.5,
        color=INK,
    )
    return figure
