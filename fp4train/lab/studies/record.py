"""STUDY/measurements.jsonl: what a study has measured, a line for each finished measurement,
written as it happens.

    {"step": 200, "event": "study", "identity": {"study": "sensitivity", …}, "crc": …}
    {"step": 200, "key": "everything/0", "values": {"nmse": [0.098, …], …}, "crc": …}

The first line says what the measurements are of. A study that goes on compares it with its own, and
refuses the record of another one. Each line has a checksum; a last one that a kill tore is dropped
(`fp4train.track.metrics`). JSON keeps floats exactly: what is read back equals what was measured in
every bit.

How far a study is, is a bar on a terminal and lines elsewhere, with the time that is left.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from fp4train import __version__
from fp4train.config.binding import bind, flattened
from fp4train.errors import UserError, user_errors
from fp4train.files import Folder
from fp4train.run.record import directory as run_directory
from fp4train.run.supervise.ledger import BAR
from fp4train.track.metrics import MetricsLog, read_metrics

_log = logging.getLogger(__name__)

MEASUREMENTS = "measurements.jsonl"
REMEDY = "remove the file to measure anew"
FORMAT = 4
"""The number of the format; it grows when an earlier record would be read wrongly."""
LOSS_SCALE = "loss_scale"
"""The loss scale that gradients are measured with, in the identity of a study whose recipe has a
loss scaling.
"""
SHOWN = 4
LENGTH = 24
"""Differences that a message names, and characters of a value in it."""

T = TypeVar("T")

Reading = dict[str, Any]
"""A measurement: plain JSON values, all numbers finite."""


class StudyRecord:
    """The finished measurements of one study, by key; `open_record` makes one.

    Args:
        path: file of the record.
        identity: identity of the study.
        step: step of the checkpoint that is studied.

    Raises:
        UserError: the record is of another study, is damaged, or cannot be read or written.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], step: int) -> None:
        self.path = path
        self.step = step
        self.known: dict[str, Reading] = {}
        """Key → values."""
        header = {**identity, "format": FORMAT, "fp4train": __version__}
        header = json.loads(json.dumps(header, allow_nan=False))
        with Folder.open(path.parent, create=True) as folder:
            if folder.status(path.name) is not None:
                lines = read_metrics(path, REMEDY)
            else:
                lines = []
        for number, line in enumerate(lines, start=1):
            needed = {"identity"} if number == 1 else {"key", "values"}
            if not needed <= set(line):
                raise UserError(f"{path}, line {number}: no measurement of a study; {REMEDY}")
            if number == 1:
                self._check(line["identity"], header)
            else:
                self.known[line["key"]] = line["values"]
        self._log = MetricsLog(path)
        if not lines:
            self._log.log_event(self.step, "study", {"identity": header})

    def _check(self, recorded: Any, expected: Mapping[str, Any]) -> None:
        old = flattened(recorded if isinstance(recorded, dict) else {})
        new = flattened(expected)
        if other := [key for key in {**new, **old} if old.get(key) != new.get(key)]:
            shown = "; ".join(_difference(key, old, new) for key in other[:SHOWN])
            raise UserError(
                f"{self.path} is the record of another study "
                f"({shown}{'; …' * (len(other) > SHOWN)}): remove it, or "
                "give this study another folder, out=…"
            )

    def __contains__(self, key: str) -> bool:
        return key in self.known

    def __getitem__(self, key: str) -> Reading:
        return self.known[key]

    def bound(self, key: str, kind: type[T]) -> T:
        """The values of a measurement as an object of class `kind`.

        Raises:
            UserError: they are not of such an object.
        """
        with user_errors(UserError, before=f"{self.path}: ", after=f"; {REMEDY}"):
            values: T = bind(self.known[key], kind, key)
        return values

    def add(self, key: str, values: Reading) -> Reading:
        """Record a finished measurement; returns the values as they will be read back.

        On a full disk the line is kept in memory and written as soon as it can be; that is reported
        once.

        Raises:
            ValueError: a value is not finite.
        """
        values = json.loads(json.dumps(values, allow_nan=False))
        self._log.log(self.step, {"key": key, "values": values})
        self.known[key] = values
        return values

    def close(self) -> None:
        """Make what is recorded durable, and close the file."""
        self._log.finish()


def _difference(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """ "settings.train.seq_len: 128 there, the default here"; a class by its own name."""
    named = key.endswith("._target_")

    def shown(values: Mapping[str, Any]) -> str:
        if key not in values:
            return "the default"
        if named:
            return str(values[key]).rpartition(".")[2]
        return str(values[key])[:LENGTH]

    return f"{key.removesuffix('._target_')}: {shown(old)} there, {shown(new)} here"


@contextmanager
def open_record(folder: Path, identity: Mapping[str, Any], step: int) -> Iterator[StudyRecord]:
    """The record of the study in `folder`, which is created; one process at a time has it open.

    Raises:
        UserError: another process works on the study; or an error of `StudyRecord`.
    """
    with run_directory.locked(
        folder, "another process works on this study; give this one another folder, out=…"
    ):
        record = StudyRecord(folder / MEASUREMENTS, identity, step)
        try:
            yield record
        finally:
            record.close()


class Shown(Protocol):
    """Receives how far a study is."""

    def __call__(self, done: int, total: int | None, what: str = "") -> None:
        """`done` of `total` are made (None: it is not known how many there will be); `what` is
        made, or comes next.

        The first call says how many there were before: the time that is left follows from those
        made since.
        """


@contextmanager
def study_progress(unit: str, every: float = 0.0) -> Iterator[Shown]:
    """Show what a study makes.

    Args:
        unit: name of a thing that is counted, in the singular: "fork".
        every: seconds between two lines where there is no terminal; 0: a line for each.
    """
    terminal = sys.stderr.isatty()
    bar = tqdm(disable=not terminal, unit=unit, **BAR)
    begun: tuple[float, int] | None = None
    last = time.perf_counter()

    def show(done: int, total: int | None, what: str = "") -> None:
        nonlocal begun, last
        now = time.perf_counter()
        if begun is None:
            begun = (now, done)
            bar.initial = done
        began, done_before = begun
        with suppress(OSError):  # a terminal that was closed is no reason to end a study
            bar.total = total
            bar.n = done
            bar.set_postfix_str(what, refresh=False)
            bar.refresh()
        if not terminal and what and now - last >= every:
            last = now
            if total:
                counted = f"{done} of {total} {unit}s"
            else:
                counted = f"{done} {unit}s"
            if total is not None and done != done_before:
                seconds = (now - began) / (done - done_before) * (total - done)
                counted += f", {tqdm.format_interval(seconds)} left"
            _log.info("%s: %s", counted, what)

    try:
        yield show
    finally:
        with suppress(OSError):
            bar.close()
