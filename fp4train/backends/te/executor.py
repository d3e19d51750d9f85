"""The GEMMs of a linear layer on TE's kernels: y [*, N] = x [*, K]·wᵀ + b, and their gradients.

One `te.pytorch.Linear` for each table, all working on the layer's own parameters. TE builds a module's quantisers
when it first runs and keeps them while the recipe's class stays the same: `NVFP4BlockScaling(disable_rht=True)` on a
module that has run with Hadamard transform is silently ignored, and delayed scaling that returns after another recipe
is no longer updated (module/base.py set_meta_tensor, quantization.py add_fp8_tensors_to_global_buffer). A module for
each recipe never changes, so neither can happen; it holds quantisers, no parameters, and is idle between its uses.

Each call enters `te.autocast` itself, so layers of one model run different recipes. Delayed scaling updates its scales
when TE's outermost autocast ends, once for all layers: wrap the model's forward pass in `region(table)` for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.backends.table import Table
from fp4train.backends.te.availability import pytorch_module
from fp4train.backends.te.translate import to_te


def _is_delayed(table: Table) -> bool:
    return any(spec.delayed is not None for spec in table.specs())


def _token_multiple(table: Table) -> int:
    """Tokens are padded to this: the longest block along tokens, and at least TE's 32."""
    blocks = [size for spec in table.specs() for size in spec.block if size is not None]
    return max(32, *blocks) if blocks else 32


@contextmanager
def region(*tables: Table) -> Iterator[None]:
    """TE's outermost autocast for one forward pass; needed for delayed scaling, harmless for other recipes.

    Args:
        tables: those that the pass uses. Nothing happens where none of them is quantised.
    """
    quantised = [table for table in tables if table.quantised]
    with ExitStack() as stack:
        if quantised:
            first = next((table for table in quantised if _is_delayed(table)), quantised[0])
            stack.enter_context(pytorch_module().autocast(enabled=True, recipe=to_te(first)))
        yield


def _state(te: Any) -> tuple[Any, str, str]:
    """(TE's global state, its field for the depth of autocasts, that for "no module has run in the outermost one")."""
    manager = te.quantization.FP8GlobalStateManager
    state = getattr(manager, "quantization_state", None)
    if state is None:  # TE 2.14 keeps it on the class
        return manager, "AUTOCAST_DEPTH", "IS_FIRST_FP8_MODULE"
    return state, "autocast_depth", "is_first_fp8_module"


def _inside_region(te: Any) -> bool:
    state, depth, _ = _state(te)
    return bool(getattr(state, depth) > 0)


@contextmanager
def _autocast(te: Any, te_recipe: Any) -> Iterator[None]:
    """TE's autocast for one layer, which leaves to the outer one that the layer has run.

    TE updates the gradients' delayed scales in the backward pass of the first module of the outermost autocast. An
    inner one restores "no module has run yet" when it ends (quantization.py set_autocast_state), so that every layer
    would be the first, and every layer's backward would roll all histories on.
    """
    state, _, first = _state(te)
    with te.autocast(enabled=True, recipe=te_recipe):
        yield
        is_first = getattr(state, first)
    if _inside_region(te):
        setattr(state, first, is_first)


@contextmanager
def _history_kept(module: Any, te_recipe: Any) -> Iterator[None]:
    """Without gradients, as in evaluation: TE's kernels write amaxes into the history, which gets its own back."""
    _make_meta(module, te_recipe)
    history: Tensor = module.fp8_meta["scaling_fwd"].amax_history
    before = history.clone()
    yield
    history.copy_(before)


def _make_meta(module: Any, te_recipe: Any) -> None:
    """Delayed scaling's tensors, which TE makes at the first call."""
    if "scaling_fwd" not in module.fp8_meta:
        module.fp8_meta["num_gemms"] = 1
        module.fp8_meta["recipe"] = te_recipe
        module.init_fp8_meta_tensors(te_recipe)


@dataclass
class _Built:
    """What one table needs in one layer."""

    te_recipe: Any
    module: Any
    token_multiple: int
    delayed: bool
    keeps: bool
    """Whether the weight's codes are kept within a step: not those of delayed scaling, whose scale may change between
    passes, nor those of quantisers that are ours, which TE keeps as tensors of another kind."""
    weight: weakref.ref[Tensor] | None = None
    """The weight that the module holds the codes of, and"""
    since: tuple[object, ...] = ()
    """from when."""

    def is_first(self, weight: Tensor, position: tuple[int, int] | None) -> bool | None:
        """`is_first_microbatch` of TE's modules: True quantises and keeps the codes, False takes those that are kept,
        None quantises and keeps none: also without gradients, where the codes lack their column-wise form.
        """
        if not self.keeps or position is None or not torch.is_grad_enabled():
            self.weight = None
            return None
        now = (position, weight._version)
        first = self.weight is None or self.weight() is not weight or self.since != now
        self.weight, self.since = weakref.ref(weight), now
        return first


class TEExecutor:
    """Runs the GEMMs of one layer through TE; the parameters come with each call.

    Args:
        name: of the layer, for TE's messages.
        translate: our table → TE's recipe; another than `to_te` puts TE's reference quantisers in its kernels' place.
    """

    def __init__(self, *, name: str, translate: Callable[[Table], Any] = to_te) -> None:
        self.name, self._translate = name, translate
        self._built: dict[Table, _Built] = {}
        self._delayed: Table | None = None
        self._to_load: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave TE's modules behind; they are rebuilt when needed, with their history."""
        return {**self.__dict__, "_built": {}, "_delayed": None, "_to_load": self.state()}

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, table: Table, *, position: tuple[int, int] | None = None
    ) -> Tensor:
        """y [*, N] in the recipe's dtype.

        Args:
            x: [*, K] on a CUDA device; padded with zeros to a multiple of 32 tokens (128 for FP8 blocks).
            weight: [N, K]; bias: [N] or None.
            table: any that `why_not` has nothing against.
            position: (seed, step): the weight is quantised once in each, if TE has a recipe for the table.
        """
        te = pytorch_module()
        dtype = table.torch_dtype
        x_MK = x.reshape(-1, x.shape[-1]).to(dtype)
        tokens = x_MK.shape[0]
        if tokens == 0:
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        built = self._build(te, table, weight, bias)
        te_recipe, module, delayed = built.te_recipe, built.module, built.delayed
        if padding := -tokens % built.token_multiple:
            x_MK = F.pad(x_MK, (0, 0, 0, padding))
        # Every call, because sharding (FSDP2) and functional calls replace the parameters behind a module's back.
        module._parameters["weight"] = weight
        if bias is not None:
            module._parameters["bias"] = bias
        with ExitStack() as stack:
            # TE wants torch's autocast where parameters and activations differ (float32 weights, BF16 activations).
            stack.enter_context(torch.autocast(x.device.type, dtype=dtype, enabled=weight.dtype != dtype))
            if delayed:
                self._enter_delayed(te, table)
            stack.enter_context(_autocast(te, te_recipe))
            if self._to_load and delayed:
                self._load(te_recipe, module)
            if delayed and not torch.is_grad_enabled():
                stack.enter_context(_history_kept(module, te_recipe))
            y_MN: Tensor = module(x_MK, is_first_microbatch=built.is_first(weight, position))
        return y_MN[:tokens].reshape(*x.shape[:-1], weight.shape[0])

    def _build(self, te: Any, table: Table, weight: Tensor, bias: Tensor | None) -> _Built:
        if table not in self._built:
            n, k = weight.shape
            # On the meta device, because the parameters are the caller's.
            options = {"bias": bias is not None, "params_dtype": weight.dtype, "device": "meta", "name": self.name}
            te_recipe, delayed = self._translate(table), _is_delayed(table)
            keeps = not delayed and not te_recipe.custom()
            self._built[table] = _Built(te_recipe, te.Linear(k, n, **options), _token_multiple(table), delayed, keeps)
        return self._built[table]

    def _enter_delayed(self, te: Any, table: Table) -> None:
        if not _inside_region(te):
            raise RuntimeError(
                f"{table.name} on backend=te: delayed scaling updates all layers' scales when a forward pass ends; "
                "run the pass inside fp4train.backends.te.region(recipe). Recomputed activations have no such end: "
                "turn recomputation off, or use FP8Current or backend=emulate."
            )
        self._delayed = table

    def state(self) -> dict[str, Tensor]:
        """Delayed scaling's scales and amax histories; empty without it."""
        if self._to_load or self._delayed is None:
            return dict(self._to_load)
        meta = self._built[self._delayed].module.fp8_meta
        return {
            f"{kind}_{direction}": getattr(meta[f"scaling_{direction}"], kind).detach().clone()
            for direction in ("fwd", "bwd")
            for kind in ("scale", "amax_history")
            if f"scaling_{direction}" in meta
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave; it reaches TE when delayed scaling runs next."""
        self._to_load = dict(state)

    def _load(self, te_recipe: Any, module: Any) -> None:
        """Load what `state` gave, as TE's own set_extra_state does, but from tensors instead of a pickle."""
        _make_meta(module, te_recipe)
        with torch.no_grad():
            for key, value in self._to_load.items():
                kind, direction = key.rsplit("_", 1)
                target: Tensor = getattr(module.fp8_meta[f"scaling_{direction}"], kind)
                # Another history length keeps the newest entries. TE's order: first the one that the current step
                # fills, then from the oldest to the newest.
                if kind == "amax_history" and value.shape[0] != target.shape[0]:
                    kept = min(value.shape[0], target.shape[0]) - 1
                    target.zero_()
                    target[0].copy_(value[0])
                    if kept:
                        target[-kept:].copy_(value[-kept:])
                else:
                    target.copy_(value)
        self._to_load = {}
