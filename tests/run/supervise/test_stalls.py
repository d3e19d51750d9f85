"""Steps go on where a disk does not answer: each wait is bounded, said once, and nothing is lost
when it answers.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import STEADY, Before, Cli, before_steps, lines, losses, recorded, steps
from limits import set_limit

from fp4train.files import Folder
from fp4train.sealed import LogWriter

WAIT = 0.3
STALL = 5.0
"""Seconds for which the disk does not answer; the steps of a tiny run, and two waits, take less."""


@pytest.fixture
def step_times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each step began."""
    set_limit(monkeypatch, "seconds to read requests", WAIT)
    set_limit(monkeypatch, "seconds for a line of metrics", WAIT)
    times: list[float] = []
    before_steps(monkeypatch, lambda run: times.append(time.monotonic()))
    return times


def stalled(
    step_times: list[float], act: Callable[..., Any], ours: Callable[..., bool]
) -> Callable[..., Any]:
    """`act`, which at the third step does not return for `STALL` seconds where `ours` says so,
    once.
    """
    begun = threading.Event()

    def stall(*rest: Any, **options: Any) -> Any:
        if len(step_times) == 3 and ours(*rest) and not begun.is_set():
            begun.set()
            time.sleep(STALL)
        return act(*rest, **options)

    return stall


@pytest.mark.long
def test_a_disk_that_takes_no_metrics_stalls_no_step(
    cli: Cli, step_times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_metrics(descriptor: int, data: bytes) -> bool:
        return b"train/loss" in bytes(data)

    monkeypatch.setattr(os, "write", stalled(step_times, os.write, of_metrics))
    ended = cli("run.name=a", "train.steps=9", "eval.every=0", *STEADY)
    assert ended.code == 0 and ended.err.count("steps go on") == 1 and "are lost" not in ended.err
    assert step_times[8] - step_times[2] < STALL, "six steps and one wait"
    assert [line["step"] for line in lines("runs/a") if "train/loss" in line] == list(range(1, 10))


@pytest.mark.long
def test_a_disk_that_lists_no_requests_stalls_no_step(
    cli: Cli, step_times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("runs/a/swap_requests").mkdir(parents=True)
    monkeypatch.setattr(
        Folder, "names", stalled(step_times, Folder.names, lambda f: f.path.name == "swap_requests")
    )
    ended = cli("run.name=a", "train.steps=9", "eval.every=0", *STEADY)
    assert ended.code == 0 and ended.err.count("steps go on") == 1
    assert step_times[8] - step_times[2] < STALL
    assert sorted(losses("runs/a")) == list(range(1, 10))


@pytest.mark.long
@pytest.mark.parametrize(
    "fails", [False, True], ids=["and then takes it", "and then refuses it once"]
)
def test_a_disk_that_does_not_take_the_record_of_a_swap_stalls_no_step(
    cli: Cli, step_times: list[float], before: Before, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    original = LogWriter.write
    tries = []

    def write(file: LogWriter, data: bytes, **options: bool) -> None:
        if b'{"event": "swap"' in data:
            tries.append(len(step_times))
            if len(tries) == 1:
                time.sleep(STALL)
                if fails:
                    raise OSError(28, "No space left on device")
        original(file, data, **options)

    monkeypatch.setattr(LogWriter, "write", write)
    before(2, lambda run: cli.raw("swap", "runs/a", "recipe=bf16", "wait=0"))
    ended = cli("run.name=a", "train.steps=9", "eval.every=0", *STEADY)
    assert ended.code == 0 and ended.err.count("steps go on") == 1
    assert step_times[8] - step_times[2] < STALL, "six steps and one wait"
    assert [v[-1] for v in losses("runs/a").values()] == ["NVFP4"] * 3 + ["BF16"] * 6
    assert tries == [3, 9] if fails else tries == [3], (
        "the checkpoint that counts on it has it written first"
    )
    assert recorded("runs/a") == [(3, "bf16")]
    assert steps() == [9] and cli("resume=runs/a", "train.steps=10").code == 0
