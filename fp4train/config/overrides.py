"""The words of a command line: key=value in Hydra's grammar, flags, and names of runs."""

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from fp4train.config.binding import bind
from fp4train.config.folders import (
    check_folder,
    options,
    own_options,
    register_file,
    registered_files,
)
from fp4train.config.schema import Config
from fp4train.config.typed import items
from fp4train.errors import UserError
from fp4train.text import shortened, typed

_FOLDER_FLAGS = ("--config-dir", "-cd")
KNOWN_FLAGS = (
    *_FOLDER_FLAGS,
    "-m",
    "--multirun",
    "--cfg",
    "-c",
    "--resolve",
    "--help",
    "-h",
    "--version",
)
_VALUED_FLAGS = (*_FOLDER_FLAGS, "--cfg", "-c")
SWEEP = frozenset({"-m", "--multirun"})


def flags_and_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of a command line as two lists: flags with their values, and everything
    else.
    """
    flags: list[str] = []
    words: list[str] = []
    previous = ""
    for argument in arguments:
        value = previous in _VALUED_FLAGS
        if argument.startswith("-") or value:
            flags.append(argument)
        else:
            words.append(argument)
        previous = "" if value else argument
    return flags, words


def names_folder(word: str) -> bool:
    """Whether a word of a command line is a directory's name: it is no key=value and takes no key
    away (~key), or there is a directory of that name.

    The directories of a sweep have the swept value in their names: runs/a-microbatch=2.
    """
    # pathlib raises where a word is too long for a name
    return not word.startswith("~") and ("=" not in word or os.path.isdir(word))


def settable_keys() -> list[str]:
    """The keys without a dot that take a value or an option of their group."""
    return [
        key
        for key, kind in get_type_hints(Config).items()
        if key in own_options() or not is_dataclass(kind)
    ]


def baseline_first(runs: Sequence[Path], baseline: Path | None) -> list[Path]:
    """The runs with the one that gaps are to at the beginning; None: they stay as they are."""
    if baseline is None:
        return list(runs)
    return [baseline, *(run for run in runs if os.path.realpath(run) != os.path.realpath(baseline))]


def parse(arguments: Sequence[str]) -> list[Override]:
    """The overrides among the arguments of a command line.

    Raises:
        UserError: one is not of the form key=value.
    """
    parser = OverridesParser.create()
    _, words = flags_and_words(arguments)
    parsed = []
    for word in words:
        try:
            override = parser.parse_override(word)
        except ValueError as error:  # a number of thousands of digits
            raise _refused(word, error) from error
        except HydraException as error:
            try:
                override = parser.parse_override(_as_text(word))
            except HydraException:
                raise _refused(word, error) from error
        if override.package is not None and not is_hydras(override):
            plain_word = word.replace(f"@{override.package}", "", 1)
            raise UserError(
                f"{word!r}: a group has one place in the configuration, without @: {plain_word}"
            )
        parsed.append(override)
    return parsed


def _as_text(word: str) -> str:
    """A word that Hydra's grammar does not have, with its texts in quotes: Müller.txt, a(1).txt,
    [a#b,c]. Sections, interpolations and a ~ that the shell was to replace stay as they are, and so
    does what has quotes.
    """
    key, equals, value = word.partition("=")
    listed = re.fullmatch(r"\[([^\[\]]*)\]", value)
    texts = items(listed[1]) if listed else [value]
    if key != "resume" and any(re.search(r"""^[\[{(~]|\$\{|[,'"]""", text) for text in texts):
        return word
    quotes = [quoted("", text).removeprefix("=") for text in texts]
    return f"{key}{equals}" + (f"[{','.join(quotes)}]" if listed else quotes[0])


def _refused(word: str, error: Exception) -> UserError:
    """The error about a word that Hydra's grammar does not have."""
    key, equals, value = shortened(word, 100).partition("=")
    if not equals:
        if Path(word).is_dir():
            return UserError(f"{word} is no key=value; a run goes on with resume={typed(word)}")
        return UserError(f"{word!r} is no key=value; a verb stands first: fp4train help lists them")
    if value.startswith("~/"):
        return UserError(
            f"{word!r}: the shell leaves ~ after = as it is; write {key}=$HOME{value[1:]}"
        )
    why = first_lines(error).partition(" expecting ")[0]
    return UserError(
        f"{key}={value}: {why}; write key=value, a list without spaces, KEY=A,B, and a value with "
        f"special characters in quotes: '{key}=\"…\"'"
    )


def is_hydras(override: Override) -> bool:
    """Whether an override is a setting of Hydra's."""
    return re.split("[./]", override.key_or_group)[0] == "hydra"


def dotted(override: Override) -> str:
    """The key that an override sets; choosing a group's option sets its whole section."""
    return override.key_or_group.replace("/", ".")


def groups(folders: Iterable[Path] = ()) -> dict[str, list[str]]:
    """Config group → its options, those of fp4train and of `folders`; nested groups with a slash
    ("data/tokenizer").
    """
    by_group = {group: list(names) for group, names in own_options().items()}
    for more in (registered_files(), *(options(folder) for folder in folders)):
        for group, names in more.items():
            by_group.setdefault(group, []).extend(names)
    return by_group


def with_files(arguments: list[str]) -> list[str]:
    """The arguments of a command; a YAML file that stands for an option (policy=FILE.yaml) is
    registered as one.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    file_groups = {group for group in own_options() if "/" not in group and group != "experiment"}

    def option(group: str, value: str) -> str:
        bare = value.strip("'\"")
        if bare.endswith((".yaml", ".yml")):
            return register_file(group, Path(bare))
        return value

    words = []
    for argument in arguments:
        group, equals, value = argument.partition("=")
        if equals and group in file_groups:
            argument = f"{group}={','.join(option(group, choice) for choice in value.split(','))}"
        words.append(argument)
    return words


def plugins(arguments: Sequence[str]) -> list[str]:
    """The packages that `plugins=[…]` names.

    Raises:
        UserError: it is no list of names, or a sweep.
    """
    packages: list[str] = []
    for override in parse(arguments):
        if override.key_or_group == "plugins":
            if override.is_sweep_override():
                raise UserError(
                    f"{override.input_line}: a list has brackets, plugins=[…]; it cannot be "
                    "swept over"
                )
            packages = []
            if not override.is_delete() and (value := override.value()) is not None:
                packages = bind(value, list[str], "plugins")
    return packages


def quoted(key: str, value: str) -> str:
    """ "key='value'", as Hydra's grammar takes any text."""
    return f"{key}='" + value.replace("'", "\\'") + "'"


def as_typed(key: str, value: str | Sequence[str]) -> str:
    """ "key=value" as it is typed in a shell; several values as a list."""
    if not isinstance(value, str):
        items = ",".join(quoted("", item).removeprefix("=") for item in value)
        return shlex.quote(f"{key}=[{items}]")
    if re.fullmatch(r"[a-zA-Z0-9_./:-]+", value):
        return f"{key}={value}"
    return shlex.quote(quoted(key, value))


def resumed_run(arguments: Iterable[str]) -> str | None:
    """The override resume=RUN of a command that goes on with a run."""
    return next((a for a in arguments if a.startswith("resume=") and a != "resume=null"), None)


def own_folders(arguments: Sequence[str]) -> list[Path]:
    """The folders of --config-dir.

    Raises:
        UserError: one is not named, or cannot be used (`check_folder`).
    """
    folders = []
    for name, folder in flag_values(arguments, _FOLDER_FLAGS):
        if not folder:
            raise UserError(f"{name} needs a folder: {name} FOLDER")
        check_folder(Path(folder))
        folders.append(Path(folder))
    return folders


def flag_values(arguments: Sequence[str], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Each flag of these names among the arguments, and its value, empty where it has none."""
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name in names:
            yield name, value if equals else following


def other_flags(arguments: Sequence[str]) -> list[str]:
    """The flags that are not --config-dir."""
    return [a for a in arguments if a.startswith("-") and a.partition("=")[0] not in _FOLDER_FLAGS]


def first_lines(error: Exception) -> str:
    """Message of an error of Hydra's or OmegaConf's, without its hints for programmers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [
        line
        for line in lines
        if not line.startswith(("full_key:", "object_type=", "reference_type=", "See https"))
    ]
    return " ".join(useful[:2]) or type(error).__name__
