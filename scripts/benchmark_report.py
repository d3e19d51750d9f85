"""Measured ratios and their table, for scripts/benchmark.py: functions that take turns, rows."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

STATES = {None: "", True: "met", False: "missed"}


def goal(row: Mapping[str, Any]) -> str:
    """The target of a row: "≤ 1.05", "≥ 15" or ""."""
    if row["target"] is None:
        return ""
    return f"{'≥' if row['at_least'] else '≤'} {row['target']:g}"


@dataclass
class Report:
    """Rows of the table: what, measured, target (None: information only)."""

    seconds: float = 2.0
    """That each function is measured for, at least; five times in any case."""
    out: Path | None = None
    """Written anew after each row: what ends the process early leaves those before."""
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        what: str,
        values: float | list[float],
        target: float | None = None,
        *,
        at_least: bool = False,
        unit: str = "×",
    ) -> None:
        """A row: one figure, or those of several processes, of which the median counts."""
        values = values if isinstance(values, list) else [values]
        value = statistics.median(values)
        met = None
        if target is not None:
            met = value >= target if at_least else value <= target
        row: dict[str, Any] = {
            "what": what,
            "value": value,
            "values": values,
            "unit": unit,
            "target": target,
            "at_least": at_least,
            "met": met,
        }
        places = {earlier["what"]: number for number, earlier in enumerate(self.rows)}
        place = places.get(what, len(self.rows))
        self.rows[place : place + 1] = [row]
        print(f"{what:<84} {value:8.3f} {unit}   {goal(row)}   {STATES[met]}", flush=True)
        self.write({})

    def go_on(self, machine: dict[str, str]) -> None:
        """Keep the rows and curves of an earlier measurement at `out`, but for those that are
        measured again.

        Raises:
            ValueError: another machine, torch or Python measured them.
        """
        if self.out is None or not self.out.with_suffix(".json").exists():
            return
        path = self.out.with_suffix(".json")
        stored = json.loads(path.read_text())
        for key, value in machine.items():
            if stored.get(key, value) != value:
                raise ValueError(
                    f"{path} is of {key} {stored[key]}, and this is {value}: measure all "
                    "parts, or elsewhere"
                )
        self.rows = stored["rows"]

    def write(self, machine: dict[str, str]) -> None:
        if self.out is not None:
            text = json.dumps({**machine, "rows": self.rows}, indent=1)
            self.out.with_suffix(".json").write_text(text + "\n")

    def markdown(self, machine: str) -> str:
        lines = [
            f"# Benchmarks: {machine}",
            "",
            "| what | median | range | target | |",
            "|---|---|---|---|---|",
        ]
        for row in self.rows:
            low = min(row["values"])
            high = max(row["values"])
            span = "" if low == high else f"{low:.3f} – {high:.3f}"
            value = f"{row['value']:.3f} {row['unit']}"
            state = STATES[row["met"]]
            lines.append(f"| {row['what']} | {value} | {span} | {goal(row)} | {state} |")
        return "\n".join(lines) + "\n"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def in_turn(
    functions: Mapping[str, Callable[[], object]], device: torch.device, *, seconds: float
) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that a drift of the machine's speed hits
    all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
        function()
    began = time.perf_counter()
    while (
        time.perf_counter() - began < seconds * len(functions) or len(times[next(iter(times))]) < 5
    ):
        for name, function in functions.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n") if info.exists() else []
    processor = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in reversed(lines))
    }
    name = processor.get("model name", platform.machine())
    if "cpu family" in processor:  # a virtual machine may call two generations by one name
        name += f" (family {processor['cpu family']}, model {processor['model']})"
    return f"{name}, {torch.get_num_threads()} threads"
