"""The GEMMs of layers that read one x, queries, keys and values or gate and up, as one product where the plan says so.

The call of the first of them computes the outputs of all, and parameters stay those of the layers. The other outputs
wait in the context's cache for the calls of their layers. A layer is multiplied alone where none waits: it is called
first, in inference mode, or with an x that is not the same tensor in the same graph. Which operands are joined, and
what that does to numbers, is in `precision.joint`.

    JointGemms    one autograd function of x and of each weight and bias: what FSDP does with them stays as it is
    JointBackend  one layer of a backend, whose weight has theirs as rows (`stacked.py`)

On a GPU dw of layers in high precision is added to the float32 gradients that they have within a GEMM of each layer: as
many launches as autograd's additions to the rows of one product, and 8 bytes per element instead of 16.

Joining is a copy; the least is none. It moves, per element of dy, 4 bytes in BF16 (read and written), of codes twice
theirs: 2.3 for both forms of NVFP4, 4.1 of MXFP8. Of w as much, once per step where its forms are kept. In return the
GEMMs read x once instead of once per layer, and write one dx instead of terms that are added.

The outputs are columns of one matrix, views that torch lets nobody change in place. As long as one of them is alive, so
is the memory of all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import Prepared
from fp4train.nn.call import Biases, Call, Counts, Executor, GradientDtypes, Recorded, Sums, Weights, gradient_dtypes
from fp4train.nn.executors.gemms import Gemms, Saved, flatten, sum_so_far, unflatten, without_torchs_autocast
from fp4train.nn.operands import Operand
from fp4train.nn.weights import JointWeights, stack
from fp4train.precision.context import State
from fp4train.precision.layer_plan import LayerPlan

if TYPE_CHECKING:
    from fp4train.nn.executors.cut import LayerShard
    from fp4train.nn.linear import Linear
    from fp4train.nn.planned import PlannedLayer

Each = Sequence[Tensor | None]
"""One of each layer, or None."""


class Waiting(NamedTuple):
    """Outputs [M, Nᵢ] of a call, by layer, for which their layers have not asked yet.

    x_MK, version: that they are of; training: whether gradients were enabled.
    """

    x_MK: Tensor
    version: int
    training: bool
    outputs: dict[str, Tensor]

    def take(self, name: str, x_MK: Tensor) -> Tensor | None:
        """The output of a layer for x; None: there is none, or it is not that of this tensor and graph."""
        own, training = self.x_MK, torch.is_grad_enabled()
        if name not in self.outputs or self.version != x_MK._version or self.training is not training:
            return None
        if own is not x_MK:
            if own.requires_grad is not x_MK.requires_grad or not own.is_set_to(x_MK):
                return None
            # Layers reshape their inputs: two views are of one tensor where their nodes in the graph have one parent.
            if training and own.requires_grad:
                nodes = own.grad_fn, x_MK.grad_fn
                if None in nodes or nodes[0].next_functions != nodes[1].next_functions:  # type: ignore[union-attr]
                    return None
        return self.outputs.pop(name)


class Joint(Executor):
    """The GEMMs of one of the layers that read one x, and of all of them in the call of the first.

    Attributes:
        alone: what runs the layer by itself. In all of the layers it is the same but for its plan.
    """

    alone: Executor

    @abstractmethod
    def products(self, x_MK: Tensor, layers: Sequence[Linear], now: State) -> Sequence[Tensor]:
        """y [M, Nᵢ] of each layer; gradients through autograd."""

    def __call__(
        self, layer: PlannedLayer, x_MK: Tensor, weights: Weights, biases: Biases, now: State, counts: Counts = ()
    ) -> Tensor:
        assert now.context is not None
        readers, name = self.plan.readers, layer.layer.name
        shared, key = now.context.shared, "joint " + readers[0]
        if x_MK.is_inference():
            return self.alone(layer, x_MK, weights, biases, now)
        waiting: Waiting | None = shared.get(key)
        if waiting is not None and (y_MN := waiting.take(name, x_MK)) is not None:
            if not waiting.outputs:
                del shared[key]
            return y_MN
        found = layer.fused_weights.layers(readers) if name == readers[0] else [None]
        if None in found:
            return self.alone(layer, x_MK, weights, biases, now)
        ys = self.products(x_MK, cast("list[Linear]", found), now)
        waits = dict(zip(readers[1:], ys[1:], strict=True))
        shared[key] = Waiting(x_MK, x_MK._version, torch.is_grad_enabled(), waits)
        return ys[0]


class JointGemms(Joint):
    """Layers with GEMMs of their own."""

    alone: Gemms

    def __init__(self, plan: LayerPlan, device: str, shard: LayerShard | None = None, *, sums: Sums = None) -> None:
        super().__init__(plan, device, shard, sums=sums)
        self.alone = Gemms(plan, device, shard, sums=sums)
        specs = plan.dgrad.operands.first, plan.wgrad.operands.first
        codes = self.alone.dgrad.takes_codes, self.alone.wgrad.takes_codes
        self.dy = Operand("dy", specs, codes, device, shard)
        """dy of one layer, whose forms are joined: without tiles, which cannot be."""
        # Quantised dy of all layers is joined for one product; apart, each would be quantised twice.
        self.adds = self.alone.adds and not plan.wgrad.operands.quantised

    @classmethod
    def why_no_graph(cls, plan: LayerPlan, recorded: Recorded = "step") -> str | None:
        return Gemms.why_no_graph(plan, recorded)

    def products(self, x_MK: Tensor, layers: Sequence[Linear], now: State) -> Sequence[Tensor]:
        calls = [each.call_in(now, self.alone, x_MK.shape[0]) for each in layers]
        tensors = (*(each.own_weights[0] for each in layers), *(each.bias for each in layers))
        ys: tuple[Tensor, ...] = JointFunction.apply(x_MK, self, calls, *tensors)  # type: ignore[no-untyped-call]
        return ys

    def forward(
        self, x_MK: Tensor, weights: Weights, biases: Biases, calls: Sequence[Call]
    ) -> tuple[Sequence[Tensor], Saved]:
        """(y [M, Nᵢ] of each layer, what backward needs of x)."""
        one, wanted = self.alone, GradientDtypes(w=_first(call.gradients.w for call in calls))
        if not self.plan.fprop.joint:  # they share x, which the first one prepares
            own = [replace(call, gradients=wanted) for call in calls]
            found = [one.forward(x_MK, *each) for each in zip(weights, biases, own, strict=True)]
            return [y_MN for y_MN, _ in found], found[0][1]
        bias_N = None
        if any(bias is not None for bias in biases):
            each = zip(weights, biases, strict=True)
            bias_N = torch.cat([x_MK.new_zeros(len(w)) if bias is None else bias for w, bias in each])
        call = _of_all(calls, weights, wanted)
        y_MN, saved = one.forward(x_MK, weights[0], bias_N, call)
        return torch.split(y_MN, [len(w) for w in weights], dim=1), saved

    def backward(
        self, dys: Sequence[Tensor], weights: Each, saved: Saved, calls: Sequence[Call], totals: Each = ()
    ) -> tuple[Tensor | None, Each, Each]:
        """dx [M, K], and of each layer dw [Nᵢ, K] and dbias [Nᵢ]; None for those not wanted.

        Args:
            dys: [M, Nᵢ] of the layers whose outputs were used; so the rest.
            weights: [Nᵢ, K] where dx is wanted.
            totals: the sum that dw of each is to be added to, if all have one; it is not returned then.
        """
        one, of_x, of_w = self.alone, self.plan.dgrad.joint, self.plan.wgrad.joint
        gradients = [call.gradients for call in calls]
        if self._add(dys, totals, saved, calls):
            gradients = [own._replace(w=None) for own in gradients]
        dx_MK: Tensor | None = None
        dw: list[Tensor | None] = [None] * len(dys)
        dbias: list[Tensor | None] = [None] * len(dys)
        both = GradientDtypes(gradients[0].x if of_x else None, _first(each.w for each in gradients) if of_w else None)
        if any(both):
            call = _of_all(calls, cast(Weights, weights), both)
            prepare = None if one.dy.pure else partial(self._joined, dys, calls)
            dy_MN = torch.cat(list(dys), dim=1) if prepare is None else dys[0]
            dx_MK, dw_NK, _ = one.backward(dy_MN, weights[0], saved, call, prepare)
            if dw_NK is not None:
                parts = torch.split(dw_NK, [dy.shape[1] for dy in dys])
                dw = [None if own.w is None else dw_NK.to(own.w) for dw_NK, own in zip(parts, gradients, strict=True)]
        # Terms of dx are added as autograd adds those of layers apart: the last layer's first, each rounded.
        for i, own in reversed(list(enumerate(gradients))):
            rest = GradientDtypes(None if of_x else own.x, None if of_w else own.w, own.bias)
            if any(rest):
                term, dw_NK, dbias[i] = one.backward(dys[i], weights[i], saved, replace(calls[i], gradients=rest))
                dw[i] = dw[i] if of_w else dw_NK
                if term is not None:
                    dx_MK = term if dx_MK is None else dx_MK + term
        return dx_MK, dw, dbias

    def _add(self, dys: Sequence[Tensor], totals: Each, saved: Saved, calls: Sequence[Call]) -> bool:
        """Add dw of all layers to their sums, each within its GEMM; whether all have one."""
        wanted = [i for i, call in enumerate(calls) if call.gradients.w is not None] if totals else []
        if not wanted or any(totals[i] is None for i in wanted):
            return False
        for i in wanted:
            call = replace(calls[i], gradients=GradientDtypes(w=torch.float32))
            self.alone.backward(dys[i], None, saved, call, total_NK=totals[i])
        return True

    def _joined(
        self, dys: Sequence[Tensor], calls: Sequence[Call], _: Tensor, call: Call, row: bool, column: bool
    ) -> tuple[Prepared | None, Prepared | None]:
        """The two prepared forms of dy of all layers, each of which is quantised for itself, by its own random bits."""
        pairs = [self.dy.prepare(dy.to(self.dtype), own, row, column) for dy, own in zip(dys, calls, strict=True)]
        found = [[cast(Prepared, each) for each in forms] for forms in zip(*pairs, strict=True)]
        return stack(found[0], columns=True) if row else None, stack(found[1], columns=False) if column else None


def _of_all(calls: Sequence[Call], weights: Weights, gradients: GradientDtypes) -> Call:
    """The call that multiplies all weights as one."""
    return replace(calls[0], weights=JointWeights(weights, calls), gradients=gradients)  # type: ignore[arg-type]


def _first(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The first that is one."""
    return next((each for each in dtypes if each is not None), None)


class JointFunction(torch.autograd.Function):
    """y [M, Nᵢ] of each layer, of (x [M, K], executor, call of each, w [Nᵢ, K] of each, bias [Nᵢ] or None of each)."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, executor: JointGemms, calls: list[Call], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.executor, ctx.calls, count = executor, calls, len(calls)
        weights, biases = cast(Weights, tensors[:count]), tensors[count:]
        wants, wants_each = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        for i, call in enumerate(calls):
            call.gradients = gradient_dtypes(x_MK, weights[i], biases[i], (wants, wants_each[i], wants_each[count + i]))
        ys, saved = executor.forward(x_MK, weights, biases, calls)
        flat, ctx.heads = flatten(saved)
        ctx.save_for_backward(*(weights if wants else [None] * count), *flat)
        ctx.summed = weights if executor.adds else ()
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        executor, count = ctx.executor, len(dys)
        used = [i for i, dy in enumerate(dys) if dy is not None]
        tensors = ctx.saved_tensors  # once: recomputation gives them once
        weights, saved = tensors[:count], unflatten(tensors[count:], ctx.heads)
        gradients: list[Tensor | None] = [None] * (3 + 2 * count)
        if used:
            nodes = ctx.next_functions[1:]  # of x, and of each weight and bias
            totals = [node and sum_so_far(w, node) for w, (node, _) in zip(ctx.summed, nodes, strict=False)]
            own = [[each[i] for i in used if each] for each in (dys, weights, ctx.calls, totals)]
            with without_torchs_autocast(executor.device):
                gradients[0], dw, dbias = executor.backward(own[0], own[1], saved, *own[2:])
            for i, *found in zip(used, dw, dbias, strict=True):
                gradients[3 + i], gradients[3 + count + i] = found
        return tuple(gradients)
