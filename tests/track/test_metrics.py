"""metrics.jsonl is the truth about a run, whatever kills it."""

import errno
import json
import logging
import math
import os
import signal
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import PATIENCE
from forked import forked
from lengths import long_but
from limits import set_limit

import fp4train.track.metrics as metrics
from fp4train.errors import OlderForm, UserError
from fp4train.track import MetricsLog, mend, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def written(path: Path, *numbers: int) -> bytes:
    log = MetricsLog(path)
    for step in numbers:
        log.log(step, {"train/loss": 1 / step})
    log.finish()
    return path.read_bytes()


def test_a_line_is_there_as_soon_as_it_is_logged(path: Path) -> None:
    log = MetricsLog(path)
    log.log(
        1, {"train/loss": 0.1 + 0.2, "train/tokens": 2**40, "precision/recipe": "nvfp4", "x": None}
    )
    log.log_event(2, "swap", {"recipe": "bf16", "at": [1, 2]})
    assert read_metrics(path) == [
        {
            "step": 1,
            "train/loss": 0.1 + 0.2,
            "train/tokens": 2**40,
            "precision/recipe": "nvfp4",
            "x": None,
        },
        {"step": 2, "event": "swap", "recipe": "bf16", "at": [1, 2]},
    ]
    log.finish()


def test_scalars_of_torch_are_numbers(path: Path) -> None:
    log = MetricsLog(path)
    log.log(1, {"a": torch.tensor(1.5), "b": torch.tensor(3)})
    log.finish()
    assert read_metrics(path) == [{"step": 1, "a": 1.5, "b": 3}]


def test_nan_and_infinity_survive_strict_readers(path: Path) -> None:
    log = MetricsLog(path)
    log.log(1, {"train/loss": math.nan, "train/grad_norm": -math.inf, "train/lr": 0.5})
    log.finish()

    def refuse(token: str) -> None:
        raise AssertionError(token)

    raw = json.loads(path.read_text(), parse_constant=refuse)
    assert raw["train/loss"] is None and raw["nonfinite"] == {
        "train/loss": "nan",
        "train/grad_norm": "-inf",
    }
    [line] = read_metrics(path)
    assert (
        math.isnan(line["train/loss"])
        and line["train/grad_norm"] == -math.inf
        and "nonfinite" not in line
    )


@pytest.mark.parametrize("key", ["step", "event", "nonfinite", "after", "crc"])
def test_reserved_keys_are_refused(path: Path, key: str) -> None:
    log = MetricsLog(path)
    with pytest.raises(ValueError, match=key):
        log.log(1, {key: 1})
    with pytest.raises(ValueError, match=key):
        log.log_event(1, "swap", {key: 1})
    log.finish()


def test_a_resume_drops_what_will_be_written_again(path: Path) -> None:
    whole = written(path, 1, 2, 3, 4)
    log = MetricsLog(path, resume_step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    log.log(3, {"train/loss": 1 / 3})
    log.log(4, {"train/loss": 1 / 4})
    log.finish()
    assert path.read_bytes() == whole
    assert os.listdir(path.parent) == ["metrics.jsonl"]


def test_a_resume_that_drops_nothing_leaves_the_file_alone(path: Path) -> None:
    written(path, 1, 2)
    before = path.stat().st_ino
    MetricsLog(path, resume_step=2).finish()
    assert path.stat().st_ino == before


@pytest.mark.parametrize(
    "tail",
    [
        b'{"step": 3, "train/lo',
        b'{"step": 3}\n',
        b'{"step": 3}',
        b"\0\0\0\0",
        b"\0\0\0\n",
        b"\xff\xfe\n",
        b"\n",
    ],
)
def test_a_torn_last_line_is_read_over_and_repaired(path: Path, tail: bytes) -> None:
    whole = written(path, 1, 2)
    path.write_bytes(whole + tail)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    log = MetricsLog(path)
    log.log(3, {})
    log.finish()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    assert path.read_bytes().startswith(whole + b'{"step": 3, "crc"')


@pytest.mark.parametrize("bit", long_but((0, 5), range(8)))
def test_no_flipped_bit_changes_a_number_in_silence(
    path: Path, caplog: pytest.LogCaptureFixture, bit: int
) -> None:
    whole = written(path, 1, 2, 3)
    good = read_metrics(path)
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        caplog.clear()
        try:
            found = read_metrics(path)
        except UserError as error:
            assert "line " in str(error)
        else:
            assert found in (good[:1], good[:2]), f"byte {at}: {bytes(damaged)!r}"
            assert "the last one, is damaged" in caplog.text or damaged[-1:] != b"\n", (
                "a torn end needs no word"
            )


def test_lines_that_name_the_checksum_of_the_line_before_are_read_and_added_to(path: Path) -> None:
    """As older versions wrote them."""
    path.parent.mkdir()
    text = '{"step": 1, "train/loss": 2.5, "after": "03b1c9e7"'
    path.write_text(f'{text}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n')
    log = MetricsLog(path, resume_step=1)
    log.log(2, {})
    log.finish()
    assert read_metrics(path) == [{"step": 1, "train/loss": 2.5}, {"step": 2}]


def test_lines_of_an_older_form_are_refused_and_stay(path: Path) -> None:
    path.parent.mkdir()
    whole = '{"step": 1, "train/loss": 2.5}\n'
    path.write_text(whole + written(path.with_name("today"), 2).decode())
    uses: tuple[Callable[[], object], ...] = (
        lambda: read_metrics(path),
        lambda: MetricsLog(path, resume_step=1),
        lambda: mend(path, 1, None),
        lambda: metrics.check_form(path),
    )
    for use in uses:
        with pytest.raises(
            OlderForm, match="it has lines without the checksums of today, which this one does not"
        ):
            use()
    assert (
        path.read_text().startswith(whole) and not path.with_name("metrics.jsonl.damaged").exists()
    )


def test_a_disk_that_stalls_costs_one_bounded_wait_and_no_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(path)
    go_on = threading.Event()
    write = os.write
    set_limit(monkeypatch, "seconds for a line of metrics", 0.2)
    monkeypatch.setattr(os, "write", lambda *rest: go_on.wait(60) and write(*rest))
    began = time.monotonic()
    for step in range(1, 200):
        log.log(step, {})
    assert time.monotonic() - began < 5 and caplog.text.count("steps go on") == 1
    set_limit(monkeypatch, "seconds for the last metrics", 0.1)
    with pytest.raises(OSError, match="is not written"):
        log.sync()
    go_on.set()
    set_limit(monkeypatch, "seconds for the last metrics", 60)
    log.sync()
    log.log(200, {})
    assert [line["step"] for line in read_metrics(path)] == list(
        range(1, 201)
    ) and "nothing is lost" in caplog.text
    log.finish()


def test_a_huge_line_takes_no_more_memory_and_time_than_lines_may_have(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fp4train.files.LINE", 1 << 20)
    whole = written(path, 1, 2)
    path.write_bytes(whole + b"x" * (1 << 21))
    assert len(read_metrics(path)) == 2
    assert (
        "line 3, the last one, is damaged and left out (it has more than 1,048,576 bytes)"
        in caplog.text
    )
    os.truncate(path, len(whole))
    os.truncate(path, 6 << 30)
    tracemalloc.start()
    try:
        assert len(read_metrics(path)) == 2 and mend(path, 2, None) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
    finally:
        tracemalloc.stop()


def test_damage_in_the_middle_is_named_by_its_line(path: Path) -> None:
    written(path, 1, 2, 3)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"garbage", *lines[2:]]))
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2: not a line of metrics"):
        read_metrics(path)


def test_a_missing_file_is_a_user_error(path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read: No such file"):
        read_metrics(path)


def test_finishing_twice_does_nothing_and_logging_afterwards_is_an_error(path: Path) -> None:
    log = MetricsLog(path)
    log.finish()
    log.finish()
    with pytest.raises(ValueError, match="is finished"):
        log.log(1, {})


def test_a_full_disk_is_reported_once_and_no_line_is_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(path)
    log.log(1, {})
    write = os.write

    def part_of_it(descriptor: int, data: bytes) -> int:
        if len(data) < 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:-4])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", part_of_it)
        for step in (2, 3, 4):
            log.log(step, {})
    assert path.read_bytes().count(b"\n") == 1 and path.read_bytes().endswith(b"\n"), (
        "no torn line while the disk is full"
    )
    assert [r.levelno for r in caplog.records] == [logging.ERROR] and "No space left" in caplog.text
    with caplog.at_level(logging.WARNING):
        log.log(5, {})
    assert "nothing is lost" in caplog.text
    log.finish()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_lines_that_never_got_a_place_are_counted_at_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = MetricsLog(path)
    monkeypatch.setattr(os, "write", full)
    log.log(1, {})
    log.log(2, {})
    log.finish()
    assert "2 lines are lost" in caplog.text


def test_an_unwritable_folder_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the run directory should be")
    with pytest.raises(UserError, match="cannot be written"):
        MetricsLog(tmp_path / "run" / "metrics.jsonl")


def test_a_kill_loses_nothing_that_was_logged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, "seconds for a line of metrics", PATIENCE)

    def logs() -> None:
        log = MetricsLog(path)
        for step in range(1, 51):
            log.log(step, {})
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(logs) == -signal.SIGKILL
    assert [line["step"] for line in read_metrics(path)] == list(range(1, 51))
