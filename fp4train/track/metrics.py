"""RUN/metrics.jsonl: one JSON object per line, each line handed to the operating system as it is
logged.

This file is the truth about a run: a kill loses at most the line being written. Two kinds of
lines::

    {"step": 120, "train/loss": 2.31, "crc": "5f0e2d1a"}
    {"step": 120, "event": "swap", "recipe": "bf16", "crc": "81d2c3aa"}

"crc" is the CRC-32 of the line without it (`fp4train.sealed`): `read_metrics` names a line in which a
digit is not as it was written. Checkpoints know whether the file lost lines since (`mend`).

A thread writes, because a disk may stall. The caller waits for each line up to `WAIT_SECONDS`;
where that is not enough it says so once and goes on, the lines wait in memory, and nobody waits
again until they are written.

NaN and infinities do not exist in JSON and would break strict readers (jq, browsers, pandas). They
are written as null and named beside it, ``{"train/loss": null, "nonfinite": {"train/loss":
"nan"}}``; `read_metrics` puts them back.

A checkpoint remembers how long the file was and its checksum up to there (`MetricsLog.mark`), so
that a resumed run can say that lines are missing or were changed; `mend` leaves out what is damaged
and keeps the file as it was found beside.

Numbers are written in their shortest exact form, so that two runs with equal losses have equal
values.
"""

import json
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp4train import files
from fp4train.errors import OlderForm, UserError, reason, user_errors
from fp4train.files import Folder
from fp4train.sealed import (
    LogWriter,
    NoChecksum,
    ScannedPart,
    changed_since,
    cut,
    open_line,
    seal_line,
)
from fp4train.track.statistics import STATISTICS, Statistics, StatisticsLog
from fp4train.worker import Worker

_log = logging.getLogger(__name__)

LIMIT = 1 << 33
"""Bytes of a metrics log that are read."""
RESERVED = ("step", "event", "nonfinite", "after", "crc")
WAIT_SECONDS = 1.0
"""Seconds for a line to be written; then the disk is left behind."""
END_SECONDS = 30.0
"""Seconds for the lines that are left at the end, and before a checkpoint that counts on them."""


class MetricsLog:
    """Append-only log of one run, with its statistics beside it; a `Tracker`.

    Args:
        path: the file; its folder is created. A last line torn by a kill is removed.
        resume_step: the steps done at the checkpoint that the run goes on from. Lines of later
            steps, which will be written again, are dropped (atomically: the file is replaced as a
            whole).

    Raises:
        UserError: the file is not a metrics log, or cannot be written.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self.path = Path(path)

        def keep(line: dict[str, Any]) -> bool:
            return resume_step is None or line["step"] <= resume_step

        refused = user_errors(OSError, before=f"{self.path} cannot be written: ")
        with refused, files.parent(self.path, create=True) as (folder, name):
            self._all, _ = cut(folder, name, _intact_lines(folder, name, REMEDY), keep)
            self._file = LogWriter(folder, name, self._all.size)
        self._waiting: deque[bytes] = deque()
        self._worker = Worker("metrics", lambda error: _log.error("%s: %s", self.path, error))
        self._behind = self._full = False
        self._open = True
        self._statistics = StatisticsLog(self.path.parent / STATISTICS, resume_step=resume_step)

    def mark(self) -> dict[str, Any]:
        """The marks of what is logged by now, for `mend`: its bytes and their SHA-256, and those of
        the statistics.
        """
        return self._all.mark() | {"statistics": self._statistics.mark}

    def sync(self) -> None:
        """Make what is logged durable; another thread may do so while lines are logged.

        Raises:
            OSError: the disk does not take it, or does not answer.
        """
        if not self._worker.wait(END_SECONDS):
            raise TimeoutError(f"{self.path} is not written after {END_SECONDS:g} s")
        self._file.sync()
        self._statistics.sync()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line. Values: None, bool, int, float, str, or anything with `.item()` (a
        scalar tensor).

        Never raises for the disk: where it is full, that is reported once and the lines wait for
        the next call.
        """
        self._append({"step": step}, values)

    def log_event(self, step: int, event: str, values: Mapping[str, Any] | None = None) -> None:
        """Append a line about something that happened: swap, resume, phase, guard, ..."""
        self._append({"step": step, "event": event}, values or {})

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Tables (the plan) are files of their own in the run directory, not metrics."""

    def log_statistics(self, statistics: Statistics) -> None:
        """Append them to statistics.bin; waits for no disk and raises for none."""
        if not self._open:
            raise ValueError(f"{self.path} is finished; nothing can be logged any more")
        self._worker.put(lambda: self._statistics.log(statistics))

    def finish(self, exit_code: int = 0) -> None:
        if not self._open:
            return
        self._open = False
        self._worker.put(self._close)
        if not self._worker.leave(END_SECONDS) or self._waiting:
            _log.error(
                "%s: %d lines are lost, they could not be written", self.path, len(self._waiting)
            )

    def _append(self, head: dict[str, Any], values: Mapping[str, Any]) -> None:
        if reserved := [key for key in RESERVED if key in values]:
            raise ValueError(f"key {reserved[0]!r} is reserved in {self.path.name}")
        if not self._open:
            raise ValueError(f"{self.path} is finished; nothing can be logged any more")
        data = seal_line(_dump({**head, **values}))
        self._all.add(data)
        self._waiting.append(data)
        if self._behind and self._worker.wait(0):
            self._behind = False
            _log.warning("%s is written again; nothing is lost", self.path)
        self._worker.put(self._flush)
        if not self._behind and not self._worker.wait(WAIT_SECONDS):
            self._behind = True
            _log.error(
                "%s is not written after %g s: steps go on, lines wait for the disk",
                self.path,
                WAIT_SECONDS,
            )

    # -- the thread's ------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Write what waits. Where the disk is full, keep it for the next time: the run matters more
        than its log.
        """
        failing = self._full
        try:
            while self._waiting:
                self._file.write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            self._full = True
            if not failing:
                _log.error(
                    "%s cannot be written (%s); lines are kept until it can", self.path, error
                )
        else:
            self._full = False
            if failing:
                _log.warning("%s can be written again; nothing is lost", self.path)

    def _close(self) -> None:
        self._flush()
        self._statistics.close()
        try:
            self._file.sync()
        finally:
            self._file.close()


REMEDY = "resuming the run leaves it out and keeps the file as it is beside"


def read_metrics(path: Path, remedy: str = REMEDY) -> list[dict[str, Any]]:
    """All whole lines of a metrics log, also of a run that is running or was killed.

    Args:
        remedy: advice about a damaged line, as the error says it.

    Raises:
        UserError: the file is missing, or a line is damaged; of the last one only a warning is
            given.
    """
    refused = user_errors(OSError, before=f"{path} cannot be read: ", message=reason)
    with refused, files.parent(path) as (folder, name):
        return [line.value for line in _intact_lines(folder, name, remedy)]


def check_form(path: Path) -> None:
    """Refuse a log of an older form, by its first line; a log that is missing is of none.

    Raises:
        UserError: it is of an older form, or cannot be read.
    """
    unreadable = user_errors(OSError, before=f"{path} cannot be read: ", message=reason)
    with unreadable, suppress(FileNotFoundError), files.parent(path) as (folder, name):
        next(_scan(folder, name), None)


def mend(path: Path, resume_step: int, mark: Mapping[str, Any] | None) -> list[str]:
    """Leave the whole lines of a log, and say what is not as the checkpoint of `resume_step` saw
    it.

    Lines that are damaged, but for a torn last one, are left out; the file as it was found is kept as NAME.damaged.

    Args:
        path: the log; it may be missing.
        resume_step: the steps done at that checkpoint.
        mark: value of `MetricsLog.mark` at that checkpoint; None if nothing was logged, or if that
            is not known.

    Returns:
        A sentence about each thing that is wrong; empty if all is well.

    Raises:
        UserError: a file cannot be read or written.
    """
    with (
        user_errors(OSError, before=f"{path} cannot be read: "),
        files.parent(path) as (folder, name),
    ):
        changed = changed_since(folder, name, mark, LIMIT)
        _, wrong = cut(folder, name, _scan(folder, name), bool, f"{name}.damaged")
    problems = [f"line {damage.number} was damaged and is left out" for damage in wrong]
    if changed:
        problems.append(f"the file {changed} since the checkpoint of step {resume_step}")
    return problems


def _scan(folder: Folder, name: str) -> Iterator[ScannedPart]:
    """The lines; not the torn end of one, nor a damaged last one, of which a warning is given.

    Raises:
        UserError: the first line has no checksum.
    """
    damaged: ScannedPart | None = None
    for number, raw in enumerate(folder.lines(name, LIMIT), start=1):
        torn = not raw.endswith(b"\n")
        if torn and len(raw) < files.LINE:
            break
        if damaged is not None:
            yield damaged
            damaged = None
        try:
            if torn:
                raise ValueError(f"it has more than {files.LINE:,} bytes")
            line = parse_line(raw)
        except (ValueError, RecursionError) as error:
            if isinstance(error, NoChecksum) and number == 1:
                raise OlderForm(
                    folder.path / name, "has lines without the checksums of today"
                ) from error
            damaged = ScannedPart(number, raw, None, str(error) or type(error).__name__)
            continue
        yield ScannedPart(number, raw, line, "")
    if damaged is not None and damaged.raw.strip(b"\0\n"):  # a power cut may leave zeros for data
        where = f"{folder.path / name}, line {damaged.number}"
        _log.warning("%s, the last one, is damaged and left out (%s)", where, damaged.why)


def _intact_lines(folder: Folder, name: str, remedy: str) -> Iterator[ScannedPart]:
    """The lines of a log, of which each is intact.

    Raises:
        UserError: a line is damaged.
    """
    for line in _scan(folder, name):
        if line.why:
            where = f"{folder.path / name}, line {line.number}"
            raise UserError(f"{where}: not a line of metrics ({line.why}); {remedy}")
        yield line


def parse_line(raw: bytes) -> dict[str, Any]:
    """A line of a metrics log.

    Raises:
        ValueError, RecursionError: it is none, or is not as it was written.
    """
    line = open_line(raw)
    if not isinstance(line.get("step"), int):
        raise ValueError("no step in it")
    nonfinite = line.pop("nonfinite", {})
    if not isinstance(nonfinite, dict) or not all(
        isinstance(text, str) for text in nonfinite.values()
    ):
        raise ValueError("nonfinite names no numbers")
    for key, text in nonfinite.items():
        line[key] = float(text)
    return line


def _dump(line: Mapping[str, Any]) -> bytes:
    plain: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for key, value in line.items():
        if not isinstance(value, bool | int | float | str | list | dict | None) and hasattr(
            value, "item"
        ):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[key] = str(float(value))
            value = None
        plain[key] = value
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json.dumps(plain, allow_nan=False).encode()
