"""wandb without a network: offline at once, or within seconds; nothing here leaves the machine."""

import http.server
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lengths import long_but
from limits import set_limit
from unused_wandb import forget_wandb

import fp4train.track
from fp4train.track import (
    GRADIENT,
    OPERAND,
    QueuedTracker,
    Statistics,
    Trackers,
    WandbTracker,
    WandbTracking,
    read_metrics,
    start_tracker,
)

wandb = pytest.importorskip("wandb")

KEY = "0" * 40

SERVICE_SECONDS = 30.0
"""Seconds for wandb's service, which answers in one, to start and end a run; on a machine in use it
may take more than the default, and would be left behind.
"""


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_wandb(monkeypatch, tmp_path)


def some_statistics() -> Statistics:
    """Twelve operands, one of them of zeros, which have no ratio of signal to noise."""
    operands = np.zeros(12, OPERAND)
    operands["operand"], operands["sqnr_db"] = np.arange(12) % 6, [np.nan, *range(11)]
    names = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
    gradients = np.zeros(1, GRADIENT)
    return Statistics(
        step=3, recipe="NVFP4", layers=("a",), names=names, operands=operands, gradients=gradients
    )


def end_service() -> None:
    """End wandb's service, which a test may have stopped or killed already."""
    with suppress(ConnectionError):
        wandb.teardown()


@pytest.fixture
def wandb_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str | None], None]]:
    """Point wandb at a server (logged in) or at none (logged out), whatever this machine's user has
    set up.
    """

    def point(url: str | None) -> None:
        end_service()
        netrc = tmp_path / "netrc"
        netrc.write_text(
            f"machine {url.removeprefix('http://')} login user password {KEY}\n" if url else ""
        )
        monkeypatch.setenv("NETRC", str(netrc))
        if url:
            monkeypatch.setenv("WANDB_BASE_URL", url)

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield point
    end_service()


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.startswith("fp4train")]


def train(
    run_dir: Path, tracking: WandbTracking, *, resume_step: int | None = None
) -> tuple[WandbTracker, float]:
    """A short run; returns wandb's part and the seconds it took."""
    start = time.monotonic()
    tracker = start_tracker(
        tracking, run_dir, "name", {"train": {"steps": 3}, "tags": ["a"]}, resume_step=resume_step
    )
    assert isinstance(tracker, Trackers)
    [behind] = tracker._services
    assert isinstance(behind, QueuedTracker)
    part = behind.inner
    assert isinstance(part, WandbTracker)
    tracker.log_table(
        "plan", ["layer", "share"], [["blocks.0", 0.5], ["head", None], ["norm", "kept"]]
    )
    for step in range(1, 4):
        tracker.log(
            step,
            {"train/loss": float("nan") if step == 2 else 1 / step, "precision/recipe": "nvfp4"},
        )
    tracker.log_event(3, "swap", {"recipe": "bf16"})
    tracker.log_statistics(some_statistics())
    tracker.finish()
    tracker.finish()
    assert tracker._services == [behind], "it failed and was switched off"
    return part, time.monotonic() - start


def test_not_logged_in_is_offline_quietly_and_a_resume_continues_the_run(
    tmp_path: Path, wandb_at: Callable[[str | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    wandb_at(None)
    caplog.set_level(logging.INFO, logger="fp4train")
    first, _ = train(tmp_path, WandbTracking(timeout=SERVICE_SECONDS))
    assert first._run.offline
    assert "not logged in" in caplog.text and "wandb sync" in caplog.text
    assert {r.levelname for r in ours(caplog)} == {"INFO"}
    again, _ = train(tmp_path, WandbTracking(timeout=SERVICE_SECONDS), resume_step=3)
    assert again._run.id == first._run.id
    fresh, _ = train(tmp_path, WandbTracking(timeout=SERVICE_SECONDS))
    assert fresh._run.id != first._run.id
    # its service writes the files on its own time, and has written them when it has ended
    wandb.teardown()
    kept = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in kept} == {f"run-{part._run.id}.wandb" for part in (first, fresh)}
    assert all(b"train/loss" in file.read_bytes() for file in kept)
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/table/plan*.json"))
    assert all(b"histogram/sqnr_db" in file.read_bytes() for file in kept)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 12


def test_what_ends_a_run_or_may_is_an_alert(
    tmp_path: Path, wandb_at: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb_at(None)
    alerts: list[Any] = []
    monkeypatch.setattr(wandb.Run, "alert", lambda run, *told, level: alerts.append(told))
    tracker = WandbTracking(timeout=SERVICE_SECONDS).build(tmp_path, "name", {})
    for event in ("swap", "divergence", "non-finite", "lost rank"):
        tracker.log_event(3, event, {"message": "why"})
    tracker.finish()
    assert alerts == [
        ("divergence in step 3", "message: why"),
        ("non-finite in step 3", "message: why"),
        ("lost rank in step 3", "message: why"),
    ]


@pytest.mark.parametrize("sweep", long_but(["sweep01"], ["", "sweep01"]))
def test_a_resume_opens_the_run_of_wandbs_own_variables_without_them(
    tmp_path: Path,
    wandb_at: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
    sweep: str,
) -> None:
    variables = {
        "RUN_ID": "agent-1",
        "SWEEP_ID": sweep,
        "PROJECT": "theirs",
        "ENTITY": "lab",
        "NAME": "fancy-sweep-1",
        "TAGS": "a,b",
        "RUN_GROUP": "g",
    }
    with monkeypatch.context() as agent:
        for name, value in variables.items():
            if value:
                agent.setenv(f"WANDB_{name}", value)
        wandb_at(None)
        first, _ = train(tmp_path, WandbTracking(timeout=SERVICE_SECONDS))
    assert (tmp_path / "wandb" / "run_id").read_text() == "agent-1\n"
    charts = first._run
    assert (charts.name, charts.tags, charts.group) == ("fancy-sweep-1", ("a", "b"), "g")
    wandb_at(None)
    tracking = WandbTracking(timeout=SERVICE_SECONDS, tags=("c",))
    again, _ = train(tmp_path, tracking, resume_step=3)
    assert again._run.path == charts.path == "lab/theirs/agent-1"
    assert again._run.tags == ("c",)


@pytest.mark.long
def test_an_unreachable_server_leaves_the_run_offline(
    tmp_path: Path,
    wandb_at: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_limit(monkeypatch, "seconds for an answer of wandb's server", SERVICE_SECONDS)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        wandb_at(f"http://127.0.0.1:{unused.getsockname()[1]}")
        part, _ = train(tmp_path, WandbTracking(timeout=SERVICE_SECONDS))
    assert part._run.offline
    assert [r.levelname for r in ours(caplog)] == ["WARNING"] and "unreachable" in caplog.text


@pytest.mark.long
def test_a_server_that_never_answers_costs_seconds(
    tmp_path: Path,
    wandb_at: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """2 seconds for an answer, and at most 10 for each of the start and the end offline."""
    set_limit(monkeypatch, "seconds for an answer of wandb's server", 2.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        wandb_at(f"http://127.0.0.1:{silent.getsockname()[1]}")
        part, seconds = train(tmp_path, WandbTracking(timeout=10))
    assert part._run.offline and seconds < 60, "wandb itself would wait for 90"
    assert "did not answer" in caplog.text or "unreachable" in caplog.text


class Useless(http.server.BaseHTTPRequestHandler):
    """A server that answers everything with an error."""

    def do_POST(self) -> None:
        self.send_response(404)
        self.end_headers()

    do_HEAD = do_GET = do_POST

    def log_message(self, *_: object) -> None: ...


@pytest.mark.long
def test_a_server_that_refuses_the_run_leaves_it_offline_also_when_resumed(
    tmp_path: Path,
    wandb_at: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_limit(monkeypatch, "seconds for an answer of wandb's server", SERVICE_SECONDS)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Useless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        wandb_at(f"http://127.0.0.1:{server.server_address[1]}")
        part, _ = train(tmp_path, WandbTracking(timeout=SERVICE_SECONDS))
        again, _ = train(tmp_path, WandbTracking(timeout=SERVICE_SECONDS), resume_step=3)
        server.shutdown()
    assert part._run.offline
    assert again._run.id == part._run.id
    assert (
        all("wandb is offline" in r.getMessage() for r in ours(caplog)) and len(ours(caplog)) == 2
    )
    assert not list((tmp_path / "wandb").glob("run-*")), (
        "nothing is left of the attempts to go online"
    )


@pytest.mark.long
def test_what_wandb_was_told_in_its_own_settings_is_no_warning(
    tmp_path: Path,
    wandb_at: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wandb_at("http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_MODE", "offline")
    caplog.set_level(logging.INFO, logger="fp4train")
    part, _ = train(tmp_path, WandbTracking(timeout=SERVICE_SECONDS))
    assert part._run.offline and "wandb is offline (asked for)" in caplog.text
    assert {r.levelname for r in ours(caplog)} == {"INFO"}


@pytest.mark.parametrize(
    ("name", "value"), [("WANDB_MODE", "disabled"), ("WANDB_BASE_URL", "no url")]
)
def test_wandb_switched_off_or_misconfigured_by_its_own_settings_leaves_the_metrics(
    tmp_path: Path,
    wandb_at: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
) -> None:
    wandb_at(None)
    monkeypatch.setenv(name, value)
    tracker = start_tracker(WandbTracking(timeout=SERVICE_SECONDS), tmp_path, "name", {})
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish()
    assert "wandb is switched off" in caplog.text
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


KILLS_THE_SERVICE = """
import os, signal, subprocess, sys
from pathlib import Path
from fp4train.track import WandbTracking, start_tracker
assert "wandb" not in sys.modules
tracker = start_tracker(WandbTracking(mode="offline", timeout=30), Path(sys.argv[1]), "name", {})
tracker.log(1, {})
for task in Path("/proc").glob("[0-9]*/cmdline"):
    if f"--pid\\0{os.getpid()}\\0".encode() in task.read_bytes():
        os.kill(int(task.parent.name), signal.SIGKILL)
for step in range(2, 500): tracker.log(step, {"train/loss": 1.0})
tracker.finish()
print("trained")
"""


def started(program: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """A process that tracks a run into `folder`: it takes 2 seconds, and 16 were seen on a machine
    in use.
    """
    root = Path(fp4train.track.__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="finds wandb's service through /proc"
)
def test_a_service_that_dies_does_not_take_the_run_with_it(tmp_path: Path) -> None:
    child = started(KILLS_THE_SERVICE, tmp_path)
    assert child.returncode == 0 and "trained" in child.stdout
    assert child.stderr.count("Wandb failed and is switched off") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 499


STOPS_THE_SERVICE = (
    KILLS_THE_SERVICE.replace("SIGKILL", "SIGSTOP")
    .replace("timeout=30", "timeout=10")
    .replace(
        "tracker.finish()",
        "import time; began = time.monotonic(); tracker.finish(); print(time.monotonic() - began)",
    )
)
"""The end takes twice the timeout."""


@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="finds wandb's service through /proc"
)
@pytest.mark.long
def test_a_service_that_is_stopped_stalls_neither_the_steps_nor_the_end(tmp_path: Path) -> None:
    child = started(STOPS_THE_SERVICE, tmp_path)
    assert child.returncode == 0 and "trained" in child.stdout, child.stderr
    assert float(child.stdout.split()[0]) < 60
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 499
