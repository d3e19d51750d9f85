"""Whether a checkpoint and the records beside it are of the same run, of this user, and as the checkpoint saw them."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fp4train import checkpoint
from fp4train.config import plain
from fp4train.config.overrides import as_typed
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.run.record import directory as run_directory
from fp4train.run.record.directory import HISTORY
from fp4train.run.record.history import Record
from fp4train.run.record.signature import outside_paths, signature
from fp4train.run.record.swaps import check_record
from fp4train.sealed import config_parts, unlike
from fp4train.track.statistics import LIMIT, STATISTICS

_log = logging.getLogger(__name__)


def check_paths(cfg: DictConfig, named: Iterable[str]) -> None:
    """Refuse paths outside of the run `cfg.resume` that its configuration names and this user did not.

    Args:
        cfg: the saved configuration of that run with a command's overrides.
        named: the keys, or sections, that the command line gives.

    Raises:
        UserError: there are some; it says what the command line would have to name.
    """
    if not cfg.resume:
        return
    run, given = Path(str(cfg.resume)), tuple(named)
    outside = outside_paths(plain(cfg), run)
    asked = [key for key in outside if not any(key == each or key.startswith(f"{each}.") for each in given)]
    if asked and (why := _why_foreign(run)) is not None:
        raise UserError(
            f"{run / run_directory.CONFIG} names paths outside of the run and {why}; nothing was read or written "
            f"there. Add what is right to the command: {' '.join(as_typed(key, outside[key]) for key in asked)}"
        )


def _why_foreign(run: Path) -> str | None:
    """Why the configuration of a run counts as somebody else's; None: this user wrote it.

    Raises:
        UserError: it cannot be read.
    """
    found, body = config_parts(run / run_directory.CONFIG)
    if found is None or found[2] is None:
        return "has no signature: an older fp4train wrote it, or somebody else"
    try:
        same = hmac.compare_digest(signature(found[0], body), found[2])
    except FileNotFoundError:  # nothing is signed on this machine yet
        same = False
    except OSError as error:
        return f"cannot be told to be yours ({error})"
    return None if same else "has the signature of another user or another machine"


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
