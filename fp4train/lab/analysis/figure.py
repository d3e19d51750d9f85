"""What all pictures share: colours, look and limits, and the one way in which a picture is drawn.

A picture is a grid of panels (`picture`). A panel paints its own axes; whatever it labels is named
in one legend below them all, so that no words lie on what is drawn. A picture is a function of its
width in inches: one description serves the file beside a run, a column of a paper, and a report.
Text stays text: in SVG it can be selected and searched.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from fp4train import files
from fp4train.config.command_line import Within
from fp4train.errors import UserError, reason, user_errors
from fp4train.lab.analysis.history import Floats
from fp4train.text import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = 9.0
"""Inches of a picture, unless another width is asked for."""
NARROW = 5.0
"""Inches below which names stand above what they name, as in a column of a paper."""
Width = Annotated[float, Within(3, "a number of inches, from 3 to 30", most=30)]
"""Inches of a file, where they are an option."""
FIGURES = (".png", ".svg", ".pdf")
"""Endings of the files that a picture is written to."""

INK = "#2b2f36"
QUIET = "#8a8f98"
LINE = "#c9cdd3"
TRAIN = "#2f6db3"
VALIDATION = "#d9541e"
IN_RECIPE = "#1a936f"
COLOURS = (TRAIN, VALIDATION, IN_RECIPE, "#8b5fbf", "#c43d6b", "#7a6a1f", "#3b3f46", "#17a2b8")
LINES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
"""Each colour comes in each of these, so that 32 runs can be told apart."""
SHADES = ("#eceef1", "#d3d8de", "#e9e2d3", "#bdc4cd", "#d3c8b2", "#a9b1bb")
HATCHES = ("", "////", "----", "xxxx")
"""Each shade comes with each of these, so that 24 recipes can be told apart."""
DASHED = (0, (4, 3))
"""The look of lines at single steps."""
LONGEST = 240
"""Characters of a name, of which a longer one has its start and its end."""
CHARACTERS = 12
"""Characters of words in an inch."""
LEADING = 0.17
"""Inches of a line of words."""
MARGIN = 0.5
"""Inches of a panel's width that its title does not have."""
EVEN = 20.0
"""Ratio of the ends of a logarithmic axis up to which evenly spaced numbers do not run together."""

Draw = Callable[[float], "Figure"]
"""Draws a picture of this width in inches."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A part of a picture that has axes of its own.

    Args:
        height: inches.
        paint: draws into the axes, which have the common style.
    """

    title: str
    height: float
    paint: Callable[[Axes], None]


def picture(rows: Sequence[Sequence[Panel]], title: str = "") -> Draw:
    """Rows of panels, those of a row equally wide, above a legend of all that has a label."""
    columns = math.lcm(*map(len, rows))

    def draw(width: float) -> Figure:
        titles = [
            [name_lines(panel.title, _room(width / len(row) - MARGIN)) for panel in row]
            for row in rows
        ]
        heights = [
            max(
                panel.height + LEADING * text.count("\n")
                for panel, text in zip(row, texts, strict=True)
            )
            for row, texts in zip(rows, titles, strict=True)
        ]
        above = name_lines(title, _room(0.8 * width))
        figure = new_figure(
            width, sum(heights) + 2 * LEADING * bool(title) + LEADING * above.count("\n")
        )
        grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
        for line, row in enumerate(rows):
            span = columns // len(row)
            for place, panel in enumerate(row):
                axes = figure.add_subplot(grid[line, place * span : (place + 1) * span])
                style(axes, titles[line][place])
                panel.paint(axes)
        if title:
            figure.suptitle(above, x=0.012, ha="left", fontsize=10, fontweight="bold")
        _legend(figure)
        return figure

    return draw


def _room(inches: float) -> int:
    """Characters of a title, or of a legend with its samples, in so many inches."""
    return int(inches * CHARACTERS)


def _legend(figure: Figure) -> None:
    """Name what has a label, below the panels; the picture grows by it."""
    width, height = figure.get_size_inches()
    room = _room(width)
    handles: dict[tuple[str, type], Any] = {}  # a curve may be called as a recipe is
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault((name_lines(label, room - 6), type(handle)), handle)
    if not handles:
        return
    labels = [label for label, _ in handles]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(len(handles), room // (longest + 6)))
    lines = sum(1 + label.count("\n") for label in labels) / columns
    figure.set_size_inches(width, height + LEADING * (1 + math.ceil(lines)))
    figure.legend(
        list(handles.values()),
        labels,
        loc="outside lower left",
        ncols=columns,
        fontsize=7.5,
        handlelength=2.4,
    )


def new_figure(width: float, height: float) -> Figure:
    """A figure without pyplot's global state: it needs no display and need not be closed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def write(path: Path, contents: bytes) -> None:
    """Write a file so that a viewer never sees half of it.

    Raises:
        UserError: it cannot be written.
    """
    with user_errors(OSError, before=f"{path} cannot be written: ", message=reason):
        files.write(path, contents, create=True, sync=False)


def save(draw: Draw, width: float, *paths: Path) -> None:
    """Write a picture to files, each in the format that its name ends in; see `write`."""
    for path in paths:
        write(path, rendered(draw, width, path.suffix.lower()))


def rendered(draw: Draw, width: float, ending: str) -> bytes:
    """A picture as the bytes of a file of one of `FIGURES`; the same one gives the same bytes.

    Raises:
        UserError: matplotlib is not installed.
    """
    contents = io.BytesIO()
    undated = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}}.get(ending)
    with warnings.catch_warnings(), common_look():
        # the font that matplotlib measures with lacks a letter of a name; a browser finds one
        warnings.simplefilter("ignore")
        draw(width).savefig(contents, format=ending.removeprefix("."), metadata=undated)
    return contents.getvalue()


@contextmanager
def common_look() -> Iterator[None]:
    """The common look of all pictures."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UserError("figures need matplotlib: pip install matplotlib") from error
    with (
        resources.as_file(resources.files(__package__) / "figure.mplstyle") as file,
        matplotlib.rc_context(fname=file),
    ):
        yield


def check_out(out: Path, endings: Sequence[str]) -> None:
    """Refuse a file that cannot be written, before anything is read.

    Raises:
        UserError: its name ends otherwise, or there is no such folder.
    """
    if out.suffix.lower() not in endings:
        raise UserError(
            f"out={out if out.name else ''}: the name must end in {' or '.join(endings)}"
        )
    if not out.parent.is_dir():
        raise UserError(f"out={out}: there is no folder {out.parent}")
    if out.is_dir():
        raise UserError(f"out={out} is a folder; name a file in it")


def plain(text: object, limit: int) -> str:
    """`text` on one line, at most `limit` characters, of which each can be seen."""
    return shortened(printable(str(text), kept=""), limit)


def name_lines(name: str, room: int) -> str:
    """A name in lines of at most `room` characters: the whole of it, up to `LONGEST` characters."""
    return textwrap.fill(plain(name, LONGEST), room)


def colour_of(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def line_of(index: int) -> Any:
    return LINES[index // len(COLOURS) % len(LINES)]


def grounds(recipes: Iterable[str]) -> dict[str, Any]:
    """How matplotlib fills the ground of each recipe, in order of appearance: a shade and a
    pattern. None has the colour of a run.
    """
    different = dict.fromkeys(recipes)
    return {
        recipe: {
            "facecolor": SHADES[i % len(SHADES)],
            "hatch": HATCHES[i // len(SHADES) % len(HATCHES)],
            "edgecolor": LINE,
        }
        for i, recipe in enumerate(different)
    }


def style(axes: Axes, title: str) -> None:
    """The common style of all panels."""
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left")
    few_ticks(axes, 10, integer=True)


def few_ticks(axes: Axes, count: int, **options: Any) -> None:
    """Set at most `count` ticks along x, fewer in a narrow panel."""
    from matplotlib.ticker import MaxNLocator

    inches = axes.get_window_extent().width / axes.figure.dpi
    axes.xaxis.set_major_locator(MaxNLocator(max(2, min(count, int(2 * inches))), **options))


def inches_wide(axes: Axes) -> float:
    """Width of the picture that the axes are in."""
    return float(axes.figure.bbox.width / axes.figure.dpi)


def name_rows(axes: Axes, names: Sequence[str], *, ticks: int, integer: bool = False) -> None:
    """A row per name, the first one at the top, and values along x."""
    axes.grid(visible=False)
    axes.grid(axis="x")
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)
    few_ticks(axes, ticks, integer=integer)


def logarithmic(axes: Axes, low: float, high: float, even: float = EVEN) -> None:
    """A logarithmic y axis for values from `low` to `high`, with plain numbers, evenly spaced where
    the ratio of the ends is at most `even`.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_yscale("log")
    if high <= even * low:
        inches = axes.get_window_extent().height / axes.figure.dpi
        axes.yaxis.set_major_locator(MaxNLocator(max(3, min(9, int(4 * inches)))))
    else:
        subs = (1.0, 2.0, 5.0) if high <= 1000 * low else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def loss_axis(axes: Axes, curves: Sequence[Floats]) -> None:
    """The y axis of losses: logarithmic where all are positive, within `loss_limits`."""
    limits = loss_limits(curves)
    if limits is None:
        return
    axes.set_ylim(*limits)
    if all((values[np.isfinite(values)] > 0).all() for values in curves):
        logarithmic(axes, *limits)


def loss_limits(curves: Sequence[Floats]) -> tuple[float, float] | None:
    """Axis limits that leave out the steep fall of the first steps, which would flatten the rest;
    None where no loss is finite.
    """
    finite = [curve[np.isfinite(curve)] for curve in curves]
    finite = [curve for curve in finite if len(curve)]
    if not finite:
        return None
    low = min(float(curve.min()) for curve in finite)
    high = max(float(curve[min(len(curve) - 1, len(curve) // 50) :].max()) for curve in finite)
    margin = 0.03 * (high - low) or 0.05 * abs(high) or 1.0
    lower_end = low - margin
    # The axis is logarithmic if all losses are positive, and then its lower end must be positive
    # too.
    if low > 0:
        lower_end = max(lower_end, low / 2)
    return lower_end, high + margin


def gap_limits(gaps: Sequence[Floats]) -> tuple[float, float]:
    """Axis limits that show 0 and the gaps of every curve but the outermost hundredth at either end
    of it.
    """
    finite = [values[np.isfinite(values)] for values in gaps]
    finite = [values for values in finite if len(values)]
    low = min([0.0, *(float(np.percentile(values, 1, method="lower")) for values in finite)])
    high = max([0.0, *(float(np.percentile(values, 99, method="higher")) for values in finite)])
    margin = 0.1 * (high - low) or 1.0
    return low - margin, high + margin
