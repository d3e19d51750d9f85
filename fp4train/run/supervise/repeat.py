"""Steps that are computed twice on the same state, and must give the same bits.

The state is copied before the step, and written back for the second time. What a run trains with is
the second result, which is that of a run that repeats nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp4train import checkpoint
from fp4train.audit.fault import Fault
from fp4train.precision import Recipe
from fp4train.run.determinism import seed_model
from fp4train.run.experts import Routed
from fp4train.run.state.moments import copied, group_values, put_back
from fp4train.run.step import step_rows
from fp4train.run.supervise.audit_failures import AuditFailures
from fp4train.run.supervise.sums import BitSums, state_sums
from fp4train.shards import local
from fp4train.text import first_line

if TYPE_CHECKING:
    from fp4train.run.run import Run

STEPS: Final = "repeated steps"


class RepeatedSteps:
    """Repeats a step of `run` every `audit.repeat` steps; not the first one, in which moments
    begin.

    Attributes:
        count: steps that were compared with their repetition.
    """

    def __init__(self, run: Run, failures: AuditFailures) -> None:
        self.run = run
        self.failures = failures
        self.every = run.config.audit.repeat
        self.count = 0

    def due(self, step: int) -> bool:
        """Whether the step of this index is repeated."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def computed(self, recipe: Recipe) -> BitSums | None:
        """Compute the step that `run.step` is at once, and take it back: the sums of the bits of
        the state after it; None: some rank has no memory for it, or they could not be taken. One
        rank that has none for the step itself repeats no more.
        """
        run = self.run
        state = None
        with self.failures.guarding(STEPS):
            tensors, _ = checkpoint.flatten(run.state())
            state = {name: local(tensor).detach().clone() for name, tensor in tensors.items()}
        if not run.world.everywhere(state is not None) or state is None:
            return None  # a step is the work of all ranks
        numbers = OptimizerNumbers.of(run.optimizer)
        scaling = run.scaling()
        failed = None if run.failed is None else run.failed.clone()
        sums = None
        try:
            run.runner.step(recipe, step_rows(run))
            with self.failures.guarding(STEPS):
                sums = state_sums(run)
        except torch.OutOfMemoryError as error:
            if run.world.size > 1:
                raise  # the other ranks wait within their step
            self.failures.add(STEPS, first_line(error))
            self.every = 0
        finally:
            self._take_back(state, numbers, scaling, failed)
        return sums

    def _take_back(
        self,
        state: dict[str, Tensor],
        numbers: OptimizerNumbers,
        scaling: dict[str, dict[str, Tensor]],
        failed: Tensor | None,
    ) -> None:
        """Put the run back before the step."""
        run = self.run
        numbers.put_back(run.optimizer)
        self._write_back(state)
        run.load_scaling(scaling)
        run.failed = failed
        run.mid_update = False
        run.optimizer.zero_grad(set_to_none=True)
        if isinstance(run.model, Routed):
            run.model.fp4train_routers().seen(run.world.device)  # loads of the first time
        seed_model(run)

    def faults(self, sums: BitSums) -> list[Fault]:
        """The tensors whose bits now are not those of the first time."""
        again = sums
        with self.failures.guarding(STEPS):
            again = state_sums(self.run)
            self.count += 1
        what = "the same step on the same state gave other bits"
        return [
            Fault(layer=name, what=what) for name, total in sums.items() if again.get(name) != total
        ]

    @torch.no_grad()
    def _write_back(self, state: dict[str, Tensor]) -> None:
        tensors, _ = checkpoint.flatten(self.run.state())
        for name, tensor in tensors.items():
            if name in state:
                local(tensor).copy_(state[name])
        if self.run.pipeline is not None:
            self.run.pipeline.copy_tied()


@dataclass(frozen=True, kw_only=True)
class OptimizerNumbers:
    """What an optimizer keeps beside the numbers in the tensors of its parameters.

    Args:
        by_parameter: parameter → its entries, of which tensors are the optimizer's own.
        beside: entries under keys that are no parameters.
        groups: values of the groups of parameters (`group_values`).
    """

    by_parameter: Mapping[Tensor, Mapping[str, Any]]
    beside: Mapping[Any, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerNumbers:
        """Copies of the numbers that an optimizer has now."""
        state = optimizer.state.items()
        return cls(
            by_parameter={
                parameter: {
                    key: value if isinstance(value, Tensor) else copied(value)
                    for key, value in entries.items()
                }
                for parameter, entries in state
                if isinstance(parameter, Tensor)
            },
            beside={key: copied(value) for key, value in state if not isinstance(key, Tensor)},
            groups=group_values(optimizer),
        )

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer these numbers again, and take away what came after them."""
        for key, entries in list(optimizer.state.items()):
            if key not in self.by_parameter:
                del optimizer.state[key]
                continue
            saved = self.by_parameter[key]
            for entry in set(entries) - set(saved):
                del entries[entry]
            for entry, value in saved.items():
                entries[entry] = value if isinstance(value, Tensor) else copied(value)
        optimizer.state.update({key: copied(value) for key, value in self.beside.items()})
        put_back(optimizer, self.groups)
