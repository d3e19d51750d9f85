"""RUN: the directory of a run, its lock, and its saved configuration.

    config.yaml       the whole configuration: plain values, and names of classes of fp4train and
                      its plugins; its first line holds the run's identity, the checksum of the
                      rest, and where the rest names paths outside of the run the signature of the
                      user who named them (`trust`)
    heartbeat.json    step, time and loss of the running process, for who watches from outside (`watch`)
    history.jsonl     the journal: what the run was told and what it ran, by stretch of steps (`journal`)
    swap_requests/    recipe changes that the running process is asked for, and its answers (`inbox`)
    plan.txt  metrics.jsonl  curves.png  checkpoints/  wandb/
    console.log       what its processes printed (`fp4train.cli.console`)
    statistics.bin    what quantisation did to each operand in the measured steps (`fp4train.track.statistics`)
    studies/          what was measured on its checkpoints, a folder for each study (`fp4train.lab.studies`)

A file lock lets one process at a time train in a directory; the operating system releases it when
that process ends.

Everything in the directory is reached through `fp4train.files`: no link in it is followed. Its
parts belong together: the identity, a random number that the run gets at its start, is in the
configuration, the checkpoints and the journal.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fp4train import checkpoint, files, sealed
from fp4train.config.binding import MISSING_KEY, bind
from fp4train.config.plugins import check_targets, walk
from fp4train.config.schema import plain
from fp4train.data.digests import KEPT as DIGESTS
from fp4train.data.template import KEPT as TEMPLATE
from fp4train.data.tokenizer_settings import KEPT as SETTINGS
from fp4train.errors import (
    LAST_WITH_OLDER_RECIPES,
    OTHER_RECIPE,
    OlderForm,
    UserError,
    user_errors,
)
from fp4train.files import Folder
from fp4train.paths import RUNS, split_weights
from fp4train.precision import LayerPolicy, Phase, Recipe
from fp4train.run.record.generation import GENERATION
from fp4train.sealed import config_parts, saved_config
from fp4train.text import first_few
from fp4train.track.config import METRICS
from fp4train.track.metrics import LIMIT as METRICS_LIMIT, parse_line, read_metrics
from fp4train.track.statistics import STATISTICS
from fp4train.track.wandb import CONSOLE

_log = logging.getLogger(__name__)

CONFIG = sealed.CONFIG
REQUESTS = "swap_requests"
CHECKPOINTS = "checkpoints"
PLAN = "plan.txt"
LOCK = ".lock"
HEARTBEAT = "heartbeat.json"
HISTORY = "history.jsonl"
ASIDE = ".new"
"""The folder in a run's for the first files of a new run that may replace it."""
TOKENIZER = ("tokenizer.json", "tokenizer_origin.json", TEMPLATE, SETTINGS, GENERATION)
SAVED = "checkpoint"
"""The event in the metrics of a checkpoint that is whole."""
_FOLDERS = (CHECKPOINTS, REQUESTS)
"""The folders of a run, beside those of its companions."""
_NEIGHBOURS = 8
"""So many runs are named in the place of one that is not there."""
_TAIL = 1 << 20
"""Bytes at the end of the metrics in which the last step is looked for."""
PARTS = (CHECKPOINTS, METRICS)
"""The results in a run directory; a new run never replaces them unasked."""


def write_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        UserError: it cannot be written; what was there before is untouched.
    """
    with user_errors(OSError, before=f"{path} cannot be written: "):
        files.write(path, text.encode())


@contextmanager
def locked(
    run: Path, taken: str = "another process trains in it; choose another run.name"
) -> Iterator[None]:
    """Hold the lock of `run`, which is created.

    Where nothing else was added in the end, because a start was refused, the lock goes again, and
    so do the folders that were made for it.

    Args:
        taken: text of the error about a lock that another process holds.

    Raises:
        UserError: another process holds it, or it cannot be written.
    """
    missing = [path for path in (run, *run.parents) if not path.exists()]
    with user_errors(OSError, before=f"{run} cannot be written: "):
        folder, descriptor, earlier_files = _locked_folder(run, taken)
    try:
        with suppress(OSError):
            folder.remove_litter()
        yield
    finally:
        with suppress(OSError):
            if LOCK not in earlier_files and set(folder.names()) <= earlier_files | {LOCK}:
                folder.remove(LOCK)
                for path in missing:
                    with files.parent(path) as (above, name):
                        above.remove_empty(name)
        os.close(descriptor)  # held until the end of the run
        folder.close()


def _locked_folder(run: Path, taken: str) -> tuple[Folder, int, set[str]]:
    """The open folder of a run, the descriptor of its lock, which is held, and the names in it
    before.

    Raises:
        UserError: another process holds the lock.
    """
    for _ in range(100):
        with ExitStack() as opened:
            folder = opened.enter_context(Folder.open(run, create=True))
            earlier_files = set(folder.names())
            try:
                descriptor = folder.descriptor_of(LOCK, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                continue  # the folder went with the lock of a start that was refused
            opened.callback(os.close, descriptor)
            if not _lock(descriptor):
                raise UserError(f"{run} is in use: {taken}")
            if os.fstat(descriptor).st_nlink:  # else it went with a start that was refused
                opened.pop_all()
                return folder, descriptor, earlier_files
    raise UserError(f"{run} is in use: {taken}")


def _lock(descriptor: int) -> bool:
    """Whether the lock could be had; `is_running` holds it for a moment when somebody looks."""
    for pause in (0.1, 0.0):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(pause)
        else:
            return True
    return False


def is_running(run: Path) -> bool:
    """Whether a process holds the lock of `run`.

    Raises:
        UserError: the lock is no regular file, or one that this user may not read.
    """
    try:
        with user_errors(files.NotPlain, PermissionError), Folder.open(run) as folder:
            descriptor = folder.descriptor_of(LOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def require_run(run: Path) -> Path:
    """`run`, if it is a run directory.

    Raises:
        UserError: it is not; it names weights of one, or the runs beside it are named.
    """
    if (run / CONFIG).is_file():
        return run
    of_weights = Path(split_weights(str(run))[0])
    if of_weights != run and (of_weights / CONFIG).is_file():
        raise UserError(
            f"{run} names weights of {of_weights}, and here the run itself is named: {of_weights}"
        )
    if above := next(
        (p for p in run.parents if (p / CONFIG).is_file() and (p / CHECKPOINTS).is_dir()), None
    ):
        raise UserError(f"{run} is not a run directory, it lies in one: {above}")
    if run.parent.is_dir():
        runs = sorted(p.parent.name for p in run.parent.glob(f"*/{CONFIG}") if p.is_file())
    else:
        runs = []
    if runs:
        neighbours = f"; {run.parent} holds {first_few(runs, _NEIGHBOURS)}"
    else:
        neighbours = ""
    if kind := kind_of_config(run):
        why = f"its {CONFIG} is {kind}, not a file: put the run's own back"
    else:
        why = f"it has no {CONFIG}"
    if not run.exists() and (RUNS / run / CONFIG).is_file():
        neighbours = f"; did you mean {RUNS / run}?"
    raise UserError(f"{run} is not a run directory ({why}){neighbours}")


def kind_of_config(run: Path) -> str:
    """The kind of what has the name of a run's configuration, in words; empty: there is nothing."""
    with suppress(OSError), Folder.open(run) as folder:
        return folder.kind(CONFIG)
    return ""


_OF_LOOPS: Mapping[str, Any] = {
    "track": {"_target_": "fp4train.track.config.JsonlTracking"},
    "hooks": [],
}
"""Sections whose classes nothing but a training loop needs → those of a run without any."""


SETTLED: Mapping[str, Sequence[Any]] = {
    "audit.repeat": [0],
    "model.draw": ["torch", "counter"],
    "parallel.amax": ["tp"],
    "parallel.norm": ["auto"],
    "track.project": ["fp4train"],
}
"""Keys that went → the values under which a run that goes on is what it is without them."""


def without_settled(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, as full key → value, without keys that went and changed nothing."""
    return {key: value for key, value in flat.items() if value not in SETTLED.get(key, ())}


def read_config(run: Path) -> DictConfig:
    """The saved configuration of a run, checked to be data only, and to be as the run wrote it.

    Raises:
        UserError: there is none, it cannot be read, it was changed, or it names a class that is
            neither fp4train's nor of a plugin that this command names; those of its tracker and
            hooks are checked where they are bound.
    """
    path = require_run(run) / CONFIG
    saved = saved_config(path)
    try:
        check_targets({key: saved[key] for key in saved if key not in _OF_LOOPS})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    # An interpolation could reach the environment; a saved configuration holds plain values only.
    for value in (part for _, *both in walk(saved) for part in both):
        if isinstance(value, str) and "${" in value:
            raise UserError(
                f"{path} holds an interpolation; a saved configuration has plain values only"
            )
        if not isinstance(value, dict | list | str | int | float | bool | None):
            raise UserError(
                f"{path} cannot be read as a configuration: it holds a {type(value).__name__}"
            )
    for key, values in SETTLED.items():
        section, _, name = key.partition(".")
        if name in saved.get(section, {}) and saved[section][name] in values:
            del saved[section][name]
    return OmegaConf.create(saved)


def read_trained(run: Path) -> DictConfig:
    """As `read_config`, for what does not train the run: where its tracker or a hook is of a plugin
    that this command does not name, it has none.
    """
    return without_plugins(read_config(run))


def without_plugins(saved: DictConfig) -> DictConfig:
    """A saved configuration, as `read_trained` gives it."""
    for section, usual in _OF_LOOPS.items():
        try:
            check_targets(plain(saved).get(section), section)
        except UserError:
            saved[section] = usual
    return saved


_WITH_RECIPES: Mapping[str, Any] = {
    "recipe": Recipe,
    "phases": Mapping[str, Phase],
    "policy": LayerPolicy,
}
"""Section of a configuration that holds recipes → its type."""


@contextmanager
def recipes_of(run: Path, saved: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the saved configuration of `run` is bound.

    Raises:
        OlderForm: that failed, and the configuration holds a recipe that is refused.
    """
    try:
        yield
    except UserError as failure:
        if str(failure).endswith(MISSING_KEY):
            raise
        for section, kind in _WITH_RECIPES.items():
            if section not in saved:
                continue
            try:
                bind(saved[section], kind, section)
            except UserError as error:
                raise OlderForm(
                    run / CONFIG,
                    f"has {section} with a refused recipe ({error})",
                    OTHER_RECIPE,
                    LAST_WITH_OLDER_RECIPES,
                ) from error
        raise


def identity(run: Path) -> str | None:
    """The identity of the run in `run`; None where there is no run, or its configuration has lost
    its first line.

    Raises:
        UserError: its configuration cannot be read.
    """
    path = run / CONFIG
    run_identity = config_parts(path)[0] if path.is_file() else None
    if run_identity is None:
        return None
    return run_identity[0]


@contextmanager
def folder_aside(run: Path, beside: Collection[str]) -> Iterator[None]:
    """Have the folder `ASIDE` in `run`, empty at first, and remove it in the end.

    Args:
        beside: folders in it that companions of a run write to.

    Raises:
        UserError: the folder cannot be made.
    """
    with (
        user_errors(OSError, before=f"{run / ASIDE} cannot be written: "),
        Folder.open(run, create=True) as folder,
    ):
        _check_ours(folder, beside)
        folder.remove_folder(ASIDE)  # a killed process may have left one
        folder.folder(ASIDE, create=True).close()
    try:
        yield
    finally:
        with suppress(OSError), Folder.open(run) as folder:
            folder.remove_folder(ASIDE)


def take_aside(run: Path) -> None:
    """Copy the files of the folder `ASIDE` in `run` to it.

    Raises:
        UserError: one cannot be read or written.
    """
    with (
        user_errors(OSError, before=f"{run / ASIDE} cannot be read: "),
        Folder.open(run / ASIDE) as aside,
    ):
        names = tuple(name for name in aside.names() if aside.has_file(name))
    copy_files(run / ASIDE, run, names)


def start_over(run: Path, beside: Collection[str]) -> None:
    """Remove the files of an earlier run from `run`, and no other files; nothing if it holds no
    run.

    Args:
        beside: folders in it that companions of a run write to.

    Raises:
        UserError: the directory is not fp4train's, or cannot be removed.
    """
    with user_errors(OSError, before="run.overwrite=true: "), Folder.open(run) as folder:
        if not folder.has_file(CONFIG):
            return
        _check_ours(folder, beside)
        for name in (*_FOLDERS, *beside):
            folder.remove_folder(name)
        drawn = ("curves.png", "statistics.png")
        records = (HISTORY, METRICS, STATISTICS, HEARTBEAT, CONSOLE)
        for name in (*records, PLAN, *drawn, DIGESTS, *TOKENIZER, CONFIG):
            folder.remove(name)
        folder.sync()


def _check_ours(folder: Folder, beside: Collection[str]) -> None:
    """Refuse to replace what fp4train did not write, or what lies elsewhere."""
    if not folder.has_file(CONFIG):
        return
    saved = saved_config(folder.path / CONFIG)  # of any plugin: nothing is built from it
    if not all(
        isinstance(saved.get(section), dict) for section in ("run", "train", "recipe", "model")
    ):
        raise UserError(
            f"{folder.path / CONFIG} is not the configuration of a run of fp4train: "
            "run.overwrite=true would remove "
            "what is beside it. Choose another run.name or run.dir"
        )
    for name in (*_FOLDERS, *beside):
        if folder.status(name) is not None and not folder.has_folder(name):
            raise UserError(
                f"{folder.path / name} is no folder but a link or a file: run.overwrite=true "
                "removes nothing that lies "
                "elsewhere. Remove it yourself, or choose another run.name"
            )


def copy_files(source: Path, run: Path, names: tuple[str, ...]) -> None:
    """Copy those of the files `names` that run `source` has to its branch `run`.

    Raises:
        UserError: one cannot be read or written.
    """
    refused = user_errors(OSError, before=f"{run} cannot become a branch of {source}: ")
    with refused, Folder.open(source) as old, Folder.open(run) as new:
        for name in names:
            if old.status(name) is not None:
                new.write(name, old.pieces(name, METRICS_LIMIT))


def check_restart(run: Path) -> None:
    """Refuse to train from step 0 where a run had saved checkpoints that are gone: its metrics
    would go, too.

    A run says in its heartbeat and in its metrics which checkpoints became whole. Steps alone prove
    none: later steps run while a checkpoint is written, and a kill may come before the first one is
    whole.

    Raises:
        UserError: they are gone.
    """
    saved = None
    with user_errors(OSError, before=f"{run}: "), Folder.open(run) as folder:
        if folder.has_file(HEARTBEAT):
            with suppress(ValueError, AttributeError, RecursionError):
                saved = json.loads(folder.read(HEARTBEAT, sealed.CONFIG_LIMIT)).get("saved")
        if not isinstance(saved, int) and folder.has_file(METRICS):
            for line in read_metrics(run / METRICS):
                if line.get("event") == SAVED:
                    saved = line["step"]
    if isinstance(saved, int):
        raise UserError(
            f"{run} had saved step {saved}, and its checkpoints are gone: put them back, or "
            "start over with "
            "run.overwrite=true, which removes its metrics"
        )


def steps_done(run: Path) -> int:
    """The steps that a run has done: by the end of its metrics, or the newest checkpoint of a run
    that keeps none.
    """
    done = checkpoint.steps(run / CHECKPOINTS)[-1:]
    try:
        with (
            files.parent(run / METRICS) as (folder, name),
            os.fdopen(folder.descriptor_of(name), "rb") as file,
        ):
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            tail = file.read(_TAIL).splitlines()
    except OSError:
        tail = []
    for raw in reversed(tail):
        with suppress(ValueError, RecursionError):
            line = parse_line(raw)
            if "train/loss" in line:
                done.append(int(line["step"]))
                break
    return max(done, default=0)
