"""Checkpoints: written atomically, verified at load, free of pickle.

Layout, one directory a step::

    RUN/checkpoints/step_00000120/tensors.safetensors    every tensor, on the CPU, in its own dtype
                                  state.json             version, step, checksums, and all that is not a tensor

Why a directory that is renamed: a rename is atomic, so a checkpoint either exists whole or does not exist. Everything
is written and fsynced in a hidden directory beside it first; a process killed meanwhile leaves only that, and the next
`save` removes it. Older checkpoints go after the newer one is complete, never before.

Why checksums: a file system that lost power, or a copy that stopped half-way, leaves files of the right name. `load`
verifies both files and falls back to the newest checkpoint that is whole, saying which it skipped and why.

Why safetensors and JSON: loading executes nothing and can name no code. Floats survive exactly (shortest round-trip
decimal); NaN and infinities, which JSON lacks, are written ``{"$float": "nan"}``.

One process writes to a folder at a time.
"""

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fp4train import files
from fp4train.checkpoint.tensors import read_tensors, separate, write_tensors
from fp4train.checkpoint.tree import JSON, flatten, from_strict, to_strict, unflatten
from fp4train.errors import UserError
from fp4train.files import Folder

__all__ = ["JSON", "Checkpoint", "CheckpointError", "flatten", "load", "prune", "save", "steps", "unflatten"]

FORMAT = "fp4train.checkpoint"
VERSION = 1
TENSORS = "tensors.safetensors"
STATE = "state.json"
STATE_LIMIT = 1 << 28
"""Bytes of a state that are read; the largest of fp4train's own have some hundred thousand."""

_NAME = re.compile(r"step_(\d{8,18})", re.ASCII)
_LEFTOVER = ".tmp_"  # being written, or being deleted: worthless after a kill
_REPLACED = ".old_"  # a whole checkpoint on its way out while one of the same step takes its place

_log = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint could not be written (disk full, no permission, ...). The earlier ones are untouched."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What `load` found.

    Args:
        step: optimiser steps done when it was written.
        tensors: name to CPU tensor; names that shared one tensor at `save` share it again.
        state: what was passed to `save` as `state`.
        path: the directory it came from.
        skipped: newer checkpoints that could not be used, each with the reason; report these.
    """

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, JSON]
    path: Path
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def save(
    folder: Path | Folder,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, JSON],
    *,
    keep: int,
    unproven: bool = False,
    spare: int | None = None,
) -> Path:
    """Write the checkpoint of `step` into `folder` and keep the newest `keep`.

    Checkpoints of later steps belong to a future that a resume abandoned; they are removed once this one is complete.

    Args:
        folder: RUN/checkpoints, open or as a path; created if missing, never followed if it is a link.
        step: optimiser steps done.
        tensors: any device, dtype, strides and sharing; each is brought to the CPU.
        state: plain JSON values (see `flatten` for anything nested with tensors, tuples or integer keys).
        keep: how many to keep, this one included; at least 1.
        unproven: nothing has been computed from this state yet, so that it does not count among the `keep`: `prune`
            removes what is too many once it is known to be good.
        spare: the newest checkpoint up to this step stays beside those.

    Returns:
        The directory of the new checkpoint.

    Raises:
        CheckpointError: it could not be written; nothing that was there before is changed.
        ValueError, TypeError: step, keep or a value is not acceptable.
    """
    if step < 0:
        raise ValueError(f"step={step}: a checkpoint's step is 0 or more")
    if keep < 1:
        raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept")
    name = _directory_name(step)
    temporary = f"{_LEFTOVER}{name}"
    place = folder.path if isinstance(folder, Folder) else Path(folder)
    try:
        with _opened(folder, create=True) as opened:
            _clean(opened)
            try:
                with opened.folder(temporary, create=True) as new:
                    _write(new, step, tensors, state)
                _replace(opened, temporary, name)
            except BaseException:  # a signal turned into an exception too: leave no half-written directory
                with suppress(OSError):
                    opened.remove_folder(temporary)
                raise
            prune(opened, step, keep + unproven, spare=spare)
    except OSError as error:
        there = _there(folder)
        raise CheckpointError(
            f"checkpoint of step {step} not written to {place}: {error}. Earlier checkpoints are untouched: {there}."
        ) from error
    return place / name


def load(folder: Path, step: int | None = None) -> Checkpoint:
    """The newest whole checkpoint in `folder`, or the one of `step` exactly.

    Raises:
        UserError: nothing usable (every checkpoint is named with its reason), or written by a newer fp4train.
    """
    folder = Path(folder)
    found = _directories(folder)
    if step is not None and step not in found:
        raise UserError(f"{folder} has no checkpoint of step {step}; it has {_list(found) or 'none'}")
    if not found:
        raise UserError(f"no checkpoint in {folder}")
    skipped: list[tuple[Path, str]] = []
    for candidate in sorted(found, reverse=True) if step is None else [step]:
        path = folder / found[candidate]
        try:
            with _opened(folder) as opened, opened.folder(path.name) as each:
                tensors, state = _read(each, candidate)
        except _Unusable as reason:
            skipped.append((path, str(reason)))
            continue
        except OSError as error:
            skipped.append((path, f"unreadable ({error})"))
            continue
        return Checkpoint(step=candidate, tensors=tensors, state=state, path=path, skipped=skipped)
    reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
    others = f". Others in the folder: {_list(set(found) - {step})}" if step is not None and len(found) > 1 else ""
    raise UserError(f"no usable checkpoint in {folder}: {reasons}{others}")


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending; whether they are whole is known to `load` only.

    Raises:
        UserError: the folder cannot be read, or is a link.
    """
    return sorted(_directories(Path(folder)))


def prune(folder: Path | Folder, newest: int, keep: int, *, spare: int | None = None) -> None:
    """Remove all checkpoints but the newest `keep` of those up to step `newest`, and the newest up to step `spare`.

    What cannot be removed is reported.
    """
    with _opened(folder) as opened:
        there = _steps_in(opened)
        past = sorted(step for step in there if step <= newest)
        spared = [step for step in past if spare is not None and step <= spare]
        for step in sorted(set(there) - {*past[-keep:], *spared[-1:]}):
            doomed = f"{_LEFTOVER}{_directory_name(step)}"
            try:
                opened.rename(there[step], doomed)  # first out of sight: a kill meanwhile leaves no damaged checkpoint
                opened.remove_folder(doomed)
            except OSError as error:
                _log.warning("old checkpoint %s could not be removed: %s", opened.path / there[step], error)


# -- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(folder: Path | Folder, *, create: bool = False) -> Iterator[Folder]:
    """`folder`, opened if it is a path."""
    if isinstance(folder, Folder):
        yield folder
    else:
        with files.parent(folder, create=create) as (above, name), above.folder(name, create=create) as opened:
            yield opened


def _write(new: Folder, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, JSON]) -> None:
    stored, aliases = separate(tensors)
    descriptor = new.descriptor_of(TENSORS, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        size, checksum = write_tensors(descriptor, stored)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "tensors": {"bytes": size, "sha256": checksum, "aliases": aliases},
        "state": to_strict(dict(state)),
    }
    text = json.dumps({**body, "sha256": _checksum(body)}, indent=1, allow_nan=False)
    new.write(STATE, text.encode())


def _replace(folder: Folder, temporary: str, name: str) -> None:
    """Rename into place. Where one of the same step exists, it is set aside first and found again after a kill."""
    aside = _REPLACED + name
    if folder.has_folder(name):
        folder.rename(name, aside)
    try:
        folder.rename(temporary, name)
    except OSError:
        if folder.has_folder(aside):
            folder.rename(aside, name)
        raise
    folder.sync()
    with suppress(OSError):
        folder.remove_folder(aside)


def _clean(folder: Folder) -> None:
    """Remove what a killed process left, and put back a checkpoint that was set aside but never replaced."""
    for entry in folder.names():
        if entry.startswith(_LEFTOVER):
            with suppress(OSError):
                folder.remove_folder(entry)
        elif entry.startswith(_REPLACED):
            name = entry.removeprefix(_REPLACED)
            if folder.has_folder(name):
                with suppress(OSError):
                    folder.remove_folder(entry)
            else:
                folder.rename(entry, name)


# -- reading ----------------------------------------------------------------------------------------------------------


class _Unusable(Exception):
    """This checkpoint cannot be used; the message is the reason."""


def _read(folder: Folder, step: int) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    try:
        body = json.loads(folder.read(STATE, STATE_LIMIT))
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise _Unusable(f"{STATE} is not one of fp4train's")
        if body.pop("sha256", None) != _checksum(body):  # first: a damaged version is damage, not a newer fp4train
            raise _Unusable(f"{STATE} is damaged (checksum differs)")
        version = body.get("version")
        if isinstance(version, int) and version > VERSION:
            raise UserError(
                f"{folder.path} has checkpoint format version {version}; this fp4train reads up to {VERSION}. "
                "Update fp4train to resume from it."
            )
        if body["step"] != step:
            raise _Unusable(f"{STATE} is of step {body['step']}, not {step}")
        state, described = from_strict(body["state"]), body["tensors"]
        if not isinstance(state, dict) or not isinstance(described["aliases"], dict):
            raise _Unusable(f"{STATE} holds no state")
        descriptor = folder.descriptor_of(TENSORS)
        try:
            if (size := os.fstat(descriptor).st_size) != described["bytes"]:
                raise _Unusable(f"{TENSORS} has {size} bytes instead of {described['bytes']}")
            try:
                tensors, checksum = read_tensors(descriptor, size)
            except ValueError as error:
                raise _Unusable(f"{TENSORS} is damaged ({error})") from error
        finally:
            os.close(descriptor)
        if checksum != described["sha256"]:
            raise _Unusable(f"{TENSORS} is damaged (checksum differs)")
        tensors |= {name: tensors[target] for name, target in described["aliases"].items()}
        return tensors, state
    except FileNotFoundError as error:
        raise _Unusable(f"{Path(str(error.filename)).name} is missing") from error
    except UnicodeDecodeError as error:
        raise _Unusable(f"{STATE} is damaged (not text)") from error
    except json.JSONDecodeError as error:
        raise _Unusable(f"{STATE} is damaged (not JSON: {error})") from error
    except (OSError, LookupError, TypeError, ValueError, RecursionError, AttributeError) as error:
        raise _Unusable(f"unreadable ({type(error).__name__}: {error})") from error


def _directories(folder: Path) -> dict[int, str]:
    try:
        with _opened(folder) as opened:
            return _steps_in(opened)
    except FileNotFoundError:
        return {}
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            return {}
        raise UserError(f"{folder} cannot be read: {error}") from error


def _steps_in(folder: Folder) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in folder.names():  # ".old_..." sorts before "step_...", which therefore wins
        match = _NAME.fullmatch(name.removeprefix(_REPLACED))
        if match and folder.has_folder(name):
            found[int(match[1])] = name
    return found


def _directory_name(step: int) -> str:
    return f"step_{step:08d}"


def _there(folder: Path | Folder) -> str:
    try:
        with _opened(folder) as opened:
            return ", ".join(map(str, sorted(_steps_in(opened)))) or "none"
    except OSError:
        return "none"


def _list(numbers: Mapping[int, str] | set[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
