"""A linear layer whose three GEMMs follow a recipe: on Transformer Engine's kernels, torch's scaled_mm, or emulated.

Here is the choice among them; the GEMMs themselves are in `gemms`, the way through torch.compile is in `compiled`.
"""

from __future__ import annotations

import logging
import zlib
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from fp4train.backends import BACKENDS, select, widened
from fp4train.backends.te import TEExecutor, why_not
from fp4train.nn import compiled
from fp4train.nn.call import Call
from fp4train.nn.gemms import LinearFunction, torch_autocasts, without_torchs_autocast
from fp4train.nn.scaling import DelayedScaling
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.context import Context, current, in_stray_recomputation, once
from fp4train.precision.layers import Layer
from fp4train.precision.recipe import Recipe

_log = logging.getLogger(__name__)


class Linear(nn.Linear):
    """`nn.Linear` that runs in the recipe of the surrounding `autocast`, and as `nn.Linear` outside of one.

    Parameters and state dict are those of `nn.Linear`. Inputs of any leading dimensions [..., in_features]; the output
    has the input's dtype, or torch.autocast's where that is on; inside, GEMMs run in the recipe's dtype.

    Args:
        layer: name and place in the model, which `convert` fills in; they key the random bits and the policy.
        backend: "te" (Transformer Engine), "native" (torch's scaled_mm), "emulate", "reference" (exact, slow), or
            "auto": TE where it can run the recipe, else native products where a GPU has them, else emulation.
    """

    is_fp4train_linear = True

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
        alone = Layer(name="linear", in_features=in_features, out_features=out_features, block=0, blocks=1)
        self._begin(layer or alone, backend)

    @classmethod
    def from_linear(cls, linear: nn.Linear, layer: Layer, backend: str) -> Linear:
        """A layer in the place of `linear`: its parameters, hooks, training flag and whatever else was set on it."""
        new = cls.__new__(cls)
        new.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in linear.__dict__.items()})
        new._begin(layer, backend)
        return new

    def _begin(self, layer: Layer, backend: str) -> None:
        self.scaling = DelayedScaling()
        self.te = TEExecutor(
            in_features=self.in_features, out_features=self.out_features, bias=self.bias is not None, name=layer.name
        )
        self._handle = compiled.Handle(self)
        self._calls = 0
        self._was_in_context = False
        self.settle(layer, backend)

    def settle(self, layer: Layer, backend: str) -> None:
        """Give the layer its name and place in a model, and its backend; what it has learnt of scales stays."""
        if backend not in ("auto", "te", *BACKENDS):
            raise ValueError(f"backend={backend!r} is not one of auto, te, {', '.join(BACKENDS)}")
        self.layer, self.backend, self.te.name = layer, backend, layer.name
        self._layer_key = zlib.crc32(layer.name.encode())
        self._weights = PreparedWeights()
        self._choices: dict[tuple[Recipe, str], str | None] = {}

    def why_not_te(self, recipe: Recipe, device: str) -> str | None:
        """Why this layer does not run `recipe` on TE's kernels, or None where it does."""
        if (recipe, device) not in self._choices:
            if self.backend not in ("auto", "te"):
                reason: str | None = f"backend={self.backend}"
            elif device != "cuda":
                reason = f"Transformer Engine needs a GPU, not {device}"
            else:
                reason = why_not(recipe, in_features=self.in_features, out_features=self.out_features)
            if reason is not None and self.backend == "te" and recipe.quantised:
                _log_fallback(recipe.name, reason)
            self._choices[recipe, device] = reason
        return self._choices[recipe, device]

    def explain(self, recipe: Recipe, gemm: str, device: str) -> tuple[str, str]:
        """(backend, why) of one GEMM of this layer in `recipe`: what `forward` and its backward will do."""
        operands = recipe.table()[gemm]
        if not recipe.quantised:
            return "torch", recipe.name
        reason = self.why_not_te(recipe, device)
        if reason is None:
            return "te", f"backend={self.backend}: Transformer Engine runs this recipe here"
        if not operands.quantised:
            return "torch", recipe.name
        module, why = select(self._off_te, operands.first, operands.second, device)
        name = module.__name__.rpartition(".")[2]
        return name, why if self.backend not in ("auto", "te") else f"{self.backend}: {reason}"

    @property
    def _off_te(self) -> str:
        """The backend of GEMMs that TE does not run."""
        return "auto" if self.backend == "te" else self.backend

    def forward(self, input: Tensor) -> Tensor:
        """y [..., out_features] of input [..., in_features]."""
        if torch.compiler.is_dynamo_compiling():
            return self._traced(input)
        context = current()
        if self.is_stray(context):
            raise RuntimeError(
                f"{self.layer.name} is recomputed in backward without the autocast context of its forward pass. Use "
                "fp4train.precision.checkpoint, or torch.utils.checkpoint.checkpoint(…, use_reentrant=False, "
                "context_fn=fp4train.precision.checkpoint_contexts)."
            )
        if context is None:
            return super().forward(input)
        recipe, device = context.recipe_for(self.layer), input.device.type
        x_MK, out_dtype, shape = self._matrix(input)
        with without_torchs_autocast(device):
            if not recipe.quantised:
                y_MN = self._by_torch(x_MK, recipe.torch_dtype)
            elif self.why_not_te(recipe, device) is None:
                y_MN = self.te(input, self.weight, self.bias, recipe)
            else:
                call = once(self, lambda: self.new_call(context, recipe, device, torch.is_grad_enabled()))
                y_MN = LinearFunction.apply(x_MK, self.weight, self.bias, call)  # type: ignore[no-untyped-call]
        return y_MN.to(out_dtype).view(shape)

    def _traced(self, input: Tensor) -> Tensor:
        """`forward` as torch.compile traces it: what depends on the run is left to the operator."""
        route = self._handle.route()
        if route.kind == "plain":
            return super().forward(input)
        if route.kind == "eager":
            return _untraced(self, input)
        x_MK, out_dtype, shape = self._matrix(input)
        assert route.dtype is not None
        with without_torchs_autocast(input.device.type):
            if route.kind == "torch":
                y_MN = self._by_torch(x_MK, route.dtype)
            else:
                context, training = current(), torch.is_grad_enabled()
                assert context is not None
                x_MK = x_MK.to(route.dtype)
                tensors = (x_MK, self.weight, self.bias)
                wanted = [training and t is not None and t.requires_grad for t in tensors]
                y_MN, _ = compiled.linear(*tensors, self._handle, context, training, wanted, route.keeps_x)
        return y_MN.to(out_dtype).view(shape)

    def _matrix(self, input: Tensor) -> tuple[Tensor, torch.dtype, tuple[int, ...]]:
        """(x [M, K] of an input, the dtype and the shape of the output)."""
        if input.shape[-1:] != (self.in_features,):
            shape = tuple(input.shape)
            raise ValueError(f"{self.layer.name}: input {shape} does not end in in_features={self.in_features}")
        device = input.device.type
        out_dtype = torch.get_autocast_dtype(device) if torch_autocasts(device) else input.dtype
        x_MK = input.reshape(input.shape[:-1].numel(), self.in_features)
        return x_MK, out_dtype, (*input.shape[:-1], self.out_features)

    def _by_torch(self, x_MK: Tensor, dtype: torch.dtype) -> Tensor:
        """torch's own layer, whose backward is not written in Python: what BF16 costs elsewhere it costs here."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return widened(F.linear, x_MK.to(dtype), self.weight.to(dtype), bias)

    def new_call(self, context: Context, recipe: Recipe, device: str, training: bool) -> Call:
        """A call of this layer; `training`: whether gradients are on."""
        if context.step is None:
            self._calls += training
        return Call(
            recipe=recipe,
            seed=context.seed,
            step=self._calls if context.step is None else context.step,
            token_offset=context.token_offset,
            layer_key=self._layer_key,
            backend=self._off_te,
            device=device,
            # Without a step nobody says when the weights change, so nothing is kept from one call to the next.
            weights=PreparedWeights() if context.step is None else self._weights,
            scaling=self.scaling,
            training=training,
        )

    def is_stray(self, context: Context | None) -> bool:
        """Whether this call recomputes one that was made in another context; asked once a call."""
        if in_stray_recomputation():
            return self._was_in_context or context is not None
        self._was_in_context = context is not None
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = compiled.Handle(self)

    def scaling_state(self) -> dict[str, Tensor]:
        """What delayed scaling has seen, which a checkpoint must hold beside the state dict; empty without it."""
        return {**self.scaling.state(), **{f"te.{k}": v for k, v in self.te.state().items()}}

    def load_scaling_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `scaling_state` gave."""
        self._weights = PreparedWeights()  # which knows whether a weight's amax has entered the history in this step
        self.scaling.load({k: v for k, v in state.items() if not k.startswith("te.")})
        self.te.load_state({k.removeprefix("te."): v for k, v in state.items() if k.startswith("te.")})

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend}"


@cache
def _log_fallback(recipe: str, reason: str) -> None:
    """Once for each recipe and reason, not for each layer: the cache is the memory."""
    _log.warning("backend=te cannot run %s (%s); emulating it", recipe, reason)


@_disable_dynamo  # imports torch._dynamo when it is called, and so only where it is there already
def _untraced(layer: Linear, input: Tensor) -> Tensor:
    return layer.forward(input)
