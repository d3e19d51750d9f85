"""Doctor on several ranks: each collective is compared with the numbers that must come, then
timed.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from forked import forked_ranks
from limits import set_limit
from torch import Tensor

from fp4train.cli import main
from fp4train.errors import UserError
from fp4train.lab.doctor import DoctorReport, ranks
from fp4train.lab.doctor.ranks import CollectiveCheck


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank."""
    set_limit(monkeypatch, "bytes of a collective that is tried", {"cpu": 1 << 10})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.long
def test_two_ranks_try_the_collectives_and_the_first_one_prints(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    printed.touch()

    def on_rank() -> None:
        os.dup2(os.open(printed, os.O_WRONLY | os.O_APPEND), 1)
        sys.stdout = os.fdopen(1, "w")
        try:
            main(["doctor", "--json"])
        except SystemExit as ended:
            assert not ended.code, ended.code
        sys.stdout.flush()

    assert forked_ranks(2, on_rank) == [0, 0]
    found = json.loads(printed.read_text("utf-8"))
    assert found["ranks"] == 2
    assert [(c["name"], c["dtype"]) for c in found["collectives"]] == [
        ("all-reduce", "float32"),
        ("all-reduce", "bfloat16"),
        ("reduce-scatter", "float32"),
        ("all-gather", "bfloat16"),
        ("all-gather", "uint8"),
    ]
    assert all(c["correct"] and c["rate"] > 0 for c in found["collectives"])


@pytest.mark.usefixtures("alone")
def test_numbers_that_a_collective_changes_are_a_problem() -> None:
    def changed(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x

    assert all(each.correct and each.problem is None for each in ranks.collectives("cpu"))
    found = ranks._tried("all-gather", "uint8", "cpu", changed)
    assert (
        found.correct is False and found.problem == "all-gather of uint8 gave rank 0 wrong numbers"
    )


@pytest.mark.usefixtures("alone")
def test_a_collective_that_fails_is_a_problem_and_the_screen_shows_it() -> None:
    def failing(x: Tensor) -> tuple[Tensor, Tensor]:
        raise dist.DistBackendError("NCCL error: unhandled system error\nmore")

    found = ranks._tried("all-reduce", "bfloat16", "cpu", failing)
    fine = CollectiveCheck(name="all-gather", dtype="uint8", correct=True, rate=2.5e9)
    report = DoctorReport(
        device="cpu", default="nvfp4", machine=(), recipes=(), ranks=2, collectives=(found, fine)
    )
    screen = report.render()
    assert report.problems == [
        "all-reduce of bfloat16: DistBackendError: NCCL error: unhandled system error"
    ]
    assert "collectives of 2 ranks" in screen and "FAILED" in screen and "2.5" in screen


def test_ranks_that_do_not_meet_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29999",
    }.items():
        monkeypatch.setenv(name, value)

    def timeout(*arguments: object, **options: object) -> None:
        raise dist.DistStoreError(
            "Timed out after 121 seconds waiting for clients. 1/2 clients joined."
        )

    monkeypatch.setattr(dist, "init_process_group", timeout)
    with (
        pytest.raises(
            UserError, match=r"rank 1 of 2 .*MASTER_ADDR=localhost.*29999.*1/2 clients joined"
        ),
        ranks.meeting(),
    ):
        pass


def test_one_process_meets_nobody() -> None:
    assert ranks.started() == (0, 1)
