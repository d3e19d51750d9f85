"""One operator per call of a linear layer in compiled graphs. Imported only by `compile`.

A graph must not depend on what changes during a run: recipe, step, seed. The operator therefore
takes the layer and the autocast context as opaque objects and reads them when it runs. It returns a
third opaque object, `SavedCall`, with the data for backward: codes and scales, whose shapes depend
on the recipe.

An operator must not keep tensors of a graph, because the compiler reuses their memory. Three rules
follow: layers that read the same input do not share its quantised forms; calls share the forms only
of a weight that is the layer's own parameter; if wgrad needs x in high precision, the graph saves x.
The compiler treats the operator as a pure function of its arguments: it merges equal calls of one
layer, and removes a call whose result is unused.

Where activations are recomputed around a graph (`precision.recompute`), its first pass keeps no
codes: the repetition gives them to the object that the first pass returned, with which backward
runs.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fp4train.backends import Prepared
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import ProductExecutor, without_torchs_autocast
from fp4train.nn.planned import LayerHandle, PlannedLayer
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.compile_classes import Metaclass, register
from fp4train.precision.context import Context, state
from fp4train.precision.recomputation import is_stray_recomputation, once

# Each call runs Python code, which sets the random key: a CUDA graph must not replay it.
_TAGS = (torch.Tag.cudagraph_unsafe,)

LayerHandle.__class__ = Metaclass  # type: ignore[method-assign]  # as in `precision.compile_context`
register(LayerHandle, guard=lambda handle: [handle.route()], constant=("route",))


@dataclass(eq=False)
class SavedCall(metaclass=Metaclass):  # type: ignore[metaclass]
    """The data of one call for its backward, except for the tensors that the graph saves."""

    call: LayerCall | None = None
    x: Prepared | None = None
    calls: list[LayerCall] = field(default_factory=list)
    """The list in which the call is recorded for recomputation."""

    def release(self) -> None:
        """Free the data after backward; the graph itself lives as long as the loss."""
        self.calls[:] = [call for call in self.calls if call is not self.call]
        self.call = self.x = None


register(SavedCall)


@torch.library.custom_op("fp4train::linear", mutates_args=(), tags=_TAGS)
def linear(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    layer: LayerHandle,
    context: Context,
    training: bool,
    wanted: Sequence[bool],
    keeps_x: bool,
) -> tuple[Tensor, SavedCall]:
    """y [M, N] of a layer in its recipe under `context`, in that recipe's dtype.

    Args:
        x_MK: input in the recipe's dtype.
        training: whether gradients are enabled; amaxes then enter their histories.
        wanted: whether backward computes the gradients of x, w and bias.
        keeps_x: whether the graph saves x for backward.
    """
    calls: list[LayerCall] = context.compiled_calls.setdefault(layer.layer, [])
    call = _call(layer.layer, calls, w_NK, context, x_MK, training)
    call.wants(wanted, x_MK, w_NK, bias_N)
    products = cast(ProductExecutor, call.executor)
    y_MN, (_, x) = products.forward(x_MK, w_NK, bias_N, call)
    saved = SavedCall(call, None, calls)
    stray = is_stray_recomputation(state())
    kept = saved if stray else once(layer, partial(weakref.ref, saved))()
    if kept is not None and not isinstance(x, Tensor) and (stray or not state().replay.records):
        kept.x = x
    return y_MN, saved


def _call(
    layer: PlannedLayer,
    calls: list[LayerCall],
    w_NK: Tensor,
    context: Context,
    x_MK: Tensor,
    training: bool,
) -> LayerCall:
    """A new call; in a graph that recomputes activations in its backward, the call of the forward
    pass.
    """
    if is_stray_recomputation(state()):
        if len(calls) != 1:
            raise RuntimeError(
                f"{layer.layer.name} was called {len(calls)} times in the forward pass that a "
                "graph recomputes, "
                "and the recomputed call cannot be identified. Compile the blocks inside the "
                "recomputed regions."
            )
        return calls[0]
    executor = layer.executor_in(context, x_MK.device)
    call = once(layer, lambda: layer.new_call(context, executor, x_MK.shape[0], training=training))
    call.shared = None
    parameter = layer._parameters.get("weight")
    # not the parameter itself: the compiler may overwrite it
    if parameter is None or not parameter.is_set_to(w_NK):
        call.weights = PreparedWeights()
    if training:
        calls.append(call)
    return call


@linear.register_fake
def _(x_MK: Tensor, w_NK: Tensor, *_: object) -> tuple[Tensor, SavedCall]:
    return x_MK.new_empty(x_MK.shape[0], w_NK.shape[0]), SavedCall()


@torch.library.custom_op("fp4train::linear_backward", mutates_args=(), tags=_TAGS)
def linear_backward(
    dy_MN: Tensor,
    x_MK: Tensor | None,
    w_NK: Tensor,
    bias_N: Tensor | None,
    saved: SavedCall,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, dbias), empty if not wanted; `x_MK` is given if wgrad takes x in high precision."""
    call = saved.call
    assert call is not None
    with without_torchs_autocast(dy_MN.device.type):
        x = saved.x if x_MK is None else x_MK
        products = cast(ProductExecutor, call.executor)
        gradients = products.backward(dy_MN, (w_NK, x), call)
    # torch has no public function for whether the pass keeps its graph.
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        saved.release()
    dx, dw, dbias = (dy_MN.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dx, dw, dbias


@linear_backward.register_fake
def _(
    dy_MN: Tensor,
    x_MK: Tensor | None,
    w_NK: Tensor,
    bias_N: Tensor | None,
    saved: SavedCall,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dx = dy_MN.new_empty((dy_MN.shape[0], w_NK.shape[1]) if wanted[0] else 0)
    if wanted[1]:
        dw = w_NK.new_empty(w_NK.shape)
    else:
        dw = dy_MN.new_empty(0)
    if bias_N is not None and wanted[2]:
        dbias = bias_N.new_empty(bias_N.shape)
    else:
        dbias = dy_MN.new_empty(0)
    return dx, dw, dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, SavedCall]) -> None:
    x_MK, w_NK, bias_N, _, _, _, ctx.wanted, keeps_x = inputs
    ctx.save_for_backward(x_MK if keeps_x and ctx.wanted[1] else None, w_NK, bias_N)
    ctx.saved = output[1]


def _backward(ctx: Any, dy_MN: Tensor, _: object) -> tuple[Tensor | None, ...]:
    gradients = linear_backward(dy_MN, *ctx.saved_tensors, ctx.saved, ctx.wanted)
    needs_grad = (
        gradient if want else None for gradient, want in zip(gradients, ctx.wanted, strict=True)
    )
    return (*needs_grad, None, None, None, None, None)


linear.register_autograd(_backward, setup_context=_setup)
