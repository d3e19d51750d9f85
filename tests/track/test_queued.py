"""A service that stalls costs a bounded time at the start and at the end, and nothing in
between.
"""

import logging
import sys
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from limits import set_limit

from fp4train.track import QueuedTracker, Trackers, WandbTracking, read_metrics, start_tracker


class Service:
    """Remembers calls, and blocks in the one named `stalls`."""

    def __init__(self, stalls: str = "") -> None:
        self.stalls = stalls
        self.calls = []
        self.go_on = threading.Event()

    def _call(self, name: str) -> None:
        if name == self.stalls:
            self.go_on.wait(60)
        self.calls.append(name)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._call(f"log {step}")

    def log_event(self, step: int, event: str, values: Mapping[str, Any] | None = None) -> None:
        self._call(event)

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self._call(name)

    def finish(self, exit_code: int = 0) -> None:
        self._call("finish")


def test_calls_arrive_in_their_order_and_the_end_waits_for_them() -> None:
    service = Service()
    tracker = QueuedTracker(lambda: service, "service", start_seconds=5, finish_seconds=5)
    tracker.log_table("plan", [], [])
    tracker.log(1, {})
    tracker.log_event(1, "swap")
    tracker.finish()
    tracker.finish()
    assert service.calls == ["plan", "log 1", "swap", "finish"]


@pytest.mark.parametrize("stalls", ["log 3", "finish"])
def test_a_service_that_stalls_is_left_behind(
    stalls: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(stalls)
    freed = []
    tracker = QueuedTracker(
        lambda: service,
        "service",
        start_seconds=5,
        finish_seconds=0.2,
        abandon=lambda: freed.append(True),
    )
    began = time.monotonic()
    for step in range(1, 100):
        tracker.log(step, {})
    assert time.monotonic() - began < 5
    tracker.finish()
    assert time.monotonic() - began < 10 and freed == [True]
    assert caplog.text.count("service does not answer and is left behind") == 1
    service.go_on.set()


def test_the_end_waits_until_a_service_that_failed_is_switched_off() -> None:
    begun = threading.Event()

    class Slow(Service):
        def _call(self, name: str) -> None:
            if name == "log 1":
                raise ConnectionError("gone")
            begun.set()
            time.sleep(0.2)
            super()._call(name)

    service = Slow()
    tracker = QueuedTracker(lambda: service, "service", start_seconds=5, finish_seconds=5)
    tracker.log(1, {})
    assert begun.wait(5)
    tracker.finish()
    assert service.calls == ["finish"]


def test_a_full_queue_drops_lines_and_says_how_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_limit(monkeypatch, "calls in a tracker's queue", 10)
    service = Service("log 1")
    tracker = QueuedTracker(lambda: service, "service", start_seconds=5, finish_seconds=0.2)
    for step in range(1, 100):
        tracker.log(step, {})
    tracker.finish()
    assert caplog.text.count("service does not keep up") == 1
    assert "lines did not reach it" in caplog.text
    service.go_on.set()


def test_a_service_that_does_not_start_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    service = Service("start")

    def start() -> Service:
        service._call("start")
        return service

    with pytest.raises(TimeoutError, match=r"did not start within 0\.1 s"):
        QueuedTracker(start, "service", start_seconds=0.1, finish_seconds=1)
    service.go_on.set()


@pytest.mark.long
def test_a_wandb_that_blocks_stalls_neither_the_start_nor_a_step_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    blocked = threading.Event()
    fake = types.ModuleType("wandb")
    settings = dict.fromkeys(("sweep_id", "launch", "run_id", "run_name", "project", "entity"))
    settings = types.SimpleNamespace(mode="offline", **settings)
    fake.setup = lambda: types.SimpleNamespace(settings=settings)
    fake.Settings = lambda **options: None
    fake.Table = lambda **options: None
    run = types.SimpleNamespace(
        id="a",
        project="p",
        entity="",
        define_metric=lambda *rest, **options: None,
        log=lambda values: blocked.wait(60),
        finish=lambda **options: blocked.wait(60),
        dir=str(tmp_path / "wandb" / "x" / "files"),
    )
    fake.init = lambda **options: run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = start_tracker(WandbTracking(timeout=0.1), tmp_path, "name", {})
    assert isinstance(tracker, Trackers)
    began = time.monotonic()
    for step in range(1, 50):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish()
    assert time.monotonic() - began < 10
    assert "left behind" in caplog.text and len(read_metrics(tmp_path / "metrics.jsonl")) == 49

    fake.init = lambda **options: blocked.wait(60)
    set_limit(monkeypatch, "seconds to import wandb", 0.2)
    began = time.monotonic()
    tracker = start_tracker(WandbTracking(timeout=0.1), tmp_path / "b", "name", {})
    tracker.log(1, {})
    tracker.finish()
    assert (
        time.monotonic() - began < 10 and "wandb is switched off: it did not start" in caplog.text
    )
    blocked.set()
