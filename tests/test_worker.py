"""A worker's caller never waits longer than it wants, and its thread is there only while there is
something to do.
"""

import threading
import time

import pytest

from fp4train import worker
from fp4train.worker import Worker


def test_calls_are_done_in_order_and_a_failure_stops_none() -> None:
    done: list[int] = []
    failed: list[str] = []
    each = Worker("x", lambda error: failed.append(str(error)))
    for number in range(5):
        each.put(lambda n=number: done.append(1 // (n - 2)))
    assert each.leave(60) and len(done) == 4 and failed == ["integer division or modulo by zero"]
    assert not each.put(lambda: None), "it takes no more"


def test_what_stalls_is_waited_for_within_bounds_and_left_behind() -> None:
    go_on = threading.Event()
    each = Worker("x", lambda error: None, capacity=2)
    each.put(lambda: go_on.wait(60) and None)
    began = time.monotonic()
    assert not each.wait(0.05) and not each.leave(0.05)
    assert time.monotonic() - began < 5
    go_on.set()


def test_a_full_queue_refuses() -> None:
    go_on = threading.Event()
    each = Worker("x", lambda error: None, capacity=2)
    begun = threading.Event()
    each.put(lambda: begun.set() or (go_on.wait(60) and None))
    begun.wait(60)
    assert [each.put(lambda: None) for _ in range(3)] == [True, True, False]
    go_on.set()
    assert each.leave(60)


def test_an_idle_thread_ends_and_the_next_call_begins_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.02)
    threads: list[threading.Thread] = []
    each = Worker("x", lambda error: None)
    for _ in range(2):
        assert each.put(lambda: threads.append(threading.current_thread())) and each.wait(60)
        threads[-1].join(60)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]
