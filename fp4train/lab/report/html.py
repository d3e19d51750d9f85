"""HTML from data: every text is escaped, and only what `tag` made is markup.

Names and values come from run directories of other people. Besides `<`, `>`, `&` and quotes, control characters,
lone surrogates and the marks that turn the direction of writing are replaced: they would let a name look like another
one, or cannot be encoded.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from fp4train.lab.analysis.figure import NARROW, WIDE, Draw, inline_svg, plain

VOID = ("br", "meta", "col")
LONGEST = 2000
"""Characters of a single text that are shown."""


ROOMY = 14
"""Characters from which a cell is not squeezed into a column of single words."""
CARDS = 4
"""Columns from which on a table is a list of cells on a phone."""


class Html(str):
    """Markup; a plain str is text."""

    __slots__ = ()


def figure(name: str, draw: Draw, *, alt: str, caption: str) -> Html:
    """A figure in both widths, with a caption.

    Args:
        name: unique on the page. alt: what it shows, for who cannot see it.
    """
    alt = plain(alt, 1000)
    return tag(
        "figure",
        tag("div", Html(inline_svg(f"{name}-wide", draw, WIDE, alt)), class_="wide"),
        tag("div", Html(inline_svg(f"{name}-narrow", draw, NARROW, alt)), class_="narrow"),
        tag("figcaption", caption),
        id=name,
    )


def escaped(child: object) -> Html:
    """Markup as it is, anything else as text."""
    return child if isinstance(child, Html) else Html(html.escape(plain(child, LONGEST)))


def tag(name: str, /, *children: object, **attributes: str | None) -> Html:
    """An element. A trailing underscore of an attribute is dropped (`class_`); None leaves it out."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(plain(value, LONGEST))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{words}>")
    return Html(f"<{name}{words}>{joined(children)}</{name}>")


def joined(parts: Iterable[object]) -> Html:
    """The parts one after another."""
    return Html("".join(escaped(part) for part in parts))


def table(
    header: Sequence[object], rows: Iterable[Sequence[object]], *, caption: str, right: Iterable[int] = ()
) -> Html:
    """A table whose columns in `right` are right-aligned. On a phone a row of more than `CARDS` cells is a list of its
    cells, each beside its column's name; a narrower table scrolls in its own box where it has to."""
    numbers, cards = set(right), len(header) > CARDS

    def cells(row: Sequence[object], kind: str) -> Html:
        labels = header if cards and kind == "td" else [None] * len(row)
        found = zip(row, labels, strict=True)
        return tag("tr", *(_cell(kind, cell, label, number=i in numbers) for i, (cell, label) in enumerate(found)))

    head = tag("thead", cells(header, "th"))
    body = tag("tbody", *(cells(row, "td") for row in rows))
    one = tag("table", head, body, aria_label=caption, class_="cards" if cards else None)
    scrolling = tag("div", one, class_="scroll", tabindex="0")
    return joined([tag("p", caption, class_="caption"), scrolling])


def _cell(kind: str, cell: object, label: object, *, number: bool) -> Html:
    roomy = len(re.sub(r"<[^>]*>", "", str(cell))) > ROOMY
    names = "n" if number else "roomy" if roomy else None
    named = None if not label else str(label)
    return tag(kind, cell, class_=names, scope="col" if kind == "th" else None, data_label=named)


def folded(summary: object, *children: object, opened: bool = False) -> Html:
    """Details that a reader may open; they are open on paper."""
    return tag("details", tag("summary", summary), *children, open="" if opened else None)
