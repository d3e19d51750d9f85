"""Screens of help: of a verb, of a key, of a group or one of its options, and of all keys of a
configuration.

A description is the comment of the key in its YAML file (`fp4train.config.descriptions`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fp4train.cli.output import fitted, terminal_width
from fp4train.config import overrides, plugins
from fp4train.config.binding import MISSING, KeyField, complete, key_fields
from fp4train.config.composition import Composed, composed, groups_around, keys_around
from fp4train.config.descriptions import Descriptions
from fp4train.config.schema import Config, plain
from fp4train.config.unknown import unknown_key
from fp4train.text import screen, shortened

_KEY_COLUMNS = 33
"""Room of a key and its value; its description follows."""
_LONGEST_VALUE = 40


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
        return list(key_fields(complete(plain(self.command.cfg), Config), Config))

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

    def topic(self, word: str, verbs: Iterable[str] = ()) -> str:
        """The screen about a key, a group, or group=option.

        Raises:
            UserError: there is nothing of that name; the message suggests a word, or one of
                `verbs`.
        """
        name, equals, option = word.rstrip(".").partition("=")
        group = name.replace(".", "/")
        if group in self.groups:
            chosen = option or self.command.choices.get(group, "")
            return self.screen(group=group, chosen=chosen, alone=bool(equals))
        matching = [key for key in self.keys if key.path == name] or [
            key for key in self.keys if key.name == name and not isinstance(key.value, Mapping)
        ]
        if matching:
            return "\n\n".join(self.screen(key=key) for key in matching)
        elsewhere = keys_around(name, self.groups, self.descriptions.folders)
        if name in elsewhere:
            (with_option,) = composed([*self.words, elsewhere[name][0]])
            return Topics(with_option, self.groups, self.descriptions).topic(name)
        options = (f"{group}={option}" for group in self.groups for option in self.groups[group])
        further_words = [*verbs, *self.groups, *elsewhere, *options]
        raise unknown_key(name, [key.path for key in self.keys], further_words)

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


def topics(arguments: Sequence[str]) -> Topics:
    """The topics of the configuration that the flags and overrides among `arguments` compose.

    Raises:
        UserError: they do not fit the configuration.
    """
    words = overrides.with_files(list(arguments))
    folders = overrides.own_folders(words)
    with plugins.using(overrides.plugins(words), folders):
        (command,) = composed(words)
        groups = {group: names for group, names in overrides.groups(folders).items() if names}
        described = Topics(command, groups, Descriptions(folders=tuple(folders)), tuple(words))
        _ = described.keys  # the classes of plugins are at hand here alone
        return described


def of_verb(verb_help: str, words: Sequence[str], *, keys: bool) -> str:
    """Help of a verb.

    Args:
        words: the other words of the command, whose options of groups are those of the listing.
        keys: whether the verb takes the keys of a run, which are then listed, too.
    """
    lines = [verb_help.strip("\n")]
    if keys:
        flags, asked = _flags_and_words(words)
        groups = overrides.groups(overrides.own_folders(flags))
        chosen = [word for word in asked if word.partition("=")[0] in groups]
        lines += ["", topics([*flags, *chosen]).screen()]
    return fitted("\n".join(lines))


def of_words(words: Sequence[str], verbs: Iterable[str]) -> str:
    """Help about keys, groups and options of groups.

    Raises:
        UserError: there is nothing of such a name; the message suggests a verb or a key.
    """
    flags, asked = _flags_and_words(words)
    groups = overrides.groups(overrides.own_folders(flags))
    chosen = dict[str, str]()
    for word in asked:
        name, _, option = word.partition("=")
        group = name.replace(".", "/")
        if option and group in groups:
            chosen[word] = f"{group}={option}"
    texts = []
    for word in asked:
        options = [chosen[word]] if word in chosen else chosen.values()
        texts.append(topics([*flags, *options]).topic(word, verbs))
    return fitted("\n\n".join(texts))


def _flags_and_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of a command with the plugins that it names, and the words that are asked about."""
    flags, others = overrides.flags_and_words(words)
    asked = [word for word in others if not word.startswith("plugins=")]
    named = [word for word in others if word not in asked] if asked else []
    return [*flags, *named], asked or others


def _shown(value: Any, room: int = _LONGEST_VALUE) -> str:
    """A value as it is typed on a command line, in so many characters."""
    if isinstance(value, str):
        text = "(must be given)" if value == MISSING else value
    elif isinstance(value, Mapping):
        text = str(value.get("_target_", "{…}")).rpartition(".")[2]
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return shortened(text, min(room, _LONGEST_VALUE))
