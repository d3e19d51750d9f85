"""RUN/history.jsonl: what a run was told and what it ran, by stretch of steps; appended as it happens, never rewritten.

One record per line::

    {"event": "start",  "step": 0,  "time": …, "config": {…}, "environment": {…}, "stretches": […], "sum": …}
    {"event": "resume", "step": 12, "time": …, "from": "step_00000012", "changed": {"train.steps": [12, 20]}, …}
    {"event": "swap",   "step": 15, "time": …, "name": "mxfp8", "at": 16, "recipe": {…}, "stretches": […], …}

`stretches` is the plan from `step` on. A later record replaces it from its own step on, and nothing before, so that the
plan of the past stays what ran. A stretch holds the rows of the plan in a compact form: its distinct kinds of GEMMs
(size, elements, backend, why), and for each layer the kinds of its three GEMMs. `sum` is a checksum over the line and
the sum of the line before; a last line that a power cut tore is left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fp4train import checkpoint, files
from fp4train.backends import GEMMS
from fp4train.config.binding import complete, flattened
from fp4train.config.schema import MOST_STEPS, Config
from fp4train.errors import UserError
from fp4train.precision.plan import Plan
from fp4train.precision.report import render, section
from fp4train.run.record.directory import CHECKPOINTS, HISTORY, identity
from fp4train.text import printable
from fp4train.track.config import METRICS
from fp4train.track.metrics import parse_line

_log = logging.getLogger(__name__)

LIMIT = 1 << 28
"""Bytes of a history that are read."""
_TAIL = 1 << 20
"""Bytes at the end of the metrics in which the last step is looked for."""

MOST_DIMENSIONS, MOST_MACS = 8, 10**30
"""Of a GEMM: many dimensions take long to multiply. Of a stretch: more multiply-adds are none that can be done."""
_HIGH = {"BF16", "FP16", "FP32"}

UNRECORDED = ("run.overwrite", "resume", "resume_step", "plugins", "gpu")
"""Keys that say how a command was given, and nothing about the run."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps [start, stop) as they were planned, or ran.

    Args:
        recipe, reason: its name, and why it holds.
        rows: per GEMM: layer, GEMM, size, elements, backend, why.
        macs: per row: its multiply-adds.
    """

    start: int
    stop: int
    recipe: str
    reason: str
    rows: tuple[tuple[str, ...], ...]
    macs: tuple[int, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Share of the linear layers' multiply-adds by elements."""
        macs: dict[str, int] = {}
        for (_, _, _, elements, *_), count in zip(self.rows, self.macs, strict=True):
            macs[elements] = macs.get(elements, 0) + count
        total = sum(macs.values()) or 1
        return {k: v / total for k, v in sorted(macs.items(), key=lambda item: -item[1])}

    @property
    def title(self) -> str:
        return printable(f"steps {self.start}–{self.stop - 1}: {self.recipe} ({self.reason})", kept="")

    def render(self, *, full: bool) -> str:
        """As `fp4train.precision.report.render` shows a stretch of a plan."""
        return section(self.title, list(self.rows), self.shares, full=full)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line.

    Args:
        event: "start", "init", "resume", "branch", "rewind", "swap" or "swap cancelled".
        step: steps done then.
        time: UTC, ISO 8601.
        changed: configuration key → value before and after.
        stretches: what was planned from `step` on.
        values: what else the line holds: config, environment (`fp4train.run.host`), from, name, at, recipe,
            run, the identity of the run that wrote it, and of a rewind diverged, skipped
            (`fp4train.run.supervise.divergence`).
        sum: its checksum and that of all lines before.
    """

    event: str
    step: int
    time: str
    changed: dict[str, tuple[Any, Any]]
    stretches: tuple[Stretch, ...]
    values: dict[str, Any]
    sum: str = ""

    def describe(self) -> str:
        """Everything but event and step, in a line."""
        parts = []
        if "from" in self.values:
            parts.append(f"from {self.values['from']}")
        if "at" in self.values:
            parts.append(f"{self.values.get('name', 'the swap')} at step {self.values['at']}")
        if "skipped" in self.values:
            first, last = self.values["skipped"]
            parts.append(f"the loss diverged at step {self.values['diverged']}; batches {first}–{last} are skipped")
        parts += [f"{key}: {_show(old)} → {_show(new)}" for key, (old, new) in self.changed.items()]
        return "; ".join(parts)


def read_history(run: Path) -> list[Record]:
    """The records of a run, oldest first; none where it has no history.

    Raises:
        UserError: the file cannot be read, or a line is damaged.
    """
    return _lines(run)[0]


def append(run: Path, event: str, step: int, plan: Plan, **values: Any) -> str:
    """Add a record. `plan` is the run's from `step` on; values are "config", "environment", "changed", "from",
    "name", "at", "recipe". Returns its sum, which a checkpoint remembers.

    Raises:
        UserError: the file cannot be read or written; its records are as before then.
    """
    records, size = _lines(run)
    line = {
        "event": event,
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": identity(run),
        **values,
        "stretches": _compact(plan),
    }
    line["sum"] = chained_sum(line, records[-1].sum if records else "")
    text = json.dumps(line, ensure_ascii=False, default=str) + "\n"
    try:
        with files.parent(run / HISTORY) as (folder, name):
            folder.append(name, text.encode(), size)
    except OSError as error:
        raise UserError(f"{run / HISTORY} cannot be written: {error}") from error
    return str(line["sum"])


def stretches(records: Iterable[Record]) -> list[Stretch]:
    """What ran and what is planned, in order: each record holds from its step on."""
    found: list[Stretch] = []
    for record in records:
        while found and found[-1].start >= record.step:
            found.pop()
        if found and found[-1].stop > record.step:
            found[-1] = replace(found[-1], stop=record.step)
        for stretch in record.stretches:
            last = found[-1] if found else None
            if last is not None and last.stop == stretch.start and _alike(last, stretch):
                found[-1] = replace(last, stop=stretch.stop)
            else:
                found.append(stretch)
    return found


def configuration(records: Iterable[Record]) -> dict[str, Any] | None:
    """The configuration that the history ends with, as full key → value; None: it holds none."""
    found: dict[str, Any] | None = None
    for record in records:
        if "config" in record.values:
            found = flat(record.values["config"])
        if found is not None:
            found |= {key: new for key, (_, new) in record.changed.items()}
    return found


def recorded_swaps(records: Iterable[Record]) -> dict[int, dict[str, Any]]:
    """Step → plain recipe of the swaps that the history knows."""
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.event == "start" or record.event == "init":
            found = {}
        elif record.event == "swap cancelled":
            found.pop(record.values["at"], None)
        elif "recipe" in record.values:
            found[record.values["at"]] = record.values["recipe"]
    return found


def steps_done(run: Path) -> int:
    """The steps that a run has done: by the end of its metrics, or the newest checkpoint of a run that keeps none."""
    done = checkpoint.steps(run / CHECKPOINTS)[-1:]
    try:
        with files.parent(run / METRICS) as (folder, name):
            descriptor = folder.descriptor_of(name)
        try:
            tail = os.pread(descriptor, _TAIL, max(0, os.fstat(descriptor).st_size - _TAIL)).splitlines()
        finally:
            os.close(descriptor)
    except OSError:
        tail = []
    for raw in reversed(tail):
        with suppress(ValueError, RecursionError):
            line = parse_line(raw)
            if "train/loss" in line:
                done.append(int(line["step"]))
                break
    return max(done, default=0)


def quantised_share(run: Path) -> float | None:
    """The share of the linear layers' multiply-adds, in the steps done, that were quantised; None: not known.

    Raises:
        UserError: the history is damaged.
    """
    done, steps, total = steps_done(run), 0, 0.0
    for stretch in stretches(read_history(run)):
        ran = max(0, min(stretch.stop, done) - stretch.start)
        total += ran * sum(share for name, share in stretch.shares.items() if set(re.findall(r"\w+", name)) - _HIGH)
        steps += ran
    return total / steps if steps else None


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A plain configuration, its classes' defaults written out, as full key → value."""
    return flattened(complete(config, Config))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys of two flat configurations whose values differ, with both values."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in UNRECORDED]
    return {key: (old.get(key), new.get(key)) for key in keys}


def plan_text(run: Path, plan: Plan, step: int) -> str:
    """The plan of a run at `step`, every row of it: the past as the history has it, the rest as `plan` says."""
    past = [replace(s, stop=min(s.stop, step)) for s in stretches(read_history(run)) if s.start < step]
    ahead = stretches([Record(event="", step=step, time="", changed={}, stretches=_planned(plan), values={})])
    if past and ahead and _alike(past[-1], ahead[0]):
        ahead[0] = replace(ahead[0], start=past.pop().start)
    if not past and ahead and ahead[0].start == plan.stretches[0].start:
        return render(plan, full=True)
    return "\n\n".join(each.render(full=True) for each in (*past, *ahead))


def _alike(a: Stretch, b: Stretch) -> bool:
    return (a.recipe, a.reason, a.rows) == (b.recipe, b.reason, b.rows)


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# -- lines ------------------------------------------------------------------------------------------------------------


def _lines(run: Path) -> tuple[list[Record], int]:
    """The records, and how many bytes of the file they are: what is behind them is the torn end of a line."""
    path, before = run / HISTORY, ""
    found: list[Record] = []
    try:
        data = files.read(path, LIMIT)
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}; move it away to go on without the record") from error
    *whole, torn = data.split(b"\n")
    for number, raw in enumerate(whole, start=1):
        try:
            line = json.loads(raw)
            if line["sum"] != chained_sum(line, before):
                raise ValueError("its checksum differs")
            found.append(_record(line))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            why = str(error).splitlines()[0] if isinstance(error, ValueError) else "it is no record"
            raise UserError(
                f"{path}, line {number} is damaged ({why}): restore the file, or move it away; the run goes on "
                "without it, but then what ran before is not on record"
            ) from error
        before = found[-1].sum
    if torn:
        _log.warning("%s: its last line was cut off and is left out", path)
    return found, len(data) - len(torn)


def chained_sum(line: Mapping[str, Any], before: str) -> str:
    body = {key: value for key, value in line.items() if key != "sum"}
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()[:16]


def _record(line: Mapping[str, Any]) -> Record:
    own = ("event", "step", "time", "changed", "stretches", "sum")
    return Record(
        event=str(line["event"]),
        step=int(line["step"]),
        time=str(line["time"]),
        changed={str(key): (old, new) for key, (old, new) in line.get("changed", {}).items()},
        stretches=tuple(_expanded(each) for each in line["stretches"]),
        values={key: value for key, value in line.items() if key not in own},
        sum=str(line["sum"]),
    )


def _planned(plan: Plan) -> tuple[Stretch, ...]:
    return tuple(_expanded(each) for each in _compact(plan))


def _compact(plan: Plan) -> list[dict[str, Any]]:
    found = []
    for stretch in plan.stretches:
        kinds: dict[tuple[tuple[int, ...], str, str, str], int] = {}
        layers: dict[str, list[int]] = {}
        for row in plan.rows:
            if row.start == stretch.start:
                kind = (tuple(row.size), row.elements, row.backend, row.why)
                layers.setdefault(row.layer.name, []).append(kinds.setdefault(kind, len(kinds)))
        found.append(
            {
                "start": stretch.start,
                "stop": stretch.stop,
                "recipe": stretch.recipe.name,
                "reason": stretch.reason,
                "kinds": [list(kind) for kind in kinds],
                "layers": layers,
            }
        )
    return found


def _expanded(node: Mapping[str, Any]) -> Stretch:
    start, stop = int(node["start"]), int(node["stop"])
    if not 0 <= start <= stop <= MOST_STEPS:
        raise ValueError("a stretch of impossible steps")
    sizes = [tuple(map(int, size)) for size, *_ in node["kinds"]]
    if any(len(size) > MOST_DIMENSIONS or min(size, default=0) < 0 for size in sizes):
        raise ValueError("a GEMM of too many dimensions, or of negative ones")
    macs = [math.prod(size) for size in sizes]
    rows = tuple(macs[index] for indices in node["layers"].values() for index in indices)
    if sum(rows) > MOST_MACS:
        raise ValueError(f"more than {MOST_MACS:.0e} multiply-adds")
    kinds = [("×".join(map(str, size)), *map(str, kind[1:])) for size, kind in zip(sizes, node["kinds"], strict=True)]
    return Stretch(
        start=start,
        stop=stop,
        recipe=str(node["recipe"]),
        reason=str(node["reason"]),
        rows=tuple(
            (str(name), gemm, *kinds[index])
            for name, indices in node["layers"].items()
            for gemm, index in zip(GEMMS * (len(indices) // len(GEMMS)), indices, strict=True)
        ),
        macs=rows,
    )
