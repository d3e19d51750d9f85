"""The command line of a verb, bound to a dataclass whose fields are the verb's options.

    @dataclass(frozen=True, kw_only=True)
    class Options(CommandLine):
        task: str | None = None
        rows: Count = 16

    line = read_line(arguments, Options, __doc__, keys=("recipe", "plugins"))

An option has the name, the type, the bounds and the default of its field; one without a default
must be given. A text or a path is what the shell gives; any other value is written as those of a
run's configuration are, and bound as they are.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from hydra.errors import HydraException

from fp4train.config import overrides, plugins
from fp4train.config.binding import bind, mark_of, takes_path, types_of
from fp4train.config.schema import Config
from fp4train.config.typed import typed
from fp4train.config.unknown import why_absent
from fp4train.errors import UserError, check_local, user_errors
from fp4train.paths import ON_STORE, NamesPath
from fp4train.text import near_miss

L = TypeVar("L", bound="CommandLine")


_ALIKE = 0.5
_ALIKE_WITHOUT_RUN = 0.75
"""Smallest similarity of a key to one that is suggested."""


@dataclass(frozen=True)
class Within:
    """Marks a number with bounds; `must` says what it must be."""

    least: float
    must: str
    most: float = float("inf")


Count = Annotated[int, Within(1, "a whole number from 1")]
WholeNumber = Annotated[int, Within(0, "a whole number from 0")]
Amount = Annotated[float, Within(0, "a number from 0")]


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What the command lines of all verbs hold; a verb's own class adds its options as fields.

    Args:
        usage: the first line of the verb's help, "fp4train VERB …".
        flags: flags with their values.
        words: every word that is no option of the verb.
        chosen: words among these on the sections of a run that the verb takes
            ("recipe=a,b", "policy.last=0.1").
        paths: paths of a run's configuration that the command names, by their full keys.
        packages: packages with classes of the user's own (plugins=[…]).
        as_data: whether the flag --json asks for data.
    """

    usage: str
    flags: Sequence[str]
    words: Sequence[str]
    chosen: Sequence[str] = ()
    paths: Mapping[str, str | None] = field(default_factory=dict)
    packages: Sequence[str] = ()
    as_data: bool = False

    @property
    def verb(self) -> str:
        return self.usage.split()[1]

    @property
    def runs(self) -> list[Path]:
        """The directories that the words name.

        Raises:
            UserError: one lies in another storage.
        """
        words = [word for word in self.words if overrides.names_folder(word)]
        for word in words:
            check_local(word)
        return [Path(word) for word in words]

    @property
    def run(self) -> Path:
        """The one directory that the words name.

        Raises:
            UserError: they name another number of directories.
        """
        if len(self.runs) != 1:
            raise UserError(f"{self.verb} needs one run directory: {self.usage}")
        return self.runs[0]

    @property
    def some_runs(self) -> list[Path]:
        """The directories that the words name.

        Raises:
            UserError: they name none.
        """
        if not self.runs:
            raise UserError(f"{self.verb} needs run directories: {self.usage}")
        return self.runs

    @property
    def overrides(self) -> list[str]:
        """The words that name no directory."""
        return [word for word in self.words if not overrides.names_folder(word)]

    @property
    def folders(self) -> list[Path]:
        """The folders of --config-dir."""
        return overrides.own_folders(self.flags)

    def using_plugins(self) -> AbstractContextManager[None]:
        """Where the classes of `packages` are at hand."""
        return plugins.using(self.packages, self.folders)


def option_names(kind: type[CommandLine]) -> list[str]:
    """The names of the options that a verb's class adds."""
    shared = {field.name for field in fields(CommandLine)}
    return [field.name for field in fields(kind) if field.name not in shared]


def read_line(
    arguments: list[str],
    kind: type[L],
    help_screen: str | None,
    *,
    keys: Collection[str] | None = (),
    paths: bool = False,
    data: bool = False,
) -> L:
    """Take a command line apart.

    Args:
        arguments: words and flags, as the shell gives them.
        kind: the class of the verb's options.
        help_screen: the help of the verb, which begins with its usage.
        keys: sections of a run's configuration, and `plugins`, that the verb takes; with `plugins`
            it takes --config-dir. None: any key and flag of a run.
        paths: whether it takes paths of a run's configuration.
        data: whether it takes the flag --json.

    Raises:
        UserError: an option is missing, given twice, misspelt or refused, or there is a key or flag
            that the verb does not take.
    """
    usage = (help_screen or "").partition("\n")[0]
    names = option_names(kind)
    hints = get_type_hints(kind, include_extras=True)
    as_data = data and "--json" in arguments
    flags, words = overrides.flags_and_words(
        [word for word in arguments if not (as_data and word == "--json")]
    )
    values: dict[str, Any] = {}
    other_words = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in names:
            other_words.append(word)
        elif key in values:
            raise UserError(f"{key}=… is given twice")
        else:
            values[key] = _value(word, text, hints[key], key)
    line = CommandLine(usage=usage, flags=flags, words=other_words)
    for key in (word.partition("=")[0] for word in line.overrides):
        if reason := why_absent(f"{line.verb} {key}"):
            raise UserError(f"unknown key {key!r}: {reason}")
    if keys is None:
        _check_run_keys(line, names)
        on_run: dict[str, Any] = {}
    else:
        on_run = _words_on_run(line, names, keys, paths=paths)
    for option in fields(kind):
        if option.name in names and option.name not in values and option.default is MISSING:
            raise UserError(f"{line.verb} needs {option.name}=…: {usage}")
    with user_errors(ValueError):
        return kind(
            usage=usage, flags=flags, words=other_words, as_data=as_data, **on_run, **values
        )


def _check_run_keys(line: CommandLine, names: Sequence[str]) -> None:
    """Refuse key=value where the key does not begin the key of a run. Where the command names no run,
    a key that is like no other is left to composition, which knows more keys to suggest.

    Args:
        names: options of the verb.
    """
    run_keys = {field.name for field in fields(Config)} | set(overrides.groups(line.folders))
    alike = _ALIKE if line.runs else _ALIKE_WITHOUT_RUN
    for word in line.overrides:
        key, equals, _ = word.partition("=")
        if equals and "." not in key and key.lstrip("+~") not in run_keys:
            candidates = [*names, *overrides.settable_keys()]
            hint = near_miss(key, candidates, alike)
            if hint or line.runs:
                listing = f" (known: {', '.join(names)} and the keys of a run)"
                raise UserError(f"unknown key {key!r}{hint}{listing}")


def _words_on_run(
    line: CommandLine,
    names: Sequence[str],
    keys: Collection[str],
    *,
    paths: bool,
) -> dict[str, Any]:
    """What a command says about runs, as fields of its `CommandLine`; see `read_line`."""
    flags = overrides.other_flags(line.flags) if "plugins" in keys else line.flags
    if flags:
        raise UserError(f"{line.verb} knows no flag {flags[0]}: {line.usage}")
    chosen = []
    named_paths = {}
    words = overrides.with_files(line.overrides)  # Hydra's grammar does not have all names of files
    for override in overrides.parse(words):
        key = override.key_or_group
        section = key.partition(".")[0]
        if section in keys and section != "plugins":
            chosen.append(str(override.input_line))
        elif paths and key == "data":
            raise UserError(
                f"{override.input_line}: {line.verb} takes the source of data of the run; its "
                "paths are given as data.path=…"
            )
        elif paths and section in _SECTIONS and not isinstance(override.value(), list | dict):
            value = override.value()
            named_paths[key] = value if isinstance(value, str | None) else typed(override)
        elif key not in keys:
            accepted = [*names, *keys]
            listing = f" (known: {', '.join(accepted)})" if accepted else ""
            raise UserError(f"unknown key {key!r}{near_miss(key, accepted)}{listing}: {line.usage}")
    return {"chosen": chosen, "paths": named_paths, "packages": overrides.plugins(words)}


_SECTIONS = {field.name for field in fields(Config)} - {"plugins", "recipe", "policy", "phases"}
"""Sections of a run's configuration that may hold paths."""


def _value(word: str, text: str, hint: Any, key: str) -> Any:
    """The value of an option.

    Args:
        word: "key=text".
        hint: type of its field.

    Raises:
        UserError: it has another type, or is out of bounds.
    """
    types = types_of(hint)
    if str in types or Path in types:
        if takes_path(hint):
            check_local(text, key, stores=mark_of(hint, NamesPath) == ON_STORE)
        return text if str in types else Path(text)
    bounds = mark_of(hint, Within)
    (override,) = overrides.parse([word])
    node = override.value()
    if override.is_sweep_override():
        with user_errors(HydraException, before=f"{word}: ", after="; write plain values"):
            node = list(override.sweep_iterator())
    value = bind(node, hint, key)
    if bounds is not None and value is not None and not bounds.least <= value <= bounds.most:
        raise UserError(f"{word} must be {bounds.must}")
    return value
