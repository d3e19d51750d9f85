"""The linear layers of a model and their positions in its blocks.

A policy counts blocks ("the last 15 % of the blocks"); `blocks.py` finds them. Linear layers outside the blocks (the
head, input projections) always stay in high precision. In a model without blocks each linear layer counts as a block,
and none is outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.parameter import is_lazy

from fp4train.backends.table import OPERANDS, Operands
from fp4train.precision.blocks import block_paths, features, is_linear
from fp4train.quantize import why_not_cut

_BLOCK = 16
"""Elements of the smallest block that shares a scale: that of NVFP4."""

_CUT_BLOCKS = {("x", "in"): "fprop", ("dy", "out"): "dgrad", ("w", "in"): "fprop", ("w", "out"): "dgrad"}
"""(operand, features that are cut) → the GEMM whose blocks of the operand lie along them; without one it is whole."""

_HARMLESS = {
    *("__init__", "reset_parameters", "__repr__", "_get_name", "extra_repr"),  # construction and printing
    *("_save_to_state_dict", "_load_from_state_dict", "get_extra_state", "set_extra_state", "_version"),
    *("__module__", "__doc__", "__dict__", "__weakref__", "__constants__", "__annotations__", "__annotate_func__"),
    *("__annotations_cache__", "__static_attributes__", "__firstlineno__"),  # made by every class statement
}
"""What a subclass of nn.Linear may redefine without changing what it computes."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One linear layer y [*, out_features] = x [*, in_features]·wᵀ.

    Args:
        name: its module path in the model.
        block: index of the block it belongs to, or None outside the blocks.
        blocks: number of blocks in the model.
        names: names of all linear layers of the model; a policy checks its patterns against them.
        unconverted: why `convert` does not replace it; None if it can be converted or is an fp4train layer.
        cut: the features along which tensor parallelism divides it, "in" or "out"; None: it is whole. in_features and
            out_features are those of the shard.
        parts: number of its shards.
    """

    name: str
    in_features: int
    out_features: int
    block: int | None
    blocks: int
    names: tuple[str, ...] = field(default=(), repr=False, compare=False)
    unconverted: str | None = field(default=None, repr=False, compare=False)
    cut: str | None = None
    parts: int = 1

    def part(self, cut: str, parts: int) -> Layer:
        """One of `parts` shards that divide the features `cut`, "in" or "out"."""
        if parts == 1:
            return self
        key = f"{cut}_features"
        sizes = {key: math.ceil(getattr(self, key) / parts)}
        return replace(self, cut=cut, parts=parts, **sizes)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model` that hold linear layers, in order; the model itself if it has none."""
    return [model.get_submodule(path) for path in block_paths(model)] or [model]


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """Every linear layer of `model` by name, in the order of definition; a shared layer has its first name.

    Raises:
        TypeError, ValueError: `fp4train_blocks` of the model is invalid.
    """
    paths = block_paths(model)
    block_of: dict[nn.Module, int] = {}
    for index, path in enumerate(paths):
        for part in model.get_submodule(path).modules():
            block_of.setdefault(part, index)
    found = [(name, module) for name, module in model.named_modules() if is_linear(module)]
    names = tuple(name for name, _ in found)
    bypassed = bypassed_linears(model.modules())
    return {
        name: Layer(
            name=name,
            in_features=features(module)[0],
            out_features=features(module)[1],
            block=block_of.get(module) if paths else index,
            blocks=len(paths) or len(found),
            names=names,
            unconverted=bypassed.get(module) or _why_unconverted(name, module),
            cut=module.layer.cut if getattr(module, "is_fp4train_linear", False) else None,
            parts=module.layer.parts if getattr(module, "is_fp4train_linear", False) else 1,
        )
        for index, (name, module) in enumerate(found)
    }


def bypassed_linears(modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Linear layers whose weights another module multiplies without calling them, and why."""
    return {
        module.out_proj: f"nn.{nn.MultiheadAttention.__name__} multiplies its weights itself; use separate projections"
        for module in modules
        if isinstance(module, nn.MultiheadAttention)
    }


def _why_unconverted(name: str, module: nn.Module) -> str | None:
    """Why fp4train's layer cannot replace this linear layer; None if it can or already has."""
    if getattr(module, "is_fp4train_linear", False):
        return None
    kind = type(module).__name__
    if is_uninitialised(module):
        return f"{kind} has no weights before its first batch: run one, then convert"
    changed = _changed(type(module)) if isinstance(module, nn.Linear) else None
    if changed:
        return f"{kind} is a subclass of nn.Linear with a {changed} of its own"
    if "forward" in vars(module):
        return "its forward is replaced on the instance: convert the model before it is wrapped or dispatched"
    rank = min(features(module))
    if rank < _BLOCK and any(part.lower().startswith("lora") for part in name.split(".")):
        return f"rank {rank} is below a block of {_BLOCK}"
    return None


def is_uninitialised(linear: nn.Module) -> bool:
    """Whether a linear layer (nn.LazyLinear) gets its shape only from its first batch."""
    weight = linear._parameters.get("weight")
    return weight is not None and is_lazy(weight)


def _changed(kind: type) -> str | None:
    """What a subclass of nn.Linear defines that its own forward may depend on."""
    own = [name for base in kind.__mro__ if base not in nn.Linear.__mro__ for name in vars(base)]
    if computed := {"weight", "bias"} & set(own):  # by a parametrisation
        return max(computed)
    return next((name for name in own if hasattr(nn.Linear, name) and name not in _HARMLESS), None)


def misaligned(layer: Layer, table: Mapping[str, Operands]) -> dict[str, str]:
    """GEMM → why the cut of `layer` divides blocks of one of its operands; empty for a layer that is whole.

    A shard quantised on its own blocks would round differently from the whole layer, and the loss would depend on the
    number of ranks. Such a GEMM stays in high precision, and the plan names it.
    """
    found: dict[str, str] = {}
    if layer.cut is None:
        return found
    extent = layer.out_features if layer.cut == "out" else layer.in_features
    for gemm, operands in table.items():
        for name, spec in zip(OPERANDS[gemm], (operands.first, operands.second), strict=True):
            along = _CUT_BLOCKS.get((name, layer.cut))
            reason = None if spec is None or along is None else why_not_cut(spec, extent, columns=gemm == along)
            if reason is not None:
                whole = f"{extent * layer.parts} {layer.cut} features"
                found.setdefault(gemm, f"{whole} over {layer.parts} ranks: {reason} ({name})")
    return found
