"""Python's cyclic garbage collector stays out of training steps, which do not need it."""

import gc
from typing import Any

import pytest
import torch
from command_line import Cli

from fp4train import train
from fp4train.run import host
from fp4train.run.host import CollectorBetweenSteps


@pytest.fixture(autouse=True)
def whole_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's run collects; others of the tests take less, see tests/conftest.py."""
    monkeypatch.setattr(host, "gc", gc)


def unreachable_tensors() -> list[torch.Size]:
    """The shapes of the tensors that a collection frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        # isinstance asks dead proxies
        tensors = [each for each in gc.garbage if issubclass(type(each), torch.Tensor)]
        return [each.shape for each in tensors]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_unreachable_tensors_are_seen() -> None:
    knot: list[object] = [torch.ones(3, 5, 7)]
    knot.append(knot)
    del knot
    assert (3, 5, 7) in unreachable_tensors()


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["train.microbatch=2", "model.recompute=true"],
        pytest.param(["recipe=mxfp8"], marks=pytest.mark.long),
        ["recipe=fp8_delayed"],
        pytest.param(["recipe=bf16"], marks=pytest.mark.long),
    ],
    ids=["nvfp4", "recomputed", "mxfp8", "delayed", "bf16"],
)
def test_a_step_leaves_no_cycles_that_would_hold_memory(
    settings: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = train.train_step
    found = list[list[torch.Size]]()

    def counted_step(run: Any, recipe: Any) -> Any:
        values = real(run, recipe)
        assert not gc.isenabled()
        found.append(unreachable_tensors())
        return values

    monkeypatch.setattr(train, "train_step", counted_step)
    for _ in range(5):
        gc.collect()  # what other tests left: finalizers may take several
    assert cli(*cli.tiny(*settings)).code == 0
    assert found == [[]] * 6


def test_cycles_that_a_model_does_leave_are_collected_every_few_steps() -> None:
    class Node:
        pass

    with CollectorBetweenSteps() as between:
        for step in range(1, host.STEPS + 1):
            node = Node()
            node.itself = node  # type: ignore[attr-defined]
            del node
            before = sum(type(each) is Node for each in gc.get_objects())
            assert before == step
            between.after(step)
        assert not any(type(each) is Node for each in gc.get_objects())


@pytest.mark.parametrize("enabled", [True, False])
def test_afterwards_the_collector_is_as_it_was(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    calls: list[str] = []
    monkeypatch.setattr(gc, "enable", lambda: calls.append("enable"))
    monkeypatch.setattr(gc, "disable", lambda: calls.append("disable"))
    with pytest.raises(RuntimeError), CollectorBetweenSteps():
        raise RuntimeError
    assert calls == (["disable", "enable"] if enabled else ["disable"])
