"""Runs on a store such as s3://: the copy that is made beside training, and one that a command brings
here to go on from.

The state of a checkpoint is uploaded last and removed first: one without it is not whole.
"""

import fcntl
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fp4train.checkpoint import STATE, directory_name, steps
from fp4train.checkpoint.model_folder import CONFIG as FOLDER_CONFIG
from fp4train.errors import UserError, check_local, user_errors
from fp4train.files import Folder, parent
from fp4train.paths import RUNS, split_weights
from fp4train.run.record import directory as parts
from fp4train.sealed import FileDigest, unsealed
from fp4train.stores import StorePath
from fp4train.track.metrics import LIMIT
from fp4train.track.statistics import STATISTICS

_IDENTITY = len("# fp4train run 0123456789abcdef")
"""Bytes of a configuration that hold the run's identity."""
_RECORDS = (parts.HISTORY, parts.METRICS, STATISTICS, *parts.TOKENIZER, parts.CONFIG)

_log = logging.getLogger(__name__)

Objects = Mapping[tuple[str, ...], StorePath]
"""The objects of a folder by the parts of their names."""


def _objects(there: StorePath) -> Objects:
    return {path.relative_to(there).parts: path for path in there.listed("find")}


def upload(run: Folder, place: str, before: Collection[int]) -> Collection[int]:
    """Give the copy of a run the checkpoints that the run has. Removed there are halves of
    checkpoints, and those that the run has no longer.

    Args:
        place: the copy's folder.
        before: steps whose checkpoints the run had at the last call.

    Returns:
        Those whose checkpoints it has now.

    Raises:
        UserError, OSError: something failed; what is whole there stays.
    """
    there = StorePath(place)
    objects = _objects(there)
    config = objects.get((parts.CONFIG,))
    if config and not _is_same(config, run):
        raise UserError(f"{there} holds another run: remove it, or name another folder or run")
    for name in _RECORDS:
        if run.has_file(name):
            (there / name).put(run, name)
    now = steps(run.path / parts.CHECKPOINTS)
    local = [*map(directory_name, now)]
    for step in local:
        with run.folder(parts.CHECKPOINTS) as folder, folder.folder(step) as files:
            if state := objects.get((parts.CHECKPOINTS, step, STATE)):
                if state.open().read() == files.read(STATE, LIMIT):
                    continue
                state.delete()
            for name in sorted(files.names(), key=STATE.__eq__):
                (there / parts.CHECKPOINTS / step / name).put(files, name)
    pruned = {*map(directory_name, before)}
    complete = {names[1] for names in objects if names[2:] == (STATE,)}
    halves = {names[1] for names in objects if len(names) == 3} - complete
    gone = (pruned | halves) - {*local}
    for names in sorted(objects, key=lambda names: names[2:] != (STATE,)):
        if len(names) == 3 and names[0] == parts.CHECKPOINTS and names[1] in gone:
            objects[names].delete()
    return now


def with_brought(words: Sequence[str]) -> list[str]:
    """The words of a command: runs on stores that `resume=`, `init=` and `teacher=` name are brought
    into `RUNS`, and named there.

    Raises:
        UserError: see `_bring`.
    """
    values = dict(word.partition("=")[::2] for word in words)
    brought = []
    for word in words:
        key, _, text = word.partition("=")
        if key in ("resume", "init", "teacher") and "://" in text:
            check_local(text, key, stores=True)
            place, step, _ = split_weights(text)
            here = RUNS / Path(place).name
            _bring(StorePath(place), here, values.get(f"{key}_step", step))
            word = word.replace(place, str(here))
        brought.append(word)
    return brought


def _bring(there: StorePath, here: Path, step: str | int | None) -> None:
    """Bring a run with a checkpoint that is not here.

    Args:
        step: the step of the checkpoint; None: the newest, unless a newer one is here.

    Raises:
        UserError: there is none that is whole, it is damaged, or another run is here.
    """
    objects = _objects(there)
    named = "" if step is None else f"step_{step:0>8}"
    whole = sorted(n[1] for n in objects if n[2:] == (STATE,) and named in ("", n[1]))
    if (parts.CONFIG,) not in objects or not whole:
        raise UserError(f"{there} holds no run with a whole checkpoint {named}")
    path = there / parts.CHECKPOINTS / whole[-1]
    state = (path / STATE).open().read()
    failed = user_errors(OSError, ValueError, before=f"{path} is not brought to {here}: ")
    with failed, Folder.open(here, create=True) as run:
        with suppress(OSError):  # other ranks wait, and find it here
            fcntl.flock(run.descriptor, fcntl.LOCK_EX)
        if run.has_file(parts.CONFIG) and not _is_same(objects[parts.CONFIG,], run):
            raise UserError(f"{here} holds another run than {there}: move it away")
        with run.folder(parts.CHECKPOINTS, create=True) as folder:
            if not named and folder.names()[-1:] > whole[-1:]:
                return
            with folder.folder(path.name, create=True) as files:
                if files.has_file(STATE):
                    return
                for name, described in unsealed(state)["tensors"]["files"].items():
                    if not files.has_file(name):
                        files.write(name, _verified(path / name, described))
                for name in _RECORDS:
                    if (name,) in objects:
                        run.write(name, objects[name,].pieces())
                files.write(STATE, state)


def _verified(path: StorePath, described: Mapping[str, Any]) -> Iterator[bytes]:
    digest = FileDigest()
    for piece in path.pieces():
        digest.add(piece)
        yield piece
    if digest.mark() != described:
        raise ValueError(f"{path.name} is damaged there (its checksum differs)")


def _is_same(config: StorePath, run: Folder) -> bool:
    """Whether a configuration there is that of the run here."""
    return bool(config.open().read(_IDENTITY) == run.read(parts.CONFIG, LIMIT)[:_IDENTITY])


@contextmanager
def copied_to(out: str) -> Iterator[Path]:
    """The folder to fill for `out`: itself, or if that lies on a store a new one here, which is
    copied there, `config.json` last, and removed.

    Raises:
        UserError: `out` is there already, or cannot be written; then the folder here stays.
    """
    if "://" not in out:
        yield Path(out)
        return
    there = StorePath(out)
    if (FOLDER_CONFIG,) in _objects(there):
        raise UserError(
            f"out={there} is there already, and nothing is written over: name a new one"
        )
    here = Path(there.name)
    yield here
    stays = user_errors(UserError, after=f"; {here} has the export: copy it there, or remove it")
    with stays, parent(here) as (above, name), above.folder(name) as folder:
        for file in sorted(folder.names(), key=FOLDER_CONFIG.__eq__):
            (there / file).put(folder, file)
        above.remove_folder(name)
