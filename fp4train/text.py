"""How things are said to people: rows as aligned columns, the near miss of a word, what a value may be."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Container, Iterable, Sequence

_ALIKE = 0.5
"""Words less alike than this (difflib's ratio) are no slip of each other."""


def columns(rows: Iterable[Sequence[str]], *, right: Container[int] = ()) -> list[str]:
    """Rows of equally many cells as lines of aligned columns; those of the indices `right` end together."""
    rows = list(rows)
    widths = _widths(rows)
    return ["  ".join(_pad(row[i], width, right=i in right) for i, width in enumerate(widths)).rstrip() for row in rows]


def tabulate(rows: Iterable[Sequence[str]], *, right: Container[int] = ()) -> list[str]:
    """`columns`, the first row underlined: it is the header."""
    header, *rest = rows
    return columns([header, ["─" * width for width in _widths([header, *rest])], *rest], right=right)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(*rows, strict=True)]


def _pad(cell: str, width: int, *, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """What of `known` somebody who wrote `word` may have meant, whatever its case; None if nothing is like it."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=_ALIKE)
    return by_lower[found[0]] if found else None


def near_miss(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'nvfp4'?", or nothing."""
    found = nearest(word, known)
    return f"; did you mean {found!r}?" if found else ""


def check_choice(key: str, value: object, allowed: Collection[object]) -> None:
    """ValueError unless `value` is one of `allowed`; it names the key, the value, what is allowed and the near miss."""
    if value not in allowed:
        hint = near_miss(value, [each for each in allowed if isinstance(each, str)]) if isinstance(value, str) else ""
        raise ValueError(f"{key}={value!r} is not one of {', '.join(map(str, allowed))}{hint}")
