"""Commands that Hydra composes (train, plan): overrides, sweeps, plugins, and the saved configuration of a resumed run.

Hydra's flags work: `-m` for sweeps, `--cfg job`, `--config-dir`. A command composes its configuration once
and binds it once; with -m each point of the sweep does.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from fp4train.checkpoint.source import WeightSource
from fp4train.cli.output import explained
from fp4train.config import overrides, plugins
from fp4train.config.binding import MISSING_KEY, bind, unknown_keys
from fp4train.config.composition import Composed, check_flags, composed
from fp4train.config.from_folder import with_folder
from fp4train.config.schema import Config, keys, plain, take_over, to_config
from fp4train.config.typed import typed_texts
from fp4train.config.unknown import unknown_key
from fp4train.errors import UserError
from fp4train.hardware import memory_asked
from fp4train.run.find import Command as Command
from fp4train.run.from_run import (
    check_model,
    names_tokenizer,
    saved_configuration,
    tokenizer_section,
    with_run,
)
from fp4train.run.record import directory as run_directory
from fp4train.run.record.journal import RecipeChoice
from fp4train.run.remote import with_brought
from fp4train.text import shortened

LONGEST_GROUP = 128
"""Characters of a group's name that Weights & Biases takes."""
_SHOW = {"--cfg", "-c"}
_SOURCES = {
    "resume": "run: resume=RUN",
    "init": "weights: init=RUN, or init=FOLDER of Hugging Face",
    "teacher": "model: teacher=RUN, or teacher=FOLDER of Hugging Face",
}
"""Keys that take a run, the last two a folder, too."""


@dataclass(kw_only=True)
class SweepJob:
    """A point of a sweep.

    Args:
        point: overrides that other points do not share.
        ending: remark on an end that is not as it should be; empty: there is none.
        metrics: the last value of every key, of a run that came to its end.
        other_run: True: its directory holds a run of another configuration.
    """

    point: str
    config: Config
    ending: str = "failed"
    metrics: Mapping[str, float | str] = field(default_factory=dict)
    other_run: bool = False


def launch(arguments: list[str], task: Callable[[Command], int]) -> int:
    """Run `task` on the composed configuration, with -m on each of the sweep's; returns the largest
    exit code.

    The configurations of a sweep are all composed and checked before the first job.

    Raises:
        UserError: the arguments do not fit the configuration, or a plugin cannot be imported.
    """
    check_flags(arguments)
    arguments = overrides.with_files(arguments)
    with plugins.using(overrides.plugins(arguments), overrides.own_folders(arguments)):
        if {argument.partition("=")[0] for argument in arguments} & {*_SHOW, "--resolve"}:
            return _show(arguments)
        codes = [0]
        for command in _commands(with_brought(arguments)):
            codes.append(_run(task, command))
            if codes[-1] > 128:  # a signal ends the whole sweep
                return codes[-1]
        return 1 if 1 in codes else max(codes)  # an error, not another job's divergence


def _commands(arguments: list[str]) -> list[Command]:
    """The commands of all points of a sweep, or the one.

    Raises:
        UserError: some of them do not fit; the message names each.
    """
    commands = []
    wrong = []
    for composition in composed(arguments):
        try:
            commands.append(settings(composition))
        except UserError as error:
            if not composition.point:
                raise
            wrong.append(f"{composition.point}: {error}")
    if wrong:
        begin = "\n  " if len(wrong) > 1 else ""
        raise UserError(f"the sweep is not started: {begin}" + "\n  ".join(wrong))
    return commands


def _show(arguments: list[str]) -> int:
    """Print the configuration that a command composes."""
    flags, words = overrides.flags_and_words(arguments)
    kinds = [kind for _, kind in overrides.flag_values(flags, _SHOW)]
    if kinds != ["job"]:
        raise UserError("the configuration of a run is shown by --cfg job, with --resolve or not")
    if overrides.SWEEP & set(flags) or overrides.resumed_run(words):
        raise UserError(
            "--cfg shows one configuration, which a command composes: leave out -m; that of RUN is "
            f"RUN/{run_directory.CONFIG}, and fp4train plan RUN shows what it ran"
        )
    (command,) = composed(arguments)
    shown = command.cfg if "--resolve" in flags else command.unresolved
    print(OmegaConf.to_yaml(shown), end="")
    return 0


def _run(task: Callable[[Command], int], command: Command) -> int:
    """One job; an error that the user can act on is one message, and a sweep goes on after it."""
    try:
        return explained(lambda: task(command))
    except (RuntimeError, MemoryError) as error:
        if not (asked := memory_asked(error)):
            raise
        advice = (
            "Try train.microbatch=…, a smaller train.batch_size or model, or model.recompute=true."
        )
        print(f"fp4train: the memory is not enough: {asked}. {advice}", file=sys.stderr)
        return 1


def settings(composition: Composed) -> Command:
    """The command that a composition makes.

    Without resume=RUN it is the composed configuration, with init=FOLDER or init=RUN with the model
    and tokenizer of those. With resume=RUN it is RUN's saved one with the overrides applied; a
    recipe among them does not change what the run began with, it is a swap. `check_paths` says
    whether the paths in it may be used.

    Raises:
        UserError: a value does not fit, or RUN cannot be resumed with these overrides.
    """
    _check_plugins(composition.cfg)
    for key, source in _SOURCES.items():
        name = composition.cfg.get(key)
        if isinstance(name, str) and not name.strip():  # as an unset variable of a shell leaves it
            raise UserError(f"{key}= names no {source}")
    if composition.cfg.resume:
        return _resumed_settings(composition)
    return _new_settings(composition)


def _new_settings(composition: Composed) -> Command:
    """As `settings`, of a run that begins."""
    changed = composition.changed
    track = composition.cfg.get("track")
    if composition.point and isinstance(track, DictConfig) and track.get("group", "") is None:
        # the runs of a sweep share a group of the service that tracks them
        track.group = shortened(" ".join(composition.swept.values()), LONGEST_GROUP)
    resolved = with_folder(composition.cfg, changed)
    init_run = saved_configuration(resolved)
    if init_run is not None:
        resolved = with_run(resolved, init_run, changed)
    config = _within_budget(resolved, changed)
    if init_run is not None:
        option = composition.choices["model"] if "model" in changed else ""
        check_model(config, resolved, init_run, option)
    return Command(config=config, cfg=resolved, named=changed, point=composition.point)


def _resumed_settings(composition: Composed) -> Command:
    """As `settings`, of a run that goes on, or of its branch."""
    resolved = composition.cfg
    changed = composition.changed
    source = _resumed(str(resolved.resume), resolved.resume_step)
    swap = _swap(composition)
    saved = run_directory.read_config(source)
    saved_values = plain(saved)
    if "init" in changed and resolved.init != saved.get("init"):
        raise UserError("resume=… goes on with a run, init=… begins one: leave one of them out")
    for key, text in typed_texts(composition.words, saved_values):
        OmegaConf.update(resolved, key, text, merge=False, force_add=True)
    with open_dict(saved):
        saved.run.overwrite = False
        saved.resume_step = None
        saved.plugins = list(plugins.named())
        for key in changed:
            if key.split(".")[0] == "recipe" or take_over(saved, resolved, key):
                continue
            if not any(key.startswith(f"{section}.") for section in changed):
                raise unknown_key(key, list(keys(saved_values)))
        section = tokenizer_section(saved_values)
        if "data" in changed and section and "tokenizer" in saved.data:  # its ids are the model's
            if names_tokenizer(changed):
                raise UserError(
                    f"data.tokenizer: a branch with other data keeps the tokenizer of {source}; "
                    "leave it out"
                )
            saved.data.tokenizer = section
        # In its own directory, unless a new name asks for a branch of the run.
        named = {"run.name", "run.dir"} & set(changed)
        saved.run.dir = resolved.run.dir if named else str(source)
    for key in unknown_keys(plain(saved), Config):
        if key not in changed:
            raise UserError(
                f"{source / run_directory.CONFIG} holds {key}, which is no longer an option: "
                "take it out of that file to go on without it"
            )
    try:
        with run_directory.recipes_of(source, saved_values):
            config = _within_budget(saved, changed)
    except UserError as error:
        key, missing, end = str(error).partition(MISSING_KEY)
        if not missing or end:
            raise
        raise UserError(
            f"{error} in {source / run_directory.CONFIG} as this command changes it; {key}=… sets "
            "it"
        ) from error
    return Command(
        config=config,
        cfg=saved,
        saved=saved_values,
        swap=swap,
        named=changed,
        point=composition.point,
    )


def _within_budget(cfg: DictConfig, changed: Collection[str]) -> Config:
    """The configuration of a command; the steps that follow from a budget of tokens are its own from
    there on.

    Raises:
        UserError: a value does not fit, or the command names steps and tokens.
    """
    config = to_config(cfg)
    if config.train.tokens is None:
        return config
    if {"train.steps", "train.tokens"} <= {*changed}:
        raise UserError("train.steps and train.tokens both say how long a run is: give one of them")
    if "train.steps" not in changed:
        cfg.train.steps = config.train.affordable_steps()
    cfg.train.tokens = None
    return to_config(cfg)


def _swap(composition: Composed) -> RecipeChoice | None:
    """The recipe that a resumed run swaps to; None: it keeps its own.

    Raises:
        UserError: the command has words that a run does not go on with.
    """
    resolved = composition.cfg
    changed = composition.changed
    if "experiment" in changed:
        raise UserError("resume=… takes single keys (train.steps=…, policy.last=…), no experiment=")
    swept = [key for key in composition.swept if key != "resume"]
    if swept and not {"run.name", "run.dir"} & set(changed):
        raise UserError(
            f"a sweep over {swept[0]} makes a branch of resume={resolved.resume} at each point: "
            "name them, run.name=…"
        )
    options = [key for key in changed if key.startswith("recipe.")]
    if "recipe" in changed:
        recipe = plain(resolved)["recipe"]
        return RecipeChoice.chosen(composition.choices["recipe"], recipe, options)
    if options:
        raise UserError(
            f"resume=… {options[0]}=… is a swap: name its recipe, too (recipe=NAME {options[0]}=…)"
        )
    return None


def _resumed(text: str, step: int | None) -> Path:
    """The run that `resume=` names.

    Args:
        step: `resume_step`.

    Raises:
        UserError: it names weights of a run, which goes on with all of its state.
    """
    source = WeightSource.parse(text)
    weights = source != WeightSource(path=Path(text))
    if weights and (source.path / run_directory.CONFIG).is_file():
        start = source if step is None else source.at(step)
        raise UserError(
            f"resume={text} names weights, and a run goes on with all of its state: "
            f"{' '.join(start.resume_words)}"
        )
    return Path(text)


def _check_plugins(cfg: DictConfig) -> None:
    """Refuse plugins that only a YAML file names: it would decide which code runs."""
    configured: tuple[str, ...] = bind(plain(cfg).get("plugins", []), tuple[str, ...], "plugins")
    if unnamed := [name for name in configured if name not in plugins.named()]:
        raise UserError(
            f"plugins=[{', '.join(unnamed)}] comes from a YAML file, which cannot import "
            "packages: add it to the command line"
        )
