"""Steps go on where a disk does not answer: each wait is bounded, said once, and nothing is lost
when it answers.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import (
    PATIENCE,
    STEADY,
    Before,
    Cli,
    before_steps,
    lines,
    losses,
    recorded,
    steps,
    wait_for,
)
from limits import set_limit

from fp4train.files import Folder
from fp4train.sealed import LogWriter
from fp4train.worker import Worker

WAIT = 0.3


class Stall:
    """The disk, which from the third step on does not answer a thread until the ninth step begins.

    The limit of the thread is `WAIT`, counted from the start of the stall: a wait for a disk that
    answers lasts as long as the machine takes.

    Args:
        thread: name of the thread's `Worker`.
        limit: name of its limit, as in `set_limit`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, thread: str, limit: str) -> None:
        self.step = 0
        """The step that began last, from 1."""
        self.outlasted = False
        """Whether the ninth step began while the disk did not answer."""
        self.waits: list[float] = []
        """The seconds of each wait for the thread meanwhile."""
        self._begun = threading.Event()
        self._ended = threading.Event()
        original = Worker.wait

        def wait(worker: Worker, seconds: float) -> bool:
            if worker.name == thread and seconds:
                wait_for(lambda: self._lasts or original(worker, 0.05))
                if self._lasts:
                    self.waits.append(seconds)
            return original(worker, seconds)

        def follow(run: Any) -> None:
            self.step = run.step + 1
            if self.step == 9:
                self.outlasted = self._lasts
                self._ended.set()

        for name in ("seconds to read requests", "seconds for a line of metrics"):
            set_limit(monkeypatch, name, WAIT if name == limit else PATIENCE)
        monkeypatch.setattr(Worker, "wait", wait)
        before_steps(monkeypatch, follow)

    @property
    def _lasts(self) -> bool:
        return self._begun.is_set() and not self._ended.is_set()

    def happens(self) -> bool:
        """Whether the disk stalled, which it does once; then the stall is over."""
        if self.step != 3 or self._begun.is_set():
            return False
        self._begun.set()
        self._ended.wait(PATIENCE)
        self._ended.set()
        return True

    def before(self, act: Callable[..., Any], ours: Callable[..., bool]) -> Callable[..., Any]:
        """`act`, before which the disk stalls where `ours` says so."""

        def act_late(*rest: Any, **options: Any) -> Any:
            if ours(*rest):
                self.happens()
            return act(*rest, **options)

        return act_late


@pytest.mark.long
def test_a_disk_that_takes_no_metrics_stalls_no_step(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_metrics(descriptor: int, data: bytes) -> bool:
        return b"train/loss" in bytes(data)

    stall = Stall(monkeypatch, "metrics", "seconds for a line of metrics")
    monkeypatch.setattr(os, "write", stall.before(os.write, of_metrics))
    ended = cli("run.name=a", "train.steps=9", "eval.every=0", *STEADY)
    assert ended.code == 0 and ended.err.count("steps go on") == 1 and "are lost" not in ended.err
    assert stall.outlasted and stall.waits == [WAIT], "six steps and one wait"
    assert [line["step"] for line in lines("runs/a") if "train/loss" in line] == list(range(1, 10))


@pytest.mark.long
def test_a_disk_that_lists_no_requests_stalls_no_step(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_requests(folder: Folder) -> bool:
        return folder.path.name == "swap_requests"

    Path("runs/a/swap_requests").mkdir(parents=True)
    stall = Stall(monkeypatch, "requests", "seconds to read requests")
    monkeypatch.setattr(Folder, "names", stall.before(Folder.names, of_requests))
    ended = cli("run.name=a", "train.steps=9", "eval.every=0", *STEADY)
    assert ended.code == 0 and ended.err.count("steps go on") == 1
    assert stall.outlasted and stall.waits == [WAIT], "six steps and one wait"
    assert sorted(losses("runs/a")) == list(range(1, 10))


@pytest.mark.long
@pytest.mark.parametrize(
    "fails", [False, True], ids=["and then takes it", "and then refuses it once"]
)
def test_a_disk_that_does_not_take_the_record_of_a_swap_stalls_no_step(
    cli: Cli, before: Before, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    stall = Stall(monkeypatch, "requests", "seconds to read requests")
    original = LogWriter.write
    tries = []

    def write(file: LogWriter, data: bytes, **options: bool) -> None:
        if b'{"event": "swap"' in data:
            tries.append(stall.step)
            if stall.happens() and fails:
                raise OSError(28, "No space left on device")
        original(file, data, **options)

    monkeypatch.setattr(LogWriter, "write", write)
    before(2, lambda run: cli.raw("swap", "runs/a", "recipe=bf16", "wait=0"))
    ended = cli("run.name=a", "train.steps=9", "eval.every=0", *STEADY)
    assert ended.code == 0 and ended.err.count("steps go on") == 1
    assert stall.outlasted and stall.waits == [WAIT], "six steps and one wait"
    assert [v[-1] for v in losses("runs/a").values()] == ["NVFP4"] * 3 + ["BF16"] * 6
    assert tries == [3, 9] if fails else tries == [3], (
        "the checkpoint that counts on it has it written first"
    )
    assert recorded("runs/a") == [(3, "bf16")]
    assert steps() == [9] and cli("resume=runs/a", "train.steps=10").code == 0
