"""A linear layer whose three GEMMs follow a recipe: on Transformer Engine's kernels, torch's scaled_mm, or emulated.

A layer stores the plan that `precision.plan.resolve` made for it and runs that plan; a forward pass makes no choices.
The GEMMs are in `gemms.py`, the support for torch.compile is in `compile.py`.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.backends import CHOICES, LAYER_BACKENDS, LayerKernels, widened
from fp4train.hardware import Device
from fp4train.nn.call import Call, TokenCount
from fp4train.nn.gathered import Gathered
from fp4train.nn.gemms import LayerGemms, LinearFunction, torch_autocasts, without_torchs_autocast
from fp4train.nn.high_precision import HighPrecision
from fp4train.nn.outliers import NORMS, STEPS, OutlierNorms, Parts, PartsFunction, make_parts
from fp4train.nn.place import Place, local
from fp4train.nn.scaling import DelayedScaling
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.context import Context, GraphInput, State, is_stray_recomputation, once, state
from fp4train.precision.layers import Layer
from fp4train.precision.plan import LayerPlan, resolve
from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import Recipe
from fp4train.precision.recipes.high import BF16, FP16, FP32
from fp4train.text import check_choice

_Key = tuple[Recipe, LayerPolicy | None, Device]


@functools.cache
def _outside(dtype: torch.dtype) -> Context:
    """The context of a layer on several ranks outside of any: its GEMMs in the dtype of the input."""
    recipes: dict[torch.dtype, Recipe] = {torch.bfloat16: BF16(), torch.float16: FP16()}
    return Context(recipe=recipes.get(dtype, FP32()))


class Route(NamedTuple):
    """The properties of a layer that a compiled graph depends on."""

    kind: Literal["plain", "torch", "operator", "eager"]
    """`plain`: nn.Linear, outside a context; `torch`: a recipe that quantises nothing; `operator`: the custom operator;
    `eager`: outside the graph, because a backend runs the whole layer, because outlier channels are recorded or
    multiplied apart, or because the call raises an error."""
    dtype: torch.dtype | None = None
    """Dtype of the recipe."""
    keeps_x: bool = False
    """Whether wgrad takes x in high precision."""


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
            return Route("eager")
        if layer.place is not None and layer.place.tensor is not None:
            return Route("eager")  # collectives, and tokens whose number changes
        if now.context is None:
            return Route("plain")
        device = next(layer.parameters()).device  # not `weight`, which a parametrization would recompute
        try:
            gemms = layer.gemms_in(now.context, device)
        except ValueError:
            return Route("eager")
        if not gemms.quantised:
            return Route("torch", gemms.dtype)
        if gemms.together is not None or gemms.plan.has_outliers:
            return Route("eager")
        return Route("operator", gemms.dtype, gemms.keeps_x)


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
        self.scaling = DelayedScaling()
        self.outliers = OutlierNorms()
        self.kernels: dict[str, LayerKernels] = {
            name: found.kernels(
                in_features=self.in_features,
                out_features=self.out_features,
                bias=self.bias is not None,
                name=layer.name,
            )
            for name, found in LAYER_BACKENDS.items()
        }
        """Kernels of the backends that run a layer as a whole, by backend name."""
        self.handle = Handle(self)
        self._calls, self._tokens = 0, TokenCount()
        self.place: Place | None = None
        """Where the layer lies among the ranks, set by `move`; None: alone on this one."""
        self._keep_forms = True
        self._sums = False
        self._was_in_context = False
        self.settle(layer, backend)

    def settle(self, layer: Layer, backend: str) -> None:
        """Set the layer's name, position in the model and backend; the amax histories of delayed scaling are kept."""
        check_choice("backend", backend, CHOICES)
        self.layer, self.backend = layer, backend
        for kernels in self.kernels.values():
            kernels.name = layer.name
        self._layer_key = zlib.crc32(layer.name.encode())
        self._weights = PreparedWeights(self._keep_forms)
        self._forget_plans()

    def move(self, place: Place) -> None:
        """Make this layer the shard at `place`; its parameters must be that shard, as DTensors if the layer is cut."""
        shard = self.weight if place.tensor is None else local(self.weight)
        self.out_features, self.in_features = shard.T.shape if self.transposed else shard.shape
        self.place = place
        parts = 1 if place.tensor is None else place.tensor.size
        self.settle(
            replace(
                self.layer, in_features=self.in_features, out_features=self.out_features, cut=place.cut, parts=parts
            ),
            self.backend,
        )

    # -- what the layer runs ------------------------------------------------------------------------------------------

    def _forget_plans(self) -> None:
        self._held: tuple[Recipe, LayerPolicy | None, torch.device] | None = None
        self._gemms: LayerGemms | None = None
        self._resolved: dict[_Key, LayerGemms] = {}
        self._parts: dict[LayerGemms, Parts | None] = {}

    def hold(self, plan: LayerPlan, recipe: Recipe, policy: LayerPolicy | None, device: torch.device) -> None:
        """Use `plan` in contexts with this `recipe` and `policy` on `device`, without resolving it again."""
        key = (recipe, policy, Device.of(device))
        known = self._resolved.get(key)
        if known is None or known.plan != plan:
            self._resolved[key] = LayerGemms(plan, device.type, self.place, sums=self._sums)
        self._held, self._gemms = (recipe, policy, device), self._resolved[key]

    def gemms_in(self, context: Context, device: torch.device) -> LayerGemms:
        """The layer's GEMMs in `context` on `device`, resolved on first use.

        Raises:
            ValueError: the recipe cannot run here; see `precision.plan.resolve`.
        """
        held = self._held
        if held is not None and held[0] is context.recipe and held[1] is context.policy and held[2] == device:
            assert self._gemms is not None
            return self._gemms
        key = (context.recipe, context.policy, Device.of(device))
        if key not in self._resolved:
            plan = resolve(self.layer, context.recipe, context.policy, self.backend, key[2])
            self._resolved[key] = LayerGemms(plan, device.type, self.place, sums=self._sums)
        self._held, self._gemms = (context.recipe, context.policy, device), self._resolved[key]
        if context.met is not None:
            context.met.append(self._gemms.quantised)
        return self._gemms

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
        context = now.context
        if context is None:
            if self.place is None or self.place.tensor is None:
                return F.linear(input, self.w_NK, self.bias)
            context = _outside(input.dtype)
        gemms = self.gemms_in(context, input.device)
        x_MK, out_dtype, shape = self.matrix(input)
        if torch_autocasts(gemms.device):
            with without_torchs_autocast(gemms.device):
                y_MN = self._multiply(x_MK, gemms, context, now)
        else:
            y_MN = self._multiply(x_MK, gemms, context, now)
        return y_MN.to(out_dtype).view(shape if y_MN.shape[0] == x_MK.shape[0] else y_MN.shape)

    def _multiply(self, x_MK: Tensor, gemms: LayerGemms, context: Context, now: State) -> Tensor:
        place = gemms.place
        if (place is None or place.tensor is None) and (
            not gemms.quantised or gemms.device == "meta"
        ):  # for meta tensors the shape is enough
            keeps = self._sums and self._keep_forms and not gemms.quantised and not gemms.plan.has_outliers
            return self.by_torch(x_MK, gemms.dtype, self.new_call(context, gemms, False) if keeps else None)
        if gemms.together is not None:
            whole = self.weight.copied() if isinstance(self.weight, Gathered) else self.w_NK.contiguous()
            position = None if context.step is None or not self._keep_forms else (context.seed, context.step)
            return self.kernels[gemms.together](x_MK, whole, self.bias, gemms.plan.table, position=position)
        training = torch.is_grad_enabled()
        tokens = x_MK.shape[0]
        if now.recording or now.replaying is not None:
            call = once(self, lambda: self.new_call(context, gemms, training, tokens))
        else:
            call = self.new_call(context, gemms, training, tokens)
        w_NK: Tensor = self.w_NK
        bias_N: Tensor | None = self.bias
        if place is not None:
            if place.tensor is not None:
                call.parameter, w_NK = w_NK, local(w_NK)
                bias_N = None if bias_N is None else local(bias_N)
            if gemms.device == "meta":
                return place.shape_of(x_MK, w_NK).to(gemms.dtype)
        outliers = gemms.plan.recipe.outliers
        if outliers is not None:
            if call.parts is not None:
                return PartsFunction.apply(x_MK, w_NK, bias_N, call.parts)  # type: ignore[no-untyped-call, no-any-return]
            if training and now.replaying is None and self.outliers.due(outliers, (call.seed, call.step)):
                self.outliers.record(x_MK, (call.seed, call.step))
        y_MN: Tensor = LinearFunction.apply(x_MK, w_NK, bias_N, call, context)  # type: ignore[no-untyped-call]
        return y_MN

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

    def by_torch(self, x_MK: Tensor, dtype: torch.dtype, call: Call | None = None) -> Tensor:
        """torch's own linear layer in `dtype`, with its C++ backward: no overhead over plain BF16; of a sum, rounding
        the weight once per step if there is a `call`."""
        x_MK, bias = x_MK.to(dtype), None if self.bias is None else self.bias.to(dtype)
        sums = self._sums and dtype != torch.float32 and not torch.compiler.is_compiling()
        if sums or isinstance(self.weight, Gathered):
            return HighPrecision.apply(x_MK, self.w_NK, bias, sums, call)  # type: ignore[no-untyped-call, no-any-return]
        return widened(F.linear, x_MK, self.w_NK.to(dtype), bias)

    def new_call(self, context: Context, gemms: LayerGemms, training: bool, tokens: int = 0) -> Call:
        """A call of this layer with so many tokens; `training`: whether gradients are enabled."""
        step, weights, offset = context.step, self._weights, context.token_offset
        if step is None:
            # Without a step the layer cannot know when its weights change, so it caches nothing between calls.
            self._calls += training
            step, weights = self._calls, PreparedWeights()
        elif offset is None and training and tokens:
            tokens *= 1 if self.place is None else self.place.tokens
            offset = self._tokens.offset((context.seed, step), tokens, self.layer.name)
        call = Call(
            *(gemms, context.seed, step, offset or 0, self._layer_key, weights, self.scaling, training),
            context.counters,
        )
        call.parameter = self.weight if self.transposed else None
        if gemms.plan.recipe.outliers is not None:
            self._begin_parts(gemms, call, keep=context.step is not None)
        return call

    def _begin_parts(self, gemms: LayerGemms, call: Call, *, keep: bool) -> None:
        """Give `call` its parts if the outlier channels are chosen."""
        self.outliers.latest = None
        outliers = gemms.plan.recipe.outliers
        if outliers is None or not self.outliers.begun(outliers, (call.seed, call.step)):
            return
        if gemms not in self._parts:
            self._parts[gemms] = make_parts(
                gemms.plan, gemms.device, self.place, sums=self._sums, keep_forms=self._keep_forms
            )
        parts = self._parts[gemms]
        if parts is not None:
            call.parts = parts.call(self.outliers, call, keep=keep)

    def keep_forms(self, keep: bool) -> None:
        """Whether prepared forms of the weight are kept within a step: not where the weight itself is freed."""
        self._keep_forms = keep
        self._weights = PreparedWeights(keep)
        self._parts.clear()

    def sum_gradients(self, sums: bool) -> None:
        """Whether the weight's gradients of several calls (microbatches, ranks) are summed: each is then computed in
        float32 and not rounded to the recipe's dtype first. Compiled high-precision layers round them."""
        self._sums = sums
        self._forget_plans()

    def is_stray(self, now: State) -> bool:
        """Whether this call recomputes one that was made in another context; evaluated once per call."""
        if is_stray_recomputation(now):
            return self._was_in_context or now.context is not None
        self._was_in_context = now.context is not None
        return False

    # -- copies, checkpoints ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "handle"}
        return {**kept, "_held": None, "_gemms": None, "_resolved": {}, "_parts": {}, "_tokens": TokenCount()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.handle = Handle(self)

    def scaling_state(self) -> dict[str, Tensor]:
        """The amax histories of delayed scaling and the norms by which outlier channels are chosen, saved in a
        checkpoint beside the state dict; empty without either."""
        of_kernels = {f"{name}.{k}": v for name, each in self.kernels.items() for k, v in each.state().items()}
        return {**self.scaling.state(), **self.outliers.state(), **of_kernels}

    def load_scaling_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `scaling_state`; the next call prepares the weight anew."""
        # It records whether the weight's amax has entered the history in this step.
        self._weights = PreparedWeights(self._keep_forms)
        self._parts.clear()  # with the prepared parts of the weight
        rest = dict(state)
        self.outliers.load({name: rest.pop(name) for name in (NORMS, STEPS) if name in rest})
        for name, kernels in self.kernels.items():
            mine = [key for key in rest if key.startswith(f"{name}.")]
            kernels.load_state({key.removeprefix(f"{name}."): rest.pop(key) for key in mine})
        self.scaling.load(rest)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend}"
