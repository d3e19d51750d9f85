"""Runs whose tensor scales are held: they resume to the bit between two measurements, with
microbatches and recomputation, and `fp4train plan` shows the steps.
"""

from pathlib import Path

import pytest
from command_line import Cli, StopAt, losses
from families import tiny_run
from held_recipe import write_held

from fp4train import checkpoint


@pytest.mark.parametrize(
    "options",
    [
        ("model.recompute=true", "train.microbatch=2"),
        pytest.param((*tiny_run("moe"), "train.microbatch=2"), marks=pytest.mark.long),
    ],
    ids=["recomputation in microbatches", "experts in microbatches"],
)
def test_a_run_resumes_to_the_bit_between_two_measurements(
    cli: Cli, stop_at: StopAt, tmp_path: Path, options: tuple[str, ...]
) -> None:
    held = (*write_held(tmp_path), "train.steps=8", "checkpoint.every=4", *options)
    stop_at(-1)
    assert cli("run.name=whole", *held).code == 0
    stop_at(5)
    assert cli("run.name=cut", *held).code == 137
    stop_at(-1)
    assert cli.raw("--config-dir", "mine", "resume=runs/cut").code == 0
    assert losses("runs/whole") == losses("runs/cut")
    states = [
        checkpoint.load(Path("runs") / name / "checkpoints").tensors for name in ("whole", "cut")
    ]
    assert states[0].keys() == states[1].keys()
    kept = [key for key in states[0] if "held.amax" in key]
    assert kept and all(states[0][key].equal(states[1][key]) for key in states[0])


def test_the_plan_shows_for_how_many_steps(cli: Cli, tmp_path: Path) -> None:
    ended = cli("plan", *write_held(tmp_path))
    assert ended.code == 0 and "held 3 steps" in ended.out


def test_a_captured_step_is_refused_by_operand(cli: Cli, tmp_path: Path) -> None:
    ended = cli("plan", *write_held(tmp_path), "train.cuda_graph=true")
    assert ended.code and "held=3" in ended.err
