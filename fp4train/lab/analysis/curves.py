"""RUN/curves.png: the losses of one run with the recipe of every stretch, the learning rate and the gradient norm."""

import io
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np

from fp4train import files
from fp4train.lab.analysis.history import Floats, History, Series, Span, read_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = "curves.png"

UPRIGHT = 44
"""Characters of an upright name that the panel is high enough for."""

INK = "#2b2f36"
QUIET = "#8a8f98"
TRAIN = "#2f6db3"
VALIDATION = "#d9541e"
IN_RECIPE = "#1a936f"
SHADES = ("#dfe9f5", "#fbe7d6", "#dcefe6", "#ece3f4", "#f6e3e6", "#eeeadb")


def draw_curves(run_dir: Path) -> Path:
    """Draw RUN/curves.png from RUN/metrics.jsonl.

    Raises:
        UserError: not a run directory, or nothing logged yet.
    """
    history = read_history(run_dir)
    return save_figure(_figure(history), Path(run_dir) / CURVES)


def new_figure(width: float, height: float) -> "Figure":
    """A figure without pyplot's global state: it needs no display and need not be closed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write a PNG so that a viewer never sees half of it."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    files.write(path, picture.getvalue(), create=True, sync=False)
    return path


def shortened(text: str, room: int) -> str:
    """`text` in at most `room` characters: its start and its end, where names of runs differ."""
    if len(text) <= room:
        return text
    end = min(room // 3, 12)
    return f"{text[: room - end - 1]}…{text[len(text) - end :]}" if room > 3 else ""


def first_words(text: str, room: int) -> str:
    """As many words of `text` as fit into `room` characters; empty if the first does not."""
    label = shorten(text, room, placeholder="…") if room > 1 else ""
    return "" if label == "…" else label


def right_end(last_step: int) -> float:
    """Where the x axis ends: far enough behind the last step that no marker on it is cut."""
    return max(last_step, 1) * 1.012


def style(axes: "Axes", title: str, *, height: float | None = None) -> None:
    """The common style of all panels; `height` is the position of the title, as a share of the panel."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.grid(axis="y", color="#c9cdd3", linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=9, color=INK, loc="left", pad=5, y=height)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.tick_params(colors=INK, labelsize=8, length=3, color=QUIET)


def plain(text: str) -> str:
    """Escape dollar signs, between which matplotlib would typeset mathematics."""
    return text.replace("$", r"\$")


def logarithmic(axes: "Axes", *, fine: bool) -> None:
    """A logarithmic y axis with plain numbers: evenly spaced ones (`fine`), or 1, 2, 5 of each decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(MaxNLocator(9) if fine else LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def shades(spans: list[Span]) -> dict[str, str]:
    """A background colour for each recipe, in order of appearance."""
    recipes = list(dict.fromkeys(span.recipe for span in spans))
    return {recipe: SHADES[i % len(SHADES)] for i, recipe in enumerate(recipes)}


def loss_limits(curves: list[Floats]) -> tuple[float, float] | None:
    """Axis limits that leave out the steep fall of the first steps, which would flatten the rest."""
    finite = [curve[np.isfinite(curve)] for curve in curves]
    finite = [curve for curve in finite if len(curve)]
    if not finite:
        return None
    low = min(float(curve.min()) for curve in finite)
    high = max(float(curve[min(len(curve) - 1, len(curve) // 50) :].max()) for curve in finite)
    margin = 0.03 * (high - low) or 0.05 * abs(high) or 1.0
    # The axis is logarithmic if all losses are positive, and then its lower end must be positive too.
    return max(low - margin, low / 2) if low > 0 else low - margin, high + margin


def gap_limits(gaps: list[Floats]) -> tuple[float, float]:
    """Axis limits that show 0 and all gaps but the outermost hundredth at either end."""
    everything = np.concatenate([*(each[np.isfinite(each)] for each in gaps), [0.0]])
    low, high = np.percentile(everything, [1, 99])
    margin = 0.15 * (high - low) or 1.0
    return min(low, 0.0) - margin, max(high, 0.0) + margin


def _figure(history: History) -> "Figure":
    figure = new_figure(9.0, 6.0)
    grid = figure.add_gridspec(2, 2, height_ratios=(3.2, 1.0))
    loss, rate, norm = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    _draw_loss(loss, history)
    _draw_small(rate, history.series("train/lr"), "learning rate")
    _draw_small(norm, history.series("train/grad_norm"), "gradient norm", log=True)
    spans = history.spans()
    colours = shades(spans)
    for axes in (loss, rate, norm):
        axes.set_xlim(0, right_end(history.last_step))
        if len(spans) > 1:
            for span in spans:
                axes.axvspan(_left(span, spans), span.last, color=colours[span.recipe], alpha=0.45, lw=0, zorder=0)
    _draw_strip(loss, spans, history.last_step)
    _mark_events(loss, history)
    figure.suptitle(plain(shortened(history.name, 44)), x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.text(0.988, 0.978, _summary(history), ha="right", va="top", fontsize=9, color=INK)
    return figure


def _draw_loss(axes: "Axes", history: History) -> None:
    train = history.series("train/loss")
    smooth = train.smoothed()
    dots = len(train) <= 2
    axes.plot(train.steps, train.values, color=TRAIN, alpha=0.28, linewidth=0.8, marker="o" if dots else None)
    axes.plot(smooth.steps, smooth.values, color=TRAIN, linewidth=1.8, label=f"training (mean of {train.window})")
    drawn = [train.values]
    for key, label, colour, line in (
        ("val/loss", "validation, high precision", VALIDATION, "-"),
        ("val/loss_recipe", "validation, in the recipe", IN_RECIPE, "--"),
    ):
        series = history.series(key)
        if len(series):
            marker = "o" if len(series) <= 40 else None
            axes.plot(
                series.steps,
                series.values,
                line,
                color=colour,
                linewidth=1.5,
                marker=marker,
                markersize=3.5,
                label=label,
            )
            drawn.append(series.values)
    style(axes, "loss (nats per token)", height=1.045)
    if all((values[np.isfinite(values)] > 0).all() for values in drawn):
        logarithmic(axes, fine=True)
    axes.set_xlabel("step", fontsize=9, color=INK)
    if limits := loss_limits(drawn):
        axes.set_ylim(*limits)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.045),
        ncols=3,
        fontsize=8.5,
        frameon=False,
        labelcolor=INK,
        borderaxespad=0.2,
        columnspacing=1.4,
    )


def _draw_small(axes: "Axes", series: Series, title: str, *, log: bool = False) -> None:
    style(axes, title)
    if log and (series.values > 0).any():
        logarithmic(axes, fine=False)
    axes.set_xlabel("step", fontsize=9, color=INK)
    if not len(series):
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", fontsize=8, color=QUIET)
        axes.set_yticks([])
        return
    axes.plot(series.steps, series.values, color=INK, linewidth=0.9, marker="o" if len(series) <= 2 else None)


def _left(span: Span, spans: list[Span]) -> int:
    return 0 if span is spans[0] else span.first


def _draw_strip(axes: "Axes", spans: list[Span], last_step: int) -> None:
    """A band above the panel with the recipe of each span; a name wider than its span is written vertically below."""
    colours = shades(spans)
    free = 0.0  # where the next upright name may begin
    for span in spans:
        left, width = _left(span, spans), max(last_step, 1)
        axes.axvspan(left, span.last, 1.005, 1.045, color=colours[span.recipe], lw=0, clip_on=False)
        fits = (span.last - left) > 0.0078 * len(span.recipe) * width
        middle = (left + span.last) / 2
        if not fits and (middle < free or span.last - left < 0.012 * width):
            continue
        if not fits:
            free = middle + 0.02 * width
        axes.text(
            middle,
            1.025 if fits else 0.98,
            plain(span.recipe if fits else shortened(span.recipe, UPRIGHT)),
            transform=axes.get_xaxis_transform(),
            rotation=0 if fits else 90,
            ha="center",
            va="center_baseline" if fits else "top",
            fontsize=7.5,
            color=INK,
        )


def _mark_events(axes: "Axes", history: History) -> None:
    names: dict[int, list[str]] = {}
    for event in history.events():
        if event.name != "recipe":  # the strip shows recipes
            names.setdefault(event.step, []).append(event.name)
    for step, several in names.items():
        axes.axvline(step, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.6, zorder=1)
        axes.annotate(
            plain(" · ".join(dict.fromkeys(several))),
            (step, 0.985),
            xycoords=("data", "axes fraction"),
            xytext=(-2, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            fontsize=7.5,
            color=INK,
            alpha=0.8,
        )


def _summary(history: History) -> str:
    parts = [f"{history.last_step} steps", f"training {history.series('train/loss').smoothed().values[-1]:.4f}"]
    validation = history.series("val/loss")
    if len(validation):
        parts.append(f"validation {validation.values[-1]:.4f}")
    return "   ".join(parts)
