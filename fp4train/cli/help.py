"""Screens of help: of a verb, of a key, of a group or one of its options, and of all keys of a configuration.

A description is the comment of the key in its YAML file (`fp4train.config.descriptions`).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from fp4train.cli.output import fitted, hanging, terminal_width
from fp4train.config import foreign, overrides, plugins
from fp4train.config.binding import MISSING, KeyField, complete, flattened, key_fields
from fp4train.config.command_line import CommandLine, option_names
from fp4train.config.composition import Composed, composed, groups_around, option_values
from fp4train.config.descriptions import Descriptions
from fp4train.config.schema import Config, plain
from fp4train.errors import UserError
from fp4train.text import near_miss, nearest, screen, shortened

_KEY_COLUMNS: Final = 33
"""Room of a key and its value; its description follows."""
_LONGEST_VALUE: Final = 40
_ALIKE: Final = 0.65
"""Smallest similarity of a topic that is suggested: one may ask for anything here."""
_NAMES: Final = ("run.name", "run.dir")
"""Keys that follow from the others."""


@dataclass(frozen=True)
class Topics:
    """What help can be asked about in the configuration that a command composes: its keys, groups
    and options.
    """

    command: Composed
    groups: Mapping[str, list[str]]
    descriptions: Descriptions
    words: tuple[str, ...] = ()

    @cached_property
    def keys(self) -> list[KeyField]:
        """All keys, sections and values, in the order of the files."""
        body = complete(plain(self.command.cfg), Config)
        return list(key_fields(body, Config))

    def place(self, key: KeyField) -> tuple[str, str]:
        """The group of the section that a key is in, and its chosen option; empty where train.yaml
        sets it.
        """
        group = next(iter(groups_around(key.path, self.groups)), "")
        return group, self.command.choices.get(group, "")

    def describe(self, key: KeyField) -> str:
        group, option = self.place(key)
        if key.path == group.replace("/", "."):
            return self.descriptions.group(group)
        return self.descriptions.key(key, group, option)

    def topic(self, word: str) -> str | None:
        """The screen about a key, a group, or group=option; None: there is nothing of that name."""
        name, equals, option = word.partition("=")
        group = name.replace(".", "/")
        if group in self.groups:
            foreign.check_option(group, option, self.groups[group] if equals else [option])
            chosen = self.command.choices.get(group, "")
            return self.screen(group=group, chosen=chosen, alone=bool(equals))
        matching = [key for key in self.keys if key.path == name]
        if not matching and "." not in name:
            matching = [
                key for key in self.keys if key.name == name and not isinstance(key.value, Mapping)
            ]
        if matching:
            return "\n\n".join(self.screen(key=key) for key in matching)
        return self._elsewhere(name)

    def screen(self, **subject: object) -> str:
        """The screen (help.txt) about a key, about a group or its chosen option alone, or about
        all of them.
        """
        return screen(
            __package__,
            "help.txt",
            topics=self,
            shown=_shown,
            column=_KEY_COLUMNS,
            width=terminal_width(),
            **subject,
        )

    def facts(self, key: KeyField) -> list[tuple[str, str]]:
        """The value of a key, what it takes, and its values with other options, in words."""
        group, option = self.place(key)
        value = _shown(key.value)
        if group:
            value += f", with {group}={option}"
        return [("value", value), ("takes", key.allowed), *self._others(key, group, option)]

    def _others(self, key: KeyField, group: str, option: str) -> list[tuple[str, str]]:
        """The values that other options of the group give a key, where they differ."""
        if not group:
            return []
        values: dict[str, list[str]] = {}
        for name, of_option in self._values(group).items():
            if name != option and of_option.get(key.path, key.value) != key.value:
                value = _shown(of_option[key.path])
                values.setdefault(value, []).append(f"{group}={name}")
        shown = "; ".join(f"{value} with {', '.join(names)}" for value, names in values.items())
        return [("or", shown)] if shown else []

    def _values(self, group: str) -> dict[str, dict[str, Any]]:
        return option_values(group, self.groups[group], self.descriptions.folders)

    def _elsewhere(self, name: str) -> str | None:
        """Where a key is that another option of its group has."""
        for group in reversed(groups_around(name, self.groups)):
            for option, values in self._values(group).items():
                if name in values:
                    other = composed([*self.words, f"{group}={option}"])
                    return Topics(next(iter(other)), self.groups, self.descriptions).topic(name)
        return None

    def other_keys(self, name: str) -> list[str]:
        """The keys that the options of the groups of a key have, whichever is chosen."""
        names: dict[str, None] = {}
        for group in groups_around(name, self.groups):
            for values in self._values(group).values():
                names |= dict.fromkeys(values)
        return list(names)

    def set_by(self, experiment: str) -> tuple[list[str], list[KeyField]]:
        """The groups ("model=llama_1b") and the keys that an experiment sets."""
        without = composed([word for word in self.words if not word.startswith("experiment=")])
        plain_run = next(iter(without))
        usual = flattened(complete(plain(plain_run.cfg), Config))
        groups = [
            f"{group}={option}"
            for group, option in self.command.choices.items()
            if group in self.groups
            and group != "experiment"
            and plain_run.choices.get(group) != option
        ]
        keys_named = self.descriptions.set_by("experiment", experiment)
        return groups, [
            key
            for key in self.keys
            if not isinstance(key.value, Mapping)
            and key.path not in _NAMES
            and (key.path in keys_named or usual.get(key.path) != key.value)
        ]


def topics(arguments: list[str]) -> Topics:
    """The topics of the configuration that the flags and overrides among `arguments` compose.

    Raises:
        UserError: they do not fit the configuration.
    """
    words = overrides.with_files(arguments)
    folders = overrides.own_folders(words)
    with plugins.using(overrides.plugins(words), folders):
        command = next(iter(composed(words)))
        groups = {group: names for group, names in overrides.groups(folders).items() if names}
        described = Topics(command, groups, Descriptions(folders=tuple(folders)), tuple(words))
        _ = described.keys  # the classes of plugins are at hand here alone
        return described


def of_verb(verb: str, verb_help: str, words: Sequence[str], *, keys: bool) -> str:
    """Help of a verb, or of one of its options.

    Args:
        verb_help: the help of the verb, which names its options.
        words: the other words of the command.
        keys: whether the verb takes the keys of a run, which are then listed, too.

    Raises:
        UserError: the verb has no such option.
    """
    flags, plain_words = overrides.flags_and_words(list(words))
    asked = [word for word in plain_words if "=" not in word and not _names_run(word)]
    declared = options_of(verb)
    settings = [
        *flags,
        *(word for word in plain_words if "=" in word and word.partition("=")[0] not in declared),
    ]
    if not asked:
        command, _, body = _joined(verb_help).partition("\n")
        lines = [*hanging(command), body]
        if keys:
            lines += ["", topics(settings).screen()]
        return fitted("\n".join(lines))
    described = topics(settings) if keys else None
    options = _options(verb_help)
    texts = []
    for word in asked:
        text = options.get(word)
        if text is None and described is not None:
            text = described.topic(word)
        if text is None:
            names = list(options)
            if described is not None:
                names += [key.path for key in described.keys]
            hint = near_miss(word, names) or f"; fp4train help {verb} lists them"
            listing = f" ({', '.join(options)})" if options else ""
            raise UserError(f"{verb} has no option {word!r}{hint}{listing}")
        texts.append(text)
    return fitted("\n\n".join(texts))


def options_of(verb: str) -> list[str]:
    """The names of a verb's own options: the fields of its class, as `PlanOptions` of plan."""
    module = import_module(f"fp4train.cli.{verb}")
    return option_names(getattr(module, f"{verb.capitalize()}Options", CommandLine))


def of_words(words: Sequence[str], verbs: Iterable[str]) -> str:
    """Help about keys, groups and options of groups.

    Raises:
        UserError: there is nothing of such a name; the message suggests a verb or a key.
    """
    flags, asked = overrides.flags_and_words(list(words))
    texts = []
    for word in asked:
        name, _, value = word.partition("=")
        name = name.rstrip(".")
        group = name.replace(".", "/")
        if value and group in overrides.groups():
            choice = f"{group}={value}"
            described = topics([*flags, choice])
            text = described.topic(choice)
        else:
            described = topics(flags)
            text = described.topic(name)
            if value:
                raise _no_value(name, value, described, list(verbs), is_key=text is not None)
        if text is None:
            raise _unknown(name, described, list(verbs))
        texts.append(text)
    return fitted("\n\n".join(texts))


def _no_value(
    name: str, value: str, described: Topics, verbs: list[str], *, is_key: bool
) -> UserError:
    """Error about a value behind a word that names no group; `is_key`: it names a key."""
    group = nearest(name, described.groups)
    if group is not None and value in described.groups[group]:
        return UserError(f"there is no group {name!r}; did you mean fp4train help {group}={value}?")
    if name in verbs:
        return UserError(f"help of a verb takes no value: fp4train help {name}")
    if is_key:
        return UserError(f"help shows keys, not their values: fp4train help {name}")
    return _unknown(name, described, verbs)


def _unknown(word: str, described: Topics, verbs: list[str]) -> UserError:
    """Error about a word of help that is neither a verb nor a key."""
    options = [f"{group}={word}" for group, names in described.groups.items() if word in names]
    if options:
        asked = " or ".join(f"fp4train help {option}" for option in options)
        return UserError(f"{word!r} is an option of a group: {asked}")
    verb, dot, option = word.partition(".")
    is_section = any(key.path.startswith(f"{verb}.") for key in described.keys)
    if dot and verb in verbs and (not is_section or _verbs_with(option, [verb])):
        return UserError(f"options of a verb follow it: fp4train help {verb} {option}")
    holders = _verbs_with(word, verbs)
    if holders:
        return UserError(
            f"{word!r} is an option of {' and '.join(holders)}: fp4train help {holders[0]} {word}"
        )
    names = list(
        dict.fromkeys([*(key.path for key in described.keys), *described.other_keys(word)])
    )
    leaves = [key.name for key in described.keys]
    alike = nearest(word, [*verbs, *described.groups, *names, *leaves], _ALIKE)
    if "." not in word and (alike in verbs or alike is None):
        if alike:
            hint = f"; did you mean {alike!r}?"
        else:
            hint = "; fp4train help lists verbs and keys"
        return UserError(f"unknown verb {word!r}{hint}")
    return foreign.unknown_key(word, [*described.groups, *names])


def _joined(verb_help: str) -> str:
    """The help of a verb with every paragraph, and every description of an option, on one line, to be folded
    once.
    """
    lines: list[str] = []
    for line in verb_help.strip("\n").splitlines():
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        previous = lines[-1] if lines else ""
        prose = (
            bool(previous)
            and not indent
            and "  " not in f"{previous}{line}"
            and not previous.startswith("fp4train ")
        )
        goes_on = indent >= 10 and previous.startswith("  ")
        if text and (prose or goes_on):
            alone = goes_on and "  " not in previous.strip()
            lines[-1] += f"{'  ' if alone else ' '}{text}"
        else:
            lines.append(line)
    return "\n".join(lines)


def _verbs_with(option: str, verbs: Iterable[str]) -> list[str]:
    """The verbs whose help lists an option."""
    return [
        verb
        for verb in verbs
        if option in _options(import_module(f"fp4train.cli.{verb}").__doc__ or "")
    ]


def _names_run(word: str) -> bool:
    """Whether a word is the name of a folder, not of a key."""
    return Path(word).is_dir() or ("/" in word and word not in overrides.groups())


def _options(verb_help: str) -> dict[str, str]:
    """The options that the help of a verb lists, and the line about each."""
    lines: dict[str, str] = {}
    for line in _joined(verb_help.partition("\n\n")[2]).splitlines():
        if option := re.match(r"  (-{0,2}\w[\w.-]*)(?==|  )", line):
            lines.setdefault(option[1], line)
    return lines


def _shown(value: Any, room: int = _LONGEST_VALUE) -> str:
    """A value as it is typed on a command line, in so many characters."""
    if isinstance(value, str):
        text = "(must be given)" if value == MISSING else value
    elif isinstance(value, Mapping):
        text = str(value.get("_target_", "{…}")).rpartition(".")[2]
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return shortened(text, min(room, _LONGEST_VALUE))
