"""The record of a study: what was measured is kept to the bit; what is not this study's is refused.
Its progress.
"""

import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fp4train.errors import UserError
from fp4train.lab.studies import MEASUREMENTS, Fork, open_record, study_progress
from fp4train.track import MetricsLog

WHO: dict[str, Any] = {"study": "test", "run": "ab", "weights": "cd"}


def make(folder: Path) -> Path:
    with open_record(folder, WHO, 200) as record:
        record.add("a", {"nmse": [0.1, 1 / 3]})
        record.add("b", {"nmse": [5e-324], "loss": -0.0})
    return folder / MEASUREMENTS


def test_a_study_that_goes_on_finds_what_it_measured_to_the_bit(tmp_path: Path) -> None:
    path = make(tmp_path)
    before = path.read_bytes()
    with open_record(tmp_path, WHO, 200) as record:
        assert "a" in record and "c" not in record
        assert record["a"] == {"nmse": [0.1, 1 / 3]} and record["b"]["nmse"] == [5e-324]
        record.add("c", {"nmse": []})
    assert path.read_bytes().startswith(before)
    with open_record(tmp_path, WHO, 200) as record:
        assert list(record.known) == ["a", "b", "c"]


def test_a_last_line_that_a_kill_tore_is_measured_again(tmp_path: Path) -> None:
    path = make(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with open_record(tmp_path, WHO, 200) as record:
        assert list(record.known) == ["a"]
        record.add("b", {"nmse": [5e-324], "loss": -0.0})
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe": "low"}, "bf16/0.recipe='low' must be a number or null"),
        ({"parts": [0.5, None]}, r"bf16/0.parts\[1\]=null must be a number"),
        ({"loss": 0.5}, "unknown key 'bf16/0.loss'"),
    ],
)
def test_a_fork_that_is_none_is_named_by_its_key_in_the_record(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    fork = {"recipe": 2.5, "high": 2.25, "train": 2.75, "problem": None, "seconds": 1.0}
    with open_record(tmp_path, WHO, 200) as record:
        record.add("nvfp4/0", {**fork, "parts": [2.5, 1 / 3]})
        record.add("bf16/0", {**fork, **values})
    with open_record(tmp_path, WHO, 200) as record:
        assert record.bound("nvfp4/0", Fork) == Fork(**fork, parts=(2.5, 1 / 3))
        with pytest.raises(UserError, match=f"{message}.*; remove the file to measure anew"):
            record.bound("bf16/0", Fork)


def test_damage_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace("0.1", "0.2")
    path.write_text("".join(lines))
    damaged = r"line 2: .*its checksum differs.*remove the file"
    with pytest.raises(UserError, match=damaged), open_record(tmp_path, WHO, 200):
        pass


def test_the_record_of_another_study_is_refused_and_the_difference_is_named(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match=r"another study \(weights: cd there, xy here\).*out="):  # noqa: SIM117
        with open_record(tmp_path, {**WHO, "weights": "xy"}, 200):
            pass


def test_the_record_of_another_version_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    monkeypatch.setattr("fp4train.lab.studies.record.__version__", "9.9")
    refused = r"record of another study \(fp4train: .* there, 9\.9 here\): remove it, or .*out="
    with pytest.raises(UserError, match=refused), open_record(tmp_path, WHO, 200):
        pass


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / MEASUREMENTS
    log = MetricsLog(path)
    log.log(1, {"train/loss": 2.0})
    log.finish()
    with (
        pytest.raises(UserError, match="line 1: no measurement of a study"),
        open_record(tmp_path, WHO, 200),
    ):
        pass


def test_two_processes_do_not_write_one_record(tmp_path: Path) -> None:
    with open_record(tmp_path, WHO, 200):  # noqa: SIM117
        with pytest.raises(UserError, match="in use: another process works on this study"):
            with open_record(tmp_path, WHO, 200):
                pass


@pytest.mark.parametrize("values", [{"x": float("nan")}, {"x": [float("inf")]}])
def test_only_finite_values_are_recorded(tmp_path: Path, values: dict[str, Any]) -> None:
    with open_record(tmp_path, WHO, 200) as record:
        with pytest.raises(ValueError, match="Out of range float"):
            record.add("a", values)
        record.add("a", {})
        assert record["a"] == {}


def test_a_full_disk_costs_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with open_record(tmp_path, WHO, 200) as record:
        record.add("a", {"x": 1})
        with monkeypatch.context() as patched:
            patched.setattr("os.write", full)
            record.add("b", {"x": 2})
        record.add("c", {"x": 3})
    with open_record(tmp_path, WHO, 200) as record:
        assert list(record.known) == ["a", "b", "c"]


# -- how far it is


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    return now


def test_the_time_left_follows_from_what_was_made_now_not_from_the_record(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), study_progress("fork") as shown:
        shown(6, 12)  # from the record
        clock[0] += 20
        shown(7, 12, "NVFP4, seed 1, loss 1.7")
    assert caplog.messages == ["7 of 12 forks, 01:40 left: NVFP4, seed 1, loss 1.7"]


def test_lines_come_now_and_then_where_that_is_asked_for(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), study_progress("measurement", every=15.0) as shown:
        for number in range(40):
            shown(number, None, "fprop")
            clock[0] += 1
    assert caplog.messages == ["15 measurements: fprop", "30 measurements: fprop"]
