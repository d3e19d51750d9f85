"""The amax history of one layer's tensors, for FP8 with delayed scaling (arXiv:2209.05433; TE's DelayedScaling).

A delayed scale comes from the amax of earlier steps: a call of the layer takes the amax to use from the history as it
is, then enters the tensor's own, or the largest of all data-parallel ranks'. Where the history gives 0 or nothing
finite, the amax used last stays in force.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train.quantize import QuantSpec
from fp4train.quantize.scaling import delayed_amax, initial_delayed_amax, push_amax


class DelayedScaling:
    """By tensor name ("x", "w", "dy"): amax history, float32 [history], newest first, and the amax used last."""

    def __init__(self) -> None:
        self.histories: dict[str, Tensor] = {}
        self.used: dict[str, Tensor] = {}

    def amax(self, name: str, spec: QuantSpec, tensor: Tensor, *, enter: bool) -> Tensor:
        """The amax that scales `tensor`, a 0-d float32.

        Args:
            name: which of the layer's tensors.
            spec: its spec, with `delayed` set.
            enter: whether the history takes the tensor's own amax (training, not evaluation).
        """
        assert spec.delayed is not None
        history, previous = self.histories.get(name), self.used.get(name)
        if history is None or previous is None:
            history = torch.zeros(spec.delayed.history, device=tensor.device)
            previous = torch.tensor(initial_delayed_amax(spec), device=tensor.device)
        history, previous = _resized(history, spec.delayed.history).to(tensor.device), previous.to(tensor.device)
        amax = delayed_amax(history, previous, spec.delayed)
        if enter:
            own = tensor.detach().abs().amax().float() if tensor.numel() else amax.new_zeros(())
            self.histories[name], self.used[name] = push_amax(history, largest_over_ranks(own)), amax
        return amax

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        return {f"history.{k}": v for k, v in self.histories.items()} | {f"used.{k}": v for k, v in self.used.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.histories = {k.removeprefix("history."): v for k, v in state.items() if k.startswith("history.")}
        self.used = {k.removeprefix("used."): v for k, v in state.items() if k.startswith("used.")}


def largest_over_ranks(amax: Tensor) -> Tensor:
    """The maximum of `amax` over the ranks of the default process group, so that all of them scale alike.

    One all-reduce of four bytes for each tensor that enters its history: x and dy of every layer once a microbatch, w
    once a step. Each costs a collective's latency and no bandwidth to speak of; TE joins those of a whole forward or
    backward pass into one. All ranks of the group must run the same layers in the same order, as data parallelism does:
    one that leaves a layer out, or evaluates while others train, leaves them waiting. Ranks that hold other layers
    (pipeline stages) must not be in the default group.
    """
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    return amax


def _resized(history: Tensor, length: int) -> Tensor:
    """The newest `length` entries; ones that are missing are 0, which no maximum notices."""
    return torch.nn.functional.pad(history[:length], (0, max(0, length - len(history))))
