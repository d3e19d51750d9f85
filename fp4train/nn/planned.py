"""A planned layer: what every layer with GEMMs of its own shares, whether it has one weight or a
group of them.

A planned layer has a name and a place in the model (`Layer`), holds the executor that its plan
became (`nn.executors`), made where a plan is applied or where a context of `autocast` is met for
the first time, and the states that executors carry from step to step. A call is context → executor
→ result. Everything outside of `nn` reads layers through this class: the plan, sharding,
checkpoints, statistics.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fp4train.backends import CHOICES, LayerState
from fp4train.hardware import Device
from fp4train.nn.call import LayerCall, TokenCount
from fp4train.nn.engine import EAGER, CompiledRoute, Executor, GradientSum, torch_autocasts
from fp4train.nn.executors import by_state, make_executor, make_state, saved_states
from fp4train.nn.fused_weights import FusedWeights
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.measured_amaxes import MeasuredAmaxes
from fp4train.nn.scaling import EARLIER_AMAXES
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.context import Context, State, state
from fp4train.precision.layer_plan import LayerPlan, resolve
from fp4train.precision.layers import Layer
from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import Recipe
from fp4train.precision.recomputation import is_stray_recomputation
from fp4train.precision.replay import NO_REPLAY
from fp4train.precision.settings import GraphInput
from fp4train.quantize import Position, RunStep
from fp4train.text import check_choice

_Key = tuple[Recipe, LayerPolicy | None, Device]
_STATES = "_extra_state"
"""Key of a layer's states in a state dict, one that torch's own tools for checkpoints know."""
_log = logging.getLogger(__name__)


class StrayRecomputation(RuntimeError):
    """A call that recomputes one of the forward pass in another context than that had."""


class LayerHandle(metaclass=GraphInput):
    """A layer as an opaque input of compiled graphs; it holds a weak reference to the layer that
    owns it.
    """

    def __init__(self, layer: PlannedLayer) -> None:
        self._layer = weakref.ref(layer)

    @property
    def layer(self) -> PlannedLayer:
        layer = self._layer()
        assert layer is not None
        return layer

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerHandle:
        return LayerHandle(memo[id(self.layer)])

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """The compiler's cache key, equal for all layers: graphs depend on the route only."""
        return str, (LayerHandle.__qualname__,)

    def route(self) -> CompiledRoute:
        """The layer's route in the current context."""
        # not `weight`, which a parametrization would recompute
        parameter = next(self.layer.parameters())
        try:
            executor, _ = self.layer.executor_now(parameter.device, parameter.dtype)
        except (ValueError, StrayRecomputation):  # the call raises it
            return EAGER
        if executor is None:
            return CompiledRoute("plain")
        return executor.route


class PlannedLayer(nn.Module):
    """A layer that runs what the plan says of it, in contexts of `autocast`.

    Attributes:
        weight: [out_features, in_features] or, of a group, one such weight after the other.
        layer: its name and position in the model; they key the random bits and the policy.
        backend: backend of its GEMMs; see `nn.Linear`.
    """

    is_fp4train_layer = True
    transposed = False
    """Whether each weight is stored as [in_features, out_features] (`Conv1D` of transformers)."""

    weight: Tensor
    in_features: int
    out_features: int
    layer: Layer
    backend: str

    @property
    @abstractmethod
    def own_weights(self) -> Sequence[Tensor]:
        """The weights [out_features, in_features]; of a layer that is cut, this rank's part."""

    def _begin(self, layer: Layer, backend: str) -> None:
        self.handle = LayerHandle(self)
        self.states: dict[str, LayerState] = {}
        """States that executors carry from step to step, by name; see `nn.executors`."""
        self.joined = False
        """Whether the loop joins the states over the ranks (`join_states`); else each call does so
        by itself.
        """
        self.layer_shard: LayerShard | None = None
        """The layer's place among the ranks, set by `shard`; None: alone on this one."""
        self.default_context: Callable[[torch.dtype], Context] | None = None
        """The context outside of any, by the dtype of the input; None: the layer is nn.Linear
        there.
        """
        self.fused_weights = FusedWeights()
        """The layers that read one input with this one: whose weights share a global scale with its
        own under `recipe.fused_scales`. Set by `convert`.
        """
        self.common: dict[Any, Any] = {}
        """Data that the states of all of the model's layers have in common (`LayerState.common`),
        set by `convert`.
        """
        self.keeps_forms = True
        """Whether prepared forms of the weight are kept: not where the weight itself is freed."""
        self.observer: Callable[[Executor], Executor] | None = None
        """Function that gives the executor of the coming call another one to run, which computes
        the same and is watched (`fp4train.audits`); None: nobody watches.
        """
        self._sums: GradientSum = None
        self._was_in_context = False
        self._calls, self._tokens = 0, TokenCount()
        self.rename(layer, backend)

    @abstractmethod
    def sampled_operands(self, x: Tensor, *counts: Any) -> tuple[Tensor, Tensor, slice]:
        """(`quantised_columns` of x [M, K] and w [N, K], the rows of x that w multiplies) of one call, for
        statistics: of a group those of the weight with the most rows.
        """

    def quantised_columns(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Tensor]:
        """See `Executor.quantised_columns`; of the executor that ran last."""
        if self._held[3] is None:
            return (x_MK, w_NK)
        return self._held[3].quantised_columns(x_MK, w_NK)

    @abstractmethod
    def shard(self, own: LayerShard) -> None:
        """Make this layer the shard `own` of the whole one; its parameters must be that shard, as
        DTensors if it is cut.

        Raises:
            ValueError: the layer cannot be cut, or cannot share its amaxes, so.
        """

    def rename(self, layer: Layer, backend: str) -> None:
        """Set the layer's name, position in the model and backend; the states are kept, a plan that
        was applied not.
        """
        check_choice("backend", backend, CHOICES)
        self.layer = layer
        self.backend = backend
        self._layer_key = zlib.crc32(layer.name.encode())
        self._forget()

    # -- what the layer runs -----------------------------------------------------------------------

    def _forget(self) -> None:
        """Forget all executors."""
        self._applied: _Key | None = None
        self._held: tuple[Any, Any, Any, Executor | None, bool | None] = (None,) * 5
        self._executors: dict[_Key, Executor] = {}

    def apply_plan(
        self, plan: LayerPlan, recipe: Recipe, policy: LayerPolicy | None, device: torch.device
    ) -> None:
        """Run `plan` in contexts with this `recipe` and `policy` on `device`, without resolving it
        again.
        """
        self._applied = key = (recipe, policy, Device.of(device))
        executor = self._executors.get(key)
        if executor is None or executor.plan != plan:
            self._executors[key] = make_executor(
                plan, device.type, self.layer_shard, sums=self._sums
            )
        self._hold(key, device)

    @property
    def applied(self) -> Executor | None:
        """The executor of the applied plan; None: none is applied."""
        return None if self._applied is None else self._executors[self._applied]

    def executor_now(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[Executor | None, State]:
        """The executor of a call with an input of this device and dtype, and the state of this
        thread with the context of the call; None: there is no context, and none that the layer has
        by default. Evaluated once per call.

        Raises:
            ValueError, RuntimeError: see `executor_in`.
            StrayRecomputation: the call recomputes one that was made in another context.
        """
        now = state()
        if is_stray_recomputation(now):
            if self._was_in_context or now.context is not None:
                raise StrayRecomputation(
                    f"layer {self.layer.name} is recomputed in backward without the autocast "
                    "context of its forward "
                    "pass. Use fp4train.precision.recompute, or "
                    "torch.utils.checkpoint.checkpoint(…, "
                    "use_reentrant=False, context_fn=fp4train.precision.recompute_contexts)."
                )
        elif self._was_in_context is (now.context is None):
            self._was_in_context = now.context is not None
        if now.context is None:
            if self.default_context is None:
                return None, now
            now = now._replace(context=self.default_context(dtype))
            assert now.context is not None
        return self.executor_in(now.context, device), now

    def executor_in(self, context: Context, device: torch.device) -> Executor:
        """Executor of the layer in `context` on `device`: that of the applied plan, or one resolved
        on first use.

        Raises:
            ValueError: the recipe cannot run here; see `precision.layer_plan.resolve`.
            RuntimeError: the context is one of an applied plan, which is not that of the layer.
        """
        recipe, policy, at, executor, applied = self._held
        strange = recipe is not context.recipe or policy is not context.policy or at != device
        if strange or executor is None or (context.applied and not applied):
            key = (context.recipe, context.policy, Device.of(device))
            if context.applied and key != self._applied:
                if self._applied is None:
                    applied_plan = "none"
                else:
                    applied_plan = f"that of {self._applied[0].name}"
                raise RuntimeError(
                    f"layer {self.layer.name} is called in {context.recipe.name} on {key[2]}, "
                    "and the plan that was "
                    f"applied to it is {applied_plan}: apply the plan of the coming stretch to the "
                    "model first (Run.apply), "
                    "or enter the recipe by autocast, which resolves it"
                )
            if key not in self._executors:
                plan = resolve(self.layer, context.recipe, context.policy, self.backend, key[2])
                self._executors[key] = make_executor(
                    plan, device.type, self.layer_shard, sums=self._sums
                )
            if context.position.step.number and not context.applied:
                self._look_for_amaxes(key)
            executor = self._hold((context.recipe, context.policy, key[2]), device)
        if context.called_layers is not None:
            context.called_layers[self] = executor.plan.quantised
        if self.observer is not None:
            return self.observer(executor)
        return executor

    def _look_for_amaxes(self, key: _Key) -> None:
        """Say once of a model that a loop of somebody else is past its first step, and the layer has
        no amaxes of earlier ones: a state dict that was loaded may lack them.
        """
        kinds = {*self._executors[key].states} & {*EARLIER_AMAXES}
        if kinds <= {*self.states} or torch.compiler.is_compiling() or _STATES in self.common:
            return
        self.common[_STATES] = "told"
        text = (
            "%s begins after step 0 without amaxes of earlier steps, at scales of 1: a state dict that "
            "holds them has keys that end in %s"
        )
        _log.warning(text, key[0].name, _STATES)

    def _hold(self, key: _Key, device: torch.device) -> Executor:
        executor = self._executors[key]
        self._held = (*key[:2], device, executor, key == self._applied)
        for kind in executor.states:
            self._state(kind)
        return executor

    def _state(self, kind: str) -> LayerState:
        """The layer's state of this kind, made where it has none."""
        if kind not in self.states:
            self.states[kind] = make_state(self, kind)
        return self.states[kind]

    # -- the call ----------------------------------------------------------------------------------

    def values(self, w_NK: Tensor, quantised: Callable[[Tensor], Tensor]) -> Tensor:
        """See `Executor.values`; of the executor that ran last."""
        if self._held[3] is None:
            return quantised(w_NK)
        return self._held[3].values(w_NK, quantised)

    def matrix(self, input: Tensor) -> tuple[Tensor, torch.dtype | None, tuple[int, ...]]:
        """(x [M, K] of an input, the dtype of torch.autocast, in which the output is then, or None:
        it is off, the shape of the output).

        Raises:
            ValueError: the last dimension is not in_features.
            TypeError: the input is not of a floating dtype.
        """
        shape = input.shape
        if not shape or shape[-1] != self.in_features:
            name = self.layer.name or "linear layer"
            raise ValueError(
                f"{name}: input {tuple(shape)} does not end in in_features={self.in_features}"
            )
        if not input.is_floating_point():
            name = self.layer.name or "linear layer"
            raise TypeError(
                f"{name}: input has dtype {input.dtype}; a linear layer takes floating numbers"
            )
        device = input.device.type
        if torch_autocasts(device):
            autocast = torch.get_autocast_dtype(device)
        else:
            autocast = None
        if len(shape) == 2:
            x_MK = input
        else:
            x_MK = input.reshape(shape[:-1].numel(), self.in_features)
        return x_MK, autocast, (*shape[:-1], self.out_features)

    def call_in(self, now: State, executor: Executor, tokens: int) -> LayerCall:
        """The coming call of `executor` with so many tokens of this rank; inside a recomputed
        region, that of the first pass.
        """
        context = now.context
        assert context is not None
        if not executor.counted:
            return self.new_call(context, executor, 0, training=False)
        training = torch.is_grad_enabled()
        tokens *= executor.tokens
        if now.replay is NO_REPLAY:
            return self.new_call(context, executor, tokens, training=training)
        return now.replay.once(
            self, partial(self.new_call, context, executor, tokens, training=training)
        )

    def new_call(
        self, context: Context, executor: Executor, tokens: int, *, training: bool
    ) -> LayerCall:
        """A call of `executor` with so many tokens; `training`: whether gradients are enabled."""
        position = context.position
        if context.counts == "calls":
            self._calls += training
            step = RunStep(position.step.seed, self._calls)
            position = Position(step, position.token, position.counters)
        elif context.counts == "tokens":
            token = 0
            if training and tokens:
                token = position.token + self._tokens.offset(position.step, tokens, self.layer.name)
            position = Position(position.step, token, position.counters)
        scaling: Any = None
        for kind in executor.states:
            if kind in EARLIER_AMAXES:
                scaling = self.states.get(kind)
        parameter = self._parameters.get("weight")
        kept: dict[object, Any] | None = context.constant
        # a weight that is computed (parametrized) may be another one in each call
        if kept is None or parameter is None:
            kept = {}
        weights: PreparedWeights | None = kept.get((self, parameter))
        if weights is None:
            if (measured := self.common.get(MeasuredAmaxes)) is None:
                measured = self.common[MeasuredAmaxes] = MeasuredAmaxes()
            weights = kept[self, parameter] = PreparedWeights(self.keeps_forms, measured)
        return LayerCall(
            executor,
            position,
            self._layer_key,
            weights,
            self.states,
            scaling,
            context.constant,
            training,
            context.shared,
            self.fused_weights,
        )

    def sum_gradients(self, sums: bool, *, in_product: bool = True) -> None:
        """Whether the weight's gradients of several calls (microbatches, ranks) are summed: each is
        then computed in float32 and not rounded to the recipe's dtype first. Compiled
        high-precision layers round them.

        Args:
            in_product: whether the products that make them may add them to the sum; else autograd
                does. It does so after `scaled_mm` in any case, and for transposed weights, outlier
                channels, weights with hooks, experts that ranks cut, FP32, and high precision under
                torch.compile.
        """
        if sums:
            self._sums = "product" if in_product else "autograd"
        else:
            self._sums = None
        self._forget()

    # -- copies, checkpoints -----------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "handle"}
        fresh: dict[str, Any] = {
            "_held": (None,) * 5,
            "_executors": {},
            "_applied": None,
            "observer": None,
        }
        return {**kept, **fresh, "_tokens": TokenCount()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.handle = LayerHandle(self)
        self.fused_weights.add(self)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """In a loop of somebody else, which applies no plan, the states are part of the state dict
        as bytes: uint8, the file format of safetensors.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._applied is None and (tensors := self.scaling_state()):
            copies = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
            stored = bytearray(safetensors.torch.save(copies))
            destination[prefix + _STATES] = torch.frombuffer(stored, dtype=torch.uint8)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *problems: list[str],
    ) -> None:
        key = prefix + _STATES
        stored = state_dict.pop(key, None)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *problems
        )
        if stored is not None:
            device = self.own_weights[0].device
            try:
                tensors = safetensors.torch.load(stored.cpu().numpy().tobytes())
                self.load_scaling_state({name: part.to(device) for name, part in tensors.items()})
            except (safetensors.SafetensorError, ValueError) as error:
                problems[-1].append(f"{key} is damaged: {error}")
        elif strict and self._applied is None and self.scaling_state():
            missing_keys.append(key)

    def scaling_state(self) -> dict[str, Tensor]:
        """The tensors of the layer's states (amax histories of delayed scaling, …), saved in a
        checkpoint beside the state dict (`nn.executors.saved_states`).
        """
        return saved_states(self.states)

    def load_scaling_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `scaling_state`."""
        tensors_by_kind = by_state(state)
        for kind in {**self.states, **tensors_by_kind}:
            self._state(kind).load_state(tensors_by_kind.get(kind, {}))
