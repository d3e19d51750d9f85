"""A linear layer whose three GEMMs follow a recipe: on Transformer Engine's kernels, torch's scaled_mm, or emulated.

Off TE, one autograd function computes, with q(·) what the recipe's table says of each operand (nothing, for high
precision),

    fprop   y  [M, N] = q(x) [M, K] · q(w) [N, K]ᵀ + bias
    dgrad   dx [M, K] = q(dy) [M, N] · q(wᵀ) [K, N]ᵀ
    wgrad   dw [N, K] = q(dyᵀ) [N, M] · q(xᵀ) [K, M]ᵀ

Row-wise and column-wise forms are each quantised from the high-precision tensor: the transpose of a quantised tensor is
not the quantised transpose, except for square blocks. No flags decide anything here; the specs do. For backward the
layer keeps q(xᵀ) as packed codes and scales (4.5 bits an element for NVFP4) instead of x.
"""

from __future__ import annotations

import logging
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from fp4train.gemm import BACKENDS, emulate, select, widened
from fp4train.nn.scaling import DelayedScaling
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.autocast import Context, current, in_stray_recomputation, once
from fp4train.precision.layers import Layer
from fp4train.precision.recipe import Recipe
from fp4train.precision.te import TEExecutor, why_not
from fp4train.quantize import Form, Operand, Quantized, QuantSpec, RandomKey, both_operands, operand_and_codes, quantize

_log = logging.getLogger(__name__)

# Words of the random key that tell the operands of a layer apart; 1 and 3 are the weight's.
_FPROP_X, _DGRAD_DY, _WGRAD_DY, _WGRAD_X = 0, 2, 4, 5


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer: everything that its forward and backward need besides tensors."""

    recipe: Recipe
    context: Context
    step: int
    layer_key: int
    backend: str
    device: str
    weights: PreparedWeights
    scaling: DelayedScaling
    training: bool
    amaxes: dict[str, Tensor] = field(default_factory=dict)

    @property
    def position(self) -> tuple[int, int]:
        """Seed and step: weights do not change while it stays the same."""
        return self.context.seed, self.step

    def key(self, operand: int, *, along_tokens: bool = False) -> RandomKey:
        """The random bits of x or dy, whose tokens are rows or, `along_tokens`, columns."""
        offset = self.context.token_offset
        # Eight neighbouring columns share one draw of the generator. An offset inside such a group is spread out, to
        # where no other one reaches.
        column = offset if offset % 8 == 0 else (1 << 34) + offset * 8
        return RandomKey(
            seed=self.context.seed,
            step=self.step,
            layer=self.layer_key,
            operand=operand,
            row_offset=0 if along_tokens else offset,
            col_offset=column if along_tokens else 0,
        )

    def form(
        self, name: str, spec: QuantSpec | None, tensor: Tensor, operand: int, *, along_tokens: bool = False
    ) -> Form | None:
        """How x or dy is quantised as this operand; None in high precision."""
        if spec is None:
            return None
        key = self.key(operand, along_tokens=along_tokens) if spec.rounding == "stochastic" else None
        return Form(spec=spec, key=key, amax=self.amax(name, spec, tensor))

    def weight_key(self, operand: int) -> RandomKey:
        """The random bits of the weight: the same for all tokens of a step."""
        return RandomKey(seed=self.context.seed, step=self.step, layer=self.layer_key, operand=operand)

    def amax(self, name: str, spec: QuantSpec | None, tensor: Tensor) -> Tensor | None:
        """The amax that scales `tensor` where its spec uses a delayed one: both its forms take the same."""
        if spec is None or spec.delayed is None:
            return None
        if name not in self.amaxes:
            self.amaxes[name] = self.scaling.amax(name, spec, tensor, enter=self.training)
        return self.amaxes[name]


def _torch_autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # "meta" knows no autocast


def _without_torchs_autocast(device: str) -> AbstractContextManager[object]:
    """The GEMMs choose their own dtypes; torch.autocast must not cast their operands again, forward or backward."""
    return torch.autocast(device, enabled=False) if _torch_autocasts(device) else nullcontext()


def prepare(gemm: ModuleType, x_RC: Tensor, form: Form | None) -> Operand | Quantized:
    """x as `gemm` multiplies it."""
    prepared: Operand | Quantized = (
        gemm.prepare(x_RC, None) if form is None else gemm.prepare(x_RC, form.spec, key=form.key, amax=form.amax)
    )
    return prepared


def prepare_input(
    x_MK: Tensor, row: Form | None, column: Form | None, gemm: ModuleType, context: Context
) -> tuple[Operand | Quantized, Quantized | None]:
    """x as fprop multiplies it, and what wgrad is to have of it, None where that is x itself.

    Layers that read the same tensor one after another (queries, keys and values; gate and up) share both, and so keep
    one copy for backward. The memo holds on to x, which makes its address a proof of identity.
    """
    free = all(form is None or (form.key is None and form.amax is None) for form in (row, column))
    of = None
    if free and not x_MK.is_inference():
        of = (x_MK.data_ptr(), x_MK._version, x_MK.shape, x_MK.stride(), row, column, gemm)
    if of is not None and context.memo.get("input", (None,))[0] == of:
        found: tuple[Operand | Quantized, Quantized | None] = context.memo["input"][2]
        return found
    if row is not None and column is not None and gemm is emulate:
        prepared: tuple[Operand | Quantized, Quantized | None] = operand_and_codes(x_MK, row, column)
    else:
        codes = None if column is None else quantize(x_MK.T, column.spec, key=column.key, amax=column.amax)
        prepared = prepare(gemm, x_MK, row), codes
    if of is not None:
        context.memo["input"] = (of, x_MK, prepared)
    return prepared


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, call: Call, dtype: torch.dtype) -> Tensor:
        table = call.recipe.table()
        gemm, _ = select(call.backend, table["fprop"].first, table["fprop"].second, call.device)
        needs_x, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        x = x_MK.to(dtype)
        row = call.form("x", table["fprop"].first, x, _FPROP_X)
        column = call.form("x", table["wgrad"].second, x, _WGRAD_X, along_tokens=True) if needs_w else None
        a, codes_x = prepare_input(x, row, column, gemm, call.context)
        held: Quantized | Tensor | None = x if needs_w and codes_x is None else codes_x
        b = call.weights.rowwise(w_NK, table["fprop"].second, gemm, dtype, call)
        y_MN: Tensor = gemm.product(a, b, out_dtype=dtype, bias=bias_N)

        codes = (held.codes, held.scales, held.amax) if isinstance(held, Quantized) else (held, None, None)
        ctx.save_for_backward(w_NK if needs_x else None, *codes)
        ctx.held = (held.spec, held.shape) if isinstance(held, Quantized) else None
        ctx.call, ctx.dtype, ctx.x_dtype, ctx.w_dtype = call, dtype, x_MK.dtype, w_NK.dtype
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        with _without_torchs_autocast(ctx.call.device):
            return _LinearFunction.gradients(ctx, dy_MN)

    @staticmethod
    def gradients(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        table = call.recipe.table()
        w_NK, codes, scales, amax_x = ctx.saved_tensors
        dy = dy_MN.to(ctx.dtype)
        dx_MK = dw_NK = dbias_N = None
        dy_row: Operand | Quantized | None
        dy_column: Operand | Quantized | None
        needs_x, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        dgrad, wgrad = table["dgrad"], table["wgrad"]
        dgrad_gemm, _ = select(call.backend, dgrad.first, dgrad.second, call.device)
        wgrad_gemm, _ = select(call.backend, wgrad.first, wgrad.second, call.device)
        row = call.form("dy", dgrad.first, dy, _DGRAD_DY) if needs_x else None
        column = call.form("dy", wgrad.first, dy, _WGRAD_DY, along_tokens=True) if needs_w else None
        if row is not None and column is not None and dgrad_gemm is wgrad_gemm is emulate:
            dy_row, dy_column = both_operands(dy, row, column)
        else:
            dy_row = prepare(dgrad_gemm, dy, row) if needs_x else None
            dy_column = prepare(wgrad_gemm, dy.T, column) if needs_w else None
        if needs_x:
            w = call.weights.columnwise(w_NK, dgrad.second, dgrad_gemm, ctx.dtype, call)
            dx_MK = dgrad_gemm.product(dy_row, w, out_dtype=ctx.dtype).to(ctx.x_dtype)
        if needs_w:
            if ctx.held is None:
                x = prepare(wgrad_gemm, codes.T, None)
            else:
                spec, shape = ctx.held
                x = Quantized(spec=spec, shape=shape, codes=codes, scales=scales, amax=amax_x)
            dw_NK = wgrad_gemm.product(dy_column, x, out_dtype=ctx.dtype).to(ctx.w_dtype)
        if ctx.needs_input_grad[2]:
            dbias_N = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx_MK, dw_NK, dbias_N, None, None


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
        # The choice of recipe, backend and kernel is made in Python at each call; torch.compile leaves it at that, so
        # that a graph compiled in one context never runs in another.
        return _untraced(self, input) if torch.compiler.is_dynamo_compiling() else self._run(input)

    def _run(self, input: Tensor) -> Tensor:
        context = current()
        self._check_recomputation(context)
        if context is None:
            return super().forward(input)
        if input.shape[-1:] != (self.in_features,):
            shape = tuple(input.shape)
            raise ValueError(f"{self.layer.name}: input {shape} does not end in in_features={self.in_features}")
        recipe, device = context.recipe_for(self.layer), input.device.type
        out_dtype = torch.get_autocast_dtype(device) if _torch_autocasts(device) else input.dtype
        dtype, shape = recipe.torch_dtype, (*input.shape[:-1], self.out_features)
        x_MK = input.reshape(input.shape[:-1].numel(), self.in_features)
        with _without_torchs_autocast(device):
            if not recipe.quantised:
                # torch's own layer, whose backward is not written in Python: what BF16 costs elsewhere it costs here.
                bias = None if self.bias is None else self.bias.to(dtype)
                return widened(F.linear, x_MK.to(dtype), self.weight.to(dtype), bias).to(out_dtype).view(shape)
            if self.why_not_te(recipe, device) is None:
                return self.te(input, self.weight, self.bias, recipe).to(out_dtype)
            call = once(self, lambda: self._call(context, recipe, device))
            arguments = (x_MK, self.weight, self.bias, call, dtype)
            y_MN: Tensor = _LinearFunction.apply(*arguments)  # type: ignore[no-untyped-call]
        return y_MN.to(out_dtype).view(shape)

    def _call(self, context: Context, recipe: Recipe, device: str) -> Call:
        training = torch.is_grad_enabled()
        if context.step is None:
            self._calls += training
        return Call(
            recipe=recipe,
            context=context,
            step=self._calls if context.step is None else context.step,
            layer_key=self._layer_key,
            backend=self._off_te,
            device=device,
            # Without a step nobody says when the weights change, so nothing is kept from one call to the next.
            weights=PreparedWeights() if context.step is None else self._weights,
            scaling=self.scaling,
            training=training,
        )

    def _check_recomputation(self, context: Context | None) -> None:
        if not in_stray_recomputation():
            self._was_in_context = context is not None
        elif self._was_in_context or context is not None:
            raise RuntimeError(
                f"{self.layer.name} is recomputed in backward without the autocast context of its forward pass. Use "
                "fp4train.precision.checkpoint, or torch.utils.checkpoint.checkpoint(…, use_reentrant=False, "
                "context_fn=fp4train.precision.checkpoint_contexts)."
            )

    def scaling_state(self) -> dict[str, Tensor]:
        """What delayed scaling has seen, which a checkpoint must hold beside the state dict; empty without it."""
        return {**self.scaling.state(), **{f"te.{k}": v for k, v in self.te.state().items()}}

    def load_scaling_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `scaling_state` gave."""
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
    return layer._run(input)
