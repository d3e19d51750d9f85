"""Amax histories of one layer's tensors, for FP8 with delayed scaling (arXiv:2209.05433; TE's DelayedScaling).

A delayed scale comes from the amax of earlier steps. A call of the layer first takes the amax to use from the history,
then adds the tensor's own amax to it (with data parallelism, the maximum over the ranks). If the history gives 0 or a
non-finite value, the amax used last is used again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train.quantize import QuantSpec
from fp4train.quantize.scaling import delayed_amax, initial_delayed_amax, push_amax


class DelayedScaling:
    """Per tensor name ("x", "w", "dy"): amax history, float32 [history], newest first, and the amax used last."""

    def __init__(self) -> None:
        self.histories: dict[str, Tensor] = {}
        self.used: dict[str, Tensor] = {}

    def amax(self, name: str, spec: QuantSpec, tensor: Tensor, *, enter: bool) -> Tensor:
        """The amax that scales `tensor`, a 0-d float32.

        Args:
            name: "x", "w" or "dy".
            spec: its spec, with `delayed` set.
            enter: whether the tensor's own amax enters the history (in training, not in evaluation).
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
        """The histories and the last amaxes, for a checkpoint."""
        return {f"history.{k}": v for k, v in self.histories.items()} | {f"used.{k}": v for k, v in self.used.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state`."""
        self.histories = {k.removeprefix("history."): v for k, v in state.items() if k.startswith("history.")}
        self.used = {k.removeprefix("used."): v for k, v in state.items() if k.startswith("used.")}


def largest_over_ranks(amax: Tensor) -> Tensor:
    """The maximum of `amax` over the ranks of the default process group, so that all use the same scale.

    One all-reduce of four bytes per tensor that enters its history: x and dy of every layer once per microbatch, w once
    per step. Each costs the latency of a collective and negligible bandwidth; TE merges those of a whole forward or
    backward pass into one. All ranks of the group must run the same layers in the same order, as in data parallelism. A
    rank that skips a layer, or evaluates while others train, makes the others hang. Ranks with other layers (pipeline
    stages) must not be in the default group.
    """
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    return amax


def _resized(history: Tensor, length: int) -> Tensor:
    """The newest `length` entries; missing ones are 0, which does not change a maximum."""
    return torch.nn.functional.pad(history[:length], (0, max(0, length - len(history))))
