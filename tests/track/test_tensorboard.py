"""track=tensorboard: what its own reader finds in RUN/tensorboard."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp4train.track import TensorBoardTracking, read_metrics, start_tracker

pytest.importorskip("tensorboard")


def found(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(
        str(run / "tensorboard"), {"scalars": 0, "tensors": 0, "histograms": 0}
    )
    return accumulator.Reload()


def text(events: Any, name: str) -> list[str]:
    return [e.tensor_proto.string_val[0].decode() for e in events.Tensors(f"{name}/text_summary")]


def test_numbers_events_and_tables_are_found_again_and_a_resume_leaves_later_points_out(
    tmp_path: Path,
) -> None:
    tracker = start_tracker(TensorBoardTracking(), tmp_path, "a", {"seed": 0})
    tracker.log_table("plan", ["layer", "format"], [["0.up", "NVFP4"]])
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 4.0 - step, "recipe": "NVFP4", "tokens": np.int64(step)})
    tracker.log_event(3, "swap", {"recipe": "BF16"})
    tracker.finish()
    tracker.finish()
    events = found(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 3.0),
        (2, 2.0),
        (3, 1.0),
    ]
    assert [e.value for e in events.Scalars("tokens")] == [1, 2, 3]
    assert text(events, "plan") == ["| layer | format |\n| --- | --- |\n| 0.up | NVFP4 |"]
    assert text(events, "event") == ["swap, recipe BF16"] and text(events, "config") == [
        "    seed: 0"
    ]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4, (
        "beside the metrics, not in their place"
    )
    again = start_tracker(TensorBoardTracking(), tmp_path, "a", {"seed": 0}, resume_step=2)
    again.log(3, {"train/loss": 9.0})
    again.finish()
    assert [(e.step, e.value) for e in found(tmp_path).Scalars("train/loss")] == [
        (1, 3.0),
        (2, 2.0),
        (3, 9.0),
    ]


def test_without_the_package_the_run_goes_on_and_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    tracker = start_tracker(TensorBoardTracking(), tmp_path, "a", {})
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish()
    (message,) = [r.getMessage() for r in caplog.records]
    assert (
        message.startswith("tensorboard is switched off: ")
        and "pip install 'fp4train[tensorboard]'" in message
    )
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_link_in_a_run_directory_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "elsewhere")
    start_tracker(TensorBoardTracking(), tmp_path / "run", "a", {}).finish()
    assert "tensorboard is switched off" in caplog.text and not list(
        (tmp_path / "elsewhere").iterdir()
    )
