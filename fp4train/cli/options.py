"""The command line of a verb that has options of its own: each is declared once, and one function reads them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fp4train.config import overrides
from fp4train.errors import UserError
from fp4train.text import whole_number


@dataclass(frozen=True)
class Option:
    """An option, key=value.

    Args:
        read: its text → its value; None: the text is refused.
        refusal: what an error says of a refused text, which stands for {}.
        default: the value where the option is not given.
    """

    read: Callable[[str], Any] = str
    refusal: str = ""
    default: Any = None


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line, taken apart.

    Args:
        flags: with their values.
        runs: the words that name directories.
        options: the value of every option of the verb.
        rest: the other words.
    """

    flags: list[str]
    runs: list[str]
    options: dict[str, Any]
    rest: list[str]


def read_options(arguments: list[str], known: Mapping[str, Option]) -> CommandLine:
    """Take a command line apart.

    Raises:
        UserError: an option is given twice, or its value is refused.
    """
    flags, words = overrides.flags_and_words(arguments)
    runs: list[str] = []
    rest: list[str] = []
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in known:
            (runs if overrides.names_folder(word) and not word.startswith("~") else rest).append(word)
        elif key in given:
            raise UserError(f"{key}=… is given twice")
        elif (value := known[key].read(text)) is None:
            raise UserError(known[key].refusal.format(text))
        else:
            given[key] = value
    values = {key: given.get(key, option.default) for key, option in known.items()}
    return CommandLine(flags=flags, runs=runs, options=values, rest=rest)


def truth(text: str) -> bool | None:
    """ "true" or "false"."""
    return {"true": True, "false": False}.get(text.lower())


def count(text: str) -> int | None:
    """A whole number from 1."""
    return whole_number(text) or None


def number(text: str) -> float | None:
    """A finite number from 0."""
    with suppress(ValueError):
        return found if 0 <= (found := float(text)) < float("inf") else None
    return None
