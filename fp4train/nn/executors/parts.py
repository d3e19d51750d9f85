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
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train.backends import DataRanks, LayerState
from fp4train.nn.call import ChannelCalls, LayerCall
from fp4train.nn.engine import Gradients, ProductExecutor, Saved
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.gathered import values_of
from fp4train.nn.layer_shard import WHOLE
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


class SplitGemms(ProductExecutor):
    """The GEMMs of a layer whose outlier channels are chosen, those of the other channels first.

    The products of both parts are added in float32, and the bias to their sum.
    """

    def build(self) -> None:
        dense, top = self.plan.channel_parts
        self.count = top.layer.in_features
        begin = -(-dense.layer.in_features // _SPREAD) * _SPREAD
        behind = replace(self.shard or WHOLE, first=begin)
        self.of_parts = (
            Gemms(dense, self.device, self.shard, sums=self.sums),
            Gemms(top, self.device, behind, sums=self.sums),
        )
        for gemms in self.of_parts:
            gemms.y_dtype = torch.float32  # a term of a sum is not rounded

    def parts_of(self, call: LayerCall, channels: Sequence[Tensor]) -> ChannelCalls:
        """The two parts of `call` that multiply these channels."""
        parts = []
        for number, gemms in enumerate(self.of_parts):
            weights = call.weights.part((self.count, number))
            part = replace(call, executor=gemms, weights=weights, shared=None)
            parts.append((channels[number], part))
        return tuple(parts)

    def forward(
        self,
        x_MK: Tensor,
        w: Tensor,
        bias: Tensor | None,
        call: LayerCall,
    ) -> tuple[Tensor, Saved]:
        terms = []
        values = values_of(w, w.dtype)
        saved: list[Any] = [None if call.gradients.x is None else w]
        assert call.parts, "nobody has chosen the parts of this call"
        for number, (channels, part) in enumerate(call.parts):
            part.gradients = call.gradients._replace(bias=None) if number else call.gradients
            x_part = x_MK.index_select(1, channels)
            w_part = values.index_select(1, channels)
            products = cast(ProductExecutor, part.executor)
            y_MN, (_, form) = products.forward(x_part, w_part, None, part)
            terms.append(y_MN)
            saved.append(form)
        y_MN = terms[0] + terms[1]
        if bias is not None:
            y_MN = y_MN + bias.to(self.dtype)
        return y_MN.to(self.dtype), saved

    def backward(
        self,
        dy_MN: Tensor,
        saved: Saved,
        call: LayerCall,
        total: Tensor | None = None,
    ) -> Gradients:
        assert total is None, "each part gives dw of its own channels"
        w, *forms = saved
        values = values_of(w, w.dtype) if isinstance(w, Tensor) else None
        gradients = []
        parts = call.parts
        assert parts, "nobody has chosen the parts of this call"
        for (channels, part), form in zip(parts, forms, strict=True):
            w_part = None if values is None else values.index_select(1, channels)
            products = cast(ProductExecutor, part.executor)
            gradients.append(products.backward(dy_MN, (w_part, form), part))
        (dense, _), (top, _) = parts
        order = torch.cat((dense, top))

        def joined(dense: Tensor | None, top: Tensor | None) -> Tensor | None:
            """A gradient in the order of the whole layer's features."""
            if dense is None or top is None:
                return None
            both = torch.cat((dense, top), dim=1)
            return torch.empty_like(both).index_copy_(1, order, both)

        (dx_dense, dw_dense, dbias_N), (dx_top, dw_top, _) = gradients
        return joined(dx_dense, dx_top), joined(dw_dense, dw_top), dbias_N


class ChannelParts(ProductExecutor):
    """A layer with outlier channels: all channels together, recorded where that is due, until the
    choice; then in parts, unless the layer is too narrow for any. A call keeps what `begin` chose
    for it.

    Attributes:
        dense_channels: the channels that the layer's own recipe multiplied in the last call, int64;
            None: all.
    """

    kinds = (ChannelNorms,)
    states = (ChannelNorms.kind,)
    runs_idle = False
    """A group's norms are those of all its rows: a weight without rows adds nothing."""
    dense_channels: Tensor | None = None

    def build(self) -> None:
        self.whole = Gemms(self.plan, self.device, self.shard, sums=self.sums)
        split = self.plan.split_channels()
        if split.outliers is None:
            self.split = None
        else:
            self.split = SplitGemms(split, self.device, self.shard, sums=self.sums)
        self.adds = self.whole.adds

    @classmethod
    def why_no_graph(cls, plan: LayerPlan) -> str | None:
        name = f"recipe {plan.recipe.name}, {plan.layer.name}"
        return f"{name}: the host counts the steps by which outlier channels are chosen"

    def quantised_columns(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Tensor]:
        if self.dense_channels is None:
            return (x_MK, w_NK)
        return (
            x_MK.index_select(1, self.dense_channels),
            w_NK.index_select(1, self.dense_channels),
        )

    def values(self, w_NK: Tensor, quantised: Callable[[Tensor], Tensor]) -> Tensor:
        if self.dense_channels is None:
            return quantised(w_NK)
        return w_NK.float().index_copy(
            1, self.dense_channels, quantised(w_NK.index_select(1, self.dense_channels))
        )

    def begin(self, calls: Sequence[LayerCall], x_MK: Tensor) -> None:
        """Choose the parts of calls of one layer, once the outlier channels are chosen; until then
        x enters the norms where that is due. Inside a recomputed region the first pass has chosen.
        """
        call = calls[0]
        if call.parts is not None:
            return
        norms = call.states[ChannelNorms.kind]
        outliers = self.plan.recipe.outliers
        assert isinstance(norms, ChannelNorms) and outliers is not None
        step = call.position.step
        self.dense_channels = None
        channels: Sequence[Tensor] = ()
        if not norms.chosen(outliers, step):
            if call.training and step.number >= outliers.start:
                norms.record(x_MK, step)
        elif self.split is not None:
            self.dense_channels, _ = channels = norms.channels(self.split.count, self.device)
        for call in calls:
            call.parts = ()
            if self.split is not None and channels:
                call.parts = self.split.parts_of(call, channels)

    def forward(
        self,
        x_MK: Tensor,
        w: Tensor,
        bias: Tensor | None,
        call: LayerCall,
    ) -> tuple[Tensor, Saved]:
        if call.parts is None:
            self.begin([call], x_MK)
        if self.split is not None and call.parts:
            return self.split.forward(x_MK, w, bias, call)
        return self.whole.forward(x_MK, w, bias, call)

    def backward(
        self,
        dy_MN: Tensor,
        saved: Saved,
        call: LayerCall,
        total: Tensor | None = None,
    ) -> Gradients:
        """See `ProductExecutor.backward`; dw of both parts is added after their products."""
        if self.split is None or not call.parts:
            return self.whole.backward(dy_MN, saved, call, total)
        dx_MK, dw_NK, dbias_N = self.split.backward(dy_MN, saved, call)
        if total is not None and dw_NK is not None:
            total += dw_NK
            dw_NK = None
        return dx_MK, dw_NK, dbias_N
