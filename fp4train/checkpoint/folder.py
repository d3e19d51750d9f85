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

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fp4train.checkpoint.tree import JSON, flatten, from_strict, to_strict, unflatten
from fp4train.errors import UserError

__all__ = ["JSON", "Checkpoint", "CheckpointError", "flatten", "load", "save", "steps", "unflatten"]

FORMAT = "fp4train.checkpoint"
VERSION = 1
TENSORS = "tensors.safetensors"
STATE = "state.json"

_NAME = re.compile(r"step_(\d{8,})")
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


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, JSON], *, keep: int) -> Path:
    """Write the checkpoint of `step` into `folder` and keep the newest `keep`.

    Checkpoints of later steps belong to a future that a resume abandoned; they are removed once this one is complete.

    Args:
        folder: RUN/checkpoints; created if missing.
        step: optimiser steps done.
        tensors: any device, dtype, strides and sharing; each is brought to the CPU.
        state: plain JSON values (see `flatten` for anything nested with tensors, tuples or integer keys).
        keep: how many to keep, this one included; at least 1.

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
    folder = Path(folder)
    path = folder / _directory_name(step)
    temporary = folder / f"{_LEFTOVER}{path.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        try:
            temporary.mkdir()
            _write(temporary, step, tensors, state)
            _replace(temporary, path)
        except BaseException:  # a signal turned into an exception too: leave no half-written directory
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint of step {step} not written to {folder}: {error}. "
            f"Earlier checkpoints are untouched: {', '.join(map(str, steps(folder))) or 'none'}."
        ) from error
    _prune(folder, step, keep)
    return path


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
        path = found[candidate]
        try:
            tensors, state = _read(path, candidate)
        except _Unusable as reason:
            skipped.append((path, str(reason)))
            continue
        return Checkpoint(step=candidate, tensors=tensors, state=state, path=path, skipped=skipped)
    reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
    others = f". Others in the folder: {_list(set(found) - {step})}" if step is not None and len(found) > 1 else ""
    raise UserError(f"no usable checkpoint in {folder}: {reasons}{others}")


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending; whether they are whole is known to `load` only."""
    return sorted(_directories(Path(folder)))


# -- writing ----------------------------------------------------------------------------------------------------------


def _write(directory: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, JSON]) -> None:
    stored, aliases = _separate(tensors)
    safetensors.torch.save_file(stored, directory / TENSORS)
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "tensors": {
            "bytes": (directory / TENSORS).stat().st_size,
            "sha256": _file_checksum(directory / TENSORS),
            "aliases": aliases,
        },
        "state": to_strict(dict(state)),
    }
    text = json.dumps({**body, "sha256": _checksum(body)}, indent=1, allow_nan=False)
    (directory / STATE).write_text(text, encoding="utf-8")
    for path in (directory / TENSORS, directory / STATE, directory):
        _sync(path)


def _separate(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Contiguous CPU tensors that share no memory, and the names that stand for another one (tied weights)."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if names.setdefault(place, name) != name:
                aliases[name] = names[place]
                continue
        tensor = tensor.cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        storages.add(tensor.untyped_storage().data_ptr())
        stored[name] = tensor
    return stored, aliases


def _replace(temporary: Path, path: Path) -> None:
    """Rename into place. Where one of the same step exists, it is set aside first and found again after a kill."""
    aside = path.with_name(_REPLACED + path.name)
    if path.exists():
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        if aside.exists():
            os.rename(aside, path)
        raise
    _sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _clean(folder: Path) -> None:
    """Remove what a killed process left, and put back a checkpoint that was set aside but never replaced."""
    for entry in list(folder.iterdir()):
        if entry.name.startswith(_LEFTOVER):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.startswith(_REPLACED):
            path = entry.with_name(entry.name.removeprefix(_REPLACED))
            if path.exists():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                os.rename(entry, path)


def _prune(folder: Path, newest: int, keep: int) -> None:
    past = [step for step in steps(folder) if step <= newest]
    for step in set(steps(folder)) - set(past[-keep:]):
        path = folder / _directory_name(step)
        doomed = path.with_name(f"{_LEFTOVER}{path.name}")
        try:
            os.rename(path, doomed)  # first out of sight: a kill while deleting leaves no damaged checkpoint
            shutil.rmtree(doomed)
        except OSError as error:
            _log.warning("old checkpoint %s could not be removed: %s", path, error)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- reading ----------------------------------------------------------------------------------------------------------


class _Unusable(Exception):
    """This checkpoint cannot be used; the message is the reason."""


def _read(path: Path, step: int) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    try:
        body = json.loads((path / STATE).read_text(encoding="utf-8"))
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise _Unusable(f"{STATE} is not one of fp4train's")
        version = body.get("version")
        if isinstance(version, int) and version > VERSION:
            raise UserError(
                f"{path} has checkpoint format version {version}; this fp4train reads up to {VERSION}. "
                "Update fp4train to resume from it."
            )
        if body.pop("sha256", None) != _checksum(body):
            raise _Unusable(f"{STATE} is damaged (checksum differs)")
        if body["step"] != step:
            raise _Unusable(f"{STATE} is of step {body['step']}, not {step}")
        file, described = path / TENSORS, body["tensors"]
        if (size := file.stat().st_size) != described["bytes"]:
            raise _Unusable(f"{TENSORS} has {size} bytes instead of {described['bytes']}")
        if _file_checksum(file) != described["sha256"]:
            raise _Unusable(f"{TENSORS} is damaged (checksum differs)")
        # clone: the loaded tensors are views of one memory map at unaligned addresses
        tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(file).items()}
        tensors |= {name: tensors[target] for name, target in described["aliases"].items()}
        return tensors, from_strict(body["state"])
    except FileNotFoundError as error:
        raise _Unusable(f"{Path(error.filename).name} is missing") from error
    except UnicodeDecodeError as error:
        raise _Unusable(f"{STATE} is damaged (not text)") from error
    except json.JSONDecodeError as error:
        raise _Unusable(f"{STATE} is damaged (not JSON: {error})") from error
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise _Unusable(f"unreadable ({type(error).__name__}: {error})") from error


def _directories(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    found: dict[int, Path] = {}
    for entry in sorted(folder.iterdir()):  # ".old_..." sorts before "step_...", which therefore wins
        match = _NAME.fullmatch(entry.name.removeprefix(_REPLACED))
        if match and entry.is_dir():
            found[int(match[1])] = entry
    return found


def _directory_name(step: int) -> str:
    return f"step_{step:08d}"


def _list(numbers: Mapping[int, Path] | set[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
