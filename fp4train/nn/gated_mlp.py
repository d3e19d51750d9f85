"""The gated MLP, whose product and whose gradients of gate and up are quantised where they are
made.

    gate = x·w_gateᵀ    up = x·w_upᵀ    h = silu(gate) ⊙ up    y = h·w_downᵀ

The codes of h come from gate and up; in backward, those of both gradients from dh, gate and up
(`quantize/produced.py`). Of layers that run three GEMMs of their own one autograd function has all
three, and the norm that makes x, if that is quantised, too, so that codes stay in its own context.
Layers of a backend are called one by one: the gate between them gives them codes as the backend's
own tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4train.backends.protocol import CodePair
from fp4train.nn.backend_sources import matrix
from fp4train.nn.call import Executor, LayerCall, gradient_dtypes
from fp4train.nn.executors.gemms import Gemms, flatten, unflatten, without_torchs_autocast
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.nn.fused_layers import FusedLayers, LayerOutputs, forms_from, outputs_of, overrides
from fp4train.nn.fused_norm import NormCodes, multiplied_codes
from fp4train.precision.context import State
from fp4train.quantize import Quantized
from fp4train.quantize.produced import SourceTensors

Ready = tuple[list[Executor], State]
"""The executors of down, gate and up, and the state of this thread."""


class GatedMLP(FusedLayers):
    """down(silu(gate(x)) ⊙ up(x)) of three layers of a module.

    Args:
        mlp: the module, which computes it otherwise. Where its class says so (`source`), it is not
            done for a subclass with a forward pass of its own.
        gate, up, down: names of the layers in it.
    """

    def __init__(
        self, mlp: nn.Module, gate: str = "gate", up: str = "up", down: str = "down"
    ) -> None:
        super().__init__(mlp)
        self._sources = attrgetter(gate, up)
        self._reader = attrgetter(down)

    @property
    def kind(self) -> str:
        return "gate"

    @property
    def readers(self) -> tuple[Any, ...]:
        return (self._reader(self.owner),)

    @property
    def writers(self) -> tuple[Any, ...]:
        layers: tuple[Any, ...] = self._sources(self.owner)
        return layers

    @property
    def layers(self) -> tuple[Any, ...]:
        """Gate, up and down."""
        return (*self.writers, *self.readers)

    def why_never(self) -> str | None:
        source = getattr(self.owner, "source", self.kind)
        if source != self.kind or overrides(self.owner, "source", "forward"):
            return f"no kernel computes {type(self.owner).__name__}"
        return super().why_never()

    def forward(self, x: Tensor | LayerOutputs) -> Tensor | None:
        """y [..., N] of x [..., K], or of the outputs of gate and up; None: the codes cannot be
        made here.

        Raises:
            RuntimeError: gate and up have been called for different tokens of the step.
        """
        like = x.tensors[0] if isinstance(x, LayerOutputs) else x
        ready = self.ready_for(like)
        if ready is None:
            return None
        (down, *of_sources), now = ready
        tokens = like.numel() // like.shape[-1]
        if isinstance(down, BackendLayer):
            gate, up = outputs_of(x, *self.writers)
            calls = self._calls(now, of_sources, tokens)
            codes = _BackendGate.apply(gate, up, calls, down)  # type: ignore[no-untyped-call]
            (y_MN,) = multiplied_codes(self.readers, [down], [codes], now)
        elif isinstance(x, LayerOutputs):
            return None
        else:
            x_MK = x.reshape(-1, x.shape[-1])
            y_MN, _ = self._multiplied(x_MK, None, None, None, ready, tokens)
        return y_MN.view(*like.shape[:-1], y_MN.shape[-1])

    def ready_for(self, x: Tensor, *, normed: bool = False) -> Ready | None:
        """What the call takes, where codes can be made from tensors like x; `normed`: for
        `of_norm`.
        """
        if not self.asked:
            self.asked = True
        if not self.enabled or not (normed or x.requires_grad):
            return None
        if any(layer.bias is not None and layer.bias.requires_grad for layer in self.writers):
            return None
        return self.ready(x)

    def of_norm(
        self, x: Tensor, change: Tensor | None, weight_K: Tensor, norm: NormCodes, ready: Ready
    ) -> tuple[Tensor, Tensor]:
        """(y of the norm of x + change, that sum)."""
        tokens = x.numel() // x.shape[-1]
        y_MN, h = self._multiplied(x, change, weight_K, norm, ready, tokens)
        assert h is not None
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1]), h

    def _multiplied(
        self,
        x: Tensor,
        change: Tensor | None,
        weight_K: Tensor | None,
        norm: NormCodes | None,
        ready: Ready,
        tokens: int,
    ) -> tuple[Tensor, Tensor | None]:
        (down, *of_sources), now = ready
        calls = self._calls(now, (*of_sources, down), tokens)
        weights = [layer.w_NK for layer in self.layers]
        biases = [layer.bias for layer in self.layers]
        outputs: tuple[Tensor, Tensor | None] = _GatedProducts.apply(  # type: ignore[no-untyped-call]
            x, change, weight_K, *weights, *biases, calls, norm
        )
        return outputs

    def _calls(self, now: State, executors: Sequence[Executor], tokens: int) -> list[LayerCall]:
        """The coming calls of the layers, of which gate and up draw random bits for one place."""
        calls = [
            layer.call_in(now, executor, tokens)
            for layer, executor in zip(self.layers, executors, strict=False)
        ]
        gate, up = calls[:2]
        if gate.position != up.position:
            names = " and ".join(layer.layer.name for layer in self.writers)
            raise RuntimeError(
                f"{names} have been called for different tokens of this step, and their gradients "
                "are rounded by the random bits of one place: give autocast a token_offset"
            )
        return calls


class _GatedProducts(torch.autograd.Function):
    """(y [M, N], h) of x, its change, the weight of their norm, the weights and biases of gate, up
    and down, and their calls; without a norm of x [M, K] alone.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight_K: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        weights = arguments[:3]
        biases = arguments[3:6]
        calls, norm = arguments[6:]
        h = x
        rstd_M = prepare = None
        if norm is not None:
            forms, h, rstd_M = norm.codes(x, change, weight_K)
            prepare = _giving(forms)
        x_MK = x if norm is None else matrix(h)
        for call, w_NK, bias_N in zip(calls, weights, biases, strict=True):
            trains_bias = bias_N is not None and bias_N.requires_grad
            call.gradients = gradient_dtypes(x_MK, w_NK, bias_N, (True, True, trains_bias))
            if norm is not None:
                # h stands for its norm; layers that share an input must not find the codes.
                call.shared = None
        gate, up, down = calls
        products: Gemms = down.executor
        gate_MH, x_of_gate = gate.executor.forward(x_MK, weights[0], biases[0], gate, prepare)
        up_MH, x_of_up = up.executor.forward(x_MK, weights[1], biases[1], up, prepare)
        source = SourceTensors("gate", (gate_MH, up_MH))
        ((row, column),) = forms_from(source, products, "x", (None,))
        assert isinstance(column, Quantized)
        w = down.weights.prepared(weights[2], products.w_row, down)
        y_MN = products.fprop.product(row, w, out_dtype=products.y_dtype, bias=biases[2])
        saved, ctx.heads = flatten((*x_of_gate, *x_of_up, column))
        of_norm = (None,) * 3 if norm is None else (h, weight_K, rstd_M)
        ctx.save_for_backward(*of_norm, *weights, gate_MH, up_MH, *saved)
        ctx.set_materialize_grads(False)
        ctx.calls = calls
        ctx.norm = norm
        return y_MN, None if norm is None else h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor | None, added: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy_MN is None:
            return added, added if ctx.needs_input_grad[1] else None, *(None,) * 9
        h, weight_K, rstd_M, w_gate, w_up, w_down, gate_MH, up_MH, *saved = ctx.saved_tensors
        x_of_gate, x_of_up, product = unflatten(saved, ctx.heads)
        gate, up, down = ctx.calls
        with without_torchs_autocast(dy_MN.device.type):
            dh_MH, dw_down, dbias = down.executor.backward(dy_MN, w_down, (product,), down)
            source = SourceTensors("gradients", (matrix(dh_MH), gate_MH, up_MH))
            of_gate, of_up = forms_from(source, gate.executor, "dy", (gate, up))
            del dh_MH, source, product
            # In the place of dy stands a tensor of its shape and dtype: its codes are there.
            dx, dw_up, _ = up.executor.backward(up_MH, w_up, (x_of_up,), up, _giving(of_up))
            del of_up, up_MH
            dx_gate, dw_gate, _ = gate.executor.backward(
                gate_MH, w_gate, (x_of_gate,), gate, _giving(of_gate)
            )
            del of_gate, gate_MH, x_of_gate, x_of_up, saved
        dx += dx_gate
        del dx_gate
        dweight = None
        if ctx.norm is not None:
            dx, dweight = ctx.norm.backward(dx, h, weight_K, rstd_M, added)
        dchange = dx if ctx.needs_input_grad[1] else None
        return dx, dchange, dweight, dw_gate, dw_up, dw_down, None, None, dbias, None, None


def _giving(forms: Any) -> Any:
    """A function in the place of `TensorForms.prepare`, of a tensor whose forms are there."""
    return lambda *_: forms


class _BackendGate(torch.autograd.Function):
    """The codes of h [M, H], which `down` takes; gate and up get their gradients as codes."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, calls: list[LayerCall], down: BackendLayer
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.calls = calls
        gate_MH = matrix(gate)
        source = SourceTensors("gate", (gate_MH, matrix(up)))
        (forms,) = forms_from(source, down, "x", (None,))
        return down.given(cast(CodePair, forms), gate_MH.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_MH: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        source = SourceTensors("gradients", tuple(map(matrix, (dh_MH, gate, up))))
        layer: BackendLayer = ctx.calls[0].executor
        codes = forms_from(source, layer, "dy", ctx.calls)
        gradients = [layer.given(cast(CodePair, forms), gate.shape) for forms in codes]
        return *gradients, None, None
