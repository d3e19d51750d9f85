"""Amaxes of a layer's tensors that are held for N steps (`QuantSpec.held`; arXiv:2609.02846).

The first call of a layer in a step measures the amax of a tensor where none is held, or where the
held one is N steps old; this call, later ones of the step (microbatches, recomputation) and those
of the next N − 1 steps take it. After the step it becomes the maximum over the ranks. Larger values
saturate. An amax that is 0 or not finite is not held: the next call measures anew.

The authors' code keeps the amax of each process, and forgets it in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train.backends import DataRanks, LayerState
from fp4train.nn.ranks import Ranks
from fp4train.quantize import Quantizer, RunStep, measure_amax


@dataclass(eq=False)
class HeldAmax:
    """The amax of one tensor, 0-d float32, and the number of the step that measured it.

    Attributes:
        joined: whether it is the maximum over the ranks.
        usable: whether it is positive and finite; None: the host has not read it yet.
    """

    amax: Tensor
    step: int
    joined: bool = True
    usable: bool | None = None

    def holds(self, steps: int, number: int) -> bool:
        """Whether it is the amax of a step of this number, where amaxes are held for so many
        steps.
        """
        if not self.step <= number < self.step + steps:
            return False
        if self.usable is None:
            self.usable = bool((self.amax > 0) & self.amax.isfinite())
        return self.usable


class HeldAmaxes(LayerState):
    """Tensor name ("x", "w", "dy") → the amax that is held, and the step that measured it.

    A call that joins by itself takes the maximum over the default process group when it measures.
    """

    kind = "held"
    tensors: ClassVar = {"amax": (torch.float32, 0, False), "step": (torch.int64, 0, True)}

    def __init__(self) -> None:
        self._amaxes: dict[str, HeldAmax] = {}

    def amax(
        self,
        name: str,
        quantizer: Quantizer,
        tensor: Tensor,
        *,
        enter: bool,
        step: RunStep,
        kernel_enters_amax: bool = False,
        ranks: Sequence[Ranks] = (),
    ) -> tuple[Tensor, None]:
        """(the amax that scales `tensor`, 0-d float32, None).

        Args:
            name: "x", "w" or "dy".
            quantizer: its quantizer, of a spec with `held` set.
            tensor: a matrix, or its amax (0-d).
            enter: whether an amax that is measured is held (in training, not in evaluation).
            step: step of the call.
            kernel_enters_amax: see `DelayedScaling.amax`; nothing is left to be done.
            ranks: groups of ranks that hold the rest of the tensor.
        """
        entry = self._amaxes.get(name)
        steps = quantizer.spec.held
        assert steps is not None
        if entry is not None and entry.holds(steps, step.number):
            return entry.amax.to(tensor.device), None
        if tensor.ndim:
            amax = measure_amax(tensor, quantizer.spec)
        else:
            amax = tensor.detach().abs().float()
        for rank_group in ranks:
            amax = rank_group.largest(amax)
        if enter:
            if not self.joined and dist.is_available() and dist.is_initialized():
                dist.all_reduce(amax, op=dist.ReduceOp.MAX)
            self._amaxes[name] = HeldAmax(amax, step.number, joined=False)
        return amax, None

    def state(self) -> dict[str, Tensor]:
        """The amaxes and the steps that measured them, for a checkpoint between two steps."""
        amaxes = {f"amax.{name}": entry.amax for name, entry in self._amaxes.items()}
        steps = {f"step.{name}": torch.tensor(entry.step) for name, entry in self._amaxes.items()}
        return amaxes | steps

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`."""
        names = [key.removeprefix("amax.") for key in state if key.startswith("amax.")]
        self._amaxes = {
            name: HeldAmax(state[f"amax.{name}"], int(state[f"step.{name}"])) for name in names
        }

    @staticmethod
    def join(states: Sequence[HeldAmaxes], ranks: DataRanks) -> None:
        """Make the amaxes that the step measured their maximum over the ranks, in one collective;
        nothing where none was measured.
        """
        measured = [
            entry
            for state in states
            for _, entry in sorted(state._amaxes.items())
            if not entry.joined
        ]
        if not measured:
            return
        largest = ranks.largest(torch.stack([entry.amax for entry in measured]))
        for entry, amax in zip(measured, largest.unbind(), strict=True):
            entry.amax = amax
            entry.joined = True
            entry.usable = None
