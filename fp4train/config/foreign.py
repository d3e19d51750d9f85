"""Suggestions for keys and options that do not exist: the nearest one, or what another framework's
word is here.

The words of other frameworks, and what fp4train calls the same thing, are in foreign.yaml.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import yaml

from fp4train.config.folders import own_options
from fp4train.errors import UserError
from fp4train.parallel.config import why_absent
from fp4train.text import near_miss, nearest

_TABLE = Path(__file__).with_suffix(".yaml")
_ALIKE = 0.65
"""Smallest similarity of a key with a section to one that is suggested."""


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
        if not ours:
            return f": {note}"
        meant = f"; did you mean {ours!r}?"
        if note:
            return f"{meant} ({note})"
        return meant
    return ""


def option_suggestion(group: str, option: str, options: Iterable[str]) -> str:
    """The hint for an option that a group does not have: longer names, another framework's word, or
    the nearest.
    """
    options = list(options)
    if same := [name for name in options if name.lower() == option.lower()]:
        return f"; did you mean {same[0]!r}?"
    begin = [name for name in options if name.startswith(f"{option.lower()}_")]
    theirs = suggestion(option)
    if len(begin) > 1:
        return f"; did you mean {', '.join(begin[:-1])} or {begin[-1]}?"
    if f"{group}=" in theirs:
        return theirs
    return near_miss(option, options)


def check_option(group: str, option: str, options: list[str]) -> None:
    """Refuse an option that the group `group` does not have.

    Raises:
        UserError: it is none of `options`; the message suggests one.
    """
    if option in options or (group == "experiment" and option in ("null", "None")):
        return
    if "/" in group or group == "experiment":
        yours = ""
    else:
        yours = f"; one of your own: {group}=FILE.yaml, or --config-dir FOLDER"
    raise UserError(
        f"{group}={option}: there is no such {group}{option_suggestion(group, option, options)} "
        f"(known: {', '.join(options)}{yours})"
    )


def unknown_key(key: str, have: list[str], elsewhere: Mapping[str, str] = {}) -> UserError:
    """The error about a key that there is not; the message suggests one.

    Args:
        key: key of a command line.
        have: keys that there are.
        elsewhere: keys that other options of the groups have → a sentence that says which,
            "data=text has it"; they are suggested, too.
    """
    if (reason := why_absent(key.removeprefix("parallel."))) is not None:
        return UserError(f"unknown key {key!r}: {reason}")
    section = key.rpartition(".")[0]
    places = [name.rpartition(".") for name in have]
    beside = [
        last for place, _, last in places if section and place == section and last != "_target_"
    ]
    listing = ""
    if beside:
        listing = f" (known: {', '.join(beside)})"
    return UserError(f"unknown key {key!r}{_meant(key, have, elsewhere)}{listing}")


def _meant(key: str, have: Collection[str], elsewhere: Mapping[str, str]) -> str:
    """The hint for a key that is none of `have`."""
    section, _, last = key.rpartition(".")
    candidates = [
        name
        for name in (*have, *elsewhere)
        if not key.startswith(f"{name}.") and not name.endswith("_target_")
    ]
    # The same name in another section (lr: optim.lr) is a better suggestion than a similar name.
    namesakes = [name for name in candidates if name.rpartition(".")[2] == last]
    near = [name for name in namesakes if section and name.startswith(f"{section}.")]
    if 1 < len(near) <= 3:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    if len(namesakes) == 1:
        return _named(namesakes[0], elsewhere)
    if theirs := suggestion(key, have):
        return theirs
    siblings = [name for name in candidates if section and name.startswith(f"{section}.")]
    # Within its own section a name alone is compared: all names there begin alike.
    sibling = nearest(last, [name.removeprefix(f"{section}.") for name in siblings], _ALIKE)
    if sibling is not None:
        return _named(f"{section}.{sibling}", elsewhere)
    likely = nearest(key, namesakes) or nearest(key, candidates, _ALIKE if section else 0.5)
    return _named(likely, elsewhere)


def _named(key: str | None, elsewhere: Mapping[str, str]) -> str:
    """ "; did you mean 'data.path'? (data=text has it)"; empty where no key is meant."""
    if key is None:
        return ""
    group = key.replace(".", "/")
    if group != key and group in own_options():
        key = group
    hint = f"; did you mean {key!r}?"
    if key in elsewhere:
        return f"{hint} ({elsewhere[key]})"
    return hint
