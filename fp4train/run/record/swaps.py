"""RUN/swaps.json: the recipe changes of a run, each with the step from which it holds.

A swap that is recorded belongs to the run: a resumed run repeats it. Recipes are stored as plain configuration values;
`as_swap` binds them, and refuses whatever is no recipe. Each entry carries the identity of its run and a checksum, and
each checkpoint the entries that it was trained with: an entry that was changed, lost or comes from another run is
noticed. `fp4train.run.record.requests` is how a running process is asked for one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp4train import files
from fp4train.config.binding import bind
from fp4train.errors import UserError
from fp4train.precision import Recipe, Swap
from fp4train.run.record import directory as run_directory
from fp4train.run.record.directory import SWAPS, write_text
from fp4train.sealed import checksum

Entry = dict[str, Any]

LIMIT = 1 << 24
"""Bytes of swaps.json that are read."""

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
        raise UserError(
            f"{path} cannot be read: {error}; remove the file to go on with the swaps of the checkpoint"
        ) from error
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


def plain_swaps(run: Path) -> dict[int, dict[str, Any]]:
    """Step → plain recipe of the recorded swaps."""
    return {e["step"]: e["recipe"] for e in read_entries(run)}


def record_swap(run: Path, step: int, recipe: dict[str, Any], name: str, request: str | None = None) -> list[Entry]:
    """Add a swap to the run's record; it replaces an earlier one at the same step. Returns the record."""
    return write_entries(run, with_entry(read_entries(run), step, recipe, name, request))


def with_entry(
    entries: Sequence[Entry], step: int, recipe: dict[str, Any], name: str, request: str | None = None
) -> list[Entry]:
    """`entries` and a swap, not yet sealed, which replaces the one at the same step."""
    entry: Entry = {"step": step, "name": name, "recipe": recipe}
    if request is not None:
        entry["request"] = request
    return [*(e for e in entries if e["step"] != step), entry]


def sealed_entries(entries: Sequence[Entry], identity: str | None) -> list[Entry]:
    """`entries` by step, each with the identity of their run and a checksum."""
    bare = [{**{k: v for k, v in e.items() if k != "sha256"}, "run": identity} for e in entries]
    return [e | {"sha256": checksum(e)} for e in sorted(bare, key=lambda e: int(e["step"]))]


def write_entries(run: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Make `entries` the record of `run`, sealed. Returns them."""
    record = sealed_entries(entries, run_directory.identity(run))
    write_text(run / SWAPS, json.dumps(record, indent=1))
    return record


def _check(entry: Any, known: str | None) -> None:
    if not isinstance(entry, dict) or not {"step", "name", "recipe"} <= set(entry) or type(entry["step"]) is not int:
        raise ValueError("an entry does not hold step, name and recipe")
    if strange := set(entry) - {"step", "name", "recipe", "run", "request", "sha256"}:
        raise ValueError(f"an entry holds {sorted(strange)[0]!r}")
    if set(entry) == {"step", "name", "recipe"}:
        return  # from before entries had a checksum
    if entry.get("sha256") != checksum(entry):
        raise ValueError(
            f"the swap at step {entry['step']} was changed after it had been recorded (its checksum differs)"
        )
    if known is not None and entry.get("run") not in (None, known):
        raise ValueError(f"it is of run {entry['run']}, not of this one ({known})")


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
