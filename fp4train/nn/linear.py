"""A linear layer whose three GEMMs follow a recipe: on Transformer Engine's kernels, torch's scaled_mm, or emulated.

A layer holds the executor that its plan became (`nn.executors`): where a plan is applied, or where a context of
`autocast` is met for the first time. A call is context → executor → result. The support for torch.compile is in
`compile.py`.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.backends import CHOICES, LayerState
from fp4train.hardware import Device
from fp4train.nn.call import EAGER, Call, Executor, Route, TokenCount
from fp4train.nn.executors import make_executor, make_state
from fp4train.nn.executors.cut import LayerShard, default_context
from fp4train.nn.executors.gemms import torch_autocasts, without_torchs_autocast
from fp4train.nn.ranks import local
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.context import Context, GraphInput, State, is_stray_recomputation, once, state
from fp4train.precision.layers import Layer
from fp4train.precision.plan import LayerPlan, resolve
from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import Recipe
from fp4train.text import check_choice

_Key = tuple[Recipe, LayerPolicy | None, Device]


class Handle(metaclass=GraphInput):
    """A linear layer as an opaque input of compiled graphs; it holds a weak reference to the layer that owns it."""

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
        """For the compiler's cache keys: all layers are equal, since graphs depend on the route only."""
        return str, (Handle.__qualname__,)

    def route(self) -> Route:
        """The layer's route in the current context."""
        now, layer = state(), self.layer
        if layer.is_stray(now):
            return EAGER
        if now.context is None:
            return Route("plain") if layer.default_context is None else EAGER
        try:
            # Not the device of `weight`, which a parametrization would recompute.
            return layer.executor_in(now.context, next(layer.parameters()).device).route
        except ValueError:  # the call raises it
            return EAGER


class Linear(nn.Linear):
    """`nn.Linear` that runs in the recipe of the surrounding `autocast`, and as `nn.Linear` outside it.

    Parameters and state dict are those of `nn.Linear`. Inputs are [..., in_features]. The output has the
    input's dtype, or that of torch.autocast if it is on; the GEMMs run in the recipe's dtype.

    Args:
        layer: name and position in the model, set by `convert`; they key the random bits and the policy.
        backend: "te" (Transformer Engine), "native" (torch's scaled_mm), "emulate", "reference" (exact, slow), or
            "auto": TE if it can run the recipe, else native products if the GPU has them, else emulation. A named
            backend that cannot run a recipe raises ValueError when the recipe is resolved.
    """

    is_fp4train_linear = True
    transposed = False
    """Whether the weight is stored as [in_features, out_features] (`Conv1D` of transformers)."""

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
    def from_linear(cls, linear: nn.Module, layer: Layer, backend: str) -> Linear:
        """A replacement for `linear` with its parameters, hooks, training flag and other attributes."""
        new = cls.__new__(cls)
        new.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in linear.__dict__.items()})
        new.in_features, new.out_features = layer.in_features, layer.out_features
        new._begin(layer, backend)
        return new

    def _begin(self, layer: Layer, backend: str) -> None:
        self.handle = Handle(self)
        self.states: dict[str, LayerState] = {}
        """What executors carry from step to step, by name; see `nn.executors`."""
        self.joined = False
        """Whether the loop joins the states over the ranks (`join_states`); else each call does so by itself."""
        self.layer_shard: LayerShard | None = None
        """Where the layer lies among the ranks, set by `shard`; None: alone on this one."""
        self.default_context: Callable[[torch.dtype], Context] | None = None
        """The context outside of any, by the dtype of the input; None: the layer is nn.Linear there."""
        self.channels: Tensor | None = None
        """The in features that the layer's own recipe multiplied in the last call, int64; None: all."""
        self.keeps_forms = True
        self._sums = self._was_in_context = False
        self._calls, self._tokens = 0, TokenCount()
        self.rename(layer, backend)

    def rename(self, layer: Layer, backend: str) -> None:
        """Set the layer's name, position in the model and backend; the states are kept, a plan that was applied not."""
        check_choice("backend", backend, CHOICES)
        self.layer, self.backend = layer, backend
        self._layer_key = zlib.crc32(layer.name.encode())
        self._forget()

    def shard(self, own: LayerShard) -> None:
        """Make this layer the shard `own` of the whole one; its parameters must be that shard, as DTensors if it is
        cut."""
        weight, parts = (self.weight, 1) if own.tensor is None else (local(self.weight), own.tensor.size)
        self.out_features, self.in_features = weight.T.shape if self.transposed else weight.shape
        self.layer_shard, self.default_context = own, None if own.tensor is None else default_context
        layer = replace(self.layer, in_features=self.in_features, out_features=self.out_features)
        self.rename(replace(layer, cut=own.cut, parts=parts), self.backend)

    # -- what the layer runs ------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Forget all executors and prepared weights."""
        self._applied: _Key | None = None
        self._held: tuple[Recipe | None, LayerPolicy | None, torch.device | None, Executor | None] = (None,) * 4
        self._executors: dict[_Key, Executor] = {}
        self._prepared: dict[Hashable, PreparedWeights] = {}

    def apply_plan(self, plan: LayerPlan, recipe: Recipe, policy: LayerPolicy | None, device: torch.device) -> None:
        """Run `plan` in contexts with this `recipe` and `policy` on `device`, without resolving it again."""
        self._applied = key = (recipe, policy, Device.of(device))
        known = self._executors.get(key)
        if known is None or known.plan != plan:
            self._executors[key] = make_executor(plan, device.type, self.layer_shard, sums=self._sums)
        self._hold(key, device)

    def executor_in(self, context: Context, device: torch.device) -> Executor:
        """What the layer runs in `context` on `device`: the applied plan, or what is resolved on first use.

        Raises:
            ValueError: the recipe cannot run here; see `precision.plan.resolve`.
            RuntimeError: the context is one of an applied plan, which is not that of the layer.
        """
        recipe, policy, at, executor = self._held
        if recipe is not context.recipe or policy is not context.policy or at != device or executor is None:
            key = (context.recipe, context.policy, Device.of(device))
            if context.applied and key != self._applied:
                applied = "none" if self._applied is None else f"that of {self._applied[0].name}"
                raise RuntimeError(
                    f"layer {self.layer.name} is called in {context.recipe.name} on {key[2]}, and the plan that was "
                    f"applied to it is {applied}: apply the plan of the coming stretch to the model first (Run.apply), "
                    "or enter the recipe by autocast, which resolves it"
                )
            if key not in self._executors:
                plan = resolve(self.layer, context.recipe, context.policy, self.backend, key[2])
                self._executors[key] = make_executor(plan, device.type, self.layer_shard, sums=self._sums)
            executor = self._hold((context.recipe, context.policy, key[2]), device)
        if context.met is not None:
            context.met[self] = executor.plan.quantised
        return executor

    def _hold(self, key: _Key, device: torch.device) -> Executor:
        executor = self._executors[key]
        self._held, self.channels = (*key[:2], device, executor), None
        for name in executor.states:
            if name not in self.states:
                self.states[name] = make_state(self, name)
        return executor

    # -- the call -----------------------------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """y [..., out_features] of input [..., in_features]."""
        if torch.compiler.is_dynamo_compiling():
            from fp4train.nn import compile as compiled

            return compiled.call(self, input)
        now = state()
        if self.is_stray(now):
            raise RuntimeError(
                f"layer {self.layer.name} is recomputed in backward without the autocast context of its forward pass. "
                "Use fp4train.precision.recompute, or torch.utils.checkpoint.checkpoint(…, use_reentrant=False, "
                "context_fn=fp4train.precision.recompute_contexts)."
            )
        if now.context is None:
            if self.default_context is None:
                return F.linear(input, self.w_NK, self.bias)
            now = now._replace(context=self.default_context(input.dtype))
        assert now.context is not None
        executor = self.executor_in(now.context, input.device)
        x_MK, out_dtype, shape = self.matrix(input)
        weights, biases = (self.w_NK,), (self.bias,)
        if torch_autocasts(input.device.type):
            with without_torchs_autocast(input.device.type):
                y_MN = executor(self, x_MK, weights, biases, now)
        else:
            y_MN = executor(self, x_MK, weights, biases, now)
        return y_MN.to(out_dtype).view(shape if y_MN.shape[0] == x_MK.shape[0] else y_MN.shape)

    @property
    def w_NK(self) -> Tensor:
        """The weight [out_features, in_features]; a view where it is stored transposed."""
        return self.weight.T if self.transposed else self.weight

    def matrix(self, input: Tensor) -> tuple[Tensor, torch.dtype, tuple[int, ...]]:
        """(x [M, K] of an input, the dtype and the shape of the output).

        Raises:
            ValueError: the last dimension is not in_features.
            TypeError: the input is not of a floating dtype.
        """
        if input.shape[-1:] != (self.in_features,):
            shape = tuple(input.shape)
            raise ValueError(
                f"{self.layer.name or 'linear layer'}: input {shape} does not end in in_features={self.in_features}"
            )
        if not input.is_floating_point():
            name = self.layer.name or "linear layer"
            raise TypeError(f"{name}: input has dtype {input.dtype}; a linear layer takes floating numbers")
        device = input.device.type
        out_dtype = torch.get_autocast_dtype(device) if torch_autocasts(device) else input.dtype
        x_MK = input if input.dim() == 2 else input.reshape(input.shape[:-1].numel(), self.in_features)
        return x_MK, out_dtype, (*input.shape[:-1], self.out_features)

    def call_in(self, now: State, executor: Executor, tokens: int) -> Call:
        """The coming call of `executor` with so many tokens; inside a recomputed region, that of the first pass."""
        context = now.context
        assert context is not None
        if not now.recording and now.replaying is None:
            return self.new_call(context, executor, tokens, training=torch.is_grad_enabled())
        return once(self, lambda: self.new_call(context, executor, tokens, training=torch.is_grad_enabled()))

    def new_call(self, context: Context, executor: Executor, tokens: int, *, training: bool) -> Call:
        """A call of `executor` with so many tokens; `training`: whether gradients are enabled."""
        step, offset = context.step, context.token_offset
        if step is None:
            # Without a step the layer cannot know when its weights change, so it caches nothing between calls.
            self._calls += training
            step, weights = self._calls, PreparedWeights()
        else:
            weights = self._prepared.get(None) or self.prepared(None)
            if offset is None and training and tokens:
                offset = self._tokens.offset((context.seed, step), tokens, self.layer.name)
        at = (context.seed, step, offset or 0, self._layer_key)
        scaling: Any = self.states.get("scaling")
        parameter = self.weight if self.transposed else None
        return Call(executor, *at, weights, scaling, training, context.shared, context.counters, parameter)

    def prepared(self, part: Hashable) -> PreparedWeights:
        """The prepared forms of the weight, or of a part of it, in a step."""
        return self._prepared.setdefault(part, PreparedWeights(self.keeps_forms))

    def keep_forms(self, keep: bool) -> None:
        """Whether prepared forms of the weight are kept within a step: not where the weight itself is freed."""
        self.keeps_forms = keep
        self._prepared.clear()

    def sum_gradients(self, sums: bool) -> None:
        """Whether the weight's gradients of several calls (microbatches, ranks) are summed: each is then computed in
        float32 and not rounded to the recipe's dtype first. Compiled high-precision layers round them."""
        self._sums = sums
        self._forget()

    def is_stray(self, now: State) -> bool:
        """Whether this call recomputes one that was made in another context; evaluated once per call."""
        if is_stray_recomputation(now):
            return self._was_in_context or now.context is not None
        if self._was_in_context is (now.context is None):
            self._was_in_context = now.context is not None
        return False

    # -- copies, checkpoints ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "handle"}
        fresh: dict[str, Any] = {"_held": (None,) * 4, "_executors": {}, "_applied": None, "_prepared": {}}
        return {**kept, **fresh, "_tokens": TokenCount(), "channels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.handle = Handle(self)

    def scaling_state(self) -> dict[str, Tensor]:
        """The tensors of the layer's states (amax histories of delayed scaling, …), saved in a checkpoint beside the
        state dict: those of "scaling" by their own names, those of others behind the name of the state."""
        return {
            key if name == "scaling" else f"{name}.{key}": tensor
            for name, each in self.states.items()
            for key, tensor in each.state().items()
        }

    def load_scaling_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `scaling_state`; the next call prepares the weight anew."""
        self._prepared.clear()  # a prepared weight knows whether its amax has entered the history in this step
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self.states}
        for key, tensor in state.items():
            name, _, rest = key.partition(".")
            if name in ("history", "used"):
                name, rest = "scaling", key
            found.setdefault(name, {})[rest] = tensor
        for name, tensors in found.items():
            if name not in self.states:
                self.states[name] = make_state(self, name)
            self.states[name].load_state(tensors)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend}"
