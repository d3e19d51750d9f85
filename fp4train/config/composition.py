"""The composition of a configuration: once for each start.

Hydra composes the files: the options of the groups that the words choose. Single keys are set on
the result, so that keys that only a section's class has can be set as well, and an unknown one is
found beside those that there are.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from fp4train.checkpoint.source import WeightSource
from fp4train.config import foreign, overrides
from fp4train.config.binding import complete, key_fields
from fp4train.config.folders import CONFIGS, own_options, register_recipes, yaml_problem
from fp4train.config.plugins import check_targets
from fp4train.config.schema import Config, is_entry, keys, plain, take_out
from fp4train.config.typed import items, lost_texts, typed, typed_texts
from fp4train.errors import UserError, user_errors
from fp4train.sealed import CONFIG
from fp4train.text import first_few, near_miss

_HYDRAS_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    AssertionError,
    AttributeError,
    ValueError,
)
"""What Hydra raises where a setting of its own has a value that it did not expect."""

_ONE_AFTER_ANOTHER = ("hydra/launcher", "hydra/sweeper")
"""Groups of Hydra's whose option is fixed: the points of a sweep run here."""


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A composed configuration, its interpolations resolved.

    Args:
        choices: group → its option, nested groups with a slash ("data/tokenizer").
        changed: the keys that the command line sets; choosing a group's option sets its whole
            section.
        swept: the keys that a sweep gives several values → the override that does.
        point: overrides of this point of a sweep that its other points do not share.
        unresolved: the configuration with its interpolations.
        words: words that set single keys.
    """

    cfg: DictConfig
    unresolved: DictConfig
    choices: Mapping[str, str]
    changed: Sequence[str]
    swept: Mapping[str, str]
    point: str
    words: Sequence[Override]


def composed(arguments: list[str]) -> Iterator[Composed]:
    """The configuration that the arguments of a command make; with -m that of each point of its
    sweep, in turn.

    Each is one composition of Hydra's. With resume=RUN any key can be set: RUN may have been
    composed of other groups, and the saved configuration is what its keys are checked against. So
    are those of the model with init=FOLDER, which brings it.

    Raises:
        UserError: an unknown group option, key or setting of Hydra's (with a suggestion), several
            values without -m, or a --config-dir that cannot be used.
    """
    sweep = bool(overrides.SWEEP & set(arguments))
    resumed = bool(overrides.resumed_run(arguments))
    folders = overrides.own_folders(arguments)
    groups = overrides.groups(folders)
    words = overrides.parse(arguments)
    for word in words:
        _check_word(word, groups, sweep)
    changed = tuple(overrides.dotted(word) for word in words if not overrides.is_hydras(word))
    axes = {word.get_key_element(): _values(word) for word in words}
    swept = {
        overrides.dotted(word): str(word.input_line) for word in words if word.is_sweep_override()
    }
    for lines in product(*axes.values()):
        point_words = words
        if sweep:
            point_words = overrides.parse(list(lines))
        chosen = [
            word for word in point_words if word.key_or_group in groups or overrides.is_hydras(word)
        ]
        composition = _composition([str(word.input_line) for word in chosen], folders)
        _refuse_idle(chosen)
        params: Mapping[str, Any] = {}
        if sweep:  # an experiment's file may ask for one, too
            params = HydraConfig.get().sweeper.params or {}
        if sweep and not swept and not params:
            raise UserError(
                "-m trains a run for each value of a key, and no key has several values: -m "
                "recipe=bf16,nvfp4"
            )
        if more := [f"{key}={value}" for key, value in params.items() if key not in axes]:
            yield from composed([*more, *arguments])
            return
        elsewhere = None
        if resumed:
            elsewhere = ""
        elif _model_brought(point_words):
            elsewhere = "model."
        choices = _choices()
        single = [word for word in point_words if word not in chosen]
        _set_keys(composition, single, choices, elsewhere)
        _whole_numbers(composition, changed)
        _keep_texts(composition, single)
        _name_point(composition, choices, swept)
        yield Composed(
            cfg=OmegaConf.create(plain(composition)),
            unresolved=composition,
            choices=choices,
            changed=changed,
            swept=swept,
            words=single,
            point=" ".join(
                str(word.input_line) for word in point_words if overrides.dotted(word) in swept
            ),
        )


def _model_brought(words: Iterable[Override]) -> bool:
    """Whether init=… brings the model: it names a Hugging Face folder, or a run, and no model=… is
    chosen.
    """
    sources = [
        WeightSource.parse(str(word.value())) for word in words if word.key_or_group == "init"
    ]
    if any(source.is_folder for source in sources):
        return True
    runs = [source for source in sources if (source.path / CONFIG).is_file()]
    return bool(runs) and not any(word.key_or_group == "model" for word in words)


def compose(arguments: list[str], folders: Iterable[Path] = ()) -> DictConfig:
    """The configuration that Hydra composes of `arguments`, with the groups in `folders` added to
    fp4train's.

    Raises:
        UserError: they do not fit the configuration.
    """
    return _composition(arguments, folders)


def sections(
    options_of: Mapping[str, Iterable[str]], folders: Iterable[Path] = ()
) -> dict[tuple[str, str], Any]:
    """(group, option) → its section as plain values, of all options in `options_of`, by group; one
    composition.

    Raises:
        UserError: Hydra cannot compose one of them.
    """
    pairs = [(group, option) for group, options in options_of.items() for option in options]
    words = [f"+{group}@options.at{index}={option}" for index, (group, option) in enumerate(pairs)]
    if not pairs:
        return {}
    bodies = plain(compose(words, folders).options)
    return {pair: bodies[f"at{index}"] for index, pair in enumerate(pairs)}


def option_values(
    group: str, options: Iterable[str], folders: Iterable[Path] = ()
) -> dict[str, dict[str, Any]]:
    """Option → the full keys of its section, sections in it too, and their values, defaults of
    classes included. An experiment has no section.
    """
    if group == "experiment":
        return {}
    section = group.replace("/", ".")
    by_option = {}
    for (_, option), body in sections({group: options}, folders).items():
        configuration = body
        for part in reversed(section.split(".")):
            configuration = {part: configuration}
        described = key_fields(complete(configuration, Config), Config)
        by_option[option] = {
            key.path: key.value for key in described if key.path.startswith(f"{section}.")
        }
    return by_option


def groups_around(key: str, groups: Iterable[str]) -> list[str]:
    """The groups whose section is `key` or holds it, the innermost first."""
    around = [group for group in groups if f"{key}.".startswith(group.replace("/", ".") + ".")]
    return sorted(around, key=len, reverse=True)


def named(group: str, option: str) -> Any:
    """The section of one of fp4train's own options as plain values, for programs that may use Hydra
    themselves: what they composed stays theirs.

    Raises:
        UserError: the group has no such option; the message suggests one.
    """
    foreign.check_option(group, option, own_options()[group])
    their_hydra = GlobalHydra.instance().hydra
    their_config = HydraConfig.instance().cfg
    try:
        return sections({group: [option]})[group, option]
    finally:
        GlobalHydra.instance().hydra = their_hydra
        HydraConfig.instance().cfg = their_config


def _composition(words: list[str], folders: Iterable[Path]) -> DictConfig:
    """Configuration that Hydra composes, whose interpolations resolve until the next one; until then
    `HydraConfig` has Hydra's own node.
    """
    GlobalHydra.instance().clear()
    register_recipes()
    search_path = ",".join(f"'file://{folder.absolute()}'" for folder in folders)
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            all_words = list(words)
            if search_path:
                all_words.insert(0, f"hydra.searchpath=[{search_path}]")
            composition = hydra_compose("train", overrides=all_words, return_hydra_config=True)
            HydraConfig.instance().set_config(composition)
            with open_dict(composition):
                del composition["hydra"]
            return composition
    except MarkedYAMLError as error:
        name = "a file of options"
        if error.problem_mark is not None and Path(error.problem_mark.name).is_file():
            name = error.problem_mark.name
        raise UserError(f"{name} cannot be read: {yaml_problem(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"a file of options is not UTF-8 text: {error}") from error
    except _HYDRAS_ERRORS as error:
        settings = [word for word in words if word.lstrip("+~").startswith("hydra")]
        if not settings and not isinstance(error, (HydraException, OmegaConfBaseException)):
            raise
        if settings == words and len(words) == 1:
            raise UserError(
                f"{words[0]}: Hydra has no such setting or value, and no setting of Hydra's "
                "changes a run: leave it out"
            ) from error
        for setting in settings:
            _composition([setting], ())  # names the one at fault
        raise UserError(overrides.first_lines(error)) from error


def _choices() -> dict[str, str]:
    """Group → its option in the last composition."""
    chosen = HydraConfig.get().runtime.choices
    return {str(group): str(option) for group, option in chosen.items()}


def _set_keys(
    composition: DictConfig,
    words: list[Override],
    choices: Mapping[str, str],
    elsewhere: str | None,
) -> None:
    """Set single keys of a composition: those it has, and those that only its classes have.

    Args:
        choices: group → its option in the composition.
        elsewhere: beginning of the keys that are checked elsewhere, against another configuration,
            so that any of them can be set here; None: there are none.

    Raises:
        UserError: a key is unknown, or a value cannot stand there.
    """
    body = plain(composition, resolve=False)
    have = list(keys(body))
    for word in words:
        if is_entry(word.key_or_group) and word.value() is None:
            word.type = OverrideType.DEL
    assignments = [word for word in words if word.type == OverrideType.CHANGE]

    def kept_elsewhere(word: Override) -> bool:
        return elsewhere is not None and word.key_or_group.startswith(elsewhere)

    strange = [word for word in assignments if kept_elsewhere(word)]
    missing = [word for word in assignments if word in strange or word.key_or_group not in have]
    try:
        if missing:
            check_targets(body)
            added = [key for key in keys(complete(body, Config)) if key not in have]
        else:
            added = []
    except UserError:  # a class that is not there is reported where it is bound
        added = []
    for word in assignments:
        # unknown keys within a mapping are found where it is bound
        section = isinstance(word.value(), dict) and word.key_or_group in have
        if section or word in strange or word.key_or_group in added:
            word.type = OverrideType.FORCE_ADD
        _check_shape(word, _value_at(composition, word.key_or_group))
    for word in words:
        if word.is_delete() and kept_elsewhere(word):
            if word.value() is not None:  # which the other configuration may not have
                key = word.key_or_group
                raise UserError(f"{word.input_line}: a key of a run is taken out by ~{key} alone")
            take_out(composition, word.key_or_group)
    words = [word for word in words if not (word.is_delete() and kept_elsewhere(word))]
    for word in words:
        key = word.key_or_group
        if word.is_delete() and key in have and _value_at(composition, key) is None:
            raise UserError(f"{word.input_line}: {key} is null, and cannot be taken out")
    try:
        ConfigLoaderImpl._apply_overrides_to_config(words, composition)
    except (HydraException, OmegaConfBaseException) as error:
        taken_out = [word for word in words if word.is_delete()]
        unknown = [
            word.key_or_group
            for word in (*missing, *taken_out)
            if word.key_or_group not in (*have, *added)
        ]
        if unknown:
            of_others = _check_options(unknown[0], choices)
            raise foreign.unknown_key(unknown[0], [*have, *added], of_others) from error
        raise UserError(overrides.first_lines(error)) from error


def _check_shape(word: Override, current: Any) -> None:
    """Refuse a list in the place of a section, and a mapping in the place of a list.

    Args:
        current: the value that the configuration has under the key.
    """
    key = word.key_or_group
    if OmegaConf.is_dict(current) and isinstance(word.value(), list):
        raise UserError(
            f"{word.input_line}: {key} is a section, and its keys are set one by one: "
            f"{key}.KEY=VALUE"
        )
    if OmegaConf.is_list(current) and isinstance(word.value(), dict):
        raise UserError(f"{word.input_line}: {key} is a list: {key}=[…]")


def _check_options(key: str, choices: Mapping[str, str]) -> dict[str, str]:
    """The keys that other options of the group of a key have, and which: "data=text has it".

    Raises:
        UserError: `key` is one of them.
    """
    groups = groups_around(key, own_options())
    if not groups:
        return {}
    group = groups[0]
    having: dict[str, list[str]] = {}
    for option, values in option_values(group, own_options()[group]).items():
        for name in values:
            having.setdefault(name, []).append(option)
    chosen = choices.get(group, "")
    elsewhere = {name: options for name, options in having.items() if chosen not in options}
    if key in elsewhere:
        section = group.replace("/", ".")
        beside = [name.removeprefix(f"{section}.") for name in having if name not in elsewhere]
        listing = ""
        if names := sorted(name for name in beside if "." not in name):
            listing = f" (known: {', '.join(names)})"
        raise UserError(
            f"unknown key {key!r}: {group}={chosen} has none of that name, "
            f"{_has(group, elsewhere[key])}{listing}"
        )
    return {name: _has(group, options) for name, options in elsewhere.items()}


def _has(group: str, options: Sequence[str]) -> str:
    """ "data=text and data=hf have it"."""
    named = first_few([f"{group}={option}" for option in options], 6)
    return f"{named} {'has' if len(options) == 1 else 'have'} it"


def _keep_texts(composition: DictConfig, words: Iterable[Override]) -> None:
    """Let keys that take text have it as it is typed.

    Raises:
        UserError: a text of a file was read as a number.
    """
    try:
        for key, text in typed_texts(words, plain(composition, resolve=False)):
            OmegaConf.update(composition, key, text, merge=False)
        lost = next(lost_texts(plain(composition, resolve=False)), None)
    except UserError:  # a class that is not there is reported where it is bound
        return
    if lost is not None:
        raise UserError(
            f"{lost[0]} is text, and YAML reads {lost[1]!r}, which may be written otherwise: put "
            "it in quotes"
        )


def _whole_numbers(composition: DictConfig, changed: Iterable[str]) -> None:
    """Make integers of the numbers that keys of whole numbers were given otherwise: train.steps=1e3
    is 1000.
    """
    float_keys = [key for key in changed if isinstance(_value_at(composition, key), float)]
    if not float_keys:
        return
    body = plain(composition, resolve=False)
    for key in key_fields(body, Config):
        if key.path in float_keys and key.takes_integers and float(key.value).is_integer():
            OmegaConf.update(composition, key.path, int(key.value))


def _value_at(composition: DictConfig, key: str) -> Any:
    """The value of a key; None for an interpolation that leads nowhere, which is refused where it
    is resolved.
    """
    return OmegaConf.select(composition, key, throw_on_resolution_failure=False)


def _name_point(cfg: DictConfig, choices: Mapping[str, str], swept: Iterable[str]) -> None:
    """Append the swept values that a run's name lacks, so that every point of a sweep has its own
    directory.
    """
    for key in swept:
        name = str(OmegaConf.to_container(cfg.run, resolve=False)["name"])  # type: ignore[index, call-overload]
        if f"choices.{key}}}" not in name and not key.startswith(("run.name", "run.dir")):
            if key in choices:
                value = choices[key]
            else:
                value = OmegaConf.select(cfg, key)
            cfg.run.name = f"{name}-{key.rpartition('.')[2]}={str(value).replace('/', '_')}"


def _check_word(word: Override, groups: Mapping[str, list[str]], sweep: bool) -> None:
    """Refuse several values without a sweep, a group taken out, and an option that is not there."""
    key = word.key_or_group
    line = word.input_line
    if key in (
        "hydra.run.dir",
        "hydra.sweep.dir",
        "hydra.sweep.subdir",
        "hydra.output_subdir",
        "hydra.job.name",
    ):
        ours = "run.name" if key == "hydra.job.name" else "run.dir"
        value = "…" if word.value() is None else word.value()
        raise UserError(
            f"{line}: the {ours.partition('.')[2].replace('dir', 'directory')} of a run is "
            f"{ours}={value}"
        )
    if word.is_delete() and key in {field.name for field in fields(Config)} and key not in groups:
        raise UserError(f"{line}: a run needs {key}; {key}.KEY=VALUE sets its keys")
    if overrides.is_hydras(word):
        _check_hydras(word)
        return
    if word.is_sweep_override() and not sweep:
        raise UserError(
            f"{line} holds several values: -m sweeps over them, and a list has brackets, {key}=[…]"
        )
    if key in groups:
        if word.is_delete():
            raise UserError(
                f"{line}: the option of a group cannot be taken out; {key}=NAME chooses another"
            )
        if word.is_sweep_override():
            values = [v.partition("=")[2] for v in _values(word)]
        else:
            values = [str(word.value())]
        for value in values:
            foreign.check_option(key, value, groups[key])


def _check_hydras(word: Override) -> None:
    """Refuse settings of Hydra that fp4train has another word for, or nothing of."""
    key = word.key_or_group
    line = word.input_line
    value = word.value()
    if key == "hydra.searchpath":
        raise UserError(f"{line}: a folder of your own options is named by --config-dir FOLDER")
    if f"{key}.".startswith("hydra.sweeper.params.") and value is not None:
        raise UserError(f"{line}: the values of a sweep are written KEY=A,B, with -m")
    if key == "hydra.sweeper.params" and word.is_delete():
        raise UserError(f"{line}: an experiment's sweep is left out by {key}=null")
    if key.startswith("hydra.sweeper.params.") and not word.is_delete():
        swept = key.removeprefix("hydra.sweeper.params.")
        raise UserError(f"{line}: ~{key} leaves {swept} out of an experiment's sweep")
    if key in _ONE_AFTER_ANOTHER and not str(value).startswith("basic"):
        raise UserError(
            f"{line}: Hydra has no such setting (the points of a sweep run here, one after another)"
        )


def _refuse_idle(words: Iterable[Override]) -> None:
    """Refuse settings of Hydra that change nothing here: of its jobs, logs and folders."""
    for word in words:
        key = word.key_or_group
        sweep = f"{key}.".startswith("hydra.sweeper.params.")
        if overrides.is_hydras(word) and not sweep and key not in _ONE_AFTER_ANOTHER:
            raise UserError(
                f"{word.input_line}: this setting of Hydra changes nothing of a run: leave it out"
            )


def _values(word: Override) -> list[str]:
    """An override for each value that it gives its key: several in a sweep."""
    if not word.is_sweep_override():
        return [str(word.input_line)]
    remedy = f"; write the values, {word.key_or_group}=A,B"
    with user_errors(HydraException, before=f"{word.input_line}: ", after=remedy):
        values = list(word.sweep_string_iterator())
    texts = items(typed(word))
    if word.is_choice_sweep() and len(texts) == len(values):
        values = texts
    return [f"{word.get_key_element()}={value}" for value in values]


def check_flags(arguments: list[str]) -> None:
    """Refuse flags that are not fp4train's.

    Raises:
        UserError: an unknown flag, a key written as one, or one of Hydra's that names another
            configuration.
    """
    flags, _ = overrides.flags_and_words(arguments)
    sections = {field.name for field in fields(Config)} | {
        group.split("/")[0] for group in overrides.groups()
    }
    for flag in [a for a in flags if a.startswith("-")]:
        name = flag.partition("=")[0]
        bare = flag.lstrip("-")
        if re.split(r"[.=/]", bare)[0] in sections:
            raise UserError(
                f"{flag}: keys are written without dashes, {bare if '=' in bare else f'{bare}=…'}"
            )
        if name in ("--config-path", "-cp", "--config-name", "-cn"):
            raise UserError(
                f"{name}: fp4train has one configuration; a folder of your own options is "
                "--config-dir FOLDER"
            )
        if name not in overrides.KNOWN_FLAGS:
            namesakes = [
                f"{k}=…"
                for k in keys(plain(compose([]), resolve=False))
                if k.rpartition(".")[2] == bare
            ]
            if namesakes:
                hint = f"; keys are written without dashes: {' or '.join(namesakes)}"
            else:
                hint = ""
            hint = (
                hint
                or foreign.suggestion(bare.partition("=")[0])
                or near_miss(name, overrides.KNOWN_FLAGS, 0.7)
            )
            raise UserError(f"unknown flag {name}{hint}; fp4train --help lists keys")
