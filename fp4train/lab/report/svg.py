"""A figure of matplotlib as SVG inside of the page.

Every figure is drawn twice, 8.4 inches wide and 3.7: a figure that is only scaled down has letters of 4 points on a
phone. The style of the page shows one of them; paper gets the wide one. Colours become variables of the page's style,
so that the figures follow its dark mode. Text stays text: it can be selected, searched and read aloud.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from fp4train.lab.analysis.curves import INK, QUIET, SHADES
from fp4train.lab.analysis.picture import COLOURS
from fp4train.lab.report.html import Html, plain, tag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE, NARROW = 8.4, 3.7
"""Inches."""
LINE = "#c9cdd3"
VARIABLES: Mapping[str, str] = {
    INK: "--ink",
    QUIET: "--quiet",
    LINE: "--line",
    **{colour: f"--c{i}" for i, colour in enumerate(COLOURS)},
    **{shade: f"--s{i}" for i, shade in enumerate(SHADES)},
}
"""Colour → variable of the style; `style` has their values, light and dark."""

_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_COLOUR = re.compile("|".join(VARIABLES))
_REFERENCE = re.compile(r"url\(#([^)]+)\)")

Draw = Callable[[float], "Figure"]
"""Draws a figure of this width in inches."""


def figure(name: str, draw: Draw, *, alt: str, caption: str) -> Html:
    """The figure in both widths, with a caption.

    Args:
        name: unique on the page. alt: what it shows, for who cannot see it.
    """
    return tag(
        "figure",
        tag("div", render(f"{name}-wide", draw, WIDE, alt), class_="wide"),
        tag("div", render(f"{name}-narrow", draw, NARROW, alt), class_="narrow"),
        tag("figcaption", caption),
        id=name,
    )


def render(name: str, draw: Draw, width_inches: float, alt: str) -> Html:
    """The figure as an element; its ids begin with `name`."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.parse_math": False,
        "path.simplify_threshold": 0.3,
    }
    file = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context(settings):
        warnings.simplefilter("ignore")  # the font that matplotlib measures with lacks a letter; a browser finds one
        drawn = draw(width_inches)
        drawn.patch.set_visible(False)
        for axes in drawn.axes:
            axes.patch.set_visible(False)
        drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(file.getvalue())
    _, _, width, height = root.attrib["viewBox"].split()
    root.attrib.update({"role": "img", "aria-label": plain(alt, 1000), "width": width, "height": height})
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        _adapt(element, name)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    return Html(ElementTree.tostring(root, encoding="unicode"))


def _adapt(element: ElementTree.Element, name: str) -> None:
    """Ids of its own, and colours from the page's style."""
    for key, value in element.attrib.items():
        if key == "id":
            value = f"{name}-{value}"
        elif key.endswith("href") and value.startswith("#"):
            value = f"#{name}-{value[1:]}"
        elif key in ("style", "clip-path"):
            value = _REFERENCE.sub(rf"url(#{name}-\1)", value)
            value = _COLOUR.sub(lambda found: f"var({VARIABLES[found[0]]})", value)
        element.attrib[key] = value
