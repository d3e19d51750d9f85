"""train.cuda_graph: a run whose steps are recorded and replayed has the losses of one that queues every kernel.

The graph is emulated (`recorder_on_cpu`), the loop around it is the real one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from command_line import Cli, events, losses
from recorder_on_cpu import RecorderOnCpu
from torch import nn

import fp4train.run.build as build
from fp4train.quantize import cpu
from fp4train.quantize.quantizer import quantizer
from fp4train.run.step_graph import WARM_UP, StepGraph

EXACT = ("optim.lr=0.0078125", "schedule=wsd", "schedule.warmup=4", "schedule.cooldown=7", "schedule.decay=linear")
"""Learning rates that are float32 numbers, as a recorded step reads them: those of eager steps are doubles."""
SMALL = ("model.layers=1", "policy=all", "train.steps=12", "train.microbatch=2", "train.seq_len=16", *EXACT)

Recorders = list[RecorderOnCpu]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], Recorders]]:
    """`recorded(True)`: the steps of the next run are recorded on the CPU; what recorded them."""
    # The C kernels are no operators of torch: a recorder of operators would not see them.
    monkeypatch.setattr(cpu, "why_not", lambda spec, device: "not seen by the recorder")
    monkeypatch.setattr("fp4train.backends.emulate.widening.WITHOUT_INSTRUCTIONS", frozenset({torch.bfloat16}))
    quantizer.cache_clear()
    assemble, on, made = build.assemble, [False], []

    def recorder(device: torch.device) -> RecorderOnCpu:
        made.append(RecorderOnCpu(device))
        return made[-1]

    def assembled(*args: Any) -> Any:
        run = assemble(*args)
        if on[0]:
            run.graph = StepGraph(run, recorder)
        return run

    monkeypatch.setattr(build, "assemble", assembled)

    def turn(wanted: bool) -> Recorders:
        on[0] = wanted
        made.clear()
        return made

    yield turn
    quantizer.cache_clear()


@pytest.mark.parametrize(
    "recipe", ["bf16", "mxfp8", "fp8_current", "fp8_delayed", "nvfp4"]
)
def test_a_recorded_run_equals_an_eager_one_in_every_bit(
    cli: Cli, recorded: Callable[[bool], Recorders], recipe: str
) -> None:
    options = (*SMALL, f"recipe={recipe}", "phases=none", "eval.every=3", "eval.errors_every=6", "checkpoint.every=4")
    recorded(False)
    assert cli("run.name=eager", *options).code == 0
    recorders = recorded(True)
    assert cli("run.name=graph", *options).code == 0
    assert losses("runs/graph") == losses("runs/eager")
    assert len(recorders) == 1
    # Steps 6 and 12 are measured, with hooks on what the model computes: no graph has them.
    assert recorders[0].replays == 12 - WARM_UP - 2
