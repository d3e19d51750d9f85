"""Replace the linear layers of any torch model by fp4train's, sharing the weights; report what is not converted."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp4train.nn.linear import Linear
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.transformers_experts import hold_experts, why_outside
from fp4train.nn.weights import FusedWeights
from fp4train.precision.layers import Layer, bypassed_linears, elementwise, find_layers, is_uninitialised
from fp4train.text import tabulate

_log = logging.getLogger(__name__)

_PLACES = 4
"""Number of groups of weights in the summary; `str` of a Conversion lists all weights."""

_CONVOLUTIONS = (*(nn.Conv1d, nn.Conv2d, nn.Conv3d), *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))


def convert(model: nn.Module, *, backend: str = "auto") -> nn.Module:
    """Turn every `nn.Linear` inside `model` into `fp4train.nn.Linear`, in place, and return the model.

    So does every `Conv1D` of transformers (GPT-2), whose weight stays [in_features, out_features]. The experts of its
    mixtures (Mixtral, Qwen3-MoE, gpt-oss) are multiplied by planned layers; see `transformers_experts.py`.

    Parameters are shared, not copied: an existing optimizer stays valid, tied weights stay tied. Hooks and the keys of
    the state dict stay the same. If `model` is itself an `nn.Linear`, its replacement is returned. A subclass of
    `nn.Linear` stays an instance of its class; it is not converted if its forward may differ. Layers that are already
    converted are kept, with updated positions in the model. If matrix weights are not converted, one warning says how
    many and where; `fp4train.conversion` lists them.

    Args:
        backend: what executes the GEMMs, see `fp4train.nn.Linear`.

    Raises:
        TypeError: `model` is not a module, or a subclass of nn.Linear uses names that fp4train's layer needs.
        ValueError: the model has no linear layer that can be converted, or an uninitialised one.
    """
    layers = _checked_layers(model)
    converted: dict[nn.Module, Linear] = {}
    for name, layer in layers.items():
        module = model.get_submodule(name)
        if isinstance(module, PlannedLayer):
            module.rename(layer, backend)
        elif layer.unconverted is None:
            converted[module] = _class_for(type(module), name, module).from_linear(module, layer, backend)
    groups: dict[tuple[str, ...], FusedWeights] = {}
    common: dict[Any, Any] = {}
    for name, layer in layers.items():
        module = model.get_submodule(name)
        if isinstance(made := converted.get(module, module), PlannedLayer):
            made.common = common
            if layer.fused:
                made.fused_weights = groups.setdefault(layer.fused, FusedWeights())
                made.fused_weights.add(made)
    # A module may appear in several places; all are replaced by the same new module.
    for parent in list(model.modules()):
        for attribute, child in parent._modules.items():
            if child in converted:
                parent._modules[attribute] = converted[child]
    model = converted.get(model, model)
    _leave_fast_paths(model)
    summary = report(model).summary()
    if summary:
        _log.warning("%s: %s", type(model).__name__, summary)
    return model


def _checked_layers(model: nn.Module) -> dict[str, Layer]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a model (torch.nn.Module) and changes it in place, not {type(model).__name__}")
    hold_experts(model)
    layers, what = find_layers(model), type(model).__name__
    if not layers:
        raise ValueError(f"{what} has no nn.Linear: there is nothing to convert")
    for name in layers:
        module = model.get_submodule(name)
        if is_uninitialised(module):
            raise ValueError(
                f"{name or what} is a {type(module).__name__} without weights yet: run one batch through the "
                "model first, then convert it"
            )
    left = {name: layer.unconverted for name, layer in layers.items() if layer.unconverted}
    if len(left) == len(layers):
        some = "; ".join(f"{name or what}: {why}" for name, why in list(left.items())[:3])
        raise ValueError(f"{what} has no nn.Linear that can be converted ({some}{'; …' if len(left) > 3 else ''})")
    return layers


# Subclasses of nn.Linear, and Conv1D


def _class_for(kind: type[nn.Module], name: str, module: nn.Module) -> type[Linear]:
    """The class of fp4train's layer that is also a subclass of `kind`."""
    theirs = {key for base in kind.__mro__ if base not in nn.Linear.__mro__ for key in vars(base)} | vars(module).keys()
    if taken := sorted(_needed() & theirs):
        raise TypeError(
            f"{name or type(module).__name__} ({kind.__name__}) has {', '.join(taken)}, which fp4train's layer needs "
            "for itself: rename it"
        )
    return _subclass(kind)  # type: ignore[arg-type]  # a class is hashable


@cache
def _needed() -> frozenset[str]:
    """Attribute names of fp4train's layer that nn.Linear does not have."""
    ours, plain = (kind(1, 1, device="meta") for kind in (Linear, nn.Linear))
    return frozenset({*vars(Linear), *vars(PlannedLayer), *vars(ours)} - {*vars(nn.Linear), *vars(plain)})


@cache
def _subclass(kind: type[nn.Module]) -> type[Linear]:
    if kind is nn.Linear:
        return Linear

    def reduce(self: Linear, protocol: Any) -> tuple[Any, ...]:
        # Pickle cannot import this class by name; it is made again from `kind`.
        return _new, (kind,), *super(made, self).__reduce_ex__(max(2, int(protocol)))[2:]

    own = {"__module__": kind.__module__, "__reduce_ex__": reduce, "transposed": not issubclass(kind, nn.Linear)}
    made: type[Linear] = type(kind.__name__, (Linear, kind), own)
    return made


def _new(kind: type[nn.Module]) -> Linear:
    made = _subclass(kind)  # type: ignore[arg-type]
    return made.__new__(made)


# torch's layers that multiply the weights of their submodules without calling them


def _leave_fast_paths(model: nn.Module) -> None:
    """Make torch's Transformer encoder layers call their linear layers in eval mode too.

    Their fast path is one fused kernel that reads the weights of the linear layers directly. It supports ReLU and GELU
    only, so a layer that declares another activation takes the training path, which computes the same values.
    """
    for module in model.modules():
        if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        if not any(isinstance(part, Linear) for part in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        else:
            module.use_nested_tensor = False  # only the fast path uses nested tensors


# What is not converted


@dataclass(frozen=True, kw_only=True)
class UnconvertedWeight:
    """A matrix weight that fp4train does not multiply.

    Args:
        name: name of the parameter in the model; for a shared one, the first name.
        module: path of the module that holds it.
        shape: shape of the parameter.
        share: share of the model's matrix weights, between 0 and 1; 0 if it is counted elsewhere (tied weights).
        why: why fp4train does not multiply it.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    share: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The matrix weights of a converted model: the weights of linear layers, and all other parameters with two or more
    dimensions that are not embeddings, norms or biases.

    Args:
        layers: the layers that run on fp4train.
        left: weights of linear layers that are not converted.
        others: matrix weights outside linear layers: experts in one 3-D parameter, convolutions, ….
        meant: those that stay in high precision on purpose: of routers, by their class's name, and of modules that say
            why in their attribute `fp4train_high_precision`.
    """

    layers: tuple[Layer, ...]
    left: tuple[UnconvertedWeight, ...]
    others: tuple[UnconvertedWeight, ...]
    meant: tuple[UnconvertedWeight, ...] = ()

    @property
    def share(self) -> float:
        """Share of the matrix weights that fp4train multiplies, between 0 and 1."""
        return 1 - sum(weight.share for weight in (*self.left, *self.others, *self.meant))

    def summary(self) -> str:
        """One line about the weights that are not converted, but for those that are meant not to be; empty if there are
        none."""
        groups = _groups((*self.left, *self.others))
        if not groups:
            return ""
        places = [f"{_tensors(len(group))} in {place} ({why})" for (place, why), group in groups.items()]
        more = [f"{len(places) - _PLACES} more"] if len(places) > _PLACES else []
        return (
            f"{_percent(sum(w.share for w in (*self.left, *self.others)))} of the matrix weights are not converted: "
            f"{', '.join(places[:_PLACES] + more)}; fp4train.conversion(model) lists them"
        )

    def __str__(self) -> str:
        rows = [
            (place, str(len(group)), "×".join(map(str, group[0].shape)), _percent(sum(w.share for w in group)), why)
            for (place, why), group in _groups((*self.left, *self.others, *self.meant)).items()
        ]
        count = len(self.layers)
        head = f"{count} linear layer{'s' * (count != 1)} converted: {_percent(self.share)} of the matrix weights"
        return "\n".join(
            [head, *tabulate([("left alone", "tensors", "shape", "share", "why"), *rows])] if rows else [head]
        )


def report(model: nn.Module) -> Conversion:
    """Which matrix weights of `model` are converted, which are not, and why; the model is not changed.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"conversion takes a model (torch.nn.Module), not {type(model).__name__}")
    layers = find_layers(model)
    ours = {name: layer for name, layer in layers.items() if isinstance(model.get_submodule(name), PlannedLayer)}
    covered = {p for name in ours for p in _parameters(model.get_submodule(name)) if not is_lazy(p)}
    found = list(_matrices(model, layers, covered))
    sizes = {p: p.numel() for p in covered if p.dim() >= 2} | {p: p.numel() for p, *_ in found}
    total = sum(sizes.values()) or 1
    left: list[UnconvertedWeight] = []
    others: list[UnconvertedWeight] = []
    meant: list[UnconvertedWeight] = []
    for parameter, name, why, is_linear in found:
        # Counted once: at its first place in the list, or in the converted layer that shares it.
        size = 0 if parameter in covered else sizes.pop(parameter, 0)
        weight = UnconvertedWeight(
            name=name, module=name.rpartition(".")[0], shape=tuple(parameter.shape), share=size / total, why=why
        )
        (left if is_linear else meant if why == _meant(model.get_submodule(weight.module)) else others).append(weight)
    return Conversion(layers=tuple(ours.values()), left=tuple(left), others=tuple(others), meant=tuple(meant))


def _parameters(layer: nn.Module) -> set[nn.Parameter]:
    """Parameters of a planned layer, those that another module holds for it included."""
    held = (getattr(layer, name, None) for name in ("weight", "bias"))
    return {*layer.parameters(), *(each for each in held if isinstance(each, nn.Parameter))}


def _meant(module: nn.Module) -> str | None:
    """Why a module keeps its own matrices in high precision; None: it does not say."""
    router = "router: chooses in high precision" if "router" in type(module).__name__.lower() else None
    return getattr(module, "fp4train_high_precision", router)


def _matrices(
    model: nn.Module, layers: dict[str, Layer], covered: set[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, str, str, bool]]:
    """(parameter, name, reason, whether a linear layer holds it) of each matrix that fp4train does not multiply.

    A weight shared with a converted layer is listed only if an unconverted linear layer holds it too.
    """
    spared = {p for m in model.modules() if _has_no_matrix(m) for p in m.parameters(recurse=False)} | elementwise(model)
    for path, module in model.named_modules():
        if isinstance(module, PlannedLayer):
            continue
        layer = layers.get(path)
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{key}" if path else key
            if is_lazy(parameter):  # has no shape; convert refuses linear layers of this kind
                continue
            if layer is not None:
                if key == "weight" or _is_matrix(key, parameter):
                    yield parameter, name, layer.unconverted or "convert was not called on it", True
            elif parameter not in covered | spared and _is_matrix(key, parameter):
                yield parameter, name, _why_other(path, module, parameter), False


def _has_no_matrix(module: nn.Module) -> bool:
    """Whether this is an embedding or a norm, by class or class name, or a convolution of each channel by itself: not a
    factor of a matrix product."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    if isinstance(module, _CONVOLUTIONS) and module.groups == module.in_channels:
        return True
    return any(word in type(module).__name__.lower() for word in ("embed", "norm"))


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter can be a factor of a matrix product, by its dimensions and its name."""
    if name.endswith("bias") or "embed" in name.lower():
        return False
    return sum(size > 1 for size in parameter.shape) >= 2


def _why_other(path: str, module: nn.Module, parameter: Tensor) -> str:
    if reason := _meant(module):
        return reason
    if isinstance(module, nn.MultiheadAttention):
        return bypassed_linears([module])[module.out_proj]
    if isinstance(module, _CONVOLUTIONS):
        return "convolution"
    kind = type(module).__name__
    if parameter.dim() >= 3:
        if reason := why_outside(module):
            return reason
        return "3-D expert parameters" if "expert" in f"{path}.{kind}".lower() else f"{parameter.dim()}-D in {kind}"
    return f"{kind} is not an nn.Linear"


def _groups(weights: tuple[UnconvertedWeight, ...]) -> dict[tuple[str, str], list[UnconvertedWeight]]:
    """Weights grouped by module path, with numbers replaced by *, and reason; the largest share first."""
    groups: dict[tuple[str, str], list[UnconvertedWeight]] = {}
    for weight in weights:
        place = re.sub(r"(?<![^.])\d+(?![^.])", "*", weight.module) or "the model itself"
        place = (place.strip("*.") and place) or "the children"
        groups.setdefault((place, weight.why), []).append(weight)
    return dict(sorted(groups.items(), key=lambda item: -sum(w.share for w in item[1])))


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' * (count != 1)}"


def _percent(share: float) -> str:
    if 0 < share < 0.01:
        return "<1 %"
    return ">99 %" if 0.99 < share < 1 else f"{share:.0%}".replace("%", " %")
