"""Overrides from the command line, checked before Hydra sees them so that a mistyped name gets a suggestion."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fp4train.config import foreign
from fp4train.config.binding import complete
from fp4train.config.folders import (
    CONFIGS,
    check_folder,
    options,
    own_options,
    register_file,
    register_recipes,
    registered_files,
)
from fp4train.config.schema import Config, keys, plain
from fp4train.errors import UserError
from fp4train.parallel.config import why_absent
from fp4train.text import near_miss

_FOLDER_FLAGS = ("--config-dir", "-cd")
_KNOWN_FLAGS = (
    *_FOLDER_FLAGS,
    *("-m", "--multirun", "--cfg", "-c", "--resolve", "--info", "-i", "--package", "-p"),
    *("--help", "-h", "--hydra-help", "--version"),
)
_OTHER_FLAGS = ("--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c", "--info", "-i")


def compose(arguments: list[str], folders: Iterable[Path] = ()) -> DictConfig:
    """The configuration that the overrides `arguments` make, with the groups in `folders` added to fp4train's.

    Raises:
        UserError: they do not fit the configuration.
    """
    GlobalHydra.instance().clear()
    register_recipes()
    found = ",".join(f"'file://{folder.absolute()}'" for folder in folders)
    arguments = [f"hydra.searchpath=[{found}]", *arguments] if found else arguments
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra_compose("train", overrides=arguments, return_hydra_config=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_first_lines(error)) from error


def flags_and_words(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of a command line as two lists: flags with their values, and everything else."""
    flags: list[str] = []
    words: list[str] = []
    before = ""
    for argument in arguments:
        value = before in _FOLDER_FLAGS or (before in _OTHER_FLAGS and "=" not in argument)
        (flags if argument.startswith("-") or value else words).append(argument)
        before = "" if value else argument
    return flags, words


def names_folder(word: str) -> bool:
    """Whether a word of a command line is a directory's name: it is no key=value, or there is a directory of that name.

    The directories of a sweep have the swept value in their names: runs/a-microbatch=2.
    """
    return "=" not in word or os.path.isdir(word)  # pathlib raises where a word is too long for a name


def flags_first(arguments: list[str]) -> list[str]:
    """The same arguments, flags before overrides: Hydra's parser does not accept flags between overrides."""
    flags, words = flags_and_words(arguments)
    return [*flags, *words]


def parse(arguments: list[str]) -> list[Override]:
    """The overrides among the arguments of a command line.

    Raises:
        UserError: one is not of the form key=value.
    """
    parser = OverridesParser.create()
    _, words = flags_and_words(arguments)
    found = []
    for word in words:
        try:
            override = parser.parse_override(word)
            if override.package is not None and not override.key_or_group.startswith("hydra"):
                plain_word = word.replace(f"@{override.package}", "", 1)
                raise UserError(f"{word!r}: a group has one place in the configuration, without @: {plain_word}")
            found.append(override)
        except (HydraException, ValueError) as error:  # ValueError: a number of thousands of digits
            if "=" not in word and Path(word).is_dir():
                raise UserError(f"{word} is no key=value; a run goes on with resume={word}") from error
            if "=" not in word:
                raise UserError(f"{word!r} is no key=value; a verb stands first: fp4train help lists them") from error
            why = _first_lines(error).partition(" expecting ")[0]
            if odd := re.search(r"token recognition error at: '(.)", why):
                key, equals, value = word.partition("=")
                quoted = f"'{key}=\"{value}\"'" if equals else "key=value"
                raise UserError(f"{word!r}: a value with the character {odd[1]} needs quotes: {quoted}") from error
            raise UserError(f"{word!r}: {why}; write key=value, and quote values with special characters") from error
    return found


def _is_override(argument: str) -> bool:
    try:
        return bool(parse([argument]))
    except UserError:
        return False


def changed_keys(arguments: list[str]) -> list[str]:
    """The configuration keys that overrides set; choosing a group's option sets its whole section."""
    return [o.key_or_group.replace("/", ".") for o in parse(arguments) if not o.key_or_group.startswith("hydra")]


def swept_keys(arguments: list[str]) -> list[str]:
    """The keys that a sweep (-m) gives several values."""
    if not {"-m", "--multirun"} & set(arguments):
        return []
    return [o.key_or_group.replace("/", ".") for o in parse(arguments) if o.is_sweep_override()]


def groups(folders: Iterable[Path] = ()) -> dict[str, list[str]]:
    """Config group → its options, those of fp4train and of `folders`; nested groups with a slash ("data/tokenizer")."""
    found = own_options()
    for more in (registered_files(), *(options(folder) for folder in folders)):
        for group, names in more.items():
            found.setdefault(group, []).extend(names)
    return found


def with_files(arguments: list[str]) -> list[str]:
    """The arguments of a command; a YAML file that stands for an option (policy=FILE.yaml) is registered as one.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    known = {group for group in own_options() if "/" not in group and group != "experiment"}

    def option(group: str, value: str) -> str:
        bare = value.strip("'\"")
        return register_file(group, Path(bare)) if bare.endswith((".yaml", ".yml")) else value

    found = []
    for argument in arguments:
        group, equals, value = argument.partition("=")
        if equals and group in known:
            argument = f"{group}={','.join(option(group, each) for each in value.split(','))}"
        found.append(argument)
    return found


def plugins(arguments: list[str]) -> list[str]:
    """The packages that `plugins=[…]` names.

    Raises:
        UserError: it is no list of names, or a sweep.
    """
    found: list[str] = []
    for override in parse(arguments):
        if override.key_or_group == "plugins":
            if override.is_sweep_override():
                raise UserError(f"{override.input_line}: a list has brackets, plugins=[…]; it cannot be swept over")
            value = None if override.is_delete() else override.value()
            names = value if isinstance(value, list) else [] if value is None else [value]
            if strange := [name for name in names if not isinstance(name, str)]:
                raise UserError(f"{override.input_line}: {strange[0]} is no package's name; write plugins=[mylab]")
            found = [str(name) for name in names]
    return found


def quoted(key: str, value: str) -> str:
    """ "key='value'", as Hydra's grammar takes any text."""
    return f"{key}='" + value.replace("'", "\\'") + "'"


def as_typed(key: str, value: str) -> str:
    """ "key=value" as it is typed in a shell."""
    return f"{key}={value}" if re.fullmatch(r"[a-zA-Z0-9_./:-]+", value) else shlex.quote(quoted(key, value))


def for_resume(arguments: list[str]) -> list[str]:
    """The arguments of a command with resume=RUN; each key=value is marked as an addition (++).

    RUN may have been composed of other groups than the default ones, which Hydra composes here, so it may have keys
    that Hydra does not know. They are checked later, against the saved configuration.
    """
    known = groups(own_folders(arguments))
    marked = []
    for argument in arguments:
        key, _, path = argument.partition("=")
        if key == "resume" and not _is_override(argument):
            # The directories of a sweep have "=" in their names, which Hydra's grammar requires to be quoted.
            argument = quoted("resume", path)
        value = "=" in argument and not argument.startswith(("-", "+", "~", "hydra"))
        marked.append(f"++{argument}" if value and key not in known and "@" not in key else argument)
    return marked


def with_defaults(arguments: list[str], folders: Iterable[Path] = ()) -> list[str]:
    """The arguments; a key that its section's class has and the YAML leaves out is marked as an addition (++).

    Plugins that the sections name must be imported (`plugins.using`).
    """
    found = parse(arguments)
    known = groups(folders)
    choices = [f"{o.key_or_group}={_picked(o)[0]}" for o in found if o.key_or_group in known and not o.is_delete()]
    only = _only_in_classes(plain(compose(choices, folders), resolve=False))
    missing = {
        str(o.input_line)
        for o in found
        if o.key_or_group in only and not (o.is_add() or o.is_force_add() or o.is_delete())
    }
    return [f"++{a}" if a in missing else a for a in arguments]


def _only_in_classes(have: Mapping[str, Any]) -> set[str]:
    """The keys that the classes of a composed configuration have and its YAML leaves out."""
    try:
        return set(keys(complete(have, Config))) - set(keys(have))
    except UserError:  # a class that is not there is reported where it is bound
        return set()


def check_flags(arguments: list[str]) -> None:
    """Refuse flags that are not fp4train's.

    Raises:
        UserError: an unknown flag, a key written as one, or one of Hydra's that names another configuration.
    """
    flags, _ = flags_and_words(arguments)
    sections = {field.name for field in fields(Config)} | {group.split("/")[0] for group in groups()}
    for flag in [a for a in flags if a.startswith("-")]:
        name = flag.partition("=")[0]
        bare = flag.lstrip("-")
        if re.split(r"[.=/]", bare)[0] in sections:
            raise UserError(f"{flag}: keys are written without dashes, {bare if '=' in bare else f'{bare}=…'}")
        if name in ("--config-path", "-cp", "--config-name", "-cn"):
            raise UserError(
                f"{name}: fp4train has one configuration; a folder of your own options is --config-dir FOLDER"
            )
        if name not in _KNOWN_FLAGS:
            namesakes = [f"{k}=…" for k in keys(plain(compose([]), resolve=False)) if k.rpartition(".")[2] == bare]
            hint = f"; keys are written without dashes: {' or '.join(namesakes)}" if namesakes else ""
            hint = hint or foreign.suggestion(bare.partition("=")[0]) or near_miss(name, _KNOWN_FLAGS)
            raise UserError(f"unknown flag {name}{hint}; fp4train --help lists keys")


def check(arguments: list[str]) -> None:
    """Check the arguments of a command against the configuration that they compose.

    Raises:
        UserError: an unknown group option or key (with a suggestion), a key written as a flag, several values without
            -m, or a --config-dir that cannot be used.
    """
    flags, _ = flags_and_words(arguments)
    sweep = bool({"-m", "--multirun"} & set(flags))
    more = own_folders(arguments)
    for folder in more:
        check_folder(folder)
    known = groups(more)
    chosen: list[list[str]] = []
    values: list[str] = []
    swept: list[str] = []
    others: list[str] = []
    for override in parse(arguments):
        key = override.key_or_group
        if key.startswith("hydra"):
            _check_hydra(str(override.input_line))
            continue
        if override.is_sweep_override() and not sweep:
            line = override.input_line
            raise UserError(f"{line} holds several values: -m sweeps over them, and a list has brackets, {key}=[…]")
        if key in known and override.is_delete():
            raise UserError(f"{override.input_line}: a run needs a {key.split('/')[-1]}; {key}=NAME chooses another")
        if key not in known and not override.is_sweep_override():
            others.append(str(override.input_line))
        if key in known and not override.is_delete():
            picked = _picked(override)
            for option in picked:
                check_option(key, option, known[key])
            chosen.append([f"{key}={option}" for option in picked if option not in ("null", "None")] or [""])
        elif not (override.is_add() or override.is_force_add()):
            values.append(key)
            if override.is_sweep_override():
                swept.append(key)
    for combination in product(*chosen):
        choices = [choice for choice in combination if choice]
        bare = plain(compose(choices, more), resolve=False)
        added = _only_in_classes(bare)
        marked = [f"++{line}" if line.partition("=")[0] in added else line for line in others]
        try:
            have = [*keys(plain(compose([*choices, *marked], more), resolve=False)), *added]
        except UserError:
            _check_keys(values, [*keys(bare), *added])
            raise
        _check_keys(swept, have)


def check_option(group: str, option: str, known: list[str]) -> None:
    """Refuse an option that the group `group` does not have.

    Raises:
        UserError: it is none of `known`; the message suggests one.
    """
    if option not in (*known, *(["null", "None"] if group == "experiment" else [])):
        raise UserError(
            f"{group}={option}: there is no such {group}{foreign.option_suggestion(group, option, known)} "
            f"(known: {', '.join(known)})"
        )


def _check_hydra(override: str) -> None:
    """Refuse a setting of Hydra's own that it does not have."""
    GlobalHydra.instance().clear()
    register_recipes()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            hydra_compose("train", overrides=[override], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{override}: Hydra has no such setting ({_first_lines(error)})") from error


def _check_keys(wanted: list[str], have: list[str]) -> None:
    for key in wanted:
        if key in have:
            continue
        if (reason := why_absent(key.removeprefix("parallel."))) is not None:
            raise UserError(f"unknown key {key!r}: {reason}")
        # The same name in another section (lr: optim.lr) is a better suggestion than a similar name.
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
            hint = f"; did you mean {namesakes[0]!r}?" if len(namesakes) == 1 else ""
            hint = hint or foreign.suggestion(key, have) or near_miss(key, namesakes or others)
        raise UserError(f"unknown key {key!r}{hint}{known}")


def _picked(override: Override) -> list[str]:
    """The options that an override of a group picks: several in a sweep."""
    if override.is_sweep_override():
        return [str(option) for option in override.sweep_string_iterator()]
    return [str(override.value())]


def own_folders(arguments: list[str]) -> list[Path]:
    """The folders of --config-dir.

    Raises:
        UserError: one is not named.
    """
    found = []
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in _FOLDER_FLAGS:
            folder = value if equals else next(iter(arguments[index + 1 :]), "")
            if not folder:
                raise UserError(f"{name} needs a folder: {name} FOLDER")
            found.append(Path(folder))
    return found


def other_flags(arguments: list[str]) -> list[str]:
    """The flags that are not --config-dir."""
    return [a for a in arguments if a.startswith("-") and a.partition("=")[0] not in _FOLDER_FLAGS]


def _first_lines(error: Exception) -> str:
    """What an error of Hydra's or OmegaConf's says, without its hints for programmers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [
        line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type=", "See https"))
    ]
    return " ".join(useful[:2]) or type(error).__name__
