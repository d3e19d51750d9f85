"""The gated MLP, whose product and whose gradients of gate and up are quantised where they are
made.

    gate = x·w_gateᵀ    up = x·w_upᵀ    h = silu(gate) ⊙ up    y = h·w_downᵀ

The codes of h come from gate and up; in backward, those of both gradients from dh, gate and up
(`quantize/produced.py`). Of layers that run three GEMMs of their own one autograd function has all
three, so that codes stay in its own context. Layers of a backend are called one by one: the gate
between them gives them codes as the backend's own tensors (`nn/produced.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends.protocol import Forms
from fp4train.nn.backend_sources import matrix
from fp4train.nn.call import Call, Executor, gradient_dtypes
from fp4train.nn.executors.gemms import Gemms, flatten, unflatten, without_torchs_autocast
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.nn.linear import Linear
from fp4train.nn.produced import Producer, forms_from, provide
from fp4train.precision.context import State
from fp4train.quantize import Quantized
from fp4train.quantize.produced import SourceTensors


class FusedGatedMLP(Producer):
    """down(silu(gate(x)) ⊙ up(x)) of three layers."""

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        super().__init__((down,), (gate, up), "gate")
        self.layers = gate, up, down

    def __call__(self, x: Tensor) -> Tensor | None:
        """y [..., N] of x [..., K]; None: the codes cannot be made here.

        Raises:
            RuntimeError: gate and up have been called for different tokens of the step.
        """
        sources = self.layers[:2]
        biases = [layer.bias for layer in sources if layer.bias is not None]
        if not x.requires_grad or any(bias.requires_grad for bias in biases):
            return None
        if (executors := self.ready(x)) is None:
            return None
        (down, gate, up), now = executors
        x_MK = x.reshape(-1, x.shape[-1])
        if isinstance(down, BackendLayer):
            outputs = [layer(x) for layer in sources]
            calls = self._calls(now, (gate, up), len(x_MK))
            h: Tensor = _BackendGate.apply(*outputs, calls, down, now)  # type: ignore[no-untyped-call]
            y: Tensor = self.layers[2](h)
            return y
        calls = self._calls(now, (gate, up, down), len(x_MK))
        weights = [layer.w_NK for layer in self.layers]
        biases = [layer.bias for layer in self.layers]
        y_MN: Tensor = _GatedProducts.apply(x_MK, *weights, *biases, calls)  # type: ignore[no-untyped-call]
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])

    def _calls(self, now: State, executors: Sequence[Executor], tokens: int) -> list[Call]:
        """The coming calls of the layers, of which gate and up draw random bits for one place."""
        calls = [
            layer.call_in(now, executor, tokens)
            for layer, executor in zip(self.layers, executors, strict=False)
        ]
        gate, up = calls[:2]
        if gate.position != up.position:
            names = " and ".join(layer.layer.name for layer in self.layers[:2])
            raise RuntimeError(
                f"{names} have been called for different tokens of this step, and their gradients "
                "are rounded by the random bits of one place: give autocast a token_offset"
            )
        return calls


class _GatedProducts(torch.autograd.Function):
    """y [M, N] of x [M, K], the weights and biases of gate, up and down, and their calls."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, *tensors: Any) -> Tensor:
        weights = tensors[:3]
        biases = tensors[3:6]
        calls = tensors[6]
        for call, w_NK, bias_N in zip(calls, weights, biases, strict=True):
            trains_bias = bias_N is not None and bias_N.requires_grad
            call.gradients = gradient_dtypes(x_MK, w_NK, bias_N, (True, True, trains_bias))
        gate, up, down = calls
        products: Gemms = down.executor
        gate_MH, x_of_gate = gate.executor.forward(x_MK, weights[0], biases[0], gate)
        up_MH, x_of_up = up.executor.forward(x_MK, weights[1], biases[1], up)
        source = SourceTensors("gate", (gate_MH, up_MH))
        ((row, column),) = forms_from(source, products, "x", (None,))
        assert isinstance(column, Quantized)
        w = down.weights.form(weights[2], products.w_row, down)
        y_MN = products.fprop.product(row, w, out_dtype=products.y_dtype, bias=biases[2])
        saved, ctx.heads = flatten((*x_of_gate, *x_of_up, column))
        ctx.save_for_backward(*weights, gate_MH, up_MH, *saved)
        ctx.calls = calls
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        w_gate, w_up, w_down, gate_MH, up_MH, *saved = ctx.saved_tensors
        x_of_gate, x_of_up, h = unflatten(saved, ctx.heads)
        gate, up, down = ctx.calls
        with without_torchs_autocast(dy_MN.device.type):
            dh_MH, dw_down, dbias = down.executor.backward(dy_MN, w_down, (h,), down)
            source = SourceTensors("gradients", (matrix(dh_MH), gate_MH, up_MH))
            of_gate, of_up = forms_from(source, gate.executor, "dy", (gate, up))
            # In the place of dy stands a tensor of its shape and dtype: its codes are there.
            dx_up, dw_up, _ = up.executor.backward(up_MH, w_up, (x_of_up,), up, lambda *_: of_up)
            dx_gate, dw_gate, _ = gate.executor.backward(
                gate_MH, w_gate, (x_of_gate,), gate, lambda *_: of_gate
            )
        return dx_up + dx_gate, dw_gate, dw_up, dw_down, None, None, dbias, None


class _BackendGate(torch.autograd.Function):
    """What stands for h, whose codes `down` takes; gate and up get their gradients as codes."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, calls: list[Call], down: BackendLayer, now: State
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.calls = calls
        return provide(SourceTensors("gate", (matrix(gate), matrix(up))), down, now, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        source = SourceTensors("gradients", tuple(map(matrix, (dh, gate, up))))
        layer: BackendLayer = ctx.calls[0].executor
        codes = forms_from(source, layer, "dy", ctx.calls)
        sources = layer.backend.sources
        gradients = [sources.given(cast(Forms, forms), gate.shape) for forms in codes]
        return *gradients, None, None, None
