"""The GEMMs of a linear layer on TE's kernels: y [*, N] = x [*, K]·wᵀ + b, and their gradients.

One `te.pytorch.Linear` for each table, all working on the layer's own parameters. TE builds a
module's quantisers when it first runs and keeps them while the recipe's class stays the same:
`NVFP4BlockScaling(disable_rht=True)` on a module that has run with Hadamard transform is silently
ignored, and delayed scaling that returns after another recipe is no longer updated (module/base.py
set_meta_tensor, quantization.py add_fp8_tensors_to_global_buffer). A module for each recipe never
changes, so neither can happen; it holds quantisers, no parameters, and is idle between its uses.

Each call enters `te.autocast` itself, so layers of one model run different recipes. Delayed scaling
updates its scales once for all layers, where `region(table)` ends: wrap the passes of an optimizer
step in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.backends.protocol import ALONE, KernelCall, LayerState, Prepared, Readers
from fp4train.backends.table import Table
from fp4train.backends.te.availability import pytorch_module
from fp4train.backends.te.shared_input import QuantisedInput
from fp4train.backends.te.translate import dequantises, shares_codes, to_te
from fp4train.backends.te.weights import given_weight

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _is_delayed(table: Table) -> bool:
    return any(spec.delayed is not None for spec in table.specs())


def _token_multiple(table: Table) -> int:
    """Tokens are padded to this: the longest block along tokens, and at least TE's 32."""
    blocks = [size for spec in table.specs() for size in spec.block if size is not None]
    return max(32, *blocks) if blocks else 32


@contextmanager
def region(*tables: Table, ranks: ProcessGroup | None = None) -> Iterator[None]:
    """The forward and backward passes of one optimizer step; needed for delayed scaling, harmless
    for other recipes.

    Within it scales stay as they are, and the kernels take the maximum of the amaxes of all passes.
    At its end every history takes that maximum in, once: the scales of a step do not depend on how
    its batch is cut into microbatches. TE alone rolls the forward histories at the end of each
    autocast (quantization.py autocast_exit), and the gradients' in the backward pass of the first
    module of each (module/linear.py _Linear.backward), before the other microbatches. A backward
    pass that follows the region enters its amaxes at the end of the next one. Without gradients, as
    in evaluation, nothing is updated. A region within a region does nothing.

    Args:
        tables: those that the passes use. Nothing happens where none of them is quantised.
        ranks: those with the same layers, whose amaxes are joined where the region ends; None: all
            ranks. Of a pipeline they are those of one stage: others would wait, or mix the amaxes
            of different layers.
    """
    quantised = [table for table in tables if table.quantised]
    if not quantised or _inside_region(te := pytorch_module()):
        yield
        return
    reference_table = next((table for table in quantised if _is_delayed(table)), quantised[0])
    with te.autocast(enabled=True, recipe=to_te(reference_table), amax_reduction_group=ranks):
        state, _, is_first = _state(te)
        setattr(state, is_first, False)  # no module is the one whose backward pass updates
        yield
        if _is_delayed(reference_table) and torch.is_grad_enabled():
            te.quantization.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


def _state(te: Any) -> tuple[Any, str, str]:
    """(TE's global state, its field for the depth of autocasts, that for "no module has run in the
    outermost one").
    """
    manager = te.quantization.FP8GlobalStateManager
    state = getattr(manager, "quantization_state", None)
    if state is None:  # TE 2.14 keeps it on the class
        return manager, "AUTOCAST_DEPTH", "IS_FIRST_FP8_MODULE"
    return state, "autocast_depth", "is_first_fp8_module"


def _inside_region(te: Any) -> bool:
    state, depth, _ = _state(te)
    return bool(getattr(state, depth) > 0)


@contextmanager
def te_autocast(te: Any, te_recipe: Any) -> Iterator[None]:
    """TE's autocast for one layer, which leaves to the outer one that the layer has run.

    TE updates the gradients' delayed scales in the backward pass of the first module of an
    outermost autocast that is not `region`. An inner one restores "no module has run yet" when it
    ends (quantization.py set_autocast_state), so that every layer would be the first, and every
    layer's backward would roll all histories on.
    """
    state, _, is_first_module = _state(te)
    if _inside_region(te):
        ranks = te.quantization.FP8GlobalStateManager.get_fp8_group()
    else:
        ranks = None
    with te.autocast(enabled=True, recipe=te_recipe, amax_reduction_group=ranks):
        yield
        is_first = getattr(state, is_first_module)
    if _inside_region(te):
        setattr(state, is_first_module, is_first)


@contextmanager
def _history_kept(module: Any, te_recipe: Any) -> Iterator[None]:
    """A call without gradients, as in evaluation: TE's kernels write amaxes to the history, which
    gets its own back.
    """
    _make_meta(module, te_recipe)
    history: Tensor = module.fp8_meta["scaling_fwd"].amax_history
    saved_history = history.clone()
    yield
    history.copy_(saved_history)


def _make_meta(module: Any, te_recipe: Any) -> None:
    """Delayed scaling's tensors, which TE makes at the first call."""
    if "scaling_fwd" not in module.fp8_meta:
        module.fp8_meta["num_gemms"] = 1
        module.fp8_meta["recipe"] = te_recipe
        module.init_fp8_meta_tensors(te_recipe)


def summed(weight: Tensor, into: Callable[[Any], Tensor]) -> Any:
    """`weight` as TE takes one whose gradients its GEMM adds up: what `into` gives in backward is
    its `main_grad`.

    Under these names TE asks for it in the backward pass, so that it need not exist before
    (module/linear.py main_grad_func, since 2.9). They are attributes of a view, not of the caller's
    parameter. Until then TE holds the function, but the view by a weak reference, and recomputation
    saves no tensors: the function keeps the view alive.
    """
    view: Any = weight.view_as(weight)

    def main_grad() -> Tensor:
        del view.get_main_grad
        return into(view.grad_fn)

    view.__fsdp_param__ = True
    view.get_main_grad = main_grad
    return view


@dataclass
class _Built:
    """TE's module and recipe for one table in one layer, and the codes that the module keeps."""

    table: Table
    rows: int
    """Rows of the weight: a layer is also run as one with others."""
    te_recipe: Any
    module: Any
    token_multiple: int
    delayed: bool
    keeps: bool
    """Whether the weight's codes are kept for later calls: not those of delayed scaling, whose amax
    each region takes in, nor those of quantisers that are ours, which TE keeps as tensors of
    another kind.
    """
    shares: bool
    """Whether codes of x may serve several layers."""
    quantizer: Any = None
    """A copy of the module's quantiser of x that makes tensors for autograd; made where codes are
    first shared.
    """

    def take(self, weight: Tensor, bias: Tensor | None, call: KernelCall) -> None:
        """Give the module the parameters of a call.

        Every call does, because sharding (FSDP2) and functional calls replace the parameters behind
        a module's back.
        """
        module = self.module
        into = call.into
        module._parameters["weight"] = weight if into is None else summed(weight, into)
        module.fuse_wgrad_accumulation = into is not None
        if hasattr(type(module), "is_fsdp2"):
            module._is_fsdp2 = call.freed
        if bias is not None:
            module._parameters["bias"] = bias

    def run(self, x: Tensor, x_MK: Tensor, weight: Tensor, call: KernelCall) -> Tensor:
        """y of the module.

        Args:
            x: the layer's input; x_MK: in the recipe's dtype, padded.
        """
        readers = call.readers if self.shares and not x.is_inference() else None
        if readers is not None:
            x_MK = self.codes_of(x, x_MK, weight, readers)
        run = self.module if call.codes is None else partial(self.with_codes, call.codes)
        y_MN: Tensor = run(x_MK, is_first_microbatch=self.is_first(weight, call.constant))
        if readers is not None and len(readers.cache["te"].given) == readers.layers:
            readers.cache.pop("te").close()
        return y_MN

    def is_first(self, weight: Tensor, constant: dict[object, Any] | None) -> bool | None:
        """`is_first_microbatch` of TE's modules: False takes the codes that are kept, or makes them
        where there are none; None quantises and keeps none: also without gradients, where the codes
        lack their column-wise form.

        True is never said: TE would also overwrite the sum of the weight's gradients in that
            microbatch's backward pass
        (module/linear.py accumulate_wgrad_into_param_main_grad).
        """
        if not self.keeps or constant is None or not torch.is_grad_enabled():
            return None
        if constant.get(self.module) is not weight:
            self.module._fp8_workspaces.clear()
            constant[self.module] = weight
        return False

    def codes_of(self, x: Tensor, x_MK: Tensor, weight: Tensor, readers: Readers) -> Tensor:
        """x [M, K] in codes that the layers that read x share.

        Args:
            x: the layer's input; x_MK: in the recipe's dtype, padded.
        """
        column = torch.is_grad_enabled() and weight.requires_grad and not dequantises(self.table)
        quantised_input: QuantisedInput | None = readers.cache.get("te")
        if quantised_input is None or not quantised_input.is_of(x, self.table, column):
            if self.quantizer is None:
                # as TE does at the start of each call (prepare_forward)
                self.module.init_fp8_metadata(num_gemms=1)
                self.quantizer = copy.copy(self.module.quantizers["scaling_fwd"][0])
                # TE's: True, True
                self.quantizer.internal = False
                self.quantizer.optimize_for_gemm = True
            self.quantizer.set_usage(rowwise=True, columnwise=column)
            with torch.no_grad():
                quantised_input = QuantisedInput(
                    x, x._version, self.table, column, self.quantizer(x_MK)
                )
            readers.cache["te"] = quantised_input
        return quantised_input.give(x_MK)

    def with_codes(self, codes: Callable[[bool], Prepared], x_MK: Tensor, **options: Any) -> Tensor:
        """y of the module, which takes the codes of its weight, in this call's backward pass,
        too.
        """
        # as TE does at the start of each call (prepare_forward)
        self.module.init_fp8_metadata(num_gemms=1)
        quantizers = self.module.quantizers["scaling_fwd"]
        weight_quantizer = quantizers[1]
        quantizers[1] = given_weight(codes, row_wise=dequantises(self.table))
        try:
            y_MN: Tensor = self.module(x_MK, **options)
        finally:
            quantizers[1] = weight_quantizer
        return y_MN

    def release(self) -> None:
        """Drop the codes of the weight, and the weight."""
        self.module._parameters["weight"] = None
        self.module._fp8_workspaces.clear()


class TEExecutor(LayerState):
    """Runs the GEMMs of one layer through TE; the parameters come with each call.

    Args:
        name: the layer's name, for TE's messages.
        translate: our table → TE's recipe; another than `to_te` puts TE's reference quantisers in
            its kernels' place.
    """

    kind = "te"  # joined where `region` ends

    def __init__(self, *, name: str, translate: Callable[[Table], Any] = to_te) -> None:
        self.name = name
        self._translate = translate
        self._built: dict[tuple[Table, int], _Built] = {}
        self._running: _Built | None = None
        self._delayed: _Built | None = None
        self._to_load: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave TE's modules behind; they are rebuilt when needed, with their
        history.
        """
        return {
            **self.__dict__,
            "_built": {},
            "_running": None,
            "_delayed": None,
            "_to_load": self.state(),
        }

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        table: Table,
        call: KernelCall = ALONE,
    ) -> Tensor:
        """y [*, N] in the recipe's dtype.

        Args:
            x: [*, K] on a CUDA device; padded with zeros to a multiple of 32 tokens (128 for FP8
                blocks).
            weight: [N, K]; bias: [N] or None.
            table: any that `why_not` has nothing against.
            call: the weight is quantised once for all calls that share `constant`, if TE has a
                recipe for the table. `into` is TE's main_grad. TE saves no codes of a `freed`
                weight, and quantises it again in backward, as it does under FSDP2 (from 2.16 on;
                older ones save the codes). x is quantised once for all `readers`, if the recipe
                has codes to share (`shares_codes`), with the bits of layers that quantise it
                themselves. With `codes`, `freed` is true.
        """
        te = pytorch_module()
        dtype = table.torch_dtype
        # a view that changes nothing is a node of autograd
        x_MK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        x_MK = x_MK.to(dtype)
        tokens = x_MK.shape[0]
        if tokens == 0:
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        built = self._running
        # A table's hash is that of its six specs.
        if built is None or built.table is not table or built.rows != weight.shape[0]:
            built = self._build(te, table, weight, bias)
        if padding := -tokens % built.token_multiple:
            x_MK = F.pad(x_MK, (0, 0, 0, padding))
        built.take(weight, bias, call)
        if built.delayed:
            self._go_on_with_histories(te, built)
        # TE wants torch's autocast where parameters and activations differ (float32 weights, BF16
        # activations).
        with (
            torch.autocast(x.device.type, dtype=dtype, enabled=weight.dtype != dtype),
            te_autocast(te, built.te_recipe),
        ):
            if built.delayed and self._to_load:
                self._load(built.te_recipe, built.module)
            keeping: AbstractContextManager[object] = nullcontext()
            if built.delayed and not torch.is_grad_enabled():
                keeping = _history_kept(built.module, built.te_recipe)
            with keeping:
                y_MN = built.run(x, x_MK, weight, call)
        if call.freed:
            built.release()
        y_MN = y_MN[:tokens] if padding else y_MN
        if x.dim() == 2:
            return y_MN
        return y_MN.reshape(*x.shape[:-1], weight.shape[0])

    def _go_on_with_histories(self, te: Any, built: _Built) -> None:
        """Histories of delayed scaling go on where another length follows."""
        if not _inside_region(te):
            raise RuntimeError(
                f"{built.table.name} on backend=te: delayed scaling updates all layers' scales when "
                "a step ends; run its "
                "forward and backward passes inside "
                "fp4train.backends.te.region(recipe.table()), where "
                "activations are recomputed, too, or use FP8Current or backend=emulate."
            )
        if built is not self._delayed:
            self._to_load = self.state()
            self._delayed = built

    def _build(self, te: Any, table: Table, weight: Tensor, bias: Tensor | None) -> _Built:
        """What runs a table, made at its first call; what ran before drops its weight."""
        n, k = weight.shape
        if (built := self._built.get((table, n))) is None:
            # On the meta device, because the parameters are the caller's.
            options = {
                "bias": bias is not None,
                "params_dtype": weight.dtype,
                "device": "meta",
                "name": self.name,
            }
            te_recipe = self._translate(table)
            delayed = _is_delayed(table)
            keeps = not delayed and not te_recipe.custom()
            module = te.Linear(k, n, **options)
            shares = shares_codes(table)
            built = _Built(
                table, n, te_recipe, module, _token_multiple(table), delayed, keeps, shares
            )
            self._built[table, n] = built
        if built is not self._running:
            self.release()
            self._running = built
        return built

    def release(self) -> None:
        """Drop the codes of the weight, and the weight."""
        if self._running is not None:
            self._running.release()
            self._running = None

    def state(self) -> dict[str, Tensor]:
        """Delayed scaling's scales and amax histories; empty without it."""
        if self._to_load or self._delayed is None:
            return dict(self._to_load)
        meta = self._delayed.module.fp8_meta
        return {
            f"{kind}_{direction}": getattr(meta[f"scaling_{direction}"], kind).detach().clone()
            for direction in ("fwd", "bwd")
            for kind in ("scale", "amax_history")
            if f"scaling_{direction}" in meta
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave: at once where delayed scaling has run, as graphs read TE's
        tensors then; else it reaches TE when delayed scaling runs.
        """
        self._to_load = dict(state)
        if self._to_load and self._delayed is not None:
            self._load(self._delayed.te_recipe, self._delayed.module)

    def _load(self, te_recipe: Any, module: Any) -> None:
        """Load what `state` gave, as TE's own set_extra_state does, but from tensors instead of a
        pickle.
        """
        _make_meta(module, te_recipe)
        with torch.no_grad():
            for key, value in self._to_load.items():
                kind, direction = key.rsplit("_", 1)
                target: Tensor = getattr(module.fp8_meta[f"scaling_{direction}"], kind)
                # Another history length keeps the newest entries. TE's order: first the one that
                # the current step fills, then from the oldest to the newest.
                if kind == "amax_history" and value.shape[0] != target.shape[0]:
                    kept = min(value.shape[0], target.shape[0]) - 1
                    target.zero_()
                    target[0].copy_(value[0])
                    if kept:
                        target[-kept:].copy_(value[-kept:])
                else:
                    target.copy_(value)
        self._to_load = {}
