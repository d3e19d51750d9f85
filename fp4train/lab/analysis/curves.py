"""The picture of one run (RUN/curves.png): its losses, the recipe of every stretch, the learning
rate and the gradient norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4train.lab.analysis import figure as look
from fp4train.lab.analysis.figure import Draw, style
from fp4train.lab.analysis.history import Band, History, Series, read_history
from fp4train.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = "curves.png"
UPRIGHT = 44
"""Characters of a line of an upright name that the panel is high enough for."""


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
        figure = look.new_figure(width, 6.0)
        places = figure.add_gridspec(2, 2, height_ratios=(3.2, 1.0))
        loss, rate, norm = (
            figure.add_subplot(place) for place in (places[0, :], places[1, 0], places[1, 1])
        )
        _draw_loss(loss, history)
        _draw_small(rate, history.series("train/lr"), "learning rate")
        _draw_small(norm, history.series("train/grad_norm"), "gradient norm", log=True)
        bands = history.bands()
        grounds = look.shades(recipe for *_, recipe in bands)
        for axes in (loss, rate, norm):
            axes.set_xlim(0, look.right_end(history.last_step))
            if len(bands) < 2:
                continue
            for start, stop, recipe in bands:
                axes.axvspan(start, stop, alpha=0.45, lw=0, zorder=0, **grounds[recipe].fill)
        unnamed = _draw_strip(loss, bands, grounds, max(history.last_step, 1), width)
        look.legend_of_recipes(figure, unnamed, int(width * look.CHARACTERS))
        _mark_events(loss, history)
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
    look.loss_axis(axes, "loss (nats per token)", drawn, height=1.045)
    axes.set_xlabel("step", fontsize=9)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.045),
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


def _draw_strip(
    axes: Axes, bands: Sequence[Band], grounds: Mapping[str, look.Shade], last: int, width: float
) -> dict[str, look.Shade]:
    """Draw a band above the panel with the recipe of each span; return the recipes that it names
    nowhere.

    A name that is wider than its span stands upright below it, where the span has room for its
    lines.
    """
    inches = (width - look.BESIDE) / look.right_end(last)
    free = 0.0  # where the next upright name may begin
    named = set()
    for start, stop, recipe in bands:
        axes.axvspan(start, stop, 1.005, 1.045, lw=0, clip_on=False, **grounds[recipe].fill)
        middle = (start + stop) / 2
        place: Any = {"transform": axes.get_xaxis_transform(), "ha": "center", **look.LABEL}
        if look.inches_of(recipe) <= (stop - start) * inches:
            axes.text(middle, 1.025, recipe, va="center_baseline", **place)
            named.add(recipe)
            continue
        lines = look.name_lines(recipe, UPRIGHT).split("\n")
        reach = look.height_of(len(lines)) / inches / 2
        if middle - reach < max(free, start - 0.01 * last) or middle + reach > stop + 0.01 * last:
            continue
        free = middle + reach
        axes.text(middle, 0.98, "\n".join(lines), rotation=90, va="top", **place)
        named.add(recipe)
    return {recipe: shade for recipe, shade in grounds.items() if recipe not in named}


def _mark_events(axes: Axes, history: History) -> None:
    names: dict[int, list[str]] = {}
    for event in history.events():
        if event.name != "recipe":  # the strip shows recipes
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
