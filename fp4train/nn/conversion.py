"""Every parameter of a model by its kind, and the matrix weights that fp4train does not
multiply.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp4train.nn.planned import PlannedLayer
from fp4train.nn.transformers_experts import why_outside
from fp4train.parameters import declared
from fp4train.precision.layers import Layer, bypassed_linears, elementwise, find_layers
from fp4train.text import tabulate

_PLACES = 4
"""Number of groups of weights in the summary; `str` of a Conversion lists all weights."""

_LOOKED_UP = "looked up by token, no matrix product"
_ADDED = "added to products"
_BY_CHANNEL = "of each channel or head by itself, no matrix product"
"""Why a parameter that is no factor of a matrix product stays in high precision."""

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass(frozen=True, kw_only=True)
class UnconvertedWeight:
    """A matrix weight that fp4train does not multiply.

    Args:
        name: name of the parameter in the model; for a shared one, the first name.
        module: path of the module that holds it.
        shape: shape of the parameter.
        share: share of the model's matrix weights, between 0 and 1; 0 if it is counted elsewhere
            (tied weights).
        why: why fp4train does not multiply it.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    share: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The matrix weights of a converted model: the weights of linear layers, and all other
    parameters with two or more dimensions that are not embeddings, norms or biases.

    Args:
        layers: the layers that run on fp4train.
        left: weights of linear layers that are not converted.
        others: matrix weights outside linear layers: experts in one 3-D parameter, convolutions, ….
        meant: those that stay in high precision on purpose: of routers, by their class's name, and
            those of which the model says why (`ParameterSpec.high_precision`).
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
        """One line about the weights that are not converted, but for those that are meant not to
        be; empty if there are none.
        """
        groups = _groups((*self.left, *self.others))
        if not groups:
            return ""
        places = [
            f"{len(group)} tensor{'s' * (len(group) != 1)} in {place} ({why})"
            for (place, why), group in groups.items()
        ]
        if len(places) > _PLACES:
            more = [f"{len(places) - _PLACES} more"]
        else:
            more = []
        return (
            f"{_percent(sum(w.share for w in (*self.left, *self.others)))} of the matrix "
            "weights are not converted: "
            f"{', '.join(places[:_PLACES] + more)}; fp4train.conversion(model) lists them"
        )

    def __str__(self) -> str:
        rows = [
            (
                place,
                str(len(group)),
                "×".join(map(str, group[0].shape)),
                _percent(sum(w.share for w in group)),
                why,
            )
            for (place, why), group in _groups((*self.left, *self.others, *self.meant)).items()
        ]
        count = len(self.layers)
        head = (
            f"{count} linear layer{'s' * (count != 1)} converted: {_percent(self.share)} of the "
            "matrix weights"
        )
        lines = [head]
        if rows:
            lines += tabulate([("left alone", "tensors", "shape", "share", "why"), *rows])
        return "\n".join(lines)


def report(model: nn.Module, layers: dict[str, Layer] | None = None) -> Conversion:
    """The matrix weights of `model` that are converted, those that are not, and why; the model is
    not changed.

    Args:
        layers: its linear layers, if `find_layers` has found them already.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"conversion takes a model (torch.nn.Module), not {type(model).__name__}")
    layers = layers or find_layers(model)
    modules = dict(model.named_modules())
    ours = {
        name: layer for name, layer in layers.items() if isinstance(modules[name], PlannedLayer)
    }
    covered = {p for name in ours for p in _parameters(modules[name]) if not is_lazy(p)}
    on_purpose = _meant(model)
    matrices = list(_matrices(model, layers, covered, on_purpose))
    sizes = {p: p.numel() for p in covered if p.dim() >= 2} | {p: p.numel() for p, *_ in matrices}
    total = sum(sizes.values()) or 1
    left: list[UnconvertedWeight] = []
    unconverted: list[UnconvertedWeight] = []
    meant: list[UnconvertedWeight] = []
    for parameter, name, why, is_linear in matrices:
        # Counted once: at its first place in the list, or in the converted layer that shares it.
        if parameter in covered:
            size = 0
        else:
            size = sizes.pop(parameter, 0)
        weight = UnconvertedWeight(
            name=name,
            module=name.rpartition(".")[0],
            shape=tuple(parameter.shape),
            share=size / total,
            why=why,
        )
        (left if is_linear else meant if name in on_purpose else unconverted).append(weight)
    return Conversion(
        layers=tuple(ours.values()), left=tuple(left), others=tuple(unconverted), meant=tuple(meant)
    )


class WeightGroup(NamedTuple):
    """Parameters that a plan treats alike.

    Args:
        kind: "planned layers", or class and name of other modules.
        tensors, parameters: how many; tied ones count once.
        active: parameters that a token meets; of experts those to which it is routed.
        why: why no recipe touches them; None: GEMMs of the plan multiply them.
    """

    kind: str
    tensors: int
    parameters: int
    active: int
    why: str | None


def weight_groups(model: nn.Module) -> list[WeightGroup]:
    """Every parameter of a model that is converted: those of planned layers, then the others; the
    largest group first.

    Raises:
        TypeError, ValueError: see `find_layers`.
    """
    modules = dict(model.named_modules())
    spared = _spared(model)
    on_purpose = _meant(model)
    held_elsewhere = {
        parameter: layer
        for name, layer in find_layers(model).items()
        for parameter in _parameters(modules[name])
    }
    groups: dict[tuple[str, str | None], tuple[int, int, int]] = {}
    for name, parameter in model.named_parameters():
        path, _, key = name.rpartition(".")
        module = modules[path]
        layer = held_elsewhere.get(parameter)
        size = parameter.numel()
        why: str | None = None
        if layer is None:
            kind = f"{type(module).__name__}.{key}"
            if isinstance(module, nn.Embedding):
                why = _LOOKED_UP
            else:
                why = _BY_CHANNEL
            if parameter not in spared and _is_matrix(key, parameter):
                why = on_purpose.get(name) or _why_other(path, module, parameter)
        else:
            kind = "experts" if layer.experts else "linear layers"
            if layer.block is not None:
                kind += " of the blocks"
            elif path == layer.name:
                kind += f" outside the blocks: {layer.name}"
            else:
                kind += f" outside the blocks: {layer.name}, tied to {path}"
            if size != layer.weights:
                kind = f"biases, {kind}"
                why = _ADDED
        if layer is not None and layer.experts:
            active = size * layer.per_token // layer.experts
        else:
            active = size
        tensors, parameters, met = groups.get((kind, why), (0, 0, 0))
        groups[kind, why] = tensors + 1, parameters + size, met + active
    weight_groups = [WeightGroup(kind, *counts, why) for (kind, why), counts in groups.items()]
    return sorted(weight_groups, key=lambda group: (group.why is not None, -group.parameters))


def _parameters(layer: nn.Module) -> set[nn.Parameter]:
    """Parameters of a planned layer, those that another module holds for it included."""
    direct = (getattr(layer, name, None) for name in ("weight", "bias"))
    return {*layer.parameters(), *(value for value in direct if isinstance(value, nn.Parameter))}


def _meant(model: nn.Module) -> dict[str, str]:
    """Name → why a matrix stays in high precision on purpose, as the model or a part of it says."""
    routers = {
        f"{path}.{key}" if path else key: "router: chooses in high precision"
        for path, module in model.named_modules()
        if "router" in type(module).__name__.lower()
        for key, _ in module.named_parameters(recurse=False)
    }
    reasons = {name: spec.high_precision for name, spec in declared(model).items()}
    return routers | {name: why for name, why in reasons.items() if why}


def _matrices(
    model: nn.Module,
    layers: dict[str, Layer],
    covered: set[nn.Parameter],
    on_purpose: Mapping[str, str],
) -> Iterator[tuple[nn.Parameter, str, str, bool]]:
    """(parameter, name, reason, whether a linear layer holds it) of each matrix that fp4train does
    not multiply.

    A weight shared with a converted layer is listed only if an unconverted linear layer holds it
    too.
    """
    covered = covered | _spared(model)
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
            elif parameter not in covered and _is_matrix(key, parameter):
                why = on_purpose.get(name) or _why_other(path, module, parameter)
                yield parameter, name, why, False


def _spared(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that are no factors of a matrix product, by what holds them."""
    return {
        p for m in model.modules() if _has_no_matrix(m) for p in m.parameters(recurse=False)
    } | elementwise(model)


def _has_no_matrix(module: nn.Module) -> bool:
    """Whether this is an embedding or a norm, by class or class name, or a convolution of each
    channel by itself: not a factor of a matrix product.
    """
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
    if isinstance(module, nn.MultiheadAttention):
        return bypassed_linears([module])[module.out_proj]
    if isinstance(module, _CONVOLUTIONS):
        return "convolution"
    kind = type(module).__name__
    if parameter.dim() >= 3:
        if reason := why_outside(module):
            return reason
        if "expert" in f"{path}.{kind}".lower():
            return "3-D expert parameters"
        return f"{parameter.dim()}-D in {kind}"
    return f"{kind} is not an nn.Linear"


def _groups(
    weights: tuple[UnconvertedWeight, ...],
) -> dict[tuple[str, str], list[UnconvertedWeight]]:
    """Weights grouped by module path, with numbers replaced by *, and reason; the largest share
    first.
    """
    groups: dict[tuple[str, str], list[UnconvertedWeight]] = {}
    for weight in weights:
        place = re.sub(r"(?<![^.])\d+(?![^.])", "*", weight.module) or "the model itself"
        place = (place.strip("*.") and place) or "the children"
        groups.setdefault((place, weight.why), []).append(weight)
    return dict(sorted(groups.items(), key=lambda item: -sum(w.share for w in item[1])))


def _percent(share: float) -> str:
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"
