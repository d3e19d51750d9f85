"""What a run logs of its experts: how even their load is in each step, and that of each expert
where it evaluates.
"""

import pytest
from command_line import Cli, events, lines

MOE = (
    "model=moe_tiny",
    "model.width=32",
    "model.layers=3",
    "model.hidden=64",
    "model.experts.count=4",
    "model.experts.hidden=32",
    "model.dense=1",
    "recipe=bf16",
    "train.steps=2",
    "eval.every=0",
)


def test_the_load_of_experts_is_logged_per_step_and_of_each_expert_at_the_end(cli: Cli) -> None:
    assert (
        cli("run.name=a", *MOE, "model.balance.capacity=1.0", "model.balance.z_loss=0.001").code
        == 0
    )
    steps = [line for line in lines("runs/a") if "train/loss" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["experts/load_max"] > 1 > line["experts/load_min"] >= 0
        assert 0 < line["experts/dropped"] < 1
        assert (
            line["experts/balance_loss"] == pytest.approx(1, abs=0.2) and line["experts/z_loss"] > 1
        )
    (event,) = events("runs/a", "expert load")
    loads = {name: value for name, value in event.items() if name.startswith("blocks.")}
    assert event["step"] == 2 and set(loads) == {"blocks.1", "blocks.2"}, "the first block is dense"
    assert [sum(load) / 4 for load in loads.values()] == pytest.approx([1, 1], abs=1e-4)
    extremes = [value for load in loads.values() for value in load]
    assert max(extremes) == pytest.approx(steps[-1]["experts/load_max"], abs=1e-4)
    assert min(extremes) == pytest.approx(steps[-1]["experts/load_min"], abs=1e-4)
