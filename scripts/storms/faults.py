"""Calls of the operating system that fail: the n-th write, fsync, rename or open of a command, or of a part of it."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import marshal
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from storms.ground import (
    EXPORTS,
    SCENARIOS,
    TRAINING,
    Ground,
    Result,
    call,
    explained,
    goes_on,
    listening,
)

KINDS = ("write", "fsync", "rename", "open")
ERRORS = (errno.ENOSPC, errno.EIO)


class Faults:
    """While entered, the call `number` (from 1) of `kind` fails with `error`; `lasting`: all later
    ones, too.

    Calls of open count where they are about files below the working directory. `counts` says how
    many there were.
    """

    def __init__(
        self, kind: str = "", number: int = 0, error: int = errno.EIO, *, lasting: bool = False
    ) -> None:
        self.kind = kind
        self.number = number
        self.error = error
        self.lasting = lasting
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Faults:
        self._here = os.getcwd()
        self._before = [
            (os, name, getattr(os, name))
            for name in ("write", "fsync", "rename", "replace", "open")
        ]
        self._before += [(io, "open", io.open), (builtins, "open", builtins.open)]
        kinds = {"replace": "rename"}
        for module, name, function in self._before:
            setattr(module, name, self._failing(kinds.get(name, name), function))
        return self

    def __exit__(self, *raised: object) -> None:
        for module, name, function in self._before:
            setattr(module, name, function)

    def _failing(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if kind == "open" and not self._ours(args[0]):
                return function(*args, **options)
            self.counts[kind] += 1
            count = self.counts[kind]
            if kind == self.kind and (
                count == self.number or (self.lasting and count > self.number > 0)
            ):
                raise OSError(self.error, os.strerror(self.error))
            return function(*args, **options)

        return call

    def _ours(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.join(
            self._here, os.fspath(path)
        ).startswith(self._here)


@contextlib.contextmanager
def counted(into: Path) -> Iterator[None]:
    """Leave in the file `into` how many calls of each kind there were."""
    with Faults() as faults:
        yield
    into.write_bytes(marshal.dumps(dict(faults.counts)))


def fault_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """A whole command with a fault, then the same one without."""
    name = draw.choice((*TRAINING, *EXPORTS))
    kind = draw.choice(KINDS)

    def count() -> dict[str, int]:
        there = ground.copy(ground.folder / f"counted_{name}")
        into = ground.folder / f"{name}.counts"
        call(there, *SCENARIOS[name].command, around=lambda: counted(into))
        counts: dict[str, int] = marshal.loads(into.read_bytes())
        return counts

    calls = ground.once(("calls", name), count)[kind]
    at = draw.randint(1, calls)
    error = draw.choice(ERRORS)
    lasting = draw.random() < 0.3
    ground.copy(place)
    code, out = call(
        place, *SCENARIOS[name].command, around=lambda: Faults(kind, at, error, lasting=lasting)
    )
    seen = "" if explained(code, out) else f"exit {code}: {out[-400:]}"
    # A full disk costs measurements, which is said. A swap holds from the checkpoint that can be
    # read.
    lost = ["statistics"]
    if name == "swap" and "cannot be used" in out:
        lost.append("losses")
    seen = seen or goes_on(ground, name, place, but=lost)
    what = f"{name}, {kind} {at} of {calls}: {errno.errorcode[error]}{' from there on' * lasting}"
    return Result(kind, not seen, f"{what}: {seen}")


# -- parts of a command, thousands of times faster -------------------------------------------------


def _checkpoint(place: Path, faulty: Callable[[], Any]) -> str:
    import torch

    from fp4train import checkpoint

    folder = place / "checkpoints"
    tensors = [
        {"model/x": torch.full((5, 3), float(n)), "optimizer/y": torch.arange(n + 2)}
        for n in range(4)
    ]
    checkpoint.save(folder, 1, tensors[1], {"n": 1}, keep=2)
    message = ""
    try:
        with faulty():
            checkpoint.save(folder, 2, tensors[2], {"n": 2}, keep=2)
    except checkpoint.CheckpointError as error:
        message = str(error)
    saved = checkpoint.load(folder)
    equal = all(torch.equal(saved.tensors[k], v) for k, v in tensors[saved.step].items())
    if (
        not equal
        or saved.state != {"n": saved.step}
        or (not message and saved.step != 2)
        or saved.skipped
    ):
        return f"step {saved.step}, whole {equal}, skipped {saved.skipped}, said {message!r}"
    checkpoint.save(folder, 3, tensors[3], {"n": 3}, keep=2)
    return "" if checkpoint.load(folder).step == 3 else "no checkpoint after that one"


def _write(place: Path, faulty: Callable[[], Any]) -> str:
    from fp4train import files

    path = place / "file"
    raised = False
    files.write(path, b"old")
    try:
        with faulty():
            files.write(path, b"newer")
    except OSError:
        raised = True
    content = path.read_bytes()
    left = [p.name for p in place.iterdir() if p != path]
    possible = {b"newer", b"old"} if raised else {b"newer"}
    if content in possible and not left:
        return ""
    return f"{content!r}, beside {left}"


def _append(place: Path, faulty: Callable[[], Any]) -> str:
    from fp4train.files import Folder
    from fp4train.sealed import LogWriter

    raised = False
    with Folder.open(place) as folder:
        with LogWriter(folder, "log", 0) as file:
            file.write(b"old\n", sync=True)
        try:
            with faulty(), LogWriter(folder, "log", 4) as file:
                file.write(b"new\n", sync=True)
        except OSError:
            raised = True
    content = (place / "log").read_bytes()
    expected = b"old\n" if raised else b"old\nnew\n"
    if content == expected:
        return ""
    return f"raised {raised}: {content!r}"


def _metrics(place: Path, faulty: Callable[[], Any]) -> str:
    from fp4train.errors import UserError
    from fp4train.track.metrics import MetricsLog, read_metrics

    try:
        with faulty(), listening() as messages:
            log = MetricsLog(place / "metrics.jsonl")
            for step in range(4):
                log.log(step, {"x": step / 3})
            log.finish()
    except UserError:
        return ""
    values = [line["x"] for line in read_metrics(place / "metrics.jsonl")]
    logged = [step / 3 for step in range(4)]
    if values == logged or (messages.lines and values == logged[: len(values)]):
        return ""
    return f"{values}, said {messages.lines}"


def _folder(place: Path, faulty: Callable[[], Any]) -> str:
    from fp4train import files

    raised = False
    try:
        with faulty(), files.new_folder(place / "out") as folder:
            for name in ("one", "two"):
                folder.write(name, name.encode())
    except OSError:
        raised = True
    contents = {
        str(path.relative_to(place)): path.read_text()
        for path in place.rglob("*")
        if path.is_file()
    }
    expected = {} if raised else {"out/one": "one", "out/two": "two"}
    if contents == expected and (place / "out").exists() != raised:
        return ""
    return f"raised {raised}: {contents}"


PARTS = {
    "checkpoint": _checkpoint,
    "write": _write,
    "folder": _folder,
    "append": _append,
    "metrics": _metrics,
}


def part_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """A part of a command, in this process, with a fault."""
    name = draw.choice(tuple(PARTS))

    def count() -> Counter[str]:
        there = ground.folder / f"part_{name}"
        faults = Faults()
        there.mkdir()
        os.chdir(there)
        PARTS[name](there, lambda: faults)
        return faults.counts

    os.chdir(place)
    calls = ground.once(("part", name), count)
    os.chdir(place)
    kind = draw.choice([kind for kind in KINDS if calls[kind]])
    at = draw.randint(1, calls[kind])
    error = draw.choice(ERRORS)
    try:
        seen = PARTS[name](place, lambda: Faults(kind, at, error))
    except Exception as raised:
        seen = f"{type(raised).__name__}: {raised}"
    finally:
        os.chdir(ground.folder)
    return Result(name, not seen, f"{kind} {at} of {calls[kind]}: {errno.errorcode[error]}: {seen}")
