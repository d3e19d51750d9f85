"""The load of experts over the ranks: after each step biases of routers follow it, and a run logs
how even it is.

Loads are numbers of assignments, summed in float64: they are exact, so a bias moves alike on every
rank, and alike for any number of ranks and microbatches.
"""

from typing import Protocol, runtime_checkable

import torch

from fp4train.models.common.router import BALANCE, DROPPED, Routers, Z
from fp4train.run.queued import Numbers, Step, Values, due
from fp4train.run.state.base import Trained


@runtime_checkable
class Routed(Protocol):
    """A model with routers, or a part of one."""

    def fp4train_routers(self) -> Routers:
        """The routers that the part has."""


def even_out(run: Trained, step: Step) -> None:
    """Balance the experts after an optimizer step, and log their load.

    | key | meaning |
    |---|---|
    | `experts/load_max`, `experts/load_min` | of all experts of all blocks, in shares of an even load |
    | `experts/dropped` | share of the assignments that no expert took |
    | `experts/balance_loss`, `experts/z_loss` | mean over blocks, without their factors |

    The load of each expert is an event, `expert load`, where the run evaluates.
    """
    model = run.model
    assert isinstance(model, Routed) and run.failed is not None
    routers = model.fp4train_routers()
    seen = run.world.summed(routers.seen(run.world.device))
    count = routers.experts
    routers.even_out(seen[:, :count], run.failed)
    numbers = Numbers(seen.flatten())

    def load() -> Values:
        table = torch.tensor(numbers.read(), dtype=torch.float64).view(-1, count + 3)
        rows = table[:, :count].sum(1).nonzero().flatten().tolist()
        if not rows:
            return {}
        loads_of_rows = table[rows]
        loads = loads_of_rows[:, :count] / loads_of_rows[:, :count].mean(1, keepdim=True)
        train = run.config.train
        sequences = train.batch_size * run.world.mesh.context
        if due(step.index + 1, run.config.eval.every, train.steps):
            listed = {
                f"blocks.{row}": [round(x, 4) for x in expert_load.tolist()]
                for row, expert_load in zip(rows, loads, strict=True)
            }
            run.record.tracker.log_event(step.index + 1, "expert load", listed)
        mean = loads_of_rows[:, count:].mean(0).float()
        return {
            "experts/load_max": float(loads.max()),
            "experts/load_min": float(loads.min()),
            "experts/dropped": float(
                loads_of_rows[:, count + DROPPED].sum() / loads_of_rows[:, :count].sum()
            ),
            "experts/balance_loss": float(mean[BALANCE]) / sequences,
            "experts/z_loss": float(mean[Z]) / sequences,
        }

    step.late.append(load)
