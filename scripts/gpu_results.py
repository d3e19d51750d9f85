"""What the programs for GPU machines share: rows of results, options, times, and the machine.

    python scripts/gpu_results.py        the machine as one line of JSON: its GPU, driver, and versions

Exit code 1: a package is absent that all checks need; 3: torch sees no GPU. The last line says which or so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

NEEDED = ("torch", "triton", "numpy", "yaml", "safetensors", "tqdm", "hydra", "omegaconf")
"""Modules that a check imports."""


class Results:
    """Rows of a JSON file, written anew after each: what ends a process early leaves what was found
    before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.machine = machine()
        self.rows: list[dict[str, Any]] = []
        self._adding = Lock()
        if path.exists():  # an earlier call of the same part: what worked then is not done again
            stored = json.loads(path.read_text())
            if stored["machine"] == self.machine:
                self.rows = [row for row in stored["rows"] if row["ok"]]

    def has(self, name: str) -> bool:
        return any(row["name"] == name for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """A row with its name and whether it is `ok`, in the place of one of that name."""
        with self._adding:
            self.rows = [*(old for old in self.rows if old["name"] != row["name"]), row]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            results = {"machine": self.machine, "rows": self.rows}
            text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
            beside = self.path.with_suffix(".part")
            beside.write_text(text, "utf-8")
            beside.replace(self.path)  # whoever packs results finds the file before or after
            print(json.dumps(row, ensure_ascii=False), flush=True)

    def measure(self, name: str, call: Callable[[], dict[str, Any]]) -> bool:
        """The row of what a call returns, whether `ok` or not, or of the error that it raises;
        nothing where an earlier call has it. Returns whether it is `ok`.
        """
        if self.has(name):
            return True
        try:
            row = {"name": name, "ok": True, **call()}
        # of the compiler, the launch or a run: the other rows still tell something
        except Exception as error:
            row = {"name": name, "ok": False, "note": first_line(error)}
        self.add(row)
        return bool(row["ok"])

    @property
    def code(self) -> int:
        """The exit code of the program."""
        return int(not self.rows or not all(row["ok"] for row in self.rows))


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of all programs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, with stand-ins")
    return parser


def begin(
    parser: argparse.ArgumentParser, words: list[str] | None
) -> tuple[argparse.Namespace, Results]:
    """The options of a program and its results; ends it where it asks for a GPU that torch does not
    see.
    """
    import torch

    options = parser.parse_args(words)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU")
        sys.exit(3)
    return options, Results(options.out)


def milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a call on the GPU; in a dry run that of one call."""
    import torch

    if not torch.cuda.is_available():
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def clock() -> dict[str, Any]:
    """The GPU's clock of multiprocessors and its power now, for a row; nothing where nobody tells."""
    import torch

    fields = {"SM MHz": "clocks.sm", "W": "power.draw"}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}"]
    if torch.cuda.is_available():
        command.append(f"--id=GPU-{torch.cuda.get_device_properties().uuid}")
    try:
        asked = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
        values = map(float, asked.stdout.splitlines()[0].split(","))
        return dict(zip(fields, values, strict=True))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def machine() -> dict[str, Any]:
    """GPU, driver and versions."""
    import torch

    from fp4train.hardware import driver_version

    versions: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("triton", "transformer_engine"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    if not torch.cuda.is_available():
        return versions | {"gpu": None}
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    gpu = {"gpu": torch.cuda.get_device_name(), "capability": capability}
    return versions | gpu | {"driver": driver_version()}


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def main() -> int:
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"{', '.join(absent)} not installed: scripts/pack_gpu.py packs what a machine lacks")
        return 1
    here = machine()
    if here["gpu"] is None:
        print(f"torch {here['torch']} sees no GPU")
        return 3
    print(json.dumps(here))
    return 0


if __name__ == "__main__":
    sys.exit(main())
