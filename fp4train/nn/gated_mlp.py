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

from torch import Tensor, nn

from fp4train.nn.backend_sources import matrix
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import Executor, LayerFunction, Saved
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.executors.whole_layer import BackendLayer
from fp4train.nn.fused_layers import FusedLayers, Ready, forms_from
from fp4train.nn.fused_norm import (
    FusedCall,
    KernelNorm,
    MadeForms,
    NormedCall,
    multiplied_codes,
    parameters_of,
)
from fp4train.nn.linear import Linear
from fp4train.precision.context import State
from fp4train.quantize.produced import SourceTensors


class GatedMLP(FusedLayers):
    """down(silu(gate(x)) ⊙ up(x)) of three layers of a module.

    Args:
        mlp: the module, which computes it otherwise; its class names the kernels ("gate").
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
    def readers(self) -> tuple[Linear, ...]:
        return (self._reader(self.owner),)

    @property
    def writers(self) -> tuple[Linear, ...]:
        layers: tuple[Linear, ...] = self._sources(self.owner)
        return layers

    def why_never(self) -> str | None:
        if getattr(self.owner, "kernel", "") != self.kind:
            return f"no kernel computes {type(self.owner).__name__}"
        reason = super().why_never()
        if reason is None and self._biased:
            return "the gradients of the biases of its layers need the values of dy, not its codes"
        return reason

    @property
    def _biased(self) -> bool:
        """Whether gate or up has a bias that is trained."""
        return any(layer.bias is not None and layer.bias.requires_grad for layer in self.writers)

    def forward(self, x: Tensor) -> Tensor | None:
        """y [..., N] of x [..., K]; None: the codes cannot be made here.

        Raises:
            RuntimeError: gate and up have been called for different tokens of the step.
        """
        ready = self.ready_for(x)
        if ready is None:
            return None
        if isinstance(ready[0][0], BackendLayer):
            gate, up = [layer(x) for layer in self.writers]
            return self._by_backend_layers(ready, gate, up)
        y_MN, _ = self._by_gemms(ready, None, x.reshape(-1, x.shape[-1]), None, None)
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])

    def normed(
        self, ready: Ready, x: Tensor, change: Tensor | None, weight_K: Tensor, norm: KernelNorm
    ) -> tuple[Tensor, Tensor]:
        """(y [..., N] of the norm of x + change, that sum), where `ready_for` says what the call
        takes.
        """
        y_MN, h = self._by_gemms(ready, norm, x, change, weight_K)
        assert h is not None
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1]), h

    def of_outputs(self, gate: Tensor, up: Tensor) -> Tensor | None:
        """y [..., N] of the outputs of gate and up, layers of a backend; None: the codes cannot be
        made from them.

        Raises:
            RuntimeError: see `forward`.
        """
        ready = self.ready_for(gate)
        if ready is None or not isinstance(ready[0][0], BackendLayer):
            return None
        return self._by_backend_layers(ready, gate, up)

    def _by_backend_layers(self, ready: Ready, gate: Tensor, up: Tensor) -> Tensor:
        """y [..., N] of the outputs of gate and up."""
        (down, *of_sources), now = ready
        assert isinstance(down, BackendLayer)
        calls = self._calls(now, of_sources, gate.numel() // gate.shape[-1])
        codes = LayerFunction.apply(GateCodesCall(calls, down), gate, up)  # type: ignore[no-untyped-call]
        (y_MN,) = multiplied_codes(self.readers, [down], [codes], now)
        return y_MN.view(*gate.shape[:-1], y_MN.shape[-1])

    def ready_for(self, x: Tensor, *, normed: bool = False) -> Ready | None:
        """What the call takes, where codes can be made from tensors like x; `normed`: after a
        norm.
        """
        if not self.asked:
            self.asked = True
        if not self.enabled or not (normed or x.requires_grad):
            return None
        if self._biased:
            return None
        return self.ready(x)

    def _by_gemms(
        self,
        ready: Ready,
        norm: KernelNorm | None,
        x: Tensor,
        change: Tensor | None,
        weight_K: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """(y [M, N] of the norm of x + change, that sum); without a norm (y of x [M, K], None)."""
        (down, *of_sources), now = ready
        calls = self._calls(now, (*of_sources, down), x.numel() // x.shape[-1])
        call = GatedCall(norm, calls[:2], calls[2])
        parameters = parameters_of((*self.writers, *self.readers))
        y_MN, h = LayerFunction.apply(call, x, change, weight_K, *parameters)  # type: ignore[no-untyped-call]
        return y_MN, h

    def _calls(self, now: State, executors: Sequence[Executor], tokens: int) -> list[LayerCall]:
        """The coming calls of gate and up, which draw random bits for one place, and of down if
        its executor follows theirs.
        """
        layers = (*self.writers, *self.readers)
        calls = [
            layer.call_in(now, executor, tokens, placed=True)
            for layer, executor in zip(layers, executors, strict=False)
        ]
        gate, up = calls[:2]
        if gate.position != up.position:
            names = " and ".join(layer.layer.name for layer in self.writers)
            raise RuntimeError(
                f"{names} have been called for different tokens of this step, and their gradients "
                "are rounded by the random bits of one place: give autocast a token_offset"
            )
        return calls


class GatedCall(NormedCall):
    """(y [M, N], h) of gate, up and down, as `NormedCall` of gate and up; h is None without a
    norm.

    Args:
        norm: norm as for `NormedCall`.
        calls: calls of gate and up.
        down: call of down.
    """

    def __init__(
        self, norm: KernelNorm | None, calls: Sequence[LayerCall], down: LayerCall
    ) -> None:
        super().__init__(norm, calls)
        self.down = down
        self.adds = False

    def wants(self, needs_grad: Sequence[bool], *tensors: Any) -> None:
        x, *_, w_down, bias = tensors
        super().wants(needs_grad[:-2], *tensors[:-2])
        self.down.wants((True, True, needs_grad[-1]), x, w_down, bias)
        # a tensor of its dtype stands for h, whose codes are there
        self.down.shared = None

    def forward(self, *arguments: Any) -> tuple[tuple[Any, ...], Saved]:
        *tensors, w_down, bias, _ = arguments
        down = self.down
        gemms = cast(Gemms, down.executor)
        outputs, saved = self.multiply(*tensors)
        source = SourceTensors("gate", tuple(outputs))
        (forms,) = forms_from(source, gemms, "x", (None,))
        codes = MadeForms(forms, source)
        y_MN, of_down = gemms.forward(outputs[0], w_down, bias, down, codes)
        return (y_MN, saved[0]), (*saved, *outputs, *of_down)

    def backward(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        dy_MN, added, saved, _, _ = arguments
        *of_layers, gate_MH, up_MH, w_down, product = saved
        if dy_MN is None:
            return *self.norm_backward(None, added, *saved[:3]), *(None,) * 6
        down = self.down
        dh_MH, *of_down = cast(Gemms, down.executor).backward(dy_MN, (w_down, product), down)
        assert dh_MH is not None
        source = SourceTensors("gradients", (matrix(dh_MH), gate_MH, up_MH))
        forms = forms_from(source, cast(Gemms, self.calls[0].executor), "dy", self.calls)
        watched = any(call.executor.watched for call in self.calls)
        kept = source if watched else None  # else dh is freed before the products
        codes = [MadeForms(pair, kept, number) for number, pair in enumerate(forms)]
        del dh_MH, source, forms, kept
        # In the place of dy stands a tensor of its shape and dtype: its codes are there.
        dx, gradients = self.multiply_backward([gate_MH, up_MH], of_layers[3:], None, codes)
        return *self.norm_backward(dx, added, *saved[:3]), *gradients, *of_down


class GateCodesCall(FusedCall):
    """The codes of h [M, H], which `down` takes, of gate and up, which get their gradients as
    codes.
    """

    def __init__(self, calls: Sequence[LayerCall], down: BackendLayer) -> None:
        self.calls = calls
        self.down = down

    def forward(self, gate: Tensor, up: Tensor, call: FusedCall) -> tuple[Tensor, Saved]:
        gate_MH = matrix(gate)
        source = SourceTensors("gate", (gate_MH, matrix(up)))
        (forms,) = forms_from(source, self.down, "x", (None,))
        return self.down.given(forms, gate_MH.shape), (gate, up)

    def backward(
        self, dh_MH: Tensor, saved: Saved, call: FusedCall, sums: None
    ) -> tuple[Tensor, ...]:
        gate, up = cast(Sequence[Tensor], saved)
        source = SourceTensors("gradients", tuple(map(matrix, (dh_MH, gate, up))))
        layer = cast(BackendLayer, self.calls[0].executor)
        codes = forms_from(source, layer, "dy", self.calls)
        return tuple([layer.given(forms, gate.shape) for forms in codes])
