"""One call of a layer, or of a group of weights: what its products need besides tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fp4train.backends import LayerState, Prepared
from fp4train.nn.engine import Executor
from fp4train.nn.fused_weights import FusedWeights
from fp4train.nn.held_amaxes import HeldAmaxes
from fp4train.nn.ranks import Ranks
from fp4train.nn.scaling import DelayedScaling, MemberScaling
from fp4train.nn.weight_form import WeightForm
from fp4train.precision.context import backward_pass
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import Position, Quantizer, RunStep
from fp4train.shards import is_sharded

Counts = Sequence[int]
"""The rows of x that each weight of a group multiplies, in turn."""


ChannelCalls: TypeAlias = "tuple[tuple[Tensor, LayerCall], ...]"
"""Channels and call of each part of the in features."""


class PreparedForms(Protocol):
    """The prepared forms of one weight [N, K] while it does not change
    (`nn.weights.PreparedWeights`).

    keep: whether they are kept: not where the weight itself is freed.
    """

    keep: bool

    def part(self, key: Hashable) -> PreparedForms:
        """Those of a part of the weight, or of one weight of a group."""

    def prepared(
        self, w_NK: Tensor, form: WeightForm, call: LayerCall, *, other: Tensor | None = None
    ) -> Prepared:
        """The weight in the given form; `other` as for `PreparedWeights`."""

    def delayed_amax(
        self, w_NK: Tensor, quantizer: Quantizer, call: LayerCall
    ) -> tuple[Tensor, Tensor | None]:
        """`DelayedScaling.amax` of the weight."""


class TokenCount:
    """The tokens that a layer was given within a step: the offset of a call whose context has no
    `token_offset`.

    So calls of one step, over microbatches or of a weight that a model uses twice, draw different
    random bits.
    """

    __slots__ = ("_calls", "_step", "_tokens")

    def __init__(self) -> None:
        self._step: RunStep | None = None
        self._calls = self._tokens = 0

    def offset(self, step: RunStep, tokens: int, name: str) -> int:
        """Index of the first token of a training call of `tokens` tokens.

        A backward pass that enters a context of its own repeats a call of its forward pass, and is
        not counted.

        Raises:
            RuntimeError: it may repeat any of several calls.
        """
        if self._step != step:
            self._step = step
            self._calls = 0
            self._tokens = 0
        if backward_pass() != -1:
            if self._calls > 1:
                raise RuntimeError(
                    f"layer {name} is called in backward by a context of its own, after "
                    f"{self._calls} calls in this "
                    "step: which of them it repeats, and with which random bits, is not "
                    "known. Give autocast a "
                    "token_offset, or recompute with fp4train.precision.recompute or "
                    "recompute_contexts."
                )
            return 0
        offset = self._tokens
        self._calls = self._calls + 1
        self._tokens = offset + tokens
        return offset


class GradientDtypes(NamedTuple):
    """The dtypes of the gradients that backward computes; None for those it does not."""

    x: torch.dtype | None = None
    w: torch.dtype | None = None
    bias: torch.dtype | None = None


_NO_GRADIENTS = GradientDtypes()


@dataclass(eq=False, slots=True)
class LayerCall:
    """The state of one call, shared by forward and backward; tensors are passed separately.

    Args:
        executor: executor of the layer's GEMMs.
        position: the place of its tokens in the run.
        layer_key: the layer's part of the random key.
        weights: the layer's prepared weights; of this call alone, where `constant` is None.
        states: the layer's states, by name.
        scaling: the layer's amax histories, or held amaxes; None: no operand takes the amax of an
            earlier step.
        constant: forms of weights that calls share; None: nothing.
        training: whether amaxes enter their histories.
        shared: the context's cache of forms that several layers read; None: this x is no other
            layer's, is that of a compiled graph, which reuses the memory of its tensors, or is no
            result of autograd in a loop without `constant`.
        fused: the weights that share a global scale with this layer's.
        parameter: the parameter whose shard w is; None: w is no shard.
        gradients: gradients that backward computes; set by each forward pass.
        amaxes: the amaxes of this call that `scaling` gave, by tensor.
        member: the place of the weight in the layer's group.
        parts: the parts of the in features that are multiplied apart; empty: all are
            multiplied together; None: nobody has decided yet.
    """

    executor: Executor
    position: Position
    layer_key: int
    weights: PreparedForms
    states: Mapping[str, LayerState]
    scaling: DelayedScaling | HeldAmaxes | MemberScaling | None
    constant: ConstantWeights | None
    training: bool
    shared: dict[str, Any] | None
    fused: FusedWeights
    parameter: Tensor | None = None
    gradients: GradientDtypes = _NO_GRADIENTS
    amaxes: dict[str, Tensor] | None = None
    member: int = 0
    parts: ChannelCalls | None = None

    def wants(
        self, needs_grad: Sequence[bool], x: Tensor, w: Tensor, bias: Tensor | None = None
    ) -> None:
        """See `engine.Call`."""
        self.gradients = GradientDtypes(
            x.dtype if needs_grad[0] else None,
            w.dtype if needs_grad[1] else None,
            bias.dtype if bias is not None and needs_grad[2] else None,
        )
        # Memory of the caller may be written between two calls; what autograd made is not.
        if self.constant is None and x.grad_fn is None:
            self.shared = None

    def summed(self, w: Tensor) -> Tensor:
        """See `engine.Call`."""
        if self.parameter is not None and is_sharded(self.parameter):
            return self.parameter
        return w

    def amax(
        self,
        name: str,
        quantizer: Quantizer,
        tensor: Tensor,
        *,
        kernel_enters_amax: bool = False,
        ranks: Sequence[Ranks] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """`DelayedScaling.amax` of x or dy, the same for both forms of the tensor."""
        assert self.scaling is not None
        if self.amaxes is None:
            self.amaxes = {}
        if name in self.amaxes:
            return self.amaxes[name], None
        step = self.position.step
        amaxes = self.scaling.amax(
            name,
            quantizer,
            tensor,
            enter=self.training,
            step=step,
            kernel_enters_amax=kernel_enters_amax,
            ranks=ranks,
        )
        self.amaxes[name] = amaxes[0]
        return amaxes


@dataclass(eq=False, slots=True)
class GroupCall:
    """One call of a group of weights.

    Args:
        executor: executor of the group.
        calls: the call of each weight; none if a backend runs them together.
        counts: the rows of x of each.
        states: the layer's states, by name.
        shape: that of all weights, [E, N, K].
    """

    executor: Executor
    calls: Sequence[LayerCall]
    counts: Counts
    states: Mapping[str, LayerState]
    gradients: GradientDtypes = _NO_GRADIENTS
    shape: tuple[int, ...] = ()

    def wants(
        self, needs_grad: Sequence[bool], x: Tensor, w_ENK: Tensor, bias: Tensor | None
    ) -> None:
        """See `LayerCall.wants`."""
        for call in self.calls:
            call.wants(needs_grad, x, w_ENK, bias)
        self.gradients = self.calls[0].gradients
        self.shape = w_ENK.shape

    def summed(self, w_ENK: Tensor) -> Tensor | None:
        """See `engine.Call`; autograd adds the gradients of experts that ranks cut."""
        return w_ENK if self.calls[0].executor.adds else None

    def used(self) -> Iterator[tuple[LayerCall, slice]]:
        """The calls that are made, each with its rows of x."""
        start = 0
        for call, count in zip(self.calls, self.counts, strict=True):
            if count or call.executor.runs_idle:
                yield call, slice(start, start + count)
            start += count
