"""RUN/history.jsonl, the journal: what a run was told and what it ran; appended as it happens,
never rewritten.

One record per line::

    {"event": "start",  "step": 0,  "time": …, "config": {…}, "environment": {…}, "stretches": […], …}
    {"event": "resume", "step": 12, "time": …, "from": "step_00000012", "changed": {"train.steps":
    [12, 20]}, …}
    {"event": "swap",   "step": 15, "time": …, "name": "mxfp8", "at": 16, "recipe": {…}, "stretches": […], …}

`stretches` is the plan from `step` on (`stretches`). A later record replaces it from its own step
on, and nothing before, so that the plan of the past stays what ran. Each line has its checksum
(`fp4train.sealed`); a last line that a power cut tore is left out. A checkpoint
holds the checksum of the last record that it was trained with, and the swaps, from which a journal
that was lost is mended.

What ran, with which configuration and swaps, is what the records say. RUN/config.yaml is a copy of
the configuration that a user may edit, and from which a resume begins: an edit of a key that a
resume may change (`fp4train.keys`) is taken over, logged, and recorded as changed; an edit of
any other is refused. Swaps are in the journal alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fp4train.config.binding import bind, complete, flattened
from fp4train.config.plugins import check_targets
from fp4train.config.schema import Config
from fp4train.errors import (
    LAST_WITH_OLDER_RECIPES,
    OTHER_RECIPE,
    OlderForm,
    UserError,
    in_words,
    user_errors,
)
from fp4train.files import Folder
from fp4train.precision import Recipe, Swap
from fp4train.precision.plan import Plan
from fp4train.run.record.directory import HISTORY, without_settled
from fp4train.run.record.formats import described_formats
from fp4train.run.record.stretches import RecordedStretch, compact, expanded, joined
from fp4train.sealed import LogWriter, NoChecksum, checksum_of, open_line, seal_line
from fp4train.text import as_written, first_line

_log = logging.getLogger(__name__)

LIMIT = 1 << 28
"""Bytes of a journal that are read."""
_DAMAGE = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Errors that reading a record may raise that somebody else prepared."""

UNRECORDED = ("run.overwrite", "resume", "resume_step", "plugins", "gpu")
"""Keys that say how a command was given, and nothing about the run."""

CANCELLED = "swap cancelled"
"""The event of a swap that is taken back before it begins."""
SwapEntry = dict[str, Any]
"""A swap: its "step", the "name" that the user gave it, and its plain "recipe"."""


class RecipeChoice(NamedTuple):
    """The recipe of a recorded or requested swap: the name that the user gave it, and its plain
    configuration.
    """

    name: str
    recipe: dict[str, Any]

    @classmethod
    def chosen(cls, option: str, recipe: dict[str, Any], keys: Iterable[str]) -> RecipeChoice:
        """An option with the keys of the recipe that a command sets or takes out,
        "recipe.high_precision" among others: "nvfp4 (high_precision=[dgrad], ~hadamard)".
        """
        options = []
        for key in keys:
            section, _, name = key.rpartition(".")
            holder: Any = recipe
            for part in section.split(".")[1:]:
                holder = holder.get(part) if isinstance(holder, dict) else None
            if not isinstance(holder, dict) or name not in holder:
                options.append(f"~{key.removeprefix('recipe.')}")
                continue
            value = holder[name]
            if isinstance(value, list):
                value = f"[{', '.join(map(str, value))}]"
            options.append(f"{key.removeprefix('recipe.')}={as_written(value)}")
        if options:
            option = f"{option} ({', '.join(options)})"
        return cls(option, recipe)

    def at(self, step: int) -> Swap:
        """The swap to it at `step`.

        Raises:
            UserError: the step is no integer; or the recipe has invalid values, or is neither
                fp4train's nor of a plugin that this command names.
        """
        return Swap(
            step=bind(step, int, "step"),
            recipe=bind(self.recipe, Recipe, "recipe"),
            name=str(self.name),
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line.

    Args:
        event: "start", "init", "resume", "branch", "rewind", "swap" or `CANCELLED`.
        step: steps done then.
        time: UTC, ISO 8601.
        changed: configuration key → value before and after.
        stretches: the plan from `step` on; empty: no change.
        values: other keys of the line: config, environment (`fp4train.run.host`), formats, from,
            name, at, recipe, request, run, the identity of the run that wrote it, and of a rewind
            diverged, skipped (`fp4train.run.supervise.divergence`).
        sum: checksum of its line, in words: what checkpoints remember of it.
    """

    event: str
    step: int
    time: str
    changed: dict[str, tuple[Any, Any]]
    stretches: tuple[RecordedStretch, ...]
    values: dict[str, Any]
    sum: str

    def describe(self) -> str:
        """Everything but event and step, in a line."""
        parts = []
        if "from" in self.values:
            parts.append(f"from {self.values['from']}")
        if "at" in self.values:
            parts.append(f"{self.values.get('name', 'the swap')} at step {self.values['at']}")
        if "skipped" in self.values:
            begin, last = self.values["skipped"]
            if begin == last:
                skipped = f"batch {begin} is skipped"
            else:
                skipped = f"batches {begin}–{last} are skipped"
            parts.append(f"the loss diverged at step {self.values['diverged']}; {skipped}")
        parts += [
            f"{key}: {as_written(old)} → {as_written(new)}"
            for key, (old, new) in self.changed.items()
        ]
        return "; ".join(parts)


class Journal:
    """The journal of the run in `folder`, for the process that trains it and adds to it.

    Args:
        identity: identity of the run.
        records: that are in the file, oldest first.
    """

    def __init__(
        self, folder: Folder, identity: str | None, records: Iterable[Record] = ()
    ) -> None:
        self.folder, self.identity, self.records = folder, identity, list(records)
        self.waiting: list[tuple[Record, bytes]] = []
        """Records that are added and not written yet, and their lines."""
        self._written = self.last

    @classmethod
    def read(cls, folder: Folder, identity: str | None) -> Journal:
        """Raises UserError: the file cannot be read, or a line is damaged."""
        return cls(folder, identity, _lines(folder)[0])

    @property
    def last(self) -> str:
        """The sum of the last record, which a checkpoint remembers; empty if there is none."""
        return self.records[-1].sum if self.records else ""

    def add(self, event: str, step: int, plan: Plan | None = None, **values: Any) -> None:
        """Add a record, which `write` makes durable.

        Args:
            plan: the run's from `step` on; None: as before.
            values: "config", "environment", "changed", "from", "name", "at", "recipe", "request".
        """
        line = {
            "event": event,
            "step": step,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": self.identity,
            **values,
            "stretches": [] if plan is None else compact(plan),
        }
        if plan is not None:
            line["formats"] = described_formats(plan)
        raw = seal_line(json.dumps(line, ensure_ascii=False, default=str).encode())
        self.records.append(_record(raw))
        self.waiting.append((self.records[-1], raw))

    def take_back(self) -> None:
        """Forget the record that was added last, which could not be written."""
        self.records.pop()
        self.waiting.pop()

    def write(self) -> None:
        """Write what was added, all of it or nothing; another thread may do so.

        Raises:
            UserError: the disk does not take it, or what is there was damaged or changed.
        """
        added = tuple(self.waiting)
        path = self.folder.path / HISTORY
        with user_errors(OSError, before=f"{path} cannot be written: "):
            records, size = _lines(self.folder)
            if (records[-1].sum if records else "") != self._written:
                raise UserError(f"{path} is not as this process wrote it: put it back")
            with LogWriter(self.folder, HISTORY, size) as file:
                file.write(b"".join(line for _, line in added), sync=True)
        self._written = added[-1][0].sum if added else self._written
        del self.waiting[: len(added)]

    def set_swaps(self, entries: Iterable[SwapEntry], step: int) -> list[int]:
        """Add, at `step`, what makes `entries` the swaps of the run; the steps of those that were
        not so on record.
        """
        have = {entry["step"]: entry for entry in swaps(self.records)}
        want = {entry["step"]: entry for entry in entries}
        changed = [at for at in sorted({**have, **want}) if have.get(at) != want.get(at)]
        for at in changed:
            if at in want:
                self.add("swap", step, at=at, name=want[at]["name"], recipe=want[at]["recipe"])
            else:
                self.add(CANCELLED, step, at=at)
        return changed


def read_journal(run: Path) -> list[Record]:
    """The records of a run, oldest first; none where it has no journal.

    Raises:
        UserError: the file cannot be read, or a line is damaged.
    """
    with Folder.open(run) as folder:
        return _lines(folder)[0]


def _lines(folder: Folder) -> tuple[list[Record], int]:
    """The records, and how many bytes of the file they are."""
    path = folder.path / HISTORY
    records: list[Record] = []
    try:
        *complete, torn = folder.read(HISTORY, LIMIT).split(b"\n")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {in_words(error, str(path))}; without it the run goes on, "
            "but what ran before is not on record"
        ) from error
    for number, raw in enumerate(complete, start=1):
        try:
            records.append(_record(raw))
        except _DAMAGE as error:
            if isinstance(error, NoChecksum) and number == 1:
                raise OlderForm(path, "has lines without the checksums of today") from error
            if isinstance(error, ValueError):
                why = first_line(error)
            else:
                why = "it is no record"
            raise UserError(
                f"{path}, line {number} is damaged ({why}): restore the file, or move it "
                "away; the run goes on "
                "without it, but then what ran before is not on record"
            ) from error
    if torn:
        _log.warning("%s: its last line was cut off and is left out", path)
    return records, sum(len(raw) + 1 for raw in complete)


def _record(raw: bytes) -> Record:
    line = open_line(raw)
    if ("recipe" in line or line["event"] == CANCELLED) and type(line["at"]) is not int:
        raise ValueError("a swap at no step")
    for key in ("config", "environment", "recipe", "formats"):
        if not isinstance(line.get(key, {}), dict):
            raise ValueError(f"its {key} is no table of values")
    if "skipped" in line:
        begin, last = line["skipped"]
        if any(type(number) is not int for number in (begin, last, line["diverged"])):
            raise ValueError("a rewind at no step")
    own_keys = ("event", "step", "time", "changed", "stretches")
    return Record(
        event=str(line["event"]),
        step=int(line["step"]),
        time=str(line["time"]),
        changed={str(key): (old, new) for key, (old, new) in line.get("changed", {}).items()},
        stretches=tuple(expanded(stretch) for stretch in line["stretches"]),
        values={key: value for key, value in line.items() if key not in own_keys},
        sum=checksum_of(raw),
    )


# -- what the records say --------------------------------------------------------------------------


def stretches(records: Iterable[Record]) -> list[RecordedStretch]:
    """The stretches that ran or are planned, in order: each record holds from its step on."""
    return joined((record.step, record.stretches) for record in records)


def recorded_formats(records: Iterable[Record]) -> list[Mapping[str, Any]]:
    """The element formats of each plan on record (`fp4train.run.record.formats`)."""
    return [record.values["formats"] for record in records if "formats" in record.values]


def plan_text(records: Iterable[Record]) -> str:
    """The stretches that ran or are planned, every row of them."""
    return "\n\n".join(stretch.render(full=True) for stretch in stretches(records))


def configuration(records: Iterable[Record]) -> dict[str, Any] | None:
    """The configuration that the records end with, as full key → value; None: they hold none."""
    newest: dict[str, Any] | None = None
    for record in records:
        if "config" in record.values:
            newest = flat(record.values["config"])
        if newest is not None:
            newest |= {key: new for key, (_, new) in record.changed.items()}
    return newest


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A plain configuration, its classes' defaults written out, as full key → value."""
    return flattened(complete(config, Config))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys of two flat configurations whose values differ, with both values."""
    old = without_settled(old)
    new = without_settled(new)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in UNRECORDED]
    return {key: (old.get(key), new.get(key)) for key in keys}


# -- swaps -----------------------------------------------------------------------------------------


def swaps(records: Iterable[Record]) -> list[SwapEntry]:
    """The swaps of a run, by step. A later record of the same step replaces an earlier one."""
    entries: dict[int, SwapEntry] = {}
    for record in records:
        values = record.values
        if record.event == CANCELLED:
            entries.pop(values["at"], None)
        elif "recipe" in values:
            entries[values["at"]] = {
                "step": values["at"],
                "name": str(values.get("name")),
                "recipe": values["recipe"],
            }
    return [entries[at] for at in sorted(entries)]


def check_entry(entry: Any) -> None:
    """Raises ValueError, TypeError, LookupError: it is no swap."""
    if type(entry["step"]) is not int or set(entry) != {"step", "name", "recipe"}:
        raise ValueError("an entry does not hold step, name and recipe alone")


def typed_swap(entry: SwapEntry) -> Swap:
    """The swap of an entry.

    Raises:
        UserError: see `RecipeChoice.at`.
    """
    return RecipeChoice(entry["name"], entry["recipe"]).at(entry["step"])


def read_swaps(run: Path) -> list[Swap]:
    """The swaps of a run, by step.

    Raises:
        UserError: its journal cannot be read, or one is no recipe.
        OlderForm: one is a recipe that is refused.
    """
    path = run / HISTORY
    read = []
    for entry in swaps(read_journal(run)):
        with user_errors(UserError, before=f"{path} cannot be read: "):
            check_targets(entry["recipe"], "recipe")
        try:
            read.append(typed_swap(entry))
        except UserError as error:
            swap = (
                f"has a swap to {entry['name']} at step {entry['step']} that is refused ({error})"
            )
            raise OlderForm(path, swap, OTHER_RECIPE, LAST_WITH_OLDER_RECIPES) from error
    return read
