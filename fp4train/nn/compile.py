"""Linear layers inside of torch.compile: one operator per call, no graph break. Imported only while it traces.

What the graph itself has to know of a layer is its `Route`: that is worked out when the graph is traced, and checked as
a guard each time before the graph runs. A change of recipe that leaves the routes alone, NVFP4 to MXFP8, compiles
nothing anew. The operators need private parts of torch 2.13; on a torch that lacks them layers run outside of the
graphs, with a break at each, and a warning says so once.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor

from fp4train.nn.gemms import without_torchs_autocast
from fp4train.nn.linear import Linear
from fp4train.precision.compile_context import UNAVAILABLE
from fp4train.precision.context import current

_log = logging.getLogger(__name__)


@functools.cache
def _operator() -> ModuleType | None:
    if UNAVAILABLE is not None:
        _log.warning("torch.compile: fp4train's linear layers run outside of the graphs: %s", UNAVAILABLE)
        return None
    from fp4train.nn import compile_operator

    return compile_operator


OPERATOR = _operator()
"""Registered before the first layer is traced."""

untraced = torch.compiler.disable(Linear.forward)  # type: ignore[no-untyped-call]


def call(layer: Linear, input: Tensor) -> Tensor:
    """`layer.forward(input)` as torch.compile traces it: what depends on the run is left to the operator."""
    if OPERATOR is None:
        result: Tensor = untraced(layer, input)
        return result
    route = layer.handle.route()
    if route.kind == "plain":
        return torch.nn.functional.linear(input, layer.weight, layer.bias)
    if route.kind == "eager":
        result = untraced(layer, input)
        return result
    x_MK, out_dtype, shape = layer.matrix(input)
    assert route.dtype is not None
    with without_torchs_autocast(input.device.type):
        if route.kind == "torch":
            y_MN = layer.by_torch(x_MK, route.dtype)
        else:
            context, training = current(), torch.is_grad_enabled()
            assert context is not None
            x_MK = x_MK.to(route.dtype)
            tensors = (x_MK, layer.weight, layer.bias)
            wanted = [training and t is not None and t.requires_grad for t in tensors]
            y_MN, _ = OPERATOR.linear(*tensors, layer.handle, context, training, wanted, route.keeps_x)
    return y_MN.to(out_dtype).view(shape)
