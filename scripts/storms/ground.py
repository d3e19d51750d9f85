"""Where storms take place: runs that trials copy, commands in forks of this process, and what they give undisturbed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 600.0
"""Seconds after which a command hangs, on a machine in use."""
STEPS = 8
TINY = (
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=64",
    "data=text",
    "train.batch_size=4",
    "train.seq_len=32",
    "eval.batches=1",
    "eval.every=0",
    "track=jsonl",
    "phases=none",
    "schedule=constant",
    "schedule.warmup=0",
    "checkpoint.every=2",
    f"train.steps={STEPS}",
    "eval.errors_every=2",
    "data.path=../text.txt",
    "data.cache_dir=cache",
)
ON = ("resume=runs/a", f"train.steps={STEPS}")


@dataclass(frozen=True)
class Result:
    """Of one trial: what was done, whether it went as it should, and what was seen otherwise."""

    kind: str
    passed: bool
    seen: str = ""


def lines_of(path: Path) -> list[str]:
    """Lines of a file; none if there is no such file."""
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def losses(run: Path) -> dict[int, float]:
    """Training losses by step."""
    by_step: dict[int, float] = {}
    path = run / "metrics.jsonl"
    for line in lines_of(path):
        with contextlib.suppress(ValueError, AttributeError):
            values = json.loads(line)
            if "train/loss" in values:
                by_step[values["step"]] = values["train/loss"]
    return by_step


def measured(run: Path) -> list[list[float]] | None:
    """Steps and largest values of the measured operands."""
    from fp4train.errors import UserError
    from fp4train.track.statistics import read_statistics

    try:
        columns = read_statistics(run).operands
    except UserError:
        return None
    return [columns["step"].tolist(), columns["amax"].tolist()]


def result_of(study: Path, name: str) -> Any:
    """The JSON that a study ends with, and what it measured."""
    lines = [json.loads(line) for line in lines_of(study / "measurements.jsonl")]
    values = {line["key"]: line["values"] for line in lines if "key" in line}
    for measurement in values.values():
        measurement.pop("seconds", None)
    return {"file": (study / name).is_file(), "measured": values}


@dataclass(frozen=True)
class Scenario:
    """A command in a copy of the base run, and what counts of what it leaves: `result(place)`.

    `out`: a folder that it makes and never writes over; where it is there, the command has done its
    work.
    """

    command: tuple[str, ...]
    result: Callable[[Path], Any]
    out: str = ""


def _run(name: str) -> Callable[[Path], Any]:
    return lambda place: {
        "losses": losses(place / "runs" / name),
        "statistics": measured(place / "runs" / name),
    }


def folder_of(place: Path) -> Any:
    """The files of an export by their checksums, and what lies beside it that is hidden."""
    out = place / "out"
    files = sorted(out.iterdir()) if out.is_dir() else []
    hidden = sorted(path.name for path in place.iterdir() if path.name.startswith("."))
    return {
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        "hidden": hidden,
    }


SCENARIOS = {
    "start": Scenario((*TINY, "run.name=c"), _run("c")),
    "resume": Scenario(ON, _run("a")),
    "swap": Scenario((*ON, "recipe=bf16"), _run("a")),
    "branch": Scenario((*ON, "run.name=b"), _run("b")),
    "init": Scenario((*TINY, "init=runs/a", "run.name=c"), _run("c")),
    "folder": Scenario((*TINY, "init=hf", "run.name=c"), _run("c")),
    "overwrite": Scenario((*TINY, "run.name=a", "run.overwrite=true"), _run("a")),
    "export": Scenario(("export", "runs/a", "to=hf", "out=out"), folder_of, out="out"),
    "pack": Scenario(
        ("export", "runs/a", "to=modelopt", "stretch=0", "calibrate=1", "out=out"),
        folder_of,
        out="out",
    ),
    "rank": Scenario(
        ("rank", "runs/a", "recipe=bf16,mxfp8", "steps=2", "forks=2", "batches=1", "out=study"),
        lambda place: result_of(place / "study", "rank.json"),
    ),
    "sensitivity": Scenario(
        ("sensitivity", "runs/a", "recipe=mxfp8", "batches=1", "out=study"),
        lambda place: result_of(place / "study", "sensitivity.json"),
    ),
}
"""Commands that write. The same command again must go on after any ending."""
TRAINING = ("start", "resume", "swap", "branch", "init", "folder", "overwrite")
EXPORTS = ("export", "pack")


@dataclass
class Undisturbed:
    """What a scenario gives when nothing happens to it.

    Attributes:
        result: the result of the scenario.
        seconds: the time that it takes.
    """

    result: Any
    seconds: float


@dataclass
class Ground:
    """A folder with text.txt and base/, where runs/a stopped at step 4 after a swap and hf/ is an
    export of it; what trials learn once.
    """

    folder: Path
    known: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made by the first trial that asks."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def copy(self, place: Path) -> Path:
        """The base run, in `place`."""
        shutil.copytree(self.folder / "base", place, dirs_exist_ok=True, symlinks=True)
        return place

    def undisturbed(self, name: str) -> Undisturbed:
        """What scenario `name` gives."""

        def make() -> Undisturbed:
            place = self.copy(self.folder / f"whole_{name}")
            began = time.monotonic()
            code, out = call(place, *SCENARIOS[name].command)
            if code:
                raise SystemExit(f"{name} failed undisturbed: {out}")
            return Undisturbed(SCENARIOS[name].result(place), time.monotonic() - began)

        undisturbed: Undisturbed = self.once(("undisturbed", name), make)
        return undisturbed


def prepare(folder: Path) -> Ground:
    """A text, its tokens, and a run stopped at step 4 by its length, with a swap; an export of
    it.
    """
    draw = random.Random(0)
    (folder / "text.txt").write_text(
        " ".join(draw.choice(("the", "quick", "fox", "4", "bits")) for _ in range(4000))
    )
    base = folder / "base"
    base.mkdir()
    for arguments in (
        (*TINY, "run.name=a", "train.steps=2", "data.cache_dir=runs/a/cache"),
        ("resume=runs/a", "recipe=mxfp8", "train.steps=4"),
        ("export", "runs/a", "to=hf", "out=hf"),
    ):
        code, out = call(base, *arguments)
        if code:
            raise SystemExit(f"the base run failed: {out}")
    return Ground(folder)


def begin(
    place: Path, *arguments: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> int:
    """Run a command in a fork of this process, its output in a file beside `place`; returns the
    process.

    `around()` is entered around it.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        out = os.open(_output(place), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        os.chdir(place)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(os.fdopen(1, "wb")),
            io.TextIOWrapper(os.fdopen(2, "wb", 0)),
        )
        sys.stderr.reconfigure(write_through=True)
        with around():
            code = run_main(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    finally:
        os._exit(code)


def run_main(arguments: tuple[str, ...]) -> int:
    """The exit code of a command in this process; what it lets through is printed as Python
    would.
    """
    from fp4train.cli import main
    from fp4train.lab.analysis import curves, heatmap

    # Pictures take longer than such runs.
    curves.draw_curves = lambda run_dir: Path(run_dir) / "curves.png"
    heatmap.draw_statistics = lambda run: Path(run) / "statistics.png"
    try:
        main(list(arguments))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    return 1


def end(pid: int, place: Path, seconds: float = PATIENCE) -> tuple[int, str]:
    """Exit code, or minus the signal, and all output of a command; -1 for what hangs."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            output = _output(place)
            return os.waitstatus_to_exitcode(status), "\n".join(lines_of(output))
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -1, "hangs"
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def call(
    place: Path,
    *arguments: str,
    seconds: float = PATIENCE,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[int, str]:
    """Exit code and all output of a command."""
    return end(begin(place, *arguments, around=around), place, seconds)


def _output(place: Path) -> Path:
    return place.with_name(f"{place.name}.out")


def explained(code: int, out: str) -> bool:
    """Whether a command ended with 0, or with 1 and its reason in a line."""
    return "Traceback" not in out and (
        code == 0 or (code == 1 and ("fp4train: " in out or "error: " in out))
    )


def goes_on(ground: Ground, name: str, place: Path, but: Sequence[str] = ()) -> str:
    """Whether the scenario's command, given again, ends as it does undisturbed; otherwise what was
    seen.

    `but`: parts of the result that may be lost.
    """
    scenario = SCENARIOS[name]
    done = scenario.out and (place / scenario.out).exists()
    code, out = (0, "") if done else call(place, *scenario.command)
    result = scenario.result(place)
    undisturbed = ground.undisturbed(name).result
    other = [key for key in undisturbed if result[key] != undisturbed[key] and key not in but]
    if code == 0 and not other:
        return ""
    return f"again: exit {code}, other {', '.join(other)}: {out[-400:]}"


class Messages(logging.Handler):
    """What is logged as a warning or an error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Any:
    """Collect what fp4train logs instead of printing it."""
    logger = logging.getLogger("fp4train")
    messages = Messages()
    logger.handlers, handlers = [messages], logger.handlers
    try:
        yield messages
    finally:
        logger.handlers = handlers
