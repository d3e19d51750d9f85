"""RUN: the directory of a run, its lock, and its saved configuration.

    config.yaml       the whole configuration: plain values, and names of classes of fp4train and its plugins
    swaps.json        the recipe changes of the run, each with its step (`swaps`)
    history.jsonl     what the run was told and what it ran, by stretch of steps (`history`)
    swap_requests/    recipe changes that the running process has not picked up (`swaps`)
    plan.txt  metrics.jsonl  curves.png  checkpoints/  wandb/

A file lock lets one process at a time train in a directory; the operating system releases it when that process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from fp4train.config.binding import complete, unknown_keys
from fp4train.config.schema import Config, plain
from fp4train.config.targets import check_targets
from fp4train.errors import UserError
from fp4train.track.config import METRICS

CONFIG, SWAPS, REQUESTS, CHECKPOINTS, PLAN = "config.yaml", "swaps.json", "swap_requests", "checkpoints", "plan.txt"
HISTORY = "history.jsonl"
TOKENIZER = ("tokenizer.json", "tokenizer_origin.json")
PARTS = (CHECKPOINTS, METRICS, SWAPS)
"""The results in a run directory; a new run never replaces them unasked."""

CONTINUED = (
    "run.name",
    "run.dir",
    "run.overwrite",
    "resume",
    "gpu",
    "plugins",
    "eval.",
    "checkpoint.",
    "track",
    "data.cache_dir",
)
"""Keys that may differ when the same command is repeated: they do not change what is computed."""
RESUMED = (
    *CONTINUED,
    *("recipe", "policy", "phases", "backend", "device", "optim.", "schedule."),
    *("train.steps", "train.microbatch", "train.compile", "model.recompute", "data.path", "data.val_path"),
)
"""Keys that `resume=` may change as well; any other would make it another run. The data may be at another path, because
its fingerprint is compared with that in the checkpoint."""


def write_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        UserError: it cannot be written; what was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error}") from error


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the lock of `run`, which is created.

    Raises:
        UserError: another process trains in it, or it cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        handle = open(run / ".lock", "w")  # noqa: SIM115 - held until the end of the run
    except OSError as error:
        raise UserError(f"run directory {run} cannot be written: {error}") from error
    with handle:
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(0.1)  # `is_running` holds it for a moment when somebody looks
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{run} is in use: another process trains in it; choose another run.name") from None
        yield


def is_running(run: Path) -> bool:
    """Whether a process holds the lock of `run`."""
    try:
        with open(run / ".lock") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def require_run(run: Path) -> Path:
    """`run`, if it is a run directory.

    Raises:
        UserError: it is not; the runs beside it are named.
    """
    if (run / CONFIG).is_file():
        return run
    if above := next((p for p in run.parents if (p / CONFIG).is_file() and (p / CHECKPOINTS).is_dir()), None):
        raise UserError(f"{run} is not a run directory, it lies in one: {above}")
    runs = sorted(p.parent.name for p in run.parent.glob(f"*/{CONFIG}")) if run.parent.is_dir() else []
    known = f"; {run.parent} holds {', '.join(runs[:8])}" if runs else ""
    raise UserError(f"{run} is not a run directory (it has no {CONFIG}){known}")


def read_config(run: Path) -> DictConfig:
    """The saved configuration of a run, checked to be data only.

    Raises:
        UserError: there is none, it cannot be read, or it names a class that is neither fp4train's nor of a plugin that
            this command names.
    """
    path = require_run(run) / CONFIG
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as a configuration: {str(error).splitlines()[0]}") from error
    if not isinstance(saved, dict) or not isinstance(saved.get("run"), dict):
        raise UserError(f"{path} cannot be read as a configuration: it has no section run")
    try:
        check_targets(saved)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    # An interpolation could reach the environment; a saved configuration holds plain values only.
    if any(isinstance(v, str) and "${" in v for v in _leaves(saved)):
        raise UserError(f"{path} holds an interpolation; a saved configuration has plain values only")
    return OmegaConf.create(saved)


def write_config(run: Path, cfg: DictConfig) -> None:
    """Save the resolved configuration."""
    write_text(run / CONFIG, OmegaConf.to_yaml(OmegaConf.create(plain(cfg))))


def _leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for value in node.values():
            yield from _leaves(value)
    elif isinstance(node, list):
        for value in node:
            yield from _leaves(value)
    else:
        yield node


def differences(old: DictConfig, new: DictConfig, allowed: tuple[str, ...]) -> list[str]:
    """The differences between two configurations, as "key: old → new", without keys that start with one of `allowed`.

    A missing key counts as its class's default: options that are newer than a saved run did not change it.
    """

    def flat(cfg: Any, prefix: str = "") -> dict[str, Any]:
        if isinstance(cfg, dict) and cfg:
            return {k: v for key, value in cfg.items() for k, v in flat(value, f"{prefix}{key}.").items()}
        return {prefix.rstrip("."): cfg}

    a, b = flat(complete(plain(old), Config)), flat(complete(plain(new), Config))
    keys = [k for k in {**a, **b} if a.get(k) != b.get(k) and not k.startswith(allowed)]
    gone = set(unknown_keys(plain(old), Config))
    return [f"{k}: {a.get(k)} → {'no longer an option' if k in gone else b.get(k)}" for k in keys]


@contextmanager
def workplace(run: Path, *, aside: bool) -> Iterator[Path]:
    """The folder for the first files of a new run: `run` itself, or with `aside` a temporary folder in it.

    Raises:
        UserError: the folder cannot be made.
    """
    if not aside:
        yield run
        return
    place = run / ".new"
    try:
        shutil.rmtree(place, ignore_errors=True)  # a killed process may have left one
        place.mkdir()
    except OSError as error:
        raise UserError(f"{place} cannot be written: {error}") from error
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def start_over(run: Path) -> None:
    """Remove the files of an earlier run from `run`, and no other files; nothing if it holds no run."""
    if not (run / CONFIG).is_file():
        return
    for name in (CHECKPOINTS, REQUESTS, "wandb"):
        shutil.rmtree(run / name, ignore_errors=True)
    for name in (SWAPS, HISTORY, PLAN, METRICS, "curves.png", *TOKENIZER, CONFIG):
        (run / name).unlink(missing_ok=True)


def copy_files(source: Path, run: Path, names: tuple[str, ...]) -> None:
    """Copy those of the files `names` that run `source` has to its branch `run`.

    Raises:
        UserError: one cannot be read or written.
    """
    try:
        for name in names:
            if (source / name).exists():
                shutil.copyfile(source / name, run / name)
    except OSError as error:
        raise UserError(f"{run} cannot become a branch of {source}: {error}") from error
