"""Text for messages and tables: aligned columns, the nearest known word, a check against allowed
values.
"""

import difflib
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fp4train.errors import in_words

if TYPE_CHECKING:
    from jinja2 import Environment

_ALIKE = 0.5
"""Smallest similarity (difflib's ratio) of a suggested word."""
_PIECE = 16
"""Characters of a line of a long name in a table that is too wide."""
_CHUNKS = re.compile(r"(\s+|[^\s_/=|+-]*[_/=|+-]+)")
"""Blanks, and parts of a long name with the signs behind them."""


def printable(text: str, *, kept: str = "\n\t") -> str:
    """`text` with every character that a terminal may act on, but those of `kept`, as JSON escapes
    it: \\u001b.
    """
    if text.isprintable():
        return text
    for character in set(text) - set(kept):
        if not character.isprintable():
            text = text.replace(character, json.dumps(character)[1:-1])
    return text


def typed(path: PurePath | str) -> str:
    """A path as it is typed in a shell: quoted if it has blanks or signs that a shell reads."""
    return shlex.quote(str(path))


def first_line(error: BaseException) -> str:
    """The first line of what an error says; the name of its type if it says nothing.

    Python's limit on digits is told without its advice to programmers.
    """
    line = next(iter(in_words(error).strip().splitlines()), "")
    if isinstance(error, ValueError) and "set_int_max_str_digits" in line:
        return f"an integer has more than {sys.get_int_max_str_digits():,} digits"
    return line or type(error).__name__


def columns(
    rows: Iterable[Sequence[str]],
    *,
    right: Container[int] = (),
    width: int | None = None,
    indent: str = "",
    headings: Iterable[str] = (),
    ruled: bool = False,
) -> list[str]:
    """Rows with equal numbers of cells as lines of aligned columns; columns in `right` are
    right-aligned.

    Args:
        width: characters of a line; a wider table folds the cells of its widest columns between
            words, or else anywhere, but those in `right`. None: any.
        indent: text before every line.
        headings: heading of each row; it stands in lines of its own above neighbouring rows that
            share it. Empty: there is none.
        ruled: whether the first row is underlined as the header.
    """
    cells = [  # no newline leads out of a cell
        [cell if cell.isprintable() else printable(cell, kept="") for cell in row] for row in rows
    ]
    sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
    gap = "  "
    if width is not None and sum(sizes) + 2 * (len(sizes) - 1) > width - len(indent):
        gap = " "
        sizes = _narrowed(cells, sizes, right, width - len(indent), header=ruled)
    form = indent + gap.join(
        [f"{{:{'>' if i in right else '<'}{size}}}" for i, size in enumerate(sizes)]
    )
    heading = ""
    lines: list[str] = []
    for row, above in zip_longest(cells, headings, fillvalue=""):
        if above != heading:
            lines += str(above).split("\n")
            heading = str(above)
        folded = [
            _folder(size).wrap(cell) if len(cell) > size else [cell]
            for cell, size in zip(row, sizes, strict=True)
        ]
        lines += [form.format(*parts).rstrip() for parts in zip_longest(*folded, fillvalue="")]
        if ruled:
            lines.append(form.format(*["─" * size for size in sizes]).rstrip())
            ruled = False
    return lines


def tabulate(rows: Iterable[Sequence[str]], **options: Any) -> list[str]:
    """`columns` with the first row underlined as the header."""
    return columns(rows, ruled=True, **options)


def _folder(width: int) -> textwrap.TextWrapper:
    """What folds a cell: between words, else behind a sign, else anywhere."""
    folder = textwrap.TextWrapper(width)
    folder.wordsep_re = _CHUNKS
    return folder


def _narrowed(
    cells: list[list[str]], sizes: list[int], right: Container[int], width: int, *, header: bool
) -> list[int]:
    """The sizes of columns that make lines of `width` characters, a blank between two.

    Headers of columns in `right` give room first, then the widest column, down to its longest word
    or a piece of it.
    """
    narrow = list(sizes)
    least = []
    for i, column in enumerate(zip(*cells, strict=True)):
        words = " ".join(column[:header] if i in right else column).split()
        longest = max(map(len, words), default=0)
        number = max(map(len, column[header:]), default=0) if i in right else 0
        least.append(max(number, min(_PIECE, longest)))
    for _ in range(sum(sizes) + len(sizes) - 1 - width):
        free = [(i in right, size, i) for i, size in enumerate(narrow) if size > least[i]]
        if free:
            narrow[max(free)[-1]] -= 1
    return narrow


def wrapped(text: str, width: int, hang: str = "") -> list[str]:
    """The lines of a text in `width` characters, broken between words alone; `hang` stands before
    those below the first.
    """
    return textwrap.wrap(
        text, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
    )


def screen(package: str | None, name: str, /, **values: object) -> str:
    """The text of a template, the file `name` of `package`: lines of Jinja2, in which a name that
    nobody gives is an error. A list stands for its lines, a path for one line (`line`). Templates
    have `TOOLS` for tables and sentences, and filters: `form` and `number` for numbers, of which
    the latter shows None as a dash, `short`, `unit` and `time` for amounts, `line` and `typed`.
    """
    return _templates(package or "").get_template(name).render(values).rstrip("\n")


@cache
def _templates(package: str) -> "Environment":
    """The templates of a package."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_inserted,
    )
    environment.filters |= {"form": format, "number": _number, "line": _line}
    environment.filters |= {"short": short, "time": time_text, "unit": with_unit, "typed": typed}
    environment.globals |= {tool.__name__: tool for tool in TOOLS}
    return environment


def _inserted(value: object) -> object:
    """What a template writes for a value."""
    if isinstance(value, list):
        return "\n".join(value)
    return _line(value) if isinstance(value, PurePath) else value


def _line(value: object) -> str:
    """A name as one line: that of a folder, or what an error quotes, may have newlines."""
    return printable(str(value), kept="")


def _number(value: float | None, form: str, unknown: str = "-") -> str:
    return unknown if value is None else format(value, form)


def as_written(value: object) -> str:
    """A value as YAML writes it: "null", "true", or its text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def whole_number(text: str) -> int | None:
    """The number that a text of up to 18 digits is; None if it is none."""
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    return None


def counted(number: int, noun: str, plural: str = "") -> str:
    """ "1 step", "1,234 steps": a number with its noun; `plural` is the noun and an s unless
    given.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or f'{noun}s'}"


def counted_are(number: int, noun: str) -> str:
    """ "1 step is", "1,234 steps are": a number with its noun and verb."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def span(start: int, stop: int) -> str:
    """ "3", "3–9": the numbers from `start` on that are below `stop`."""
    if stop - start == 1:
        return str(start)
    return f"{start}–{stop - 1}"


def step_span(start: int, stop: int) -> str:
    """ "step 3", "steps 3–9": the steps of a stretch [start, stop)."""
    if stop - start == 1:
        return f"step {start}"
    return f"steps {span(start, stop)}"


def ranges(numbers: Iterable[int], *, least: int = 2) -> str:
    """ "1–3, 7" for 1, 2, 3, 7; a range stands for at least `least` numbers."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts: list[str] = []
    for run in runs:
        if len(run) >= least:
            texts.append(f"{run[0]}–{run[-1]}")
        else:
            texts.extend(map(str, run))
    return ", ".join(texts)


def first_few(
    words: Sequence[str], most: int, *, joined: str = ", ", remark: str = " and {} more"
) -> str:
    """ "a, b and 3 more": the first words, and a remark on the number of others."""
    text = joined.join(words[:most])
    if len(words) > most:
        return text + remark.format(len(words) - most)
    return text


def shortened(text: str, room: int) -> str:
    """`text` in at most `room` characters: its start and its end, where names of runs differ."""
    if len(text) <= room:
        return text
    end = min(room // 3, 12)
    if room > 3:
        return f"{text[: room - end - 1]}…{text[len(text) - end :]}"
    return ""


def short(number: float, digits: int = 3) -> str:
    """ "1.23 M", "7.39 B", "1.5 T": a count in so many digits, in thousands, millions, billions or
    trillions.
    """
    return _scaled(number, ("", "k", "M", "B", "T"), digits).rstrip()


def with_unit(number: float, unit: str, digits: int = 3) -> str:
    """ "1.23 MB", "275 GB", "12 B": an amount in so many digits, with its unit."""
    return f"{_scaled(number, ('', 'k', 'M', 'G', 'T', 'P', 'E'), digits)}{unit}"


def _scaled(number: float, prefixes: Sequence[str], digits: int) -> str:
    """A number between 1 and 1000 with the prefix of what it is to be multiplied by; with the last
    prefix any number above.
    """
    limit = 1000 - 0.5 * 10.0 ** (3 - digits)
    *smaller, largest = prefixes
    for prefix in smaller:
        if number < limit:
            return f"{number:.{digits}g} {prefix}"
        number /= 1000
    if number < limit:
        return f"{number:.{digits}g} {largest}"
    return f"{number:,.0f} {largest}"


def three_digits(number: float) -> str:
    """ "0.0123", "12.3", "1,234": three digits, or all before the point."""
    if number >= 999.5:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def time_text(seconds: float) -> str:
    """ "12.3 µs", "4.56 ms", "7.89 s", "1.2 h": three digits."""
    for unit, length in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{three_digits(seconds / length)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"


def p_value(p: float) -> str:
    """ "0.0013", "0.17", "<.0001": as tables show it."""
    if p < 1e-4:
        return "<.0001"
    return f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


TOOLS: tuple[Callable[..., object], ...] = (
    columns,
    counted,
    counted_are,
    p_value,
    span,
    tabulate,
    shortened,
    wrapped,
)
"""The functions that templates of screens call."""


def nearest(word: str, words: Iterable[str], alike: float = _ALIKE) -> str | None:
    """The word of `words` most similar to `word`, ignoring case; None if none is `alike`."""
    by_lower = {candidate.lower(): candidate for candidate in words}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=alike)
    return by_lower[matches[0]] if matches else None


def near_miss(word: str, words: Iterable[str], alike: float = _ALIKE) -> str:
    """ "; did you mean 'nvfp4'?", or an empty string where no word is `alike`."""
    suggestion = nearest(word, words, alike)
    if suggestion:
        return f"; did you mean {suggestion!r}?"
    return ""


def next_fitting(size: int, most: int, fits: Callable[[int], bool]) -> str:
    """The numbers from 1 to `most` that fit, next below and next above `size`: "2 or 4"."""
    below = next(filter(fits, range(min(size - 1, most), 0, -1)), None)
    above = next(filter(fits, range(size + 1, most + 1)), None)
    return " or ".join(str(number) for number in (below, above) if number is not None)


def check_least(owner: object, section: str, *names: str, least: int = 1, must: str = "") -> None:
    """Raise ValueError where a number of `owner` is below `least`; it names section, field, value
    and what it must be.

    Args:
        names: fields; None is no number, and is left alone.
        least: smallest allowed number.
        must: words of the error for what is allowed; the default is "at least" and the number.
    """
    for name in names:
        if (value := getattr(owner, name)) is not None and value < least:
            raise ValueError(f"{section}{name}={value} must be {must or f'at least {least}'}")


def check_choice(key: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError unless `value` is one of `allowed`; it names key, value, allowed values and
    the nearest one.
    """
    if value not in allowed:
        names = list(map(str, allowed))
        hint = near_miss(str(value), names)
        raise ValueError(f"{key}={value!r} is not one of {', '.join(names)}{hint}")
