"""The composition of a configuration: once for each start.

Hydra composes the files: the options of the groups that the words choose. Single keys are set on
the result, so that keys that only a section's class has can be set as well, and an unknown one is
found beside those that there are.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from fp4train.checkpoint.source import WeightSource
from fp4train.config import overrides
from fp4train.config.binding import complete, key_fields
from fp4train.config.folders import CONFIGS, own_options, register_recipes, yaml_problem
from fp4train.config.schema import Config, is_entry, keys, plain, take_out
from fp4train.config.typed import items, lost_texts, typed, typed_texts
from fp4train.config.unknown import check_option, unknown_key
from fp4train.errors import UserError, user_errors
from fp4train.sealed import CONFIG
from fp4train.text import first_few, near_miss


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
        point_words = overrides.parse(lines) if sweep else words
        chosen = [
            word for word in point_words if word.key_or_group in groups or overrides.is_hydras(word)
        ]
        single = [word for word in point_words if word not in chosen]
        composition = compose([str(word.input_line) for word in chosen], folders)
        if sweep and (more := _axes_of_file(axes, swept)):
            yield from composed([*more, *arguments])
            return
        choices = _choices()
        _set_keys(composition, single, _checked_elsewhere(point_words))
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


def _axes_of_file(axes: Collection[str], swept: Collection[str]) -> list[str]:
    """The values that an experiment's file gives its keys in a sweep, but for those in `axes`.

    Raises:
        UserError: neither the file nor the command sweeps over a key.
    """
    params = HydraConfig.get().sweeper.get("params") or {}
    if not swept and not params:
        raise UserError(
            "-m trains a run for each value of a key, and no key has several values: -m "
            "recipe=bf16,nvfp4"
        )
    return [f"{key}={value}" for key, value in params.items() if key not in axes and value]


def _checked_elsewhere(words: Iterable[Override]) -> str | None:
    """The beginning of the keys that are checked against another configuration than the composed
    one: all of a run that goes on, those of a model that init=… brings. None: there are none.
    """
    values = {word.key_or_group: word.value() for word in words}
    if values.get("resume") is not None:
        return ""
    if values.get("init") is None:
        return None
    source = WeightSource.parse(str(values["init"]))
    has_model = (source.path / CONFIG).is_file() and "model" not in values
    return "model." if source.is_folder or has_model else None


def compose(arguments: list[str], folders: Iterable[Path] = ()) -> DictConfig:
    """The configuration that Hydra composes of `arguments`, with the groups in `folders` added to
    fp4train's. Its interpolations resolve until the next one; until then `HydraConfig` has Hydra's
    own node.

    Raises:
        UserError: they do not fit the configuration.
    """
    GlobalHydra.instance().clear()
    register_recipes()
    search_path = ",".join(f"'file://{folder.absolute()}'" for folder in folders)
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            if search_path:
                arguments = [f"hydra.searchpath=[{search_path}]", *arguments]
            composition = hydra_compose("train", overrides=arguments, return_hydra_config=True)
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
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(overrides.first_lines(error)) from error


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


def keys_around(
    key: str, groups: Mapping[str, Sequence[str]], folders: Iterable[Path] = ()
) -> dict[str, list[str]]:
    """The keys that the options of the groups around a key have → these options ("data=text")."""
    having: dict[str, list[str]] = {}
    for group in groups_around(key, groups):
        for option, values in option_values(group, groups[group], folders).items():
            for name in values:
                having.setdefault(name, []).append(f"{group}={option}")
    return having


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
    check_option(group, option, own_options()[group])
    their_hydra = GlobalHydra.instance().hydra
    their_config = HydraConfig.instance().cfg
    try:
        return sections({group: [option]})[group, option]
    finally:
        GlobalHydra.instance().hydra = their_hydra
        HydraConfig.instance().cfg = their_config


def _choices() -> dict[str, str]:
    """Group → its option in the last composition."""
    chosen = HydraConfig.get().runtime.choices
    return {str(group): str(option) for group, option in chosen.items()}


def _set_keys(composition: DictConfig, words: Iterable[Override], elsewhere: str | None) -> None:
    """Set single keys of a composition: those it has, and those that only its classes have.

    Args:
        elsewhere: beginning of the keys that are checked elsewhere, against another configuration,
            so that any of them can be set here; None: there are none.

    Raises:
        UserError: a key is unknown, or a value cannot stand there.
    """
    body = plain(composition, resolve=False)
    all_keys = list(keys(body))
    if any(word.key_or_group not in all_keys for word in words):
        all_keys = list(keys(complete(body, Config)))
    for word in words:
        key = word.key_or_group
        value = word.value()
        beside_text = isinstance(_value_at(composition, key.rpartition(".")[0]), str)
        free = elsewhere is not None and key.startswith(elsewhere) and not beside_text
        # what + adds, such as an entry of a section that has any number, is checked where it is bound
        adds = word.is_add() or word.is_force_add()
        is_there = key in all_keys or _value_at(composition, key) is not None
        if not (is_there or free or adds):
            having = keys_around(key, own_options())
            if key in having:
                raise UserError(f"unknown key {key!r}: it is one of {first_few(having[key], 6)}")
            raise unknown_key(key, all_keys, having)
        if word.is_delete() and value is not None:
            raise UserError(f"{word.input_line}: a key is taken out by ~{key} alone")
        if word.is_delete() or (value is None and is_entry(key)):
            take_out(composition, key)
        else:
            wrong = f"{word.input_line}: "
            with user_errors(OmegaConfBaseException, before=wrong, message=overrides.first_lines):
                OmegaConf.update(composition, key, value, merge=True, force_add=True)


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
    """Refuse settings of Hydra's that change nothing, several values without a sweep, a group taken
    out, and an option that is not there.
    """
    key = word.key_or_group
    line = word.input_line
    if overrides.is_hydras(word):
        if not f"{key}.".startswith("hydra.sweeper.params.") or word.value() is not None:
            raise UserError(
                f"{line}: settings of Hydra change nothing of a run, whose directory is run.dir=…; "
                "the values of a sweep are written KEY=A,B, with -m"
            )
    elif word.is_sweep_override() and not sweep:
        raise UserError(
            f"{line} holds several values: -m sweeps over them, and a list has brackets, {key}=[…]"
        )
    elif key in groups and word.is_delete():
        raise UserError(
            f"{line}: the option of a group cannot be taken out; {key}=NAME chooses another"
        )
    elif key in groups:
        for value in _values(word):
            check_option(key, value.partition("=")[2], groups[key])


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


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse flags that are not fp4train's.

    Raises:
        UserError: an unknown flag, or a key written as one.
    """
    flags, _ = overrides.flags_and_words(arguments)
    for flag in flags:
        name = flag.partition("=")[0]
        if not flag.startswith("-") or name in overrides.KNOWN_FLAGS:
            continue
        hint = near_miss(name, overrides.KNOWN_FLAGS, 0.7)
        raise UserError(
            f"unknown flag {name}{hint}; keys are written without dashes, and fp4train --help lists "
            "them"
        )
