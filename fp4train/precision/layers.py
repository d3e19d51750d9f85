"""The linear layers of a model and their positions in its blocks.

A policy counts blocks ("the last 15 % of the blocks"); `blocks.py` finds them. Linear layers
outside the blocks (the head, input projections) always stay in high precision. In a model without
blocks each linear layer counts as a block, and none is outside.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import nn
from torch.nn.parameter import is_lazy

from fp4train.backends.table import Operands, sourced
from fp4train.parameters import DECLARED_BY, declared
from fp4train.precision.blocks import block_paths, features, is_linear

_TUNED = "base_layer"
"""Name of the layer itself in peft's wrapper of it."""

CLASS = "class:"
"""Beginning of a policy's patterns that are about the class of a layer, not about its name."""

_HARMLESS = {
    # construction and printing
    "__init__",
    "reset_parameters",
    "__repr__",
    "_get_name",
    "extra_repr",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
    "_version",
    "__module__",
    "__doc__",
    "__dict__",
    "__weakref__",
    "__constants__",
    "__annotations__",
    "__annotate_func__",
    # made by every class statement
    "__annotations_cache__",
    "__static_attributes__",
    "__firstlineno__",
}
"""Names that a subclass of nn.Linear may redefine without changing what it computes."""
STEERING = frozenset(
    {
        "shared_expert_gate",  # Qwen2-MoE
        "in_proj_ba",  # Qwen3-Next
        "in_proj_a",  # Qwen3.5
        "in_proj_b",
        "x_proj",  # Mamba, Jamba
        "dt_proj",
        "a_proj",  # OLMo Hybrid
        "b_proj",
        "f_a_proj",  # Kimi Linear
        "f_b_proj",
        "f_proj",  # Bailing Hybrid
        "wg",  # router of HunYuan
    }
)
"""Names in `transformers` of layers that give the gates of shared experts, the decays and steps of
recurrences, and of routers whose module is not called so."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One linear layer y [*, out_features] = x [*, in_features]·wᵀ.

    Args:
        name: its module path in the model.
        block: index of the block it belongs to, or None outside the blocks.
        blocks: number of blocks in the model.
        classes: its class and those of the modules inside its block that hold it: "class:Linear",
            "class:Attention".
        names: names of all linear layers of the model, and their classes; a policy checks its
            patterns against them.
        unconverted: why `convert` does not replace it; None if it can be converted or is an
            fp4train layer.
        cut: the features along which tensor parallelism divides it, "in" or "out", or "experts", of
            which a rank has some; None: it is whole. in_features, out_features and experts are
            those of the shard.
        parts: number of its shards.
        sources: ranks whose own microbatches it multiplies, under expert parallelism.
        segments: out features of the shard in each of the weight's segments; none: they are one.
        experts: number of its weights, each of these sizes and for the tokens that are routed to
            it; 0: it has one weight, for all tokens.
        per_token: number of experts that a token is routed to.
        fused: names of the layers, this one included, that serving software multiplies with it as
            one; none: no other.
    """

    name: str
    in_features: int
    out_features: int
    block: int | None
    blocks: int
    classes: tuple[str, ...] = field(default=(), repr=False, compare=False)
    names: tuple[str, ...] = field(default=(), repr=False, compare=False)
    unconverted: str | None = field(default=None, repr=False, compare=False)
    cut: str | None = None
    parts: int = 1
    sources: int = 1
    segments: tuple[int, ...] = ()
    experts: int = 0
    per_token: int = 1
    fused: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __deepcopy__(self, memo: object) -> Self:
        """Itself, which does not change: each layer of a model that is copied has the names of all."""
        return self

    @property
    def weights(self) -> int:
        """The number of its weights: of all experts together."""
        return max(1, self.experts) * self.in_features * self.out_features

    @property
    def steers(self) -> str | None:
        """Why its values are weights of others, which a rounding moves most, by its shape or its
        name; None: they are not, as far as that tells.
        """
        name = self.name.rpartition(".")[2]
        if "router" in self.name.lower():
            return "router: chooses in high precision"
        if name in STEERING:
            return f"{name}: a gate, decay or step by its name"
        if self.out_features * (self.parts if self.cut == "out" else 1) == 1:
            return "one out feature: a gate"
        return None

    @property
    def group(self) -> int:
        """The number of experts on all ranks together."""
        return self.experts * self.parts

    def rows(self, tokens: int) -> int:
        """Rows of x for so many tokens: of experts those of all together, of a rank's experts an
        even share.
        """
        if self.experts:
            return math.ceil(tokens * self.per_token * self.sources / self.parts)
        return tokens

    @property
    def active(self) -> int:
        """The number of its weights that multiply one token; of a rank's experts on average."""
        return self.rows(self.in_features * self.out_features)

    @property
    def label(self) -> str:
        """The layer's name, and the number of its experts if it has some."""
        if self.experts:
            return f"{self.name} ({self.experts} experts)"
        return self.name

    def part(self, cut: str, parts: int, segments: tuple[int, ...] = ()) -> Layer:
        """One of `parts` shards that divide the features `cut`, "in" or "out", or the experts of a
        group.

        Args:
            segments: out features of each segment of the weight, each of which is divided; none:
                they are one.
        """
        if parts == 1:
            return self
        if self.experts:
            return replace(
                self, cut="experts", parts=parts, experts=math.ceil(self.experts / parts)
            )
        key = f"{cut}_features"
        sizes = {key: math.ceil(getattr(self, key) / parts)}
        if cut == "out":
            shares = tuple(math.ceil(size / parts) for size in segments)
        else:
            shares = ()
        return replace(self, cut=cut, parts=parts, segments=shares, **sizes)

    def shared(self, ranks: int) -> Layer:
        """What one of so many expert-parallel ranks has of it: some of the experts of a group."""
        if ranks == 1 or not self.experts:
            return self
        return replace(self.part("experts", ranks), sources=ranks)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model` that hold linear layers, in order; the model itself if it has none."""
    return [model.get_submodule(path) for path in block_paths(model)] or [model]


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """Every linear layer of `model` by name, in the order of definition; a shared layer has its
    first name.

    Raises:
        TypeError, ValueError: `fp4train_blocks` or `fp4train_parameters` of the model or of a part
            of it is invalid.
    """
    paths = block_paths(model)
    modules = dict(model.named_modules())
    block_of: dict[nn.Module, int] = {}
    for index, path in enumerate(paths):
        for part in model.get_submodule(path).modules():
            block_of.setdefault(part, index)
    linears = [(name, module) for name, module in modules.items() if is_linear(module)]
    names = tuple(name for name, _ in linears)
    classes = {name: _classes(modules, name, paths) for name in names}
    matched_names = (
        *names,
        *dict.fromkeys(class_name for name in names for class_name in classes[name]),
    )
    tuned = {path.removesuffix(f".{_TUNED}") for path in modules if path.endswith(f".{_TUNED}")}
    bypassed = bypassed_linears(modules.values())
    fused = _fused(model, names)
    return {
        name: Layer(
            name=name,
            in_features=features(module)[0],
            out_features=features(module)[1],
            block=block_of.get(module) if paths else index,
            blocks=len(paths) or len(linears),
            classes=classes[name],
            names=matched_names,
            unconverted=bypassed.get(module) or _why_unconverted(name, module, tuned),
            fused=fused.get(name, ()),
            **_cut_and_experts(module),
        )
        for index, (name, module) in enumerate(linears)
    }


def _cut_and_experts(module: nn.Module) -> dict[str, Any]:
    """The fields of a `Layer` that a planned layer alone knows: its cut, and its experts."""
    declared_keys = ("cut", "parts", "sources", "segments", "experts", "per_token")
    if getattr(module, "is_fp4train_layer", False):
        return {key: getattr(module.layer, key) for key in declared_keys}
    return {}


def _classes(
    modules: Mapping[str, nn.Module], name: str, blocks: Collection[str]
) -> tuple[str, ...]:
    """The classes of a layer and of the modules that hold it, up to its block."""
    parts = name.split(".") if name else []
    classes = []
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        if path in blocks and length < len(parts):
            break
        classes.append(f"{CLASS}{type(modules[path]).__name__}")
    return tuple(classes or [f"{CLASS}{type(modules['']).__name__}"])


def elementwise(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of `model` that are no factors of a matrix product: those of which it says so
    (`ParameterSpec.elementwise`), and the biases of planned layers, which experts have in two
    dimensions.
    """
    names = {name for name, spec in declared(model).items() if spec.elementwise}
    layers = [module for module in model.modules() if getattr(module, "is_fp4train_layer", False)]
    biases = {layer.bias for layer in layers if isinstance(layer.bias, nn.Parameter)}
    return biases | {parameter for name, parameter in model.named_parameters() if name in names}


def _fused(model: nn.Module, names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Layer → the layers that serving software multiplies with it as one, as the parts of a model
    say.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for spec in declared(model).values():
        if spec.fused:
            if spec.layer not in names:
                raise ValueError(
                    f"{DECLARED_BY}: {spec.name} with fused={spec.fused!r} is in no linear layer"
                )
            groups.setdefault((spec.holder, spec.fused), []).append(spec.layer)
    return {layer: tuple(layers) for layers in groups.values() for layer in layers}


def bypassed_linears(modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Linear layers whose weights another module multiplies without calling them, and why."""
    return {
        module.out_proj: f"nn.{nn.MultiheadAttention.__name__} multiplies its weights itself; "
        "use separate projections"
        for module in modules
        if isinstance(module, nn.MultiheadAttention)
    }


def _adapter(name: str, tuned: Collection[str]) -> str | None:
    """The component of a layer's name that makes it an adapter of a layer beside it; None: it is
    none.

    An adapter is known by its name and never by its rank: it is small, is trained with a few
        thousand tokens, and is
    merged into the weight later. peft's wrapper of a layer holds the layer as `base_layer` and its
    adapters beside it.

    Args:
        tuned: paths of the modules that hold a `base_layer`.
    """
    parts = name.split(".")
    if lora := next((part for part in parts if part.lower().startswith("lora")), None):
        return lora
    inner = next((n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in tuned), None)
    if inner is None or parts[inner] == _TUNED:
        return None
    return parts[inner]


def _why_unconverted(name: str, module: nn.Module, tuned: Collection[str]) -> str | None:
    """Why fp4train's layer does not replace this linear layer; None if it can or already has."""
    if getattr(module, "is_fp4train_layer", False):
        return None
    kind = type(module).__name__
    if is_uninitialised(module):
        return f"{kind} has no weights before its first batch: run one, then convert"
    if isinstance(module, nn.Linear):
        changed = _changed(type(module))
    else:
        changed = None
    if changed:
        return f"{kind} is a subclass of nn.Linear with a {changed} of its own"
    if "forward" in vars(module):
        return (
            "its forward is replaced on the instance: convert the model before it is wrapped "
            "or dispatched"
        )
    adapter = _adapter(name, tuned)
    if adapter is None:
        return None
    return f"adapter ({adapter}): kept in high precision by its name"


def is_uninitialised(linear: nn.Module) -> bool:
    """Whether a linear layer (nn.LazyLinear) gets its shape only from its first batch."""
    weight = linear._parameters.get("weight")
    return weight is not None and is_lazy(weight)


def _changed(kind: type) -> str | None:
    """A name that a subclass of nn.Linear defines, and its own forward may depend on; None: there
    is none.
    """
    overridden = [
        name for base in kind.__mro__ if base not in nn.Linear.__mro__ for name in vars(base)
    ]
    if computed := {"weight", "bias"} & set(overridden):  # by a parametrisation
        return max(computed)
    return next(
        (name for name in overridden if hasattr(nn.Linear, name) and name not in _HARMLESS), None
    )


def misaligned(layer: Layer, table: Mapping[str, Operands]) -> dict[str, str]:
    """GEMM → why the cut of `layer` divides blocks of one of its operands; empty for a layer that
    is whole.

    A shard quantised on its own blocks would round differently from the whole layer, and the loss
    would depend on the number of ranks. Such a GEMM stays in high precision, and the plan names it.
    """
    why_misaligned: dict[str, str] = {}
    if layer.cut is None:
        return why_misaligned
    extents = layer.segments or (layer.out_features if layer.cut == "out" else layer.in_features,)
    for (gemm, name), operand in sourced(table).items():
        if not operand.has(layer.cut):
            continue
        reasons = ((size, operand.why_not_cut(layer.cut, size)) for size in extents)
        extent, reason = next(((size, why) for size, why in reasons if why is not None), (0, None))
        if reason is not None:
            aligned = (
                f"{'a segment of ' if layer.segments else ''}{extent * layer.parts} {layer.cut} "
                "features"
            )
            why_misaligned.setdefault(
                gemm, f"{aligned} over {layer.parts} ranks: {reason} ({name})"
            )
    return why_misaligned
