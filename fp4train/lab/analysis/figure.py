"""The common ground of all figures: colours, style, limits and labels; a figure as a PNG file, or
as SVG in a page.

A figure is a function of its width in inches, so that one description serves the picture beside a
run and the page. A page has every figure twice, 8.4 inches wide and 3.7: a figure that is only
scaled down has letters of 4 points on a phone. The style of the page shows one of them; paper gets
the wide one. There colours become variables of the page's style, so that figures follow its dark
mode. Text stays text: it can be selected, searched and read aloud.
"""

from __future__ import annotations

import io
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from fp4train import files
from fp4train.config.command_line import Within
from fp4train.errors import UserError, reason, user_errors
from fp4train.lab.analysis.history import Floats
from fp4train.text import fold, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 8.4
NARROW = 3.7
PICTURE = 9.0
"""Inches: in a page on a screen, in a page on a phone, of a PNG file."""
Width = Annotated[float, Within(3, "a number of inches, from 3 to 30", most=30)]
"""Inches of a file, where they are an option."""

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
VARIABLES: Mapping[str, str] = {
    INK: "--ink",
    QUIET: "--quiet",
    LINE: "--line",
    **{colour: f"--c{i}" for i, colour in enumerate(COLOURS)},
    **{shade: f"--s{i}" for i, shade in enumerate(SHADES)},
}
"""Colour → variable of a page's style."""

FIGURES = (".png", ".svg", ".pdf")
"""Endings of the files that a figure is written to."""

HATCHES = ("", "////", "----", "xxxx")
"""Each shade comes with each of these, so that 24 recipes can be told apart; of lines, which are
short as SVG.
"""
WORDS = 7.5
"""Points of words in a panel."""
LABEL: Any = {"fontsize": WORDS}
"""The look of words in a panel."""
LONGEST = 240
"""Characters of a name, of which a longer one has its start and its end."""
DASHED = (0, (4, 3))
EVEN = 20.0
"""Ratio of the ends of a logarithmic axis up to which evenly spaced numbers do not run together."""
"""The look of lines at single steps."""
CHARACTERS = 14
"""Characters of words in an inch."""
BESIDE = 0.65
"""Inches beside a panel and the names of its rows."""
LEADING = 1.35
"""Height of a line of words, as a multiple of their size."""

Draw = Callable[[float], "Figure"]
"""Draws a figure of this width in inches."""

_SVG = "http://www.w3.org/2000/svg"
_COLOUR = re.compile("|".join(VARIABLES))


def colour_of(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def line_of(index: int) -> Any:
    return LINES[index // len(COLOURS) % len(LINES)]


class Shade(NamedTuple):
    """The ground of a recipe: a colour and a pattern."""

    colour: str
    hatch: str

    @property
    def fill(self) -> Any:
        """The arguments with which matplotlib fills a shape so."""
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": LINE}


def shades(recipes: Iterable[str]) -> dict[str, Shade]:
    """A ground for each recipe, in order of appearance. None has the colour of a run."""
    different = dict.fromkeys(recipes)
    return {
        recipe: Shade(SHADES[i % len(SHADES)], HATCHES[i // len(SHADES) % len(HATCHES)])
        for i, recipe in enumerate(different)
    }


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
    """Write a figure to files, each in the format that its name ends in; see `write`."""
    for path in paths:
        write(path, rendered(draw, width, path.suffix.lower()))


def rendered(draw: Draw, width: float, ending: str, **settings: Any) -> bytes:
    """A figure as the bytes of a file of one of `FIGURES`; the same figure gives the same bytes.

    Args:
        settings: matplotlib's, an underscore for the dot in a name.
    """
    picture = io.BytesIO()
    undated = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}}.get(ending)
    more = {key.replace("_", ".", 1): value for key, value in settings.items()}
    with (
        warnings.catch_warnings(),
        _look({"svg.hashsalt": "fp4train", "pdf.fonttype": 42, **more}),
    ):
        # the font that matplotlib measures with lacks a letter of a name; a browser finds one
        warnings.simplefilter("ignore")
        draw(width).savefig(picture, format=ending.removeprefix("."), metadata=undated)
    return picture.getvalue()


def endings_of(text: str) -> tuple[str, ...]:
    """The endings of files that an option figures= names, png,svg.

    Raises:
        ValueError: one is none of `FIGURES`.
    """
    endings = tuple(
        dict.fromkeys(f".{ending.strip().lower().removeprefix('.')}" for ending in text.split(","))
    )
    if not set(endings) <= set(FIGURES):
        raise ValueError(f"figures={text}: one or several of png, svg and pdf, with commas")
    return endings


def inline_svg(name: str, draw: Draw, width: float, alt: str) -> str:
    """A figure as an element of a page.

    Args:
        name: name that is unique on the page. alt: description for who cannot see the figure.
    """
    root = ElementTree.fromstring(
        rendered(
            draw,
            width,
            ".svg",
            svg_hashsalt=name,
            path_simplify_threshold=0.3,
            savefig_transparent=True,
        )
    )
    *_, shown_width, shown_height = root.attrib["viewBox"].split()
    root.attrib.update(
        {"role": "img", "aria-label": alt, "width": shown_width, "height": shown_height}
    )
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                element.remove(child)
        if element.tag == f"{{{_SVG}}}g":
            # every figure has the same; those of clips and markers depend on the name
            element.attrib.pop("id", None)
        if style := element.get("style"):
            element.set("style", _COLOUR.sub(lambda match: f"var({VARIABLES[match[0]]})", style))
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode")


def check_out(out: Path, endings: Sequence[str], option: str = "out") -> None:
    """Refuse a file that cannot be written, before anything is read; errors name the `option`.

    Raises:
        UserError: its name ends otherwise, or there is no such folder.
    """
    if out.suffix.lower() not in endings:
        raise UserError(
            f"{option}={out if out.name else ''}: the name must end in {' or '.join(endings)}"
        )
    if not out.parent.is_dir():
        raise UserError(f"{option}={out}: there is no folder {out.parent}")
    if out.is_dir():
        raise UserError(f"{option}={out} is a folder; name a file in it")


@contextmanager
def _look(more: Any = None) -> Iterator[None]:
    """The common look of all figures, and `more` settings.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UserError("figures need matplotlib: pip install matplotlib") from error
    with (
        resources.as_file(resources.files(__package__) / "figure.mplstyle") as file,
        matplotlib.rc_context(more, file),
    ):
        yield


def plain(text: object, limit: int) -> str:
    """`text` on one line, at most `limit` characters, without characters that cannot be seen."""
    shown = str(text)
    if len(shown) > limit:
        shown = f"{shown[: limit - 12]}…{shown[-11:]}"
    return "".join(map(_visible, shown))


def _visible(character: str) -> str:
    """A space for a line's end or a tab, and � for another character that cannot be seen."""
    if character in "\n\t":
        return " "
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co"):
        return "�"
    return character


def inches_of(text: str, points: float = WORDS) -> float:
    """The width of a line of text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(
        text, FontProperties(size=points), ismath=False
    )
    return float(width) / 72


def height_of(lines: int, points: float = WORDS) -> float:
    """The height of lines of text in inches."""
    return lines * LEADING * points / 72


def lines_within(text: str, inches: float, points: float = WORDS) -> list[str]:
    """The whole text in lines that are at most so wide, broken between words; empty where a word is
    wider.
    """
    lines: list[str] = []
    if len(text) > LONGEST:
        return lines
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and inches_of(longer, points) <= inches:
            lines[-1] = longer
        elif inches_of(word, points) <= inches:
            lines.append(word)
        else:
            return []
    return lines


def name_lines(name: str, room: int) -> str:
    """A name in lines of at most `room` characters: the whole of it, up to `LONGEST` characters."""
    return "\n".join(fold(shortened(name, LONGEST), room))


def legend_of_recipes(figure: Figure, names: Mapping[str, Shade], room: int) -> None:
    """Name grounds below a figure, in lines of at most `room` characters."""
    from matplotlib.patches import Patch

    if not names:
        return
    labels = [name_lines(name, room) for name in names]
    columns = max(1, min(len(names), room // (6 + max(map(len, "\n".join(labels).split("\n"))))))
    patches = [Patch(**shade.fill) for shade in names.values()]
    figure.legend(
        patches, labels, loc="outside lower left", ncols=columns, fontsize=WORDS, handlelength=1.8
    )


def right_end(last_step: int) -> float:
    """The end of the x axis: far enough behind the last step that no marker on it is cut."""
    return max(last_step, 1) * 1.012


def style(axes: Axes, title: str) -> None:
    """The common style of all panels."""
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left")
    few_ticks(axes, 10, integer=True)


def row_style(axes: Axes, title: str, names: Sequence[str], *, ticks: int) -> None:
    """The style of a panel with a row per name, the first one at the top, and values along x."""
    style(axes, title)
    axes.grid(visible=False)
    axes.grid(axis="x")
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    few_ticks(axes, ticks)


def few_ticks(axes: Axes, count: int, **options: Any) -> None:
    """Set at most `count` ticks along x."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(count, **options))


def colour_bar(axes: Axes, image: Any, **options: Any) -> Any:
    """The scale of a map beside it."""
    bar = axes.figure.colorbar(image, ax=axes, **options)
    bar.ax.tick_params(labelsize=7, colors=INK, length=2)
    bar.outline.set_visible(False)
    return bar


def logarithmic(axes: Axes, *, fine: bool) -> None:
    """A logarithmic y axis with plain numbers: evenly spaced ones (`fine`), or those of `decades`."""
    from matplotlib.ticker import (
        FuncFormatter,
        MaxNLocator,
        NullFormatter,
        NullLocator,
        ScalarFormatter,
    )

    axes.set_yscale("log")
    if fine:
        axes.yaxis.set_major_locator(MaxNLocator(9))
        axes.yaxis.set_major_formatter(ScalarFormatter())
    else:
        axes.yaxis.set_major_locator(decades())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def decades(**options: Any) -> Any:
    """Where numbers stand on a logarithmic axis: at 1, 2, 5 of each decade, over more than three
    decades at some powers of ten.
    """
    from matplotlib.ticker import LogLocator

    class Decades(LogLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            self.set_params(subs=(1.0, 2.0, 5.0) if vmax <= 1000 * vmin else (1.0,))
            return super().tick_values(vmin, vmax)

    return Decades(**options)


def loss_axis(axes: Axes, title: str, curves: Sequence[Floats]) -> None:
    """The y axis of losses: logarithmic where all are positive, within `loss_limits`."""
    style(axes, title)
    limits = loss_limits(curves)
    if limits is not None:
        axes.set_ylim(*limits)
    if all((values[np.isfinite(values)] > 0).all() for values in curves):
        logarithmic(axes, fine=limits is None or limits[1] <= EVEN * limits[0])


def loss_limits(curves: Sequence[Floats]) -> tuple[float, float] | None:
    """Axis limits that leave out the steep fall of the first steps, which would flatten the
    rest.
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
