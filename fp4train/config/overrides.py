"""Overrides from the command line: checked before Hydra sees them, so that a slip gets its near miss suggested."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from itertools import product
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fp4train.config.schema import CONFIGS, Config, keys, plain
from fp4train.errors import UserError
from fp4train.text import near_miss

_FOLDER_FLAGS = ("--config-dir", "-cd")
_OTHER_FLAGS = ("--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c", "--info", "-i")


def compose(arguments: list[str], folders: Iterable[Path] = ()) -> DictConfig:
    """The configuration that the overrides `arguments` make, with the groups in `folders` beside fp4train's own.

    Raises:
        UserError: they do not fit the configuration.
    """
    GlobalHydra.instance().clear()
    found = ",".join(f"'file://{folder.absolute()}'" for folder in folders)
    arguments = [f"hydra.searchpath=[{found}]", *arguments] if found else arguments
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra_compose("train", overrides=arguments, return_hydra_config=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_first_lines(error)) from error


def flags_and_words(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The flags among the arguments of a command line, with their values, and all that is no flag's."""
    flags: list[str] = []
    words: list[str] = []
    before = ""
    for argument in arguments:
        value = before in _FOLDER_FLAGS or (before in _OTHER_FLAGS and "=" not in argument)
        (flags if argument.startswith("-") or value else words).append(argument)
        before = "" if value else argument
    return flags, words


def flags_first(arguments: list[str]) -> list[str]:
    """The same arguments, flags before overrides: Hydra's parser takes overrides in one piece only."""
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
            found.append(parser.parse_override(word))
        except HydraException as error:
            if "=" not in word and Path(word).is_dir():
                raise UserError(f"{word} is no key=value; a run goes on with resume={word}") from error
            why = _first_lines(error).partition(" expecting ")[0]
            raise UserError(f"{word!r}: {why}; write key=value, and quote values with special characters") from error
    return found


def _is_override(argument: str) -> bool:
    try:
        return bool(parse([argument]))
    except UserError:
        return False


def changed_keys(arguments: list[str]) -> list[str]:
    """The configuration keys that overrides set; choosing a group sets its whole section, nested groups their part."""
    return [o.key_or_group.replace("/", ".") for o in parse(arguments) if not o.key_or_group.startswith("hydra")]


def swept_keys(arguments: list[str]) -> list[str]:
    """The keys that a sweep (-m) gives several values."""
    if not {"-m", "--multirun"} & set(arguments):
        return []
    return [o.key_or_group.replace("/", ".") for o in parse(arguments) if o.is_sweep_override()]


def groups(folders: Iterable[Path] = (CONFIGS,)) -> dict[str, list[str]]:
    """Config group → its options, nested groups with a slash ("data/tokenizer")."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*/*.yaml")) + sorted(folder.glob("*/*/*.yaml")):
            found.setdefault(path.parent.relative_to(folder).as_posix(), []).append(path.stem)
    return found


def for_resume(arguments: list[str]) -> list[str]:
    """The arguments of a command with resume=RUN, its keys marked as ones that may be new.

    Which keys there are depends on the groups that RUN was composed of, and Hydra composes the default ones. The keys
    are checked when they are applied to the saved configuration.
    """
    known = groups([CONFIGS, *own_folders(arguments)])
    marked = []
    for argument in arguments:
        key, _, path = argument.partition("=")
        if key == "resume" and not _is_override(argument):
            # The name of a sweep's point holds "=", which the grammar of overrides wants quoted.
            argument = "resume='" + path.replace("'", "\\'") + "'"
        value = "=" in argument and not argument.startswith(("-", "+", "~", "hydra"))
        marked.append(f"++{argument}" if value and key not in known and "@" not in key else argument)
    return marked


def check(arguments: list[str]) -> None:
    """Raise UserError for an unknown group option or key, with the near miss, and for a key written as a flag."""
    flags, _ = flags_and_words(arguments)
    sweep = bool({"-m", "--multirun"} & set(flags))
    more = own_folders(arguments)
    for folder in more:
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder}: there is no such folder")
    known = groups([CONFIGS, *more])
    sections = {field.name for field in fields(Config)} | {group.split("/")[0] for group in known}
    for flag in other_flags(flags):
        name = flag.lstrip("-")
        if re.split(r"[.=/]", name)[0] in sections:
            raise UserError(f"{flag}: keys are written without dashes, {name if '=' in name else f'{name}=…'}")
    chosen: list[list[str]] = []
    values: list[str] = []
    swept: list[str] = []
    others: list[str] = []
    for override in parse(arguments):
        key = override.key_or_group
        if key.startswith("hydra"):
            continue
        if override.is_sweep_override() and not sweep:
            line = override.input_line
            raise UserError(f"{line} holds several values: -m sweeps over them, and a list has brackets, {key}=[…]")
        if key not in known and not override.is_sweep_override():
            others.append(str(override.input_line))
        if key in known and not override.is_delete():
            options = _options(override)
            for option in options:
                if option not in (*known[key], *(["null", "None"] if key == "experiment" else [])):
                    listed = ", ".join(known[key])
                    raise UserError(
                        f"{key}={option}: there is no such {key}{near_miss(option, known[key])} (known: {listed})"
                    )
            chosen.append([f"{key}={option}" for option in options if option not in ("null", "None")] or [""])
        elif not (override.is_add() or override.is_force_add()):
            values.append(key)
            if override.is_sweep_override():
                swept.append(key)
    for combination in product(*chosen):
        choices = [choice for choice in combination if choice]
        try:
            have = list(keys(plain(compose([*choices, *others], more), resolve=False)))
        except UserError:
            _check_keys(values, list(keys(plain(compose(choices, more), resolve=False))))
            raise
        _check_keys(swept, have)


def _check_keys(wanted: list[str], have: list[str]) -> None:
    for key in wanted:
        if key in have:
            continue
        # A key of the right name in another section is likelier meant than one that looks alike: lr, optim.lr.
        others = [k for k in have if not key.startswith(f"{k}.")]
        namesakes = [k for k in others if k.rpartition(".")[2] == key.rpartition(".")[2]]
        section = key.rpartition(".")[0]
        beside = [k.rpartition(".")[2] for k in have if section and k.rpartition(".")[0] == section]
        beside = [name for name in beside if name != "_target_"]
        known = f" (known: {', '.join(beside)})" if beside else ""
        hint = f"; did you mean {namesakes[0]!r}?" if len(namesakes) == 1 else near_miss(key, namesakes or others)
        raise UserError(f"unknown key {key!r}{hint}{known}")


def _options(override: Override) -> list[str]:
    """The options that a group override names: several in a sweep."""
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
