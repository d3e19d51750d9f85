"""Commands that Hydra composes (train, plan): overrides, sweeps, plugins, and the saved configuration of a resumed run.

Hydra's flags work: `-m` for sweeps, `--cfg job`, `--config-dir`. A command composes its configuration once
and binds it once; with -m each point of the sweep does.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from fp4train.checkpoint.source import WeightSource
from fp4train.cli.output import explained
from fp4train.config import foreign, overrides, plugins
from fp4train.config.binding import MISSING_KEY, bind, unknown_keys
from fp4train.config.composition import Composed, check_flags, composed
from fp4train.config.from_folder import with_folder
from fp4train.config.schema import Config, keys, plain, take_over, to_config
from fp4train.config.typed import typed_texts
from fp4train.errors import UserError
from fp4train.hardware import memory_asked
from fp4train.run.command import Command as Command
from fp4train.run.from_run import check_model, saved_configuration, with_run
from fp4train.run.record import directory as run_directory
from fp4train.run.record.journal import RecipeChoice
from fp4train.text import shortened

LONGEST_GROUP = 128
"""Characters of a group's name that Weights & Biases takes."""
_SHOW = {"--cfg", "-c"}
_SOURCES = {"init": "weights", "teacher": "model"}
"""Keys that take a run or a folder."""


def launch(arguments: list[str], task: Callable[[Command], int]) -> int:
    """Run `task` on the composed configuration, with -m on each of the sweep's; returns the largest
    exit code.

    The configurations of a sweep are all composed and checked before the first job.

    Raises:
        UserError: the arguments do not fit the configuration, or a plugin cannot be imported.
    """
    flags, _ = overrides.flags_and_words(arguments)
    asked_for = {flag.partition("=")[0] for flag in flags}
    check_flags(arguments)
    arguments = overrides.with_files(arguments)
    if asked_for & overrides.SWEEP and asked_for & _SHOW:
        raise UserError("--cfg shows one configuration, not a sweep's: leave out -m")
    resumed = overrides.resumed_run(arguments)
    if resumed is not None and not resumed.removeprefix("resume=").strip("'\" "):
        raise UserError("resume= names no run: resume=RUN")
    _refuse_empty_sources(arguments)
    if resumed and asked_for & _SHOW:
        run = Path(resumed.removeprefix("resume="))
        raise UserError(
            f"--cfg shows what a command composes: {run / run_directory.CONFIG} is "
            f"the configuration of the run, fp4train plan {run} what it ran"
        )
    for slip in (a for a in arguments if a.startswith(("resume.", "init."))):
        key = slip.partition("=")[0].replace(".", "_").replace("init_from", "init")
        raise UserError(f"unknown key {slip.partition('=')[0]!r}; did you mean {key!r}?")
    folders = overrides.own_folders(arguments)
    if "--resolve" in asked_for and not asked_for & _SHOW:
        raise UserError(
            "--resolve belongs to --cfg job, which shows the configuration: --cfg job --resolve"
        )
    with plugins.using(overrides.plugins(arguments), folders):
        if asked_for & _SHOW:
            return _show(arguments)
        commands = []
        wrong = []
        for composition in composed(arguments):
            if composition.point and not resumed:
                _group(composition)
            if (
                resumed
                and composition.point
                and not {"run.name", "run.dir"} & set(composition.changed)
            ):
                swept = [key for key in composition.swept if key != "resume"]
                if swept:
                    raise UserError(
                        f"a sweep over {swept[0]} makes a branch of {resumed} at each point: "
                        "name them, run.name=…"
                    )
            try:
                commands.append(settings(composition))
            except UserError as error:
                if not composition.point:
                    raise
                wrong.append(f"{composition.point}: {error}")
        if len(wrong) == 1:
            raise UserError(f"the sweep is not started: {wrong[0]}")
        if wrong:
            raise UserError("\n  ".join(["the sweep is not started: ", *wrong]))
        codes = [0]
        for command in commands:
            codes.append(_run(task, command))
            if codes[-1] > 128:  # a signal ends the whole sweep
                break
        if codes[-1] <= 128 and 1 in codes:
            return 1  # an error, not another job's divergence
        return max(codes)


def _refuse_empty_sources(arguments: list[str]) -> None:
    """Refuse `init=` and `teacher=` without a name, as an unset variable of a shell leaves them."""
    for override in overrides.parse(arguments):
        key = overrides.dotted(override)
        if key not in _SOURCES or override.is_delete():
            continue
        names: list[Any]
        if override.is_choice_sweep():
            names = [name.strip("'\"") for name in override.sweep_string_iterator()]
        else:
            names = [override.value()]
        if any(isinstance(name, str) and not name.strip() for name in names):
            raise UserError(
                f"{override.input_line} names no {_SOURCES[key]}: {key}=RUN, or {key}=FOLDER of "
                "Hugging Face"
            )


def _group(composition: Composed) -> None:
    """Let the runs of a sweep share a group of the service that tracks them, unless the command
    names one.
    """
    track = composition.cfg.get("track")
    if isinstance(track, DictConfig) and "group" in track and track.group is None:
        track.group = shortened(" ".join(composition.swept.values()), LONGEST_GROUP)


def _show(arguments: list[str]) -> int:
    """Print the configuration."""
    (command,) = composed(arguments)  # refuses what does not fit
    flags, _ = overrides.flags_and_words(arguments)
    _, kind = next(overrides.flag_values(flags, _SHOW))
    if kind != "job":
        raise UserError(f"--cfg {kind}: it is job, the configuration of the run")
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
    if composition.cfg.resume:
        return _resumed_settings(composition)
    return _new_settings(composition)


def _new_settings(composition: Composed) -> Command:
    """As `settings`, of a run that begins."""
    changed = composition.changed
    resolved = with_folder(composition.cfg, changed)
    init_run = saved_configuration(resolved)
    if init_run is None:
        config = to_config(resolved)
    else:
        resolved = with_run(resolved, init_run, changed)
        config = to_config(resolved)
        option = composition.choices["model"] if "model" in changed else ""
        check_model(config, resolved, init_run, option)
    return Command(config=config, cfg=resolved, named=changed, point=composition.point)


def _resumed_settings(composition: Composed) -> Command:
    """As `settings`, of a run that goes on, or of its branch."""
    resolved = composition.cfg
    changed = composition.changed
    source = _resumed(str(resolved.resume), resolved.resume_step)
    saved = run_directory.read_config(source)
    saved_values = plain(saved)
    if "experiment" in changed:
        raise UserError("resume=… takes single keys (train.steps=…, policy.last=…), no experiment=")
    if "init" in changed and resolved.init != saved.get("init"):
        raise UserError("resume=… goes on with a run, init=… begins one: leave one of them out")
    swap = None
    options = [key for key in changed if key.startswith("recipe.")]
    if "recipe" in changed:
        swap = RecipeChoice.chosen(
            composition.choices["recipe"], plain(resolved)["recipe"], options
        )
    elif options:
        raise UserError(
            f"resume=… {options[0]}=… is a swap: name its recipe, too (recipe=NAME {options[0]}=…)"
        )
    unknown = set(unknown_keys(saved_values, Config))
    with open_dict(saved):
        saved.run.overwrite = False
        saved.resume_step = None
        saved.plugins = list(plugins.named())
        for key, text in typed_texts(composition.words, saved_values):
            OmegaConf.update(resolved, key, text, merge=False, force_add=True)
        for key in changed:
            if key.split(".")[0] == "recipe" or take_over(saved, resolved, key):
                continue
            if not any(key.startswith(f"{section}.") for section in changed):
                raise foreign.unknown_key(key, list(keys(plain(saved))))
        # In its own directory, unless a new name asks for a branch of the run.
        if {"run.name", "run.dir"} & set(changed):
            saved.run.dir = resolved.run.dir
        else:
            saved.run.dir = str(source)
    if gone := [key for key in unknown_keys(plain(saved), Config) if key in unknown]:
        raise UserError(
            f"{source / run_directory.CONFIG} holds {gone[0]}, which is no longer an option: "
            "take it out of that file to go on without it"
        )
    try:
        with run_directory.recipes_of(source, saved_values):
            config = to_config(saved)
    except UserError as error:
        if not str(error).endswith(MISSING_KEY):
            raise
        missing = str(error).removesuffix(MISSING_KEY)
        raise UserError(_of_missing(missing, saved_values, changed, source)) from error
    return Command(
        config=config,
        cfg=saved,
        saved=saved_values,
        swap=swap,
        named=changed,
        point=composition.point,
    )


def _of_missing(key: str, saved: Mapping[str, Any], changed: Sequence[str], source: Path) -> str:
    """The message about a key that is missing where a run goes on.

    Args:
        saved: the configuration of the run.
        changed: the keys that the command sets or takes out.
        source: the run.
    """
    if key in changed:
        return f"~{key}: a run needs {key}; {key}=VALUE sets it"
    section = key.rpartition(".")[0]
    set_there = [name for name in changed if name.startswith(f"{section}.")]
    in_file = any(name.startswith(f"{section}.") for name in keys(saved))
    if not set_there or (in_file and key not in keys(saved)):
        return f"{source / run_directory.CONFIG}: {key}{MISSING_KEY}; put it back"
    return (
        f"{set_there[0]}: there is no {section} that it could change; a new one needs {key}=…, too"
    )


def _resumed(text: str, step: int | None) -> Path:
    """The run that `resume=` names.

    Args:
        step: `resume_step`.

    Raises:
        UserError: it names weights of a run, which goes on with all of its state.
    """
    source = WeightSource.parse(text)
    if (
        source == WeightSource(path=Path(text))
        or not (source.path / run_directory.CONFIG).is_file()
    ):
        return Path(text)
    start = source if step is None else source.at(step)
    raise UserError(
        f"resume={text} names weights, and a run goes on with all of its state: "
        f"{' '.join(start.resume_words)}"
    )


def _check_plugins(cfg: DictConfig) -> None:
    """Refuse plugins that only a YAML file names: it would decide which code runs."""
    configured: tuple[str, ...] = bind(plain(cfg).get("plugins", []), tuple[str, ...], "plugins")
    if unnamed := [name for name in configured if name not in plugins.named()]:
        raise UserError(
            f"plugins=[{', '.join(unnamed)}] comes from a YAML file, which cannot import "
            "packages: add it to the command line"
        )
