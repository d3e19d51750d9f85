"""Linear layers in torch.compile: one operator per call, no graph break. Imported only during
tracing.

A graph depends on a layer only through its `CompiledRoute`. The route is determined when the graph is
traced, and a guard checks it before each run of the graph. A change of recipe that keeps the
routes, such as NVFP4 to MXFP8, does not recompile. The operators need private parts of torch (2.13
and newer). With a torch version that lacks them, each layer breaks the graph and runs outside it,
and one warning is logged.
"""

import functools
import logging
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from fp4train.nn.engine import EAGER, without_torchs_autocast
from fp4train.nn.executors.whole_layer import torch_linear
from fp4train.nn.planned import LayerHandle
from fp4train.precision.compile_context import UNAVAILABLE
from fp4train.precision.context import current

_log = logging.getLogger(__name__)


@functools.cache
def _operator() -> ModuleType | None:
    if UNAVAILABLE is not None:
        _log.warning(
            "torch.compile: fp4train's linear layers run outside of the graphs: %s", UNAVAILABLE
        )
        return None
    from fp4train.nn import compile_operator

    return compile_operator


OPERATOR = _operator()
"""The operator, registered before the first layer is traced."""


class TracedLayer(Protocol):
    """A linear layer as a trace sees it (`nn.linear.Linear`)."""

    handle: LayerHandle

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def w_NK(self) -> Tensor: ...

    def matrix(self, input: Tensor) -> tuple[Tensor, torch.dtype | None, tuple[int, ...]]: ...

    def forward(self, input: Tensor) -> Tensor: ...


def _forward(layer: TracedLayer, input: Tensor) -> Tensor:
    return layer.forward(input)


untraced = torch.compiler.disable(_forward)  # type: ignore[no-untyped-call]


def call(layer: TracedLayer, input: Tensor) -> Tensor:
    """`layer.forward(input)` for tracing: recipe, step and seed are read by the operator at run
    time.
    """
    route = EAGER if OPERATOR is None else layer.handle.route()
    if route.kind == "eager":
        result: Tensor = untraced(layer, input)
        return result
    if route.kind == "plain":
        return torch.nn.functional.linear(input, layer.w_NK, layer.bias)
    x_MK, autocast, shape = layer.matrix(input)
    assert route.dtype is not None
    with without_torchs_autocast(input.device.type):
        if route.kind == "torch":
            y_MN = torch_linear(x_MK, layer.w_NK, layer.bias, route.dtype)
        else:
            context = current()
            training = torch.is_grad_enabled()
            assert context is not None and OPERATOR is not None
            tensors = (x_MK.to(route.dtype), layer.w_NK, layer.bias)
            needs_grad = [training and t is not None and t.requires_grad for t in tensors]
            y_MN, _ = OPERATOR.linear(
                *tensors, layer.handle, context, training, needs_grad, route.keeps_x
            )
    return y_MN.to(autocast or input.dtype).view(shape)
