"""The words of other frameworks, and what fp4train calls the same thing: suggestions for keys that do not exist.

The table is foreign.yaml.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import yaml

from fp4train.text import near_miss

_TABLE = Path(__file__).with_suffix(".yaml")


def words() -> list[tuple[str, list[str], str]]:
    """(what fp4train calls it, the others' words, a note) of each row."""
    rows = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return [(ours, theirs.split(), "".join(note)) for ours, theirs, *note in rows]


def suggestion(word: str, have: Collection[str] | None = None) -> str:
    """ "; did you mean 'optim.lr'?" for another framework's word, or an empty string.

    Args:
        word: a key or an option; its last component counts.
        have: the keys that there are; None: any of fp4train's.
    """
    last = word.lower().rpartition(".")[2].replace("-", "_")
    for ours, theirs, note in words():
        if last not in theirs or (have is not None and "." in ours and ours not in have):
            continue
        meant = f"; did you mean {ours!r}?" if ours else ""
        return f"{meant} ({note})" if meant and note else meant or f": {note}"
    return ""


def option_suggestion(group: str, option: str, known: Iterable[str]) -> str:
    """The hint for an option that a group does not have: longer names, another framework's word, or the nearest."""
    known = list(known)
    begin = [name for name in known if name.startswith(f"{option.lower()}_")]
    theirs = suggestion(option)
    if len(begin) > 1:
        return f"; did you mean {', '.join(begin[:-1])} or {begin[-1]}?"
    return theirs if f"{group}=" in theirs else near_miss(option, known)
