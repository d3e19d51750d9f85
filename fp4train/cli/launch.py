"""Commands that Hydra composes (train, plan): overrides, sweeps, plugins, and the saved configuration of a resumed run.

Hydra's flags work: `-m` for sweeps, `--cfg job`, `--help`, `--config-dir`. Everything that can be checked before Hydra
starts is checked before, because Hydra's own messages are for programmers.
"""

from __future__ import annotations

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
from fp4train.config.folders import CONFIGS, register_recipes
from fp4train.config.schema import Config, plain
from fp4train.errors import UserError
from fp4train.run import directory as run_directory

_SWEEP = {"-m", "--multirun"}
_SHOW = {"--cfg", "-c", "--info", "-i"}
_HELP = {"--help", "-h", "--hydra-help"}


def launch(arguments: list[str], task: Callable[[DictConfig], int]) -> int:
    """Run `task` on the composed configuration, with -m on each of the sweep's; returns the largest exit code.

    Raises:
        UserError: the arguments do not fit the configuration, or a plugin cannot be imported.
    """
    given = set(arguments)
    if given & _SWEEP and given & _SHOW:
        raise UserError("--cfg and --info: Hydra shows one configuration, not a sweep's; leave out -m")
    resumed = [a for a in arguments if a.startswith("resume=") and a != "resume=null"]
    if "resume=" in resumed:
        raise UserError("resume= names no run: resume=RUN")
    if resumed:
        arguments = overrides.for_resume(arguments)
    packages: list[str] = []
    if not given & (_HELP | _SHOW):
        overrides.check(arguments)
        packages = overrides.plugins(arguments)
    swept = overrides.swept_keys(arguments)
    if resumed and set(swept) - {"resume"} and not {"run.name", "run.dir"} & set(overrides.changed_keys(arguments)):
        raise UserError(f"a sweep over {swept[0]} makes a branch of {resumed[0]} at each point: name them, run.name=…")
    folders = overrides.own_folders(arguments)
    with plugins.using(packages, folders):
        if not resumed and not given & (_HELP | _SHOW):
            arguments = overrides.with_defaults(arguments, folders)
        return _run_hydra(arguments, swept, task)


def _run_hydra(arguments: list[str], swept: Sequence[str], task: Callable[[DictConfig], int]) -> int:
    codes: list[int] = []

    def job(cfg: DictConfig) -> None:
        # Hydra prints a traceback for an exception that leaves a job, and a sweep should go on after one bad point.
        try:
            _name_point(cfg, swept)
            codes.append(task(cfg))
        except UserError as error:
            print(f"fp4train: {error}", file=sys.stderr)
            codes.append(1)
        except BrokenPipeError:
            codes.append(discard_output())
        except torch.OutOfMemoryError as error:
            print(
                f"fp4train: {str(error).splitlines()[0]} Try train.microbatch=… or model.recompute=true.",
                file=sys.stderr,
            )
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


def settings(cfg: DictConfig) -> tuple[DictConfig, tuple[str, dict[str, Any]] | None]:
    """The configuration to run, and the recipe to swap to: its name and its plain configuration, or None.

    Without resume=RUN it is the composed configuration. With it, it is RUN's saved one with the overrides applied; a
    recipe among them does not change what the run began with, it is a swap.

    Raises:
        UserError: RUN cannot be resumed with these overrides.
    """
    resolved = OmegaConf.create(plain(cfg))
    _check_plugins(resolved)
    if not resolved.resume:
        return resolved, None
    source = Path(str(resolved.resume))
    saved = run_directory.read_config(source)
    changed = overrides.changed_keys(list(HydraConfig.get().overrides.task))
    if "experiment" in changed:
        raise UserError("resume=… takes single keys (train.steps=…, policy.last=…), no experiment=")
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
    return saved, swap


def _check_plugins(cfg: DictConfig) -> None:
    """Refuse plugins that only a YAML file names: it would decide which code runs."""
    wanted: tuple[str, ...] = bind(plain(cfg).get("plugins", []), tuple[str, ...], "plugins")
    if others := [name for name in wanted if name not in plugins.named()]:
        raise UserError(
            f"plugins=[{', '.join(others)}] comes from a YAML file, which cannot import packages: add it to the "
            "command line"
        )
