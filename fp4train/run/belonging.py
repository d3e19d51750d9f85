"""Whether a checkpoint and the records beside it are of the same run, and these as the checkpoint saw them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4train import checkpoint
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.run import directory as run_directory
from fp4train.run.directory import HISTORY
from fp4train.run.history import Record
from fp4train.run.swaps import check_record
from fp4train.sealed import unlike
from fp4train.track.statistics import LIMIT, STATISTICS

_log = logging.getLogger(__name__)


def identity_of(start: checkpoint.Checkpoint) -> str | None:
    """Of the run that a checkpoint belongs to; None for one from before runs had an identity."""
    run = start.state.get("run")
    found = run.get("id") if isinstance(run, dict) else None
    return found if isinstance(found, str) and found else None


def check_belongs(start: checkpoint.Checkpoint, source: Path, *, mend: bool) -> None:
    """Refuse a checkpoint, or a record of swaps, that is not of the run in `source`.

    Raises:
        UserError: it is another run's; or the swaps are not those that the checkpoint was trained with.
    """
    own, theirs = run_directory.identity(source), identity_of(start)
    if own is not None and theirs is not None and own != theirs:
        raise UserError(
            f"{start.path} is a checkpoint of run {theirs}, not of the run in {source} ({own}): another run left it "
            "there, or it was copied from one. Move it away, or resume the run that it belongs to"
        )
    run = start.state.get("run")
    if own is None and isinstance(run, dict) and run.get("config") not in (None, run_directory.config_checksum(source)):
        _log.warning(
            "%s has lost its first line and is not as %s was trained with",
            source / run_directory.CONFIG,
            start.path.name,
        )
    entries = start.state.get("swaps", [])
    try:
        if not isinstance(entries, list):
            raise TypeError("it is no list")
        if "swaps" in start.state:
            check_record(source, start.step, entries, mend=mend)  # type: ignore[arg-type]
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{start.path} holds no record of swaps: {error}") from error


def lost_records(folder: Folder, state: Mapping[str, Any], records: Sequence[Record]) -> dict[str, str]:
    """The records in `folder`, but for the metrics, that are not as a checkpoint saw them: name → a sentence.

    Args:
        state: of the checkpoint. records: of the history.
    """
    found, marks = {}, state.get("metrics")
    if changed := unlike(folder, STATISTICS, marks.get("statistics") if isinstance(marks, dict) else None, LIMIT):
        found[STATISTICS] = f"{folder.path / STATISTICS} {changed} since the checkpoint: measured steps are missing"
    if (last := state.get("history")) and last not in {record.sum for record in records}:
        found[HISTORY] = f"{folder.path / HISTORY} lacks records that the checkpoint saw: what ran is not all on record"
    return found
