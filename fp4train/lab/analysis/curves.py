"""The picture of one run (RUN/curves.png): its losses, the recipe of every stretch, the learning
rate and the gradient norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp4train.lab.analysis import figure as look
from fp4train.lab.analysis.figure import Draw, style
from fp4train.lab.analysis.history import ROUTINE, History, Series, read_history
from fp4train.lab.analysis.over_steps import RecipeRow, RecipeStrip
from fp4train.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = "curves.png"
LOSS = 3.9
SMALL = 1.25
"""Inches of the panel of losses, and of those of the learning rate and the gradient norm."""


def draw_curves(run_dir: Path) -> Path:
    """Draw RUN/curves.png from RUN/metrics.jsonl.

    Raises:
        UserError: not a run directory, or nothing logged yet.
    """
    history = read_history(run_dir)
    path = Path(run_dir) / CURVES
    look.save(one_run(history), look.PICTURE, path)
    return path


def one_run(history: History) -> Draw:
    """The losses of one run with the recipe of every stretch, the learning rate and the gradient
    norm.
    """

    def draw(width: float) -> Figure:
        bands = history.bands()
        row = RecipeRow(label="", index=0, bands=bands, done=history.last_step)
        strip = RecipeStrip([row], width, history.last_step)
        heights = (LOSS, strip.height, SMALL)
        figure = look.new_figure(width, sum(heights) + 0.7)
        panels = figure.subplot_mosaic(
            [["loss", "loss"], ["strip", "strip"], ["rate", "norm"]], height_ratios=heights
        )
        _draw_loss(panels["loss"], history)
        panels["loss"].tick_params(labelbottom=False)
        strip.draw(panels["strip"])
        _draw_small(panels["rate"], history.series("train/lr"), "learning rate")
        _draw_small(panels["norm"], history.series("train/grad_norm"), "gradient norm", log=True)
        for name, axes in panels.items():
            axes.set_xlim(0, look.right_end(history.last_step))
            if len(bands) < 2 or name == "strip":
                continue
            for start, stop, recipe in bands:
                axes.axvspan(start, stop, alpha=0.45, lw=0, zorder=0, **strip.shades[recipe].fill)
        look.legend_of_recipes(figure, strip.unnamed, int(width * look.CHARACTERS))
        _mark_events(panels["loss"], history)
        title = look.name_lines(history.name, 44)
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        figure.text(0.988, 0.978, _summary(history), ha="right", va="top", fontsize=9)
        return figure

    return draw


def _draw_loss(axes: Axes, history: History) -> None:
    train = history.series("train/loss")
    smooth = train.smoothed()
    marker = "o" if len(train) <= 2 else None
    axes.plot(train.steps, train.values, color=look.TRAIN, alpha=0.28, linewidth=0.8, marker=marker)
    axes.plot(smooth.steps, smooth.values, color=look.TRAIN, linewidth=1.8, label=smoothing(train))
    drawn = [train.values]
    for key, label, colour, line in (
        ("val/loss", "validation, high precision", look.INK, "-"),
        ("val/loss_recipe", "validation, in the recipe", look.QUIET, "--"),
    ):
        series = history.series(key)
        if len(series):
            marker = "o" if len(series) <= 40 else None
            axes.plot(
                series.steps,
                series.values,
                line,
                color=colour,
                lw=1.5,
                marker=marker,
                ms=3.5,
                label=label,
            )
            drawn.append(series.values)
    look.loss_axis(axes, "loss (nats per token)", drawn)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=3,
        fontsize=7.5,
        borderaxespad=0.2,
        columnspacing=1.4,
    )


def smoothing(train: Series) -> str:
    """What the line of training losses is."""
    return f"training, smoothed: the last tenth of the steps, at most {train.window}"


def _draw_small(axes: Axes, series: Series, title: str, *, log: bool = False) -> None:
    style(axes, title)
    if log and (series.values > 0).any():
        look.logarithmic(axes, fine=False)
    axes.set_xlabel("step", fontsize=9)
    if not len(series):
        axes.text(
            0.5,
            0.5,
            "not logged",
            transform=axes.transAxes,
            ha="center",
            va="center",
            fontsize=8,
            color=look.QUIET,
        )
        axes.set_yticks([])
        return
    axes.plot(
        series.steps,
        series.values,
        color=look.INK,
        linewidth=0.9,
        marker="o" if len(series) <= 2 else None,
    )


def _mark_events(axes: Axes, history: History) -> None:
    names: dict[int, list[str]] = {}
    for event in history.events():
        if event.name not in ("recipe", *ROUTINE):  # the strip shows recipes
            names.setdefault(event.step, []).append(event.name)
    for step, several in names.items():
        axes.axvline(
            step, color=look.INK, linewidth=0.9, linestyle=look.DASHED, alpha=0.6, zorder=1
        )
        axes.annotate(
            " · ".join(dict.fromkeys(several)),
            (step, 0.985),
            xycoords=("data", "axes fraction"),
            xytext=(-2, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            alpha=0.8,
            **look.LABEL,
        )


def _summary(history: History) -> str:
    parts = [
        counted(history.last_step, "step"),
        f"training {history.loss('train/loss').values[-1]:.4f}",
    ]
    validation = history.series("val/loss")
    if len(validation):
        parts.append(f"validation {validation.values[-1]:.4f}")
    return "   ".join(parts)
