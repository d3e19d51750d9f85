"""Linear layers inside of torch.compile: one operator a call, no graph break.

A graph must not depend on what changes in a run: recipe, step, seed. So the operator takes the layer and the autocast
context as opaque objects, reads them when it runs, and leaves what backward needs (codes and scales, whose shapes are
the recipe's business) in another one. What the graph itself has to know of a layer is its `Route`: that is worked out
when the graph is traced, and checked as a guard each time before it runs. A change of recipe that leaves the routes
alone, NVFP4 to MXFP8, compiles nothing anew.

An operator may not keep a graph's tensors: the compiler puts other values into them. So layers share nothing that they
made of the same input here, only a layer's own parameter is prepared once a step, and an x that wgrad needs in high
precision is saved by the graph. To the compiler the operator is a function of its arguments: two equal calls of one
layer in a graph are one call, a call whose result nobody uses is none.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBase

from fp4train.nn.call import Call
from fp4train.nn.gemms import Gradients, backward, forward, without_torchs_autocast
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.context import Context, current, in_stray_recomputation, once
from fp4train.quantize import Quantized

if TYPE_CHECKING:
    from fp4train.nn.linear import Linear

# What Python decides at each call, random bits above all, must not be replayed from a recording.
_TAGS = (torch.Tag.cudagraph_unsafe,)

Kind = Literal["plain", "torch", "operator", "eager"]


class Route(NamedTuple):
    """What a graph has to know of a layer."""

    kind: Kind
    """`plain`: nn.Linear, outside of a context; `torch`: a recipe that quantises nothing; `operator`; `eager`: not in
    the graph, because Transformer Engine runs it or because it raises an error."""
    dtype: torch.dtype | None = None
    """The recipe's."""
    keeps_x: bool = False
    """Whether wgrad takes x in high precision."""


class Handle(OpaqueBase):
    """A linear layer as torch.compile sees it; the layer owns it, not the other way round."""

    def __init__(self, layer: Linear) -> None:
        self._layer = weakref.ref(layer)

    @property
    def layer(self) -> Linear:
        layer = self._layer()
        assert layer is not None
        return layer

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return Handle(memo[id(self.layer)])

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """For the compiler's cache keys, to which all layers are alike: graphs hold nothing of one but its route."""
        return str, (Handle.__qualname__,)

    def route(self) -> Route:
        """The layer's route in the current context."""
        context, layer = current(), self.layer
        if layer.is_stray(context):
            return Route("eager")
        if context is None:
            return Route("plain")
        try:
            recipe = context.recipe_for(layer.layer)
        except ValueError:
            return Route("eager")
        if not recipe.quantised:
            return Route("torch", recipe.torch_dtype)
        device = next(layer.parameters()).device.type  # not `weight`, which a parametrization would compute anew
        if layer.why_not_te(recipe, device) is None:
            return Route("eager")
        return Route("operator", recipe.torch_dtype, recipe.table()["wgrad"].second is None)


register_opaque_type(
    Handle, typ="reference", guard_fn=lambda handle: [handle.route()], members={"route": MemberType.USE_REAL}
)


@dataclass(eq=False)
class Saved(OpaqueBase):
    """What a call leaves to its backward, but for the tensors that the graph saves."""

    call: Call | None = None
    gradients: Gradients | None = None
    x: Quantized | None = None
    calls: list[Call] = field(default_factory=list)
    """Where the call is recorded for recomputation."""

    def release(self) -> None:
        """After backward: the graph itself lives as long as the loss."""
        self.calls[:] = [call for call in self.calls if call is not self.call]
        self.call = self.gradients = self.x = None


register_opaque_type(Saved, typ="reference")


@torch.library.custom_op("fp4train::linear", mutates_args=(), tags=_TAGS)
def linear(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    layer: Handle,
    context: Context,
    training: bool,
    wanted: Sequence[bool],
    keeps_x: bool,
) -> tuple[Tensor, Saved]:
    """y [M, N] of a layer in the recipe that `context` has for it, in that recipe's dtype.

    Args:
        x_MK: in the recipe's dtype.
        training: whether gradients are on, so that amaxes enter their histories.
        wanted: of x, w and bias, which gradients backward will be asked for.
        keeps_x: whether backward is given x by the graph.
    """
    calls: list[Call] = context.compiled_calls.setdefault(layer.layer, [])
    call = _call(layer.layer, calls, w_NK, context, x_MK.device.type, training)
    gradients = Gradients.of((x_MK, w_NK, bias_N), tuple(wanted))
    y_MN, x = forward(x_MK, w_NK, bias_N, call, gradients, share=None)
    return y_MN, Saved(call, gradients, x if isinstance(x, Quantized) else None, calls)


def _call(layer: Linear, calls: list[Call], w_NK: Tensor, context: Context, device: str, training: bool) -> Call:
    """A new call, or, where a graph recomputes activations in its backward, the one of its forward."""
    if in_stray_recomputation():
        if len(calls) != 1:
            raise RuntimeError(
                f"{layer.layer.name} was called {len(calls)} times in the forward pass that a graph recomputes, "
                "and nothing tells which of them this is. Compile the blocks inside of the recomputed regions instead."
            )
        return calls[0]
    recipe = context.recipe_for(layer.layer)
    call = once(layer, lambda: layer.new_call(context, recipe, device, training))
    own = layer._parameters.get("weight")
    if own is None or own.data_ptr() != w_NK.data_ptr():
        call = replace(call, weights=PreparedWeights())
    if training:
        calls.append(call)
    return call


@linear.register_fake
def _(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    layer: Handle,
    context: Context,
    training: bool,
    wanted: Sequence[bool],
    keeps_x: bool,
) -> tuple[Tensor, Saved]:
    return x_MK.new_empty(x_MK.shape[0], w_NK.shape[0]), Saved()


@torch.library.custom_op("fp4train::linear_backward", mutates_args=(), tags=_TAGS)
def linear_backward(
    dy_MN: Tensor, x_MK: Tensor | None, w_NK: Tensor, bias_N: Tensor | None, saved: Saved, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, dbias), without elements where one is not wanted; `x_MK` where wgrad takes it in high precision."""
    assert saved.call is not None and saved.gradients is not None
    with without_torchs_autocast(dy_MN.device.type):
        dx, dw, dbias = backward(dy_MN, w_NK, saved.x if x_MK is None else x_MK, saved.call, saved.gradients)
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        saved.release()
    nothing = dy_MN.new_empty(0)
    return (
        nothing if dx is None else dx,
        nothing.clone() if dw is None else dw,
        nothing.clone() if dbias is None else dbias,
    )


@linear_backward.register_fake
def _(
    dy_MN: Tensor, x_MK: Tensor | None, w_NK: Tensor, bias_N: Tensor | None, saved: Saved, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dx = dy_MN.new_empty((dy_MN.shape[0], w_NK.shape[1]) if wanted[0] else 0)
    dw = w_NK.new_empty(w_NK.shape) if wanted[1] else dy_MN.new_empty(0)
    dbias = bias_N.new_empty(bias_N.shape) if bias_N is not None and wanted[2] else dy_MN.new_empty(0)
    return dx, dw, dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Saved]) -> None:
    x_MK, w_NK, bias_N, _, _, _, ctx.wanted, keeps_x = inputs
    ctx.save_for_backward(x_MK if keeps_x and ctx.wanted[1] else None, w_NK, bias_N)
    ctx.saved = output[1]


def _backward(ctx: Any, dy_MN: Tensor, _: object) -> tuple[Tensor | None, ...]:
    gradients = linear_backward(dy_MN, *ctx.saved_tensors, ctx.saved, ctx.wanted)
    wanted = (gradient if want else None for gradient, want in zip(gradients, ctx.wanted, strict=True))
    return (*wanted, None, None, None, None, None)


linear.register_autograd(_backward, setup_context=_setup)
