"""What a run's bits depend on: `train.threads` fixes the threads, and a resume says what has
changed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import STEADY, Before, Cli, losses
from pretended import Machine

from fp4train.run.bits import computing_threads, differences

HERE = {
    "device": "cpu",
    "threads": 2,
    "cpu": "A",
    "instructions": "AVX2",
    "versions": {"torch": "2.13", "python": "3.11"},
}


def test_train_threads_is_the_number_of_threads_of_the_run_and_of_no_later_one(
    cli: Cli, before: Before
) -> None:
    threads = torch.get_num_threads()
    seen: list[int] = []
    before(0, lambda run: seen.append(torch.get_num_threads()))
    assert cli("run.name=a", "train.steps=1", f"train.threads={threads + 1}", *STEADY).code == 0
    assert seen == [threads + 1]
    assert torch.get_num_threads() == threads
    (start,) = [
        json.loads(line) for line in Path("runs/a/history.jsonl").read_text().splitlines()[:1]
    ]
    assert start["environment"]["threads"] == threads + 1
    assert (
        start["environment"]["instructions"].split()[0] == torch.backends.cpu.get_cpu_capability()
    )


@pytest.mark.long
def test_a_resume_with_other_threads_says_so_and_how_to_keep_them(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=2", "train.threads=1", *STEADY).code == 0
    same = cli.raw("resume=runs/a", "train.steps=3")
    assert same.code == 0 and "same bits" not in same.err
    other = cli.raw("resume=runs/a", "train.steps=4", "train.threads=2")
    (line,) = [line for line in other.err.splitlines() if "same bits" in line]
    assert line == (
        "warning: the run goes on, and not in the same bits as without a stop: threads 1 → 2; "
        "train.threads=1 keeps the threads"
    )
    assert sorted(losses("runs/a")) == [1, 2, 3, 4]


def test_a_resume_on_another_cpu_or_torch_says_so(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("run.name=a", "train.steps=2", *STEADY).code == 0
    Machine(monkeypatch).has_cpu("Another 9000", "SVE")
    ended = cli.raw("resume=runs/a", "train.steps=3")
    (line,) = [line for line in ended.err.splitlines() if "same bits" in line]
    assert "→ Another 9000" in line and "→ SVE" in line and "train.threads" not in line


@pytest.mark.parametrize(
    ("change", "on_cpu", "said"),
    [
        ({}, True, []),
        ({"threads": 1}, True, ["threads 2 → 1"]),
        ({"threads": 1, "cpu": "B"}, False, []),
        ({"device": "H200"}, False, ["device cpu → H200"]),
        ({"versions": {"torch": "2.14", "python": "3.12"}}, True, ["torch 2.13 → 2.14"]),
        ({"instructions": None}, True, []),
        ({"versions": "damaged"}, True, []),
    ],
)
def test_what_makes_other_bits_is_named_and_nothing_else(
    change: dict[str, Any], on_cpu: bool, said: list[str]
) -> None:
    assert differences(HERE, HERE | change, on_cpu=on_cpu) == said


def test_an_error_leaves_the_threads_as_they_were() -> None:
    threads = torch.get_num_threads()
    with pytest.raises(KeyError), computing_threads(threads + 1):
        raise KeyError
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("threads", ["0", "-1", "100000", "two"])
def test_a_number_of_threads_that_is_none_is_refused(cli: Cli, threads: str) -> None:
    assert "train.threads" in cli("plan", f"train.threads={threads}").message
