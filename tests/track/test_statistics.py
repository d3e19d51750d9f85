"""RUN/statistics.bin: what is written is read, damage costs one block, a resume drops what comes
later.
"""

import json
import logging
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp4train.errors import UserError
from fp4train.track import (
    GRADIENT,
    OPERAND,
    STATISTICS,
    JsonlTracking,
    Statistics,
    StatisticsLog,
    read_statistics,
    start_tracker,
)

NAMES = ("fprop.x", "fprop.w")


def block(step: int, *, layers: tuple[str, ...] = ("a", "b")) -> Statistics:
    operands = np.zeros(2 * len(layers), OPERAND)
    operands["layer"], operands["operand"] = (
        np.repeat(np.arange(len(layers)), 2),
        np.tile([0, 1], len(layers)),
    )
    operands["sqnr_db"] = step + np.arange(len(operands))
    gradients = np.zeros(len(layers), GRADIENT)
    gradients["layer"] = np.arange(len(layers))
    gradients["gradient"] = 3.0
    gradients["noise"] = step
    return Statistics(
        step=step,
        recipe="NVFP4",
        layers=layers,
        names=NAMES,
        operands=operands,
        gradients=gradients,
    )


def written(run: Path, *steps: int) -> Path:
    log = StatisticsLog(run / STATISTICS)
    for step in steps:
        log.log(block(step))
    log.close()
    return run / STATISTICS


def test_columns_are_what_was_logged(tmp_path: Path) -> None:
    log = StatisticsLog(tmp_path / STATISTICS)
    log.log(block(50))
    log.log(block(100, layers=("a", "new", "c")))
    log.close()
    found = read_statistics(tmp_path)
    assert found.operands["step"].tolist() == [50] * 4 + [100] * 6
    assert found.operands["layer"].tolist() == [
        "a",
        "a",
        "b",
        "b",
        "a",
        "a",
        "new",
        "new",
        "c",
        "c",
    ]
    assert found.operands["operand"].tolist() == list(NAMES) * 5
    assert found.operands["sqnr_db"].dtype == np.float32 and found.operands["sqnr_db"][3] == 53
    assert found.gradients["layer"].tolist() == ["a", "b", "a", "new", "c"]
    assert found.gradients["noise"].tolist() == [50, 50, 100, 100, 100]
    assert set(found.operands["recipe"]) == {"NVFP4"}


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_block_torn_by_a_kill_is_left_out_and_replaced(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path, 1, 2)
    path.write_bytes(path.read_bytes()[:-cut])
    assert set(read_statistics(tmp_path).operands["step"]) == {1}
    written(tmp_path, 3)
    assert set(read_statistics(tmp_path).operands["step"]) == {1, 3}
    first = block(1).to_bytes()
    assert path.read_bytes() == first + block(3).to_bytes()


@pytest.mark.parametrize("at", [0, 6, 30, 300])
def test_a_damaged_block_costs_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    path = written(tmp_path, 1, 2, 3)
    data = bytearray(path.read_bytes())
    size = len(block(1).to_bytes())
    data[size + at] ^= 0x55
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert sorted(set(read_statistics(tmp_path).operands["step"])) == [1, 3]
    assert f"{size} bytes at {size} are damaged" in caplog.text


@pytest.mark.parametrize(
    "values",
    [
        {"step": float("inf")},
        {"step": 10**30},
    ],
    ids=str,
)
def test_a_block_whose_numbers_are_none_is_left_out(tmp_path: Path, values: dict[str, Any]) -> None:
    """Of a file that somebody else wrote, with checksums that fit."""
    raw = block(1).to_bytes()
    tables = block(1).operands.nbytes + block(1).gradients.nbytes
    header = json.loads(raw[20:-tables])
    header |= {key: value for key, value in values.items() if key in header}
    header["columns"][1] = [[name, values.get(name, kind)] for name, kind in header["columns"][1]]
    text = json.dumps(header).encode()
    body = text + raw[-tables:]
    lengths = (len(text), block(1).operands.nbytes, block(1).gradients.nbytes)
    (tmp_path / STATISTICS).write_bytes(
        struct.pack("<4sIIII", b"f4s1", *lengths, zlib.crc32(body)) + body
    )
    assert not len(read_statistics(tmp_path).gradients["step"])
    assert set(read_statistics(written(tmp_path, 2).parent).operands["step"]) == {2}


def test_a_resume_drops_later_steps(tmp_path: Path) -> None:
    written(tmp_path, 10, 20, 30)
    tracker = start_tracker(JsonlTracking(), tmp_path, "a", {}, resume_step=20)
    tracker.log_statistics(block(25))
    tracker.finish()
    assert sorted(set(read_statistics(tmp_path).operands["step"])) == [10, 20, 25]


def test_a_run_that_measures_nothing_has_no_file_and_the_error_says_how_to_get_one(
    tmp_path: Path,
) -> None:
    start_tracker(JsonlTracking(), tmp_path, "a", {}).finish()
    assert not (tmp_path / STATISTICS).exists()
    with pytest.raises(UserError, match=r"eval\.errors_every=STEPS"):
        read_statistics(tmp_path)


def test_a_full_disk_loses_steps_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = StatisticsLog(tmp_path / STATISTICS)
    log.log(block(1))
    whole = (tmp_path / STATISTICS).read_bytes()
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if len(data) < 100:
            raise OSError(28, "No space left on device")
        return write(descriptor, bytes(data)[: len(data) - 99])

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        log.log(block(2))
        log.log(block(3))
    assert (tmp_path / STATISTICS).read_bytes() == whole
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    log.log(block(4))
    log.close()
    assert sorted(set(read_statistics(tmp_path).operands["step"])) == [1, 4]


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / STATISTICS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="link"):
        StatisticsLog(tmp_path / STATISTICS)
