"""Amax histories of a model's tensors, for FP8 with delayed scaling (arXiv:2209.05433; TE's
DelayedScaling).

A delayed scale comes from the amax of earlier steps. The first call of a layer in a step takes the
amax to use from the history; all calls of that step use it. The tensor's own amax enters the
history once per step: the maximum over the calls of the step (microbatches) and, with data
parallelism, over the ranks. So a step's scales do not depend on how its batch is split. If the
history gives 0 or a non-finite value, the amax used last is used again.

The histories of a model roll together (`Stack`): the first amax that enters in a step takes the
amaxes to use of all of them and makes room for the new ones, in the kernels of one. A call of a
layer then reads one number, and its kernel writes one. A history in which nothing enters stays as
it was; it rolls alone when something does again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp4train.backends import DataRanks, LayerState
from fp4train.nn.held_amaxes import HeldAmaxes
from fp4train.nn.ranks import Ranks
from fp4train.quantize import Quantizer, QuantSpec, RunStep
from fp4train.quantize.scaling import delayed_amax, initial_delayed_amax
from fp4train.quantize.spec import Delayed

StackKind = tuple[Delayed, torch.device]
Stacks = dict[StackKind, "Stack"]
"""Stacks of a model."""


class Stack(dict["AmaxHistory", None]):
    """The histories of a model that roll together: those of one length and algorithm on one
    device.
    """

    def __reduce__(self) -> tuple[type[Stack], tuple[()]]:
        """Copies are empty: a copied history enters when it rolls."""
        return Stack, ()


class AmaxHistory:
    """The amax history of one tensor, float32 [H], newest first, and the amax used last, 0-d.

    Attributes:
        newest: history[0]; step: that in which an amax entered last.
        coming: (step, [history, newest, used]) of a step that began, and in which nothing has
            entered yet.
        given: whether the tensors were handed out, so that they are not written any more.
    """

    def __init__(
        self, kind: StackKind, stack: Stack, history: Tensor, used: Tensor, step: RunStep | None
    ) -> None:
        self.kind = kind
        self.stack = stack
        self.load(history, used, step)

    def load(self, history: Tensor, used: Tensor, step: RunStep | None = None) -> None:
        """Take over these tensors."""
        self.history = history
        self.newest = history[0]
        self.used = used
        self.given = True
        self.step = step
        self.coming: tuple[RunStep | None, Sequence[Tensor]] = (None, ())

    def enter(self, step: RunStep | None) -> None:
        """Let an amax be joined to `newest`, which is 0 before the first one of the step.

        The first one of all histories begins the step for those in which an amax entered since they
            rolled last: it
        takes the amaxes to use, and makes room for the new ones.
        """
        if step != self.step:
            if self.coming[0] != step:
                self.stack[self] = None
                rolled = []
                for member in self.stack:
                    if member is self or (member.coming[0] is None and member.step != step):
                        rolled.append(member)
                history, used = map(
                    torch.stack, zip(*map(attrgetter("history", "used"), rolled), strict=True)
                )
                used = delayed_amax(history, used, self.kind[0])
                history = F.pad(history[:, :-1], (1, 0))
                for member, *tensors in zip(
                    rolled, history.unbind(), history[:, 0].unbind(), used.unbind(), strict=True
                ):
                    member.coming = step, tensors
            self.step, (self.history, self.newest, self.used) = self.coming
        elif self.given:
            self.load(self.history.clone(), self.used, step)
        self.coming = (None, ())
        self.given = False


class DelayedScaling(LayerState):
    """Tensor name ("x", "w", "dy") → amax history, float32 [history], newest first, and the amax
    used last.

    A call that joins by itself takes the maximum over the default process group, for loops that are
    not fp4train's: one all-reduce of four bytes per call and tensor. All ranks of the group must
    run the same layers in the same order, as in data parallelism. A rank that skips a layer, or
    evaluates while others train, makes the others hang. Ranks with other layers (pipeline stages)
    must not be in that group.
    """

    kind = "scaling"
    prefixed = False
    tensors: ClassVar = {"history": (torch.float32, 1, False), "used": (torch.float32, 0, False)}

    def __init__(self) -> None:
        self._histories: dict[str, AmaxHistory] = {}
        self.common: Stacks = {}

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
    ) -> tuple[Tensor, Tensor | None]:
        """(the amax that scales `tensor`, a 0-d float32; the entry of the history that the caller
        makes the larger of itself and the tensor's own amax, None: nothing is left to be done).

        Args:
            name: "x", "w" or "dy".
            quantizer: its quantizer, of a spec with `delayed` set.
            tensor: a matrix, or its amax (0-d).
            enter: whether the tensor's own amax enters the history (in training, not in
                evaluation).
            step: step of the call; the newest entry is that of the step in which an amax entered
                last.
            kernel_enters_amax: whether the caller can do so.
            ranks: ranks that hold the rest of the tensor; a history is joined over all ranks after
                the step.
        """
        spec = quantizer.spec
        assert spec.delayed is not None
        history = self._histories.get(name)
        kind = (spec.delayed, tensor.device)
        if history is None or history.kind != kind:
            history = self._fitting(history, spec, kind)
        if not enter:
            if history.step == step:
                return history.used, None
            return delayed_amax(history.history, history.used, spec.delayed), None
        self._histories[name] = history
        history.enter(step)
        alone = self.joined or not (dist.is_available() and dist.is_initialized())
        if kernel_enters_amax and alone and tensor.numel():
            return history.used, history.newest
        if tensor.numel():
            amax_tensor = tensor.detach()
        else:
            amax_tensor = tensor.new_zeros(())
        if amax_tensor.ndim:
            amax_tensor = quantizer.amax(amax_tensor, into=history.newest if alone else None)
        else:
            amax_tensor = amax_tensor.abs().float()
        if not alone:
            dist.all_reduce(amax_tensor, op=dist.ReduceOp.MAX)
        if amax_tensor is not history.newest:
            torch.maximum(history.newest, amax_tensor, out=history.newest)
        return history.used, None

    def _fitting(
        self, earlier: AmaxHistory | None, spec: QuantSpec, kind: StackKind
    ) -> AmaxHistory:
        """A new history of this kind, with the newest entries of `earlier`; missing ones are 0."""
        delayed, device = kind
        if earlier is None:
            history = torch.zeros(1)
        else:
            history = earlier.history[: delayed.history]
        if earlier is None:
            used = torch.tensor(initial_delayed_amax(spec))
        else:
            used = earlier.used
        history = F.pad(history, (0, delayed.history - len(history))).to(device)
        stack = self.common.setdefault(kind, Stack())
        last = None if earlier is None else earlier.step
        return AmaxHistory(kind, stack, history, used.to(device), last)

    def state(self) -> dict[str, Tensor]:
        """The histories and the last amaxes, for a checkpoint; no later step writes into them."""
        for history in self._histories.values():
            history.given = True
        histories = {
            f"history.{name}": history.history for name, history in self._histories.items()
        }
        return histories | {
            f"used.{name}": history.used for name, history in self._histories.items()
        }

    def entered(self) -> dict[str, RunStep | None]:
        """Name of a history in `state` → the step in which an amax entered last."""
        return {f"history.{name}": history.step for name, history in self._histories.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`; no amax of the coming step has entered yet."""
        histories = self._histories
        self._histories = {}
        for name in [key.removeprefix("history.") for key in state if key.startswith("history.")]:
            history = state[f"history.{name}"]
            used = state[f"used.{name}"]
            earlier = histories.get(name)
            kind = Delayed(history=len(history)), history.device  # until a spec says more
            if earlier is None or (earlier.kind[0].history, earlier.kind[1]) != (
                len(history),
                history.device,
            ):
                earlier = AmaxHistory(kind, Stack(), history, used, None)
            earlier.load(history, used)
            self._histories[name] = earlier

    @staticmethod
    def join(scalings: Sequence[DelayedScaling], ranks: DataRanks) -> None:
        """Make the newest entries of all histories their maximum over the ranks, in one
        collective.
        """
        histories = [
            history for scaling in scalings for _, history in sorted(scaling._histories.items())
        ]
        if not histories:
            return
        for history in histories:
            history.enter(history.step)
        newest = [history.newest for history in histories]
        # What is not a number is infinite from here on: a maximum of NaNs is not the same in every
        # library.
        joined = ranks.largest(torch.stack(newest).nan_to_num(nan=torch.inf, posinf=torch.inf))
        torch._foreach_copy_(newest, joined.unbind())


EARLIER_AMAXES = (DelayedScaling.kind, HeldAmaxes.kind)
"""The kinds of states that give the amaxes of earlier steps; a layer's recipe has one of them."""


class MemberScaling:
    """The part of a group's amax histories, or held amaxes, that one of its weights has: its
    tensors are "x.3", "w.3", "dy.3".

    Args:
        member: the weight's place in the whole group.
        elsewhere: places of weights that other ranks have. An amax of 0 enters their histories with
            this weight's, so that all ranks have the same histories once they are joined.
    """

    def __init__(
        self, scaling: DelayedScaling | HeldAmaxes, member: int, elsewhere: Sequence[int] = ()
    ) -> None:
        self._scaling = scaling
        self._member = member
        self._elsewhere = elsewhere

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
    ) -> tuple[Tensor, Tensor | None]:
        """See `DelayedScaling.amax`."""
        for other in self._elsewhere if enter else ():
            self._scaling.amax(
                f"{name}.{other}", quantizer, tensor.new_empty(0), enter=True, step=step
            )
        name = f"{name}.{self._member}"
        return self._scaling.amax(
            name,
            quantizer,
            tensor,
            enter=enter,
            step=step,
            kernel_enters_amax=kernel_enters_amax,
            ranks=ranks,
        )
