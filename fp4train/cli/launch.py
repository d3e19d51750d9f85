"""Commands that Hydra composes (train, plan): overrides, sweeps, plugins, and the saved configuration of a resumed run.

Hydra's flags work: `-m` for sweeps, `--cfg job`, `--help`, `--config-dir`. Everything that can be checked before Hydra
starts is checked before, because Hydra's own messages are for programmers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from fp4train.cli.output import discard_output
from fp4train.config import overrides, plugins
from fp4train.config.binding import bind, unknown_keys
from fp4train.config.folders import CONFIGS, check_folder, register_recipes
from fp4train.config.schema import Config, plain, to_config
from fp4train.errors import UserError
from fp4train.run.record import directory as run_directory

_SWEEP = {"-m", "--multirun"}
_SHOW = {"--cfg", "-c", "--info", "-i"}
_HELP = {"--help", "-h", "--hydra-help"}


def launch(arguments: list[str], task: Callable[[DictConfig], int]) -> int:
    """Run `task` on the composed configuration, with -m on each of the sweep's; returns the largest exit code.

    The configurations of a sweep are all composed and checked before the first job.

    Raises:
        UserError: the arguments do not fit the configuration, or a plugin cannot be imported.
    """
    given = set(arguments)
    overrides.check_flags(arguments)
    arguments = overrides.with_files(arguments)
    if given & _SWEEP and given & _SHOW:
        raise UserError("--cfg and --info: Hydra shows one configuration, not a sweep's; leave out -m")
    resumed = [a for a in arguments if a.startswith("resume=") and a != "resume=null"]
    if "resume=" in resumed:
        raise UserError("resume= names no run: resume=RUN")
    if resumed and given & _SHOW:
        run = Path(resumed[0].removeprefix("resume="))
        raise UserError(
            f"--cfg and --info show what a command composes: {run / run_directory.CONFIG} is the configuration of the "
            f"run, fp4train plan {run} what it ran"
        )
    for slip in (a for a in arguments if a.startswith(("resume.", "init."))):
        key = slip.partition("=")[0].replace(".", "_").replace("init_from", "init")
        raise UserError(f"unknown key {slip.partition('=')[0]!r}; did you mean {key!r}?")
    folders = overrides.own_folders(arguments)
    if resumed:
        arguments = overrides.for_resume(arguments)
    asking = bool(given & (_HELP | _SHOW))
    for folder in folders:
        check_folder(folder)
    packages = [] if asking else overrides.plugins(arguments)
    swept = overrides.swept_keys(arguments)
    with plugins.using(packages, folders):
        if not asking:
            overrides.check(arguments)
            arguments = arguments if resumed else overrides.with_defaults(arguments, folders)
        if resumed and set(swept) - {"resume"} and not {"run.name", "run.dir"} & set(overrides.changed_keys(arguments)):
            raise UserError(
                f"a sweep over {swept[0]} makes a branch of {resumed[0]} at each point: name them, run.name=…"
            )
        if swept and not asking:
            _check_points(arguments, swept)
        return _run_hydra(arguments, swept, task)


def _check_points(arguments: list[str], swept: Sequence[str]) -> None:
    """Raises UserError that names the jobs of a sweep whose configurations are refused."""
    wrong = []

    def check(cfg: DictConfig) -> int:
        try:
            to_config(settings(cfg)[0])
        except UserError as error:
            wrong.append(f"{point(swept)}: {error}")
        return 0

    _run_hydra(arguments, swept, check)
    if wrong:
        raise UserError("the sweep is not started: " + "\n  ".join(["", *wrong] if wrong[1:] else wrong))


def point(swept: Sequence[str]) -> str:
    """The overrides of this job of a sweep that others do not share."""
    task = HydraConfig.get().overrides.task
    return " ".join(each for each in task if each.lstrip("+").partition("=")[0].replace("/", ".") in swept)


def _run_hydra(arguments: list[str], swept: Sequence[str], task: Callable[[DictConfig], int]) -> int:
    codes: list[int] = []

    def job(cfg: DictConfig) -> None:
        # Hydra prints a traceback for an exception that leaves a job, and a sweep should go on after one bad point.
        try:
            _name_point(cfg, swept)
            codes.append(task(cfg))
        except UserError as error:
            print(f"fp4train: {error}", file=sys.stderr)
            codes.append(error.exit_code)
        except BrokenPipeError:
            codes.append(discard_output())
        except (torch.OutOfMemoryError, MemoryError) as error:
            codes.append(_out_of_memory(error))
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            codes.append(_out_of_memory(error))
        except OSError as error:
            print(f"fp4train: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
            codes.append(1)
        if codes[-1] > 128:  # a signal ends the whole sweep
            raise SystemExit(codes[-1])

    register_recipes()
    saved, sys.argv = sys.argv, ["fp4train", *overrides.flags_first(arguments)]
    try:
        hydra.main(config_path=str(CONFIGS), config_name="train", version_base="1.3")(job)()
    finally:
        sys.argv = saved
    return max(codes, default=0)


def _out_of_memory(error: BaseException) -> int:
    """Say in a line how much memory was asked for, and what takes less; the exit code."""
    text = (str(error).splitlines() or [""])[0]
    asked = re.search(r"you tried to allocate (\d+) bytes", text)
    why = f"{int(asked[1]) / 2**30:,.1f} GiB were asked for" if asked else text.rstrip(".") or "no more can be had"
    advice = "Try train.microbatch=…, a smaller train.batch_size or model, or model.recompute=true."
    print(f"fp4train: the memory is not enough: {why}. {advice}", file=sys.stderr)
    return 1


def _name_point(cfg: DictConfig, swept: Sequence[str]) -> None:
    """Append the swept values that a run's name lacks, so that every point of a sweep has its own directory."""
    if not swept:
        return
    name = str(OmegaConf.to_container(cfg.run, resolve=False)["name"])  # type: ignore[index, call-overload]
    choices = HydraConfig.get().runtime.choices
    for key in swept:
        if f"choices.{key}}}" not in name and not key.startswith(("run.name", "run.dir")):
            value = choices[key] if key in choices else OmegaConf.select(cfg, key)
            cfg.run.name = f"{cfg.run.name}-{key.rpartition('.')[2]}={str(value).replace('/', '_')}"


Swapped = tuple[str, dict[str, Any]]
"""Of a recipe: its name and its plain configuration."""


def settings(cfg: DictConfig) -> tuple[DictConfig, Swapped | None, list[str]]:
    """The configuration to run, the recipe to swap to, or None, and the keys that the command line gave.

    Without resume=RUN it is the composed configuration. With it, it is RUN's saved one with the overrides applied; a
    recipe among them does not change what the run began with, it is a swap. `check_paths` says whether the paths in it
    may be used.

    Raises:
        UserError: RUN cannot be resumed with these overrides.
    """
    resolved = OmegaConf.create(plain(cfg))
    _check_plugins(resolved)
    if not resolved.resume:
        return resolved, None, []
    source = Path(str(resolved.resume))
    saved = run_directory.read_config(source)
    changed = overrides.changed_keys(list(HydraConfig.get().overrides.task))
    if "experiment" in changed:
        raise UserError("resume=… takes single keys (train.steps=…, policy.last=…), no experiment=")
    if "init" in changed and resolved.init != saved.get("init"):
        raise UserError("resume=… goes on with a run, init=… begins one: leave one of them out")
    swap = None
    if "recipe" in changed:
        swap = str(HydraConfig.get().runtime.choices["recipe"]), plain(resolved)["recipe"]
    elif options := [key for key in changed if key.startswith("recipe.")]:
        raise UserError(f"resume=… {options[0]}=… is a swap: name its recipe, too (recipe=NAME {options[0]}=…)")
    unknown = set(unknown_keys(plain(saved), Config))
    with open_dict(saved):
        saved.run.overwrite = False
        saved.resume_step = None
        saved.plugins = list(plugins.named())
        for key in changed:
            if key.split(".")[0] != "recipe":
                OmegaConf.update(saved, key, OmegaConf.select(resolved, key), merge=False, force_add=True)
        # In its own directory, unless a new name asks for a branch of the run.
        saved.run.dir = resolved.run.dir if {"run.name", "run.dir"} & set(changed) else str(source)
    if gone := [key for key in unknown_keys(plain(saved), Config) if key in unknown]:
        raise UserError(
            f"{source / run_directory.CONFIG} holds {gone[0]}, which is no longer an option: take it out of that file "
            "to go on without it"
        )
    try:
        bind(plain(saved), Config, "")
    except UserError as error:
        if str(error).endswith(" is missing"):
            raise UserError(f"{source / run_directory.CONFIG}: {error}; put it back") from error
        raise
    return saved, swap, changed


def _check_plugins(cfg: DictConfig) -> None:
    """Refuse plugins that only a YAML file names: it would decide which code runs."""
    wanted: tuple[str, ...] = bind(plain(cfg).get("plugins", []), tuple[str, ...], "plugins")
    if others := [name for name in wanted if name not in plugins.named()]:
        raise UserError(
            f"plugins=[{', '.join(others)}] comes from a YAML file, which cannot import packages: add it to the "
            "command line"
        )
