"""Recipe changes of a run: swaps.json in its directory records them, swap_requests/ asks a running process for them.

`fp4train swap` writes one request file per swap. The training process takes it between two steps, records the swap with
its step, and from then on it belongs to the run: a resumed run repeats it. Recipes are stored as plain configuration
values; `as_swap` binds them, and refuses whatever is no recipe. Each entry carries the identity of its run and a
checksum, and each checkpoint the entries that it was trained with: an entry that was changed, lost or comes from
another run is noticed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp4train import files
from fp4train.config.binding import bind
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.precision import Recipe, Swap
from fp4train.run import directory as run_directory
from fp4train.run.directory import REQUESTS, SWAPS, write_text

Entry = dict[str, Any]

LIMIT = 1 << 24
"""Bytes of swaps.json that are read."""
REQUEST_LIMIT = 1 << 20
"""Bytes of a request that are read."""
AT_ONCE = 100
"""Requests that are taken between two steps."""

_log = logging.getLogger(__name__)


def read_entries(run: Path) -> list[Entry]:
    """The recorded swaps of a run, as they are stored.

    Raises:
        UserError: the record cannot be read, was changed, or is another run's.
    """
    path = run / SWAPS
    try:
        text = files.read(path, LIMIT)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    known = run_directory.identity(run)
    try:
        entries = json.loads(text)
        if not isinstance(entries, list):
            raise ValueError("it is no list")
        for entry in entries:
            _check(entry, known)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return entries


def read_swaps(run: Path) -> list[Swap]:
    """The recorded swaps of a run, by step.

    Raises:
        UserError: as `read_entries`, or an entry is no recipe.
    """
    try:
        return [as_swap(e["step"], e["recipe"], e["name"]) for e in read_entries(run)]
    except UserError as error:
        said = str(error)
        raise UserError(said if SWAPS in said else f"{run / SWAPS} cannot be read: {error}") from error


def record_swap(run: Path, step: int, recipe: dict[str, Any], name: str, request: str | None = None) -> list[Entry]:
    """Add a swap to the run's record; it replaces an earlier one at the same step. Returns the record."""
    entry: Entry = {"step": step, "name": name, "recipe": recipe, "run": run_directory.identity(run)}
    if request is not None:
        entry["request"] = request
    entries = [e for e in read_entries(run) if e["step"] != step] + [entry]
    return write_entries(run, entries)


def write_entries(run: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Make `entries` the record of `run`, each with its identity and a checksum. Returns them."""
    known = run_directory.identity(run)
    sealed = [{**{k: v for k, v in e.items() if k != "sha256"}, "run": known} for e in entries]
    sealed = [e | {"sha256": _checksum(e)} for e in sorted(sealed, key=lambda e: int(e["step"]))]
    write_text(run / SWAPS, json.dumps(sealed, indent=1))
    return sealed


def _check(entry: Any, known: str | None) -> None:
    if not isinstance(entry, dict) or not {"step", "name", "recipe"} <= set(entry) or type(entry["step"]) is not int:
        raise ValueError("an entry does not hold step, name and recipe")
    if strange := set(entry) - {"step", "name", "recipe", "run", "request", "sha256"}:
        raise ValueError(f"an entry holds {sorted(strange)[0]!r}")
    if set(entry) == {"step", "name", "recipe"}:
        return  # from before entries had a checksum
    if entry.get("sha256") != _checksum({k: v for k, v in entry.items() if k != "sha256"}):
        raise ValueError(
            f"the swap at step {entry['step']} was changed after it had been recorded (its checksum differs); remove "
            "the file to go on with the swaps of the checkpoint"
        )
    if known is not None and entry.get("run") not in (None, known):
        raise ValueError(f"it is of run {entry['run']}, not of this one ({known})")


def _checksum(entry: Mapping[str, Any]) -> str:
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_record(run: Path, step: int, trained: Sequence[Entry], *, mend: bool) -> None:
    """Compare the record with `trained`, the entries in the checkpoint of `step`.

    Args:
        mend: write a record that is missing anew.

    Raises:
        UserError: the record is not the one that the checkpoint was trained with, or is missing and not to be mended.
    """
    path = run / SWAPS
    for entry in trained:
        _check(entry, None)
    with files.parent(path) as (folder, name):
        missing = folder.status(name) is None
    if missing and trained:
        if not mend:
            raise UserError(
                f"{path} is missing, but {run} was swapped at step {trained[0]['step']}: resume it in place first"
            )
        _log.warning("%s is missing; it is written anew from the checkpoint of step %d", path, step)
        write_entries(run, trained)
        return

    def past(entries: Sequence[Entry]) -> list[tuple[int, str, str]]:
        return [(e["step"], e["name"], json.dumps(e["recipe"], sort_keys=True)) for e in entries if e["step"] < step]

    here, there = past(read_entries(run)), past(trained)
    if here != there:
        at = next((e[0] for e in [*there, *here] if e not in here or e not in there), step)
        raise UserError(
            f"{path} is not what the checkpoint of step {step} was trained with (the swap at step {at}): undo the "
            "change, or remove the file to go on with the swaps of the checkpoint"
        )


def as_swap(step: int, recipe: dict[str, Any], name: str) -> Swap:
    """The swap that a recorded or requested entry describes.

    Raises:
        UserError: the step is no integer; or the recipe has invalid values, or is neither fp4train's nor of a plugin
            that this command names.
    """
    return Swap(step=bind(step, int, "step"), recipe=bind(recipe, Recipe, "recipe"), name=str(name))


def request_swap(run: Path, recipe: dict[str, Any], name: str, at: int | None) -> Path:
    """Ask the process that trains in `run` (now, or after a resume) to change the recipe at step `at`.

    Args:
        recipe: plain configuration values.
        name: what the user calls it ("mxfp8").
        at: None: at the next step.

    Raises:
        UserError: the request cannot be written.
    """
    key = f"{time.time_ns()}-{secrets.token_hex(4)}"
    request = {"recipe": recipe, "name": name, "at": at}
    data = json.dumps(request | {"sha256": _checksum(request)}).encode()
    try:
        with Folder.open(run) as folder, folder.folder(REQUESTS, create=True) as requests:
            requests.write(f"{key}.json", data)
    except OSError as error:
        raise UserError(f"{run / REQUESTS} cannot be written: {error}") from error
    return run / REQUESTS / f"{key}.json"


def take_requests(folder: Folder, done: Sequence[Entry]) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """Yield each pending request, and remove it when the caller asks for the next one.

    Args:
        folder: the run's directory.
        done: the recorded swaps: a request that one of them answers was carried out before a kill, and only goes.

    Yields:
        (its key, the request, "") or (its key, None, why it cannot be read).
    """
    try:
        requests = folder.folder(REQUESTS)
    except FileNotFoundError:
        return
    except OSError as error:
        with suppress(OSError):
            folder.rename(REQUESTS, f"{REQUESTS}.refused")
        yield "", None, f"requests cannot be read: {error}"
        return
    answered = {entry.get("request") for entry in done}
    with requests:
        for name in [name for name in requests.names() if name.endswith(".json")][:AT_ONCE]:
            key = name.removesuffix(".json")
            if key in answered:
                _set_aside(requests, name)
                continue
            try:
                request = json.loads(requests.read(name, REQUEST_LIMIT))
                if not isinstance(request, dict) or not {"recipe", "name", "at"} <= set(request):
                    raise ValueError("it does not hold recipe, name and at")
                checksum = request.pop("sha256", None)
                if checksum is not None and checksum != _checksum(request):
                    raise ValueError("it is damaged (its checksum differs)")
            except (OSError, ValueError, RecursionError) as error:
                _set_aside(requests, name)
                yield key, None, f"request {name} cannot be read: {error}"
            else:
                yield key, request, ""
                _set_aside(requests, name)


def _set_aside(requests: Folder, name: str) -> None:
    """Remove a request, or rename it, so that it is not taken again."""
    try:
        requests.remove(name)
    except OSError:
        with suppress(OSError):
            requests.rename(name, f"{name.removesuffix('.json')}.refused")
