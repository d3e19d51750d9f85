"""Suggestions for keys and options that do not exist: the nearest one, or what another framework's
word is here.

The words of other frameworks, and what fp4train calls the same thing, are in foreign.yaml.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

import yaml

from fp4train.errors import UserError
from fp4train.parallel.config import why_absent
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
        if meant and note:
            return f"{meant} ({note})"
        return meant or f": {note}"
    return ""


def option_suggestion(group: str, option: str, known: Iterable[str]) -> str:
    """The hint for an option that a group does not have: longer names, another framework's word, or
    the nearest.
    """
    known = list(known)
    if same := [name for name in known if name.lower() == option.lower()]:
        return f"; did you mean {same[0]!r}?"
    begin = [name for name in known if name.startswith(f"{option.lower()}_")]
    theirs = suggestion(option)
    if len(begin) > 1:
        return f"; did you mean {', '.join(begin[:-1])} or {begin[-1]}?"
    if f"{group}=" in theirs:
        return theirs
    return near_miss(option, known)


def check_option(group: str, option: str, known: list[str]) -> None:
    """Refuse an option that the group `group` does not have.

    Raises:
        UserError: it is none of `known`; the message suggests one.
    """
    if option not in (*known, *(["null", "None"] if group == "experiment" else [])):
        raise UserError(
            f"{group}={option}: there is no such {group}{option_suggestion(group, option, known)} "
            f"(known: {', '.join(known)})"
        )


def check_keys(wanted: list[str], have: list[str]) -> None:
    for key in wanted:
        if key in have:
            continue
        if (reason := why_absent(key.removeprefix("parallel."))) is not None:
            raise UserError(f"unknown key {key!r}: {reason}")
        # The same name in another section (lr: optim.lr) is a better suggestion than a similar
        # name.
        others = [k for k in have if not key.startswith(f"{k}.") and not k.endswith("_target_")]
        namesakes = [k for k in others if k.rpartition(".")[2] == key.rpartition(".")[2]]
        section = key.rpartition(".")[0]
        beside = [k.rpartition(".")[2] for k in have if section and k.rpartition(".")[0] == section]
        beside = [name for name in beside if name != "_target_"]
        known = f" (known: {', '.join(beside)})" if beside else ""
        near = [k for k in namesakes if section and k.startswith(f"{section}.")]
        if 1 < len(near) <= 3:
            hint = f"; did you mean {' or '.join(map(repr, near))}?"
        else:
            if len(namesakes) == 1:
                hint = f"; did you mean {namesakes[0]!r}?"
            else:
                hint = ""
            hint = hint or suggestion(key, have) or near_miss(key, namesakes or others)
        raise UserError(f"unknown key {key!r}{hint}{known}")
