"""A service beside the metrics may fail; the run may not notice more than one line about it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp4train.config import bind
from fp4train.track import (
    JsonlTracking,
    MetricsLog,
    NoTracking,
    Statistics,
    TensorBoardTracking,
    Trackers,
    Tracking,
    WandbTracking,
    read_metrics,
    start_tracker,
)


class Failing:
    """A service whose `broken` method raises."""

    def __init__(self, broken: str) -> None:
        self.broken = broken
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.broken:
            raise ConnectionError("gone")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._call("log")

    def log_event(self, step: int, event: str, values: Mapping[str, Any] | None = None) -> None:
        self._call("log_event")

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self._call("log_table")

    def log_statistics(self, statistics: Statistics) -> None:
        self._call("log_statistics")

    def finish(self, exit_code: int = 0) -> None:
        self._call("finish")


@pytest.mark.parametrize("broken", ["log", "log_event", "log_table", "finish"])
def test_a_failing_service_is_reported_once_and_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    bad = Failing(broken)
    good = Failing("nothing")
    tracker = Trackers(MetricsLog(tmp_path / "m.jsonl"), bad, good)
    for step in (1, 2):
        tracker.log_table("plan", ["layer"], [["a"]])
        tracker.log(step, {"train/loss": 1.0})
        tracker.log_event(step, "swap")
    tracker.finish()
    tracker.finish()
    assert len(read_metrics(tmp_path / "m.jsonl")) == 4
    assert bad.calls.count(broken) == (2 if broken == "finish" else 1), (
        "at most one more attempt, to end it"
    )
    assert bad.calls[-1] == "finish"
    assert good.calls.count("log") == 2
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "Failing failed and is switched off: gone"
    ]


def test_what_the_first_tracker_raises_reaches_the_caller(tmp_path: Path) -> None:
    other = Failing("nothing")
    tracker = Trackers(Failing("finish"), other)
    with pytest.raises(ConnectionError):
        tracker.finish()
    assert other.calls == ["finish"]


@pytest.mark.parametrize("broken", ["nothing", "log", "build"])
def test_a_plugins_tracker_is_a_service_beside_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    service = Failing(broken)

    class Plugin:
        def build(self, *_: object, **__: object) -> Failing:
            service._call("build")
            return service

    tracker = start_tracker(Plugin(), tmp_path, "run", {}, resume_step=None)
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert service.calls[:2] == (["build"] if broken == "build" else ["build", "log"])
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == (broken != "nothing")
    named = ("plugin is switched off: gone", "Plugin failed and is switched off: gone")
    assert all(line.startswith(named) for line in warned)


def test_no_tracking_writes_nothing(tmp_path: Path) -> None:
    tracker = start_tracker(NoTracking(), tmp_path, "run", {})
    tracker.log(1, {"train/loss": 1.0})
    tracker.log_event(1, "swap")
    tracker.log_table("plan", [], [])
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


def test_jsonl_tracking_goes_on_from_a_step(tmp_path: Path) -> None:
    for resume_step in (None, 2):
        tracker = start_tracker(JsonlTracking(), tmp_path, "run", {}, resume_step=resume_step)
        for step in range((resume_step or 0) + 1, 5):
            tracker.log(step, {})
        tracker.log_table("plan", ["layer"], [["a"]])
        tracker.finish()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(("field", "value"), [("mode", "on"), ("timeout", 0)])
def test_settings_that_make_no_sense_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"track.{field}={value!r}"):
        WandbTracking(**{field: value})  # type: ignore[arg-type]


def test_every_config_of_the_group_builds_its_class() -> None:
    folder = Path(__file__).parents[2] / "configs" / "track"
    built = {
        file.stem: bind(yaml.safe_load(file.read_text()), Tracking, "track")
        for file in folder.glob("*.yaml")
    }
    assert built == {
        "jsonl": JsonlTracking(),
        "wandb": WandbTracking(),
        "tensorboard": TensorBoardTracking(),
        "none": NoTracking(),
    }
