"""Amax histories of one layer's tensors, for FP8 with delayed scaling (arXiv:2209.05433; TE's DelayedScaling).

A delayed scale comes from the amax of earlier steps. The first call of a layer in a step takes the amax to use from the
history; all calls of that step use it. The tensor's own amax enters the history once per step: the maximum over the
calls of the step (microbatches) and, with data parallelism, over the ranks. So a step's scales do not depend on how its
batch is split. If the history gives 0 or a non-finite value, the amax used last is used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train.quantize import QuantSpec, quantizer
from fp4train.quantize.scaling import delayed_amax, initial_delayed_amax, push_amax

Position = tuple[int, int]
"""Seed and step."""


class DataRanks(Protocol):
    """The ranks that train a model: elementwise reductions, which every rank calls."""

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over all ranks."""
        ...

    def summed_over_data(self, x: Tensor) -> Tensor:
        """The sum over the ranks with other tokens."""
        ...


class DelayedScaling:
    """Per tensor name ("x", "w", "dy"): amax history, float32 [history], newest first, and the amax used last.

    Attributes:
        joined: the loop joins the newest entries of all layers over the ranks (`join`); else each call of a
            layer takes the maximum over the default process group by itself.
    """

    name: ClassVar = "scaling"
    tensors: ClassVar = {"history": (torch.float32, 1, False), "used": (torch.float32, 0, False)}
    """Saved tensors: beginning of the name → (dtype, dimensions, whether it must be finite)."""

    def __init__(self) -> None:
        self.histories: dict[str, Tensor] = {}
        self.used: dict[str, Tensor] = {}
        self.joined = False
        self._entered: dict[str, Position] = {}

    def amax(self, name: str, spec: QuantSpec, tensor: Tensor, *, enter: bool, position: Position) -> Tensor:
        """The amax that scales `tensor`, a 0-d float32.

        Args:
            name: "x", "w" or "dy".
            spec: its spec, with `delayed` set.
            enter: whether the tensor's own amax enters the history (in training, not in evaluation).
            position: the step; the newest entry is that of the step in which an amax entered last.
        """
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
            own = _amax(tensor.detach(), spec) if tensor.numel() else amax.new_zeros(())
            own = own if self.joined else largest_over_ranks(own)
            if again:
                history, own = history[1:], torch.maximum(own, history[0])
                self.histories[name] = torch.cat((own.reshape(1), history))
            else:
                self.histories[name], self.used[name] = push_amax(history, own), amax
                self._entered[name] = position
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
        """Make the newest entries of all histories their maximum over the ranks, in one collective.

        Args:
            each: of all layers; every rank gives the same ones in the same order, after the last backward of a step.
        """
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

    def amax(self, name: str, spec: QuantSpec, tensor: Tensor, *, enter: bool, position: Position) -> Tensor:
        """See `DelayedScaling.amax`."""
        for other in self._elsewhere if enter else ():
            none = tensor.new_zeros((), dtype=torch.float32)
            self._scaling.amax(f"{name}.{other}", spec, none, enter=True, position=position)
        return self._scaling.amax(f"{name}.{self._member}", spec, tensor, enter=enter, position=position)


def largest_over_ranks(amax: Tensor) -> Tensor:
    """The maximum of `amax` over the ranks of the default process group, so that all use the same scale.

    For loops that are not fp4train's: one all-reduce of four bytes per call of a layer and tensor. All ranks of the
    group must run the same layers in the same order, as in data parallelism. A rank that skips a layer, or evaluates
    while others train, makes the others hang. Ranks with other layers (pipeline stages) must not be in that group.
    """
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    return amax


def _amax(tensor: Tensor, spec: QuantSpec) -> Tensor:
    """The largest magnitude of a matrix or, 0-d, of one that is measured already; float32, NaN if there is one."""
    return quantizer(spec, tensor.device.type).amax(tensor) if tensor.ndim else tensor.abs().float()


def _resized(history: Tensor, length: int) -> Tensor:
    """The newest `length` entries; missing ones are 0, which does not change a maximum."""
    return torch.nn.functional.pad(history[:length], (0, max(0, length - len(history))))
