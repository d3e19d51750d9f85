"""What is restored fits: each tensor's name, shape, dtype and numbers, and each value of the
state.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import (
    STEADY,
    Cli,
    losses,
    reseal,
)


def moment(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def act(held: dict[str, Any]) -> None:
        name = next(n for n in held if n.endswith("/exp_avg"))
        held[name] = change(held[name])

    return act


def weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def act(held: dict[str, Any]) -> None:
        name = next(n for n in held if n.startswith("model/") and held[n].dim() == 2)
        held[name] = change(held[name])

    return act


TENSORS = {
    "a moment that is shorter": (moment(lambda t: t.flatten()[:3]), "has shape [3]"),
    "a moment that is no number": (moment(lambda t: t.fill_(torch.nan)), "is not finite"),
    "a weight of another shape": (weight(lambda t: t[:1]), "has shape"),
    "a weight that is infinite": (weight(lambda t: t.fill_(torch.inf)), "is not finite"),
}


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS.keys())
def test_a_tensor_that_does_not_fit_is_named_and_refused(
    cli: Cli, change: Any, message: str
) -> None:
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    reseal(Path("runs/a/checkpoints/step_00000002"), change, lambda state: None)
    said = cli("resume=runs/a", "train.steps=3").message
    assert "does not fit this model" in said and message in said


def setting(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def act(state: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for key in way:
            state = state[key]
        state[last] = value

    return act


WEIGHT = "embed.weight"
STATES = {
    "no loss scale": setting("loss_scale", None),
    "a negative loss scale": setting("loss_scale.scale", -1.0),
    "weights of a list": setting("model", []),
    "a tensor that is not there": setting("model", {"a": {"$tensor": "nowhere"}}),
    "an optimizer without state": setting("optimizer", {}),
    "a parameter too many": lambda state: state["optimizer"].update(more={"decays": True}),
    "another choice of decay": lambda state: state["optimizer"][WEIGHT].update(decays=False),
    "no moments": lambda state: state["optimizer"].update({WEIGHT: {"decays": True, "step": 1}}),
    "items of nothing": setting("optimizer", {"$items": [3]}),
    "scales of a layer that is not there": setting("scaling", {"nowhere": {}}),
    "swaps of nothing": setting("swaps", [{"step": 1}]),
    "an identity of another run": setting("run", {"id": "0" * 16}),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES.keys())
def test_a_crafted_state_is_refused_with_one_line(cli: Cli, change: Any) -> None:
    cli.trained("run.name=a", "train.steps=1", *STEADY)
    reseal(Path("runs/a/checkpoints/step_00000001"), lambda held: None, change)
    before = Path("runs/a/metrics.jsonl").read_bytes()
    ended = cli("resume=runs/a", "train.steps=2")
    assert ended.code == 1 and "step_00000001" in ended.message
    assert Path("runs/a/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("mark", [None, {"bytes": -1, "sha256": 3}])
def test_a_crafted_mark_of_the_metrics_costs_nothing(cli: Cli, mark: Any) -> None:
    cli.trained("run.name=a", "train.steps=1", *STEADY)
    reseal(Path("runs/a/checkpoints/step_00000001"), lambda held: None, setting("metrics", mark))
    assert cli("resume=runs/a", "train.steps=2").code == 0
    assert sorted(losses("runs/a")) == [1, 2]
