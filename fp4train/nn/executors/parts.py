"""The GEMMs of a layer with outlier channels: their norms, the choice, and the call that multiplies
them apart.

A group of weights has one choice, from the norms of the rows of all of them: its state is that of
one layer.

The state of a layer is the sum over the recorded steps of the norm of each input channel, and the
number of steps. A step's norm is √(Σ x²) over all its tokens: over the calls of the step
(microbatches) and, with data parallelism, over the ranks. The calls of the last recorded step
multiply all channels together; those of later steps in two parts. The channels of a part are in the
order of their sums, the largest first, of equal sums the first.

The random bits of both parts are those of one layer whose channels are in this order: the outlier
channels lie behind the others. So no two elements of w or x share their bits, and dy, which both
parts multiply, is rounded alike in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train.backends import DataRanks, LayerState
from fp4train.nn.call import (
    Biases,
    CallSource,
    Counts,
    Executor,
    GradientSum,
    GroupCallSource,
    LayerCall,
    Weights,
)
from fp4train.nn.executors.gemms import Gemms, Gradients, LayerFunction, Prepare, SavedInput
from fp4train.nn.gathered import values_of
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.context import Context, State
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.recipe import OutlierChannels
from fp4train.quantize import RunStep

_SPREAD = 8
"""Neighbouring columns that share a draw of the random generator: a part begins at a multiple of
it.
"""


class ChannelNorms(LayerState):
    """The norms of one layer's input channels, and the channels chosen by them.

    A call that joins by itself sums the squares over the default process group.
    """

    kind = "outliers"
    tensors: ClassVar = {"norms": (torch.float64, 1, True), "steps": (torch.int64, 0, True)}

    def __init__(self) -> None:
        self._norms: Tensor | None = None
        self._squares: Tensor | None = None
        self._steps = 0
        self._step: RunStep | None = None
        self._open = False
        self._order: Tensor | None = None

    def chosen(self, outliers: OutlierChannels, step: RunStep) -> bool:
        """Whether calls of a step multiply outlier channels apart."""
        return self._steps >= outliers.steps and step != self._step

    def record(self, x_MK: Tensor, step: RunStep) -> None:
        """The tokens of one call of a step enter the norms."""
        squares = x_MK.detach().float().square().sum(0, dtype=torch.float64)
        if not self.joined and dist.is_available() and dist.is_initialized():
            dist.all_reduce(squares)
        if step == self._step and self._squares is not None:
            self._squares = self._squares + squares
        else:
            self._norms = self._sums(x_MK)
            self._squares = squares
            self._steps = self._steps + 1
            self._step = step
        self._open = True
        self._order = None

    def channels(self, count: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
        """(the other channels, the `count` outlier channels), int64 on `device`."""
        if self._order is None or self._order.device.type != torch.device(device).type:
            self._order = self._sums().to(device).argsort(descending=True, stable=True)
        return self._order[count:], self._order[:count]

    def _sums(self, like: Tensor | None = None) -> Tensor:
        """The sums of the norms, float64 [K], the step that is being recorded included."""
        if self._norms is None:
            assert like is not None
            return torch.zeros(like.shape[1], dtype=torch.float64, device=like.device)
        if like is None:
            norms = self._norms
        else:
            norms = self._norms.to(like.device)
        if self._squares is None:
            return norms
        return norms + self._squares.to(norms.device).sqrt()

    def state(self) -> dict[str, Tensor]:
        """The sums and the number of steps, for a checkpoint between two steps."""
        if self._norms is None:
            return {}
        return {"norms": self._sums(), "steps": torch.tensor(self._steps)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`; no call of the coming step is recorded yet."""
        self._norms = state.get("norms")
        self._squares = None
        self._steps = int(state["steps"]) if "steps" in state else 0
        self._step = None
        self._open = False
        self._order = None

    @staticmethod
    def join(states: Sequence[ChannelNorms], ranks: DataRanks) -> None:
        """Sum the squares of a step over the data ranks, in one collective; nothing where no call
        was recorded.
        """
        recorded = [
            (norms, norms._squares)
            for norms in states
            if norms._open and norms._squares is not None
        ]
        if not recorded:
            return
        joined = ranks.summed_over_data(torch.cat([squares for _, squares in recorded]))
        parts = torch.split(joined, [len(squares) for _, squares in recorded])
        for (norms, squares), total in zip(recorded, parts, strict=True):
            norms._squares = total.to(squares.device)
            norms._open = False
            norms._order = None


@dataclass(eq=False, slots=True)
class SplitCall(LayerCall):
    """A call that multiplies parts of the in features; `parts`: (channels, call) of each."""

    parts: tuple[tuple[Tensor, LayerCall], ...] = ()


class SplitGemms(Gemms):
    """The GEMMs of a layer whose outlier channels are chosen, those of the other channels first.

    The products of both parts are added in float32, and the bias to their sum.
    """

    def __init__(
        self, plan: LayerPlan, device: str, shard: LayerShard | None, *, sums: GradientSum
    ) -> None:
        Executor.__init__(self, plan, device, shard, sums=sums)
        dense, top = plan.channel_parts
        self.count = top.layer.in_features
        begin = -(-dense.layer.in_features // _SPREAD) * _SPREAD
        if shard is None:
            behind = None
        else:
            behind = replace(shard, first=begin)
        self.of_parts = (
            Gemms(dense, device, shard, sums=sums),
            Gemms(top, device, behind, sums=sums),
        )
        if shard is None:
            self.of_parts[1].begin_at(begin)
        for gemms in self.of_parts:
            gemms.y_dtype = torch.float32  # a term of a sum is not rounded

    def call(
        self, call: LayerCall, channels: Sequence[Tensor], source: CallSource, *, keep: bool
    ) -> SplitCall:
        """`call`, whose two parts multiply these channels; `keep`: whether prepared weights are
        kept for the step.
        """
        parts = []
        for number, executor in enumerate(self.of_parts):
            if keep:
                weights = source.prepared((call.member, self.count, number))
            else:
                weights = PreparedWeights()
            parts.append(
                (channels[number], replace(call, executor=executor, weights=weights, shared=None))
            )
        values = {item.name: getattr(call, item.name) for item in fields(LayerCall)} | {
            "executor": self
        }
        return SplitCall(**values, parts=tuple(parts))

    def forward(
        self,
        x_MK: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        call: LayerCall,
        prepare: Prepare | None = None,
    ) -> tuple[Tensor, SavedInput]:
        assert isinstance(call, SplitCall)
        terms = []
        w = values_of(w_NK, w_NK.dtype)
        saved: list[Any] = []
        for number, (channels, part) in enumerate(call.parts):
            part.parameter = w_NK if call.parameter is None else call.parameter
            if number:
                part.gradients = call.gradients._replace(bias=None)
            else:
                part.gradients = call.gradients
            x_part = x_MK.index_select(1, channels)
            w_part = w.index_select(1, channels)
            y_MN, x = part.executor.forward(x_part, w_part, None, part)
            terms.append(y_MN)
            saved += x
        y_MN = terms[0] + terms[1]
        return (y_MN if bias_N is None else y_MN + bias_N.to(self.dtype)).to(self.dtype), tuple(
            saved
        )

    def backward(
        self,
        dy_MN: Tensor,
        w_NK: Tensor | None,
        saved: SavedInput,
        call: LayerCall,
        prepare: Prepare | None = None,
        total_NK: Tensor | None = None,
    ) -> Gradients:
        assert isinstance(call, SplitCall) and total_NK is None
        if w_NK is None:
            w = None
        else:
            w = values_of(w_NK, w_NK.dtype)
        gradients_of_parts = []
        for (channels, part), x in zip(call.parts, saved, strict=True):
            w_part = None if w is None else w.index_select(1, channels)
            gradients_of_parts.append(part.executor.backward(dy_MN, w_part, (x,), part))
        (dense, _), (top, _) = call.parts
        order = torch.cat((dense, top))

        def joined(dense: Tensor | None, top: Tensor | None) -> Tensor | None:
            """A gradient in the order of the whole layer's features."""
            if dense is None or top is None:
                return None
            both = torch.cat((dense, top), dim=1)
            return torch.empty_like(both).index_copy_(1, order, both)

        (dx_rest, dw_rest, dbias_N), (dx_top, dw_top, _) = gradients_of_parts
        return joined(dx_rest, dx_top), joined(dw_rest, dw_top), dbias_N


class ChannelParts(Executor):
    """A layer with outlier channels: all channels together, recorded where that is due, until the
    choice; then in parts, unless the layer is too narrow for any.

    Attributes:
        rest: the channels that the layer's own recipe multiplied in the last call, int64; None:
            all.
    """

    kinds = (ChannelNorms,)
    states = (ChannelNorms.kind,)
    rest: Tensor | None = None

    def __init__(
        self,
        plan: LayerPlan,
        device: str,
        shard: LayerShard | None = None,
        *,
        sums: GradientSum = None,
    ) -> None:
        super().__init__(plan, device, shard, sums=sums)
        self.whole = Gemms(plan, device, shard, sums=sums)
        split = plan.split_channels()
        if split.outliers is None:
            self.split = None
        else:
            self.split = SplitGemms(split, device, shard, sums=sums)

    @classmethod
    def why_no_graph(cls, plan: LayerPlan) -> str | None:
        name = f"recipe {plan.recipe.name}, {plan.layer.name}"
        return f"{name}: the host counts the steps by which outlier channels are chosen"

    def quantised_columns(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Tensor]:
        if self.rest is None:
            return (x_MK, w_NK)
        return (x_MK.index_select(1, self.rest), w_NK.index_select(1, self.rest))

    def values(self, w_NK: Tensor, quantised: Callable[[Tensor], Tensor]) -> Tensor:
        if self.rest is None:
            return quantised(w_NK)
        return w_NK.float().index_copy(1, self.rest, quantised(w_NK.index_select(1, self.rest)))

    def __call__(
        self,
        source: CallSource,
        x_MK: Tensor,
        weights: Weights,
        biases: Biases,
        now: State,
        counts: Counts = (),
    ) -> Tensor:
        def new(context: Context, *, training: bool) -> list[LayerCall]:
            return [source.new_call(context, self.whole, x_MK.shape[0], training=training)]

        (call,) = self.calls(source, x_MK, now, new)
        y_MN: Tensor = LayerFunction.apply(x_MK, weights[0], biases[0], call)  # type: ignore[no-untyped-call]
        return y_MN

    def calls_of_group(
        self, source: GroupCallSource, x_MK: Tensor, now: State, counts: Counts
    ) -> list[LayerCall]:
        return self.calls(
            source, x_MK[: sum(counts)], now, partial(source.new_calls, self.whole, counts)
        )

    def calls(
        self, source: CallSource, x_MK: Tensor, now: State, new: Callable[..., list[LayerCall]]
    ) -> list[LayerCall]:
        """The coming calls of the layer `source`, one of each weight, in parts if the outlier
        channels are chosen; until then x enters the norms where that is due. Inside a recomputed
        region, those of the first pass.

        Args:
            x_MK: the rows of all weights, and no others.
            new: makes the calls of `whole`, at least one, in a context (`CallSource.new_call`).
        """
        norms = source.states[ChannelNorms.kind]
        outliers = self.plan.recipe.outliers
        context = now.context
        assert isinstance(norms, ChannelNorms) and outliers is not None and context is not None
        make = partial(new, context, training=torch.is_grad_enabled())
        calls = now.replay.once(source, make)
        if now.replay.values is not None:
            return calls
        step = calls[0].position.step
        self.rest = None
        if not norms.chosen(outliers, step):
            if torch.is_grad_enabled() and step.number >= outliers.start:
                norms.record(x_MK, step)
        elif self.split is not None:
            self.rest, _ = channels = norms.channels(self.split.count, self.device)
            calls[:] = [
                self.split.call(call, channels, source, keep=context.step is not None)
                for call in calls
            ]
        return calls
