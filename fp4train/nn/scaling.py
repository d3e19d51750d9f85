"""Amax histories of one layer's tensors, for FP8 with delayed scaling (arXiv:2209.05433; TE's DelayedScaling).

A delayed scale comes from the amax of earlier steps. The first call of a layer in a step takes the amax to use from the
history; all calls of that step use it. The tensor's own amax enters the history once per step: the maximum over the
calls of the step (microbatches) and, with data parallelism, over the ranks. So a step's scales do not depend on how its
batch is split. If the history gives 0 or a non-finite value, the amax used last is used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train.backends import DataRanks, LayerState
from fp4train.quantize import Quantizer
from fp4train.quantize.scaling import delayed_amax, initial_delayed_amax

Position = tuple[int, int]
"""Seed and step."""


class DelayedScaling(LayerState):
    """Per tensor name ("x", "w", "dy"): amax history, float32 [history], newest first, and the amax used last.

    A call that joins by itself takes the maximum over the default process group, for loops that are not fp4train's: one
    all-reduce of four bytes per call and tensor. All ranks of the group must run the same layers in the same order, as
    in data parallelism. A rank that skips a layer, or evaluates while others train, makes the others hang. Ranks with
    other layers (pipeline stages) must not be in that group.
    """

    kind, prefixed = "scaling", False
    tensors: ClassVar = {"history": (torch.float32, 1, False), "used": (torch.float32, 0, False)}

    def __init__(self) -> None:
        self.histories: dict[str, Tensor] = {}
        self.used: dict[str, Tensor] = {}
        self._entered: dict[str, Position] = {}

    def amax(self, name: str, quantizer: Quantizer, tensor: Tensor, *, enter: bool, position: Position) -> Tensor:
        """The amax that scales `tensor`, a 0-d float32.

        Args:
            name: "x", "w" or "dy".
            quantizer: its quantizer, of a spec with `delayed` set.
            tensor: a matrix, or its amax (0-d).
            enter: whether the tensor's own amax enters the history (in training, not in evaluation).
            position: the step; the newest entry is that of the step in which an amax entered last.
        """
        spec = quantizer.spec
        assert spec.delayed is not None
        history, previous = self.histories.get(name), self.used.get(name)
        if history is None or previous is None:
            history = torch.zeros(spec.delayed.history, device=tensor.device)
            previous = torch.tensor(initial_delayed_amax(spec), device=tensor.device)
        if len(history) != spec.delayed.history:
            history = _resized(history, spec.delayed.history)
        history, previous = history.to(tensor.device), previous.to(tensor.device)
        again = self._entered.get(name) == position
        amax = previous if again else delayed_amax(history, previous, spec.delayed)
        if enter:
            own = tensor.detach() if tensor.numel() else amax.new_zeros(())
            own = quantizer.amax(own) if own.ndim else own.abs().float()
            if not self.joined and dist.is_available() and dist.is_initialized():
                dist.all_reduce(own, op=dist.ReduceOp.MAX)
            if again:
                own, older = torch.maximum(own, history[0]), history[1:]
            else:
                older, self.used[name], self._entered[name] = history[:-1], amax, position
            self.histories[name] = torch.cat((own.reshape(1), older))
        return amax

    def state(self) -> dict[str, Tensor]:
        """The histories and the last amaxes, for a checkpoint."""
        return {f"history.{k}": v for k, v in self.histories.items()} | {f"used.{k}": v for k, v in self.used.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`; no amax of the coming step has entered yet."""
        self._entered.clear()
        self.histories = {k.removeprefix("history."): v for k, v in state.items() if k.startswith("history.")}
        self.used = {k.removeprefix("used."): v for k, v in state.items() if k.startswith("used.")}

    @staticmethod
    def join(each: Sequence[DelayedScaling], ranks: DataRanks) -> None:
        """Make the newest entries of all histories their maximum over the ranks, in one collective."""
        entries = [(scaling, name) for scaling in each for name in sorted(scaling.histories)]
        if not entries:
            return
        newest = torch.stack([scaling.histories[name][0] for scaling, name in entries])
        # What is not a number is infinite from here on: a maximum of NaNs is not the same in every library.
        joined = ranks.largest(newest.nan_to_num(nan=torch.inf, posinf=torch.inf))
        for (scaling, name), amax in zip(entries, joined.unbind(), strict=True):
            scaling.histories[name] = torch.cat((amax.reshape(1), scaling.histories[name][1:]))


class MemberScaling:
    """The part of a group's amax histories that one of its weights has: its tensors are "x.3", "w.3", "dy.3".

    Args:
        member: the weight's place in the whole group.
        elsewhere: places of weights that other ranks have. An amax of 0 enters their histories with this weight's, so
            that all ranks have the same histories once they are joined.
    """

    def __init__(self, scaling: DelayedScaling, member: int, elsewhere: Sequence[int] = ()) -> None:
        self._scaling, self._member, self._elsewhere = scaling, member, elsewhere

    def amax(self, name: str, quantizer: Quantizer, tensor: Tensor, *, enter: bool, position: Position) -> Tensor:
        """See `DelayedScaling.amax`."""
        for other in self._elsewhere if enter else ():
            none = tensor.new_zeros((), dtype=torch.float32)
            self._scaling.amax(f"{name}.{other}", quantizer, none, enter=True, position=position)
        return self._scaling.amax(f"{name}.{self._member}", quantizer, tensor, enter=enter, position=position)


def _resized(history: Tensor, length: int) -> Tensor:
    """The newest `length` entries; missing ones are 0, which does not change a maximum."""
    return torch.nn.functional.pad(history[:length], (0, max(0, length - len(history))))
