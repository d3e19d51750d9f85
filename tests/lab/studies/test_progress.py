"""One progress for every study: lines where there is no terminal, with the time that is left."""

import logging

import pytest

from fp4train.lab.studies import progress
from fp4train.lab.studies.progress import study_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    return now


def test_the_time_left_follows_from_what_was_made_now_not_from_the_record(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), study_progress("fork") as shown:
        shown(6, 12)  # from the record
        clock[0] += 20
        shown(7, 12, "NVFP4, seed 1, loss 1.7")
    assert caplog.messages == ["7 of 12 forks, 01:40 left: NVFP4, seed 1, loss 1.7"]


def test_lines_come_now_and_then_where_that_is_asked_for(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), study_progress("measurement", every=15.0) as shown:
        for number in range(40):
            shown(number, None, "fprop")
            clock[0] += 1
    assert caplog.messages == ["15 measurements: fprop", "30 measurements: fprop"]
