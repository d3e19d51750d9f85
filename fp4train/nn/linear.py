"""A linear layer whose three GEMMs follow a recipe: on Transformer Engine's kernels, torch's
scaled_mm, or emulated.

What it shares with groups of weights is in `planned.py`, the support for torch.compile in
`compile.py`.
"""

from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.nn.engine import without_torchs_autocast
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.planned import PlannedLayer
from fp4train.precision.layers import Layer


class LinearLayer(PlannedLayer):
    """A layer of one weight, whatever class it replaces."""

    bias: Tensor | None

    @classmethod
    def from_linear(cls, linear: nn.Module, layer: Layer, backend: str) -> Self:
        """A replacement for `linear` with its parameters, hooks, training flag and other
        attributes.
        """
        new = cls.__new__(cls)
        new.__dict__.update(
            {k: v.copy() if isinstance(v, dict) else v for k, v in linear.__dict__.items()}
        )
        new.in_features = layer.in_features
        new.out_features = layer.out_features
        new._begin(layer, backend)
        return new

    def sampled_operands(self, x: Tensor, *counts: Any) -> tuple[Tensor, Tensor, slice]:
        return *self.quantised_columns(x.reshape(-1, x.shape[-1]), self.w_NK), slice(None)

    def shard(self, own: LayerShard) -> None:
        self.layer_shard = own
        self.default_context = own.default_context
        self.out_features, self.in_features = self.own_weights[0].shape
        layer = replace(self.layer, in_features=self.in_features, out_features=self.out_features)
        segments = tuple(count for _, count in own.runs_of("w"))
        self.rename(replace(layer, cut=own.cut, parts=own.parts, segments=segments), self.backend)

    def forward(self, input: Tensor) -> Tensor:
        """y [..., out_features] of input [..., in_features]."""
        if torch.compiler.is_dynamo_compiling():
            from fp4train.nn import compile as compiled

            return compiled.call(self, input)
        executor, now = self.executor_now(input.device, input.dtype)
        if executor is None:
            return F.linear(input, self.w_NK, self.bias)
        x_MK, autocast, shape = self.matrix(input)
        w_NK = self.w_NK
        call = None
        if executor.counted or executor.takes_call(w_NK):
            call = self.call_in(now, executor, x_MK.shape[0])
        if autocast is not None:
            with without_torchs_autocast(input.device.type):
                y_MN = executor(x_MK, w_NK, self.bias, call)
        else:
            y_MN = executor(x_MK, w_NK, self.bias, call)
        y_MN = y_MN.to(autocast or input.dtype)
        if input.dim() != 2 and y_MN.shape[0] == x_MK.shape[0]:
            y_MN = torch.ops.aten._unsafe_view(y_MN, shape)  # no view, as nn.Linear gives none
        return y_MN

    @property
    def w_NK(self) -> Tensor:
        """The weight [out_features, in_features]."""
        return self.weight

    @property
    def own_weights(self) -> tuple[Tensor, ...]:
        return (self.w_NK if self.layer_shard is None else self.layer_shard.local_part(self.w_NK),)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend}"


class Linear(LinearLayer, nn.Linear):  # type: ignore[misc]  # its bias may be None
    """`nn.Linear` that runs in the recipe of the surrounding `autocast`, and as `nn.Linear` outside
    it.

    Parameters and state dict are those of `nn.Linear`. Inputs are [..., in_features]. The output
    has the input's dtype, or that of torch.autocast if it is on; the GEMMs run in the recipe's
    dtype.

    Args:
        layer: name and position in the model, set by `convert`; they key the random bits and the
            policy.
        backend: "te" (Transformer Engine), "native" (torch's scaled_mm), "emulate", "reference"
            (exact, slow), or "auto": TE if it can run the recipe, else native products if the GPU
            has them, else emulation. A named backend that cannot run a recipe raises ValueError
            when the recipe is resolved.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        layer: Layer | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        alone = Layer(
            name="linear", in_features=in_features, out_features=out_features, block=0, blocks=1
        )
        self._begin(layer or alone, backend)


class TransposedLinear(LinearLayer):
    """A layer that stores its weight as [in_features, out_features]: `Conv1D` of transformers.

    It is no `nn.Linear`, so that other code, such as peft, knows how the weight lies.
    """

    transposed = True

    @property
    def w_NK(self) -> Tensor:
        return self.weight.T
