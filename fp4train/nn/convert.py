"""Replace the linear layers of any torch model by fp4train's, sharing the weights."""

import logging
from functools import cache
from typing import Any

from torch import nn

from fp4train.nn.conversion import report
from fp4train.nn.fused_weights import FusedWeights
from fp4train.nn.linear import Linear, LinearLayer, TransposedLinear
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.transformers_experts import hold_experts
from fp4train.precision.layers import Layer, find_layers, is_uninitialised

_log = logging.getLogger(__name__)


def convert(model: nn.Module, *, backend: str = "auto") -> nn.Module:
    """Turn every `nn.Linear` inside `model` into `fp4train.nn.Linear`, in place, and return the
    model.

    A `Conv1D` of transformers (GPT-2) becomes a planned layer that is still a `Conv1D`: its weight
    stays [in_features, out_features]. The experts of its mixtures (Mixtral, Qwen3-MoE, gpt-oss) are
    multiplied by planned layers; see `transformers_experts.py`.

    Parameters are shared, not copied: an existing optimizer stays valid, tied weights stay tied.
    Hooks and the keys of the state dict stay the same. If `model` is itself an `nn.Linear`, its
    replacement is returned. A subclass of `nn.Linear` stays an instance of its class; it is not
    converted if its forward may differ. Layers that are already converted are kept, with updated
    positions in the model. If matrix weights are not converted, one warning says how many and
    where; `fp4train.conversion` lists them.

    Args:
        backend: backend of the GEMMs, see `fp4train.nn.Linear`.

    Raises:
        TypeError: `model` is not a module, or a subclass of nn.Linear uses names that fp4train's
            layer needs.
        ValueError: the model has no linear layer that can be converted, or an uninitialised one.
    """
    layers = _checked_layers(model)
    modules = dict(model.named_modules())
    converted: dict[nn.Module, LinearLayer] = {}
    for name, layer in layers.items():
        module = modules[name]
        if isinstance(module, PlannedLayer):
            module.rename(layer, backend)
        elif layer.unconverted is None:
            converted[module] = _class_for(type(module), name, module).from_linear(
                module, layer, backend
            )
    groups: dict[tuple[str, ...], FusedWeights] = {}
    common: dict[Any, Any] = {}
    for name, layer in layers.items():
        if isinstance(converted_layer := converted.get(modules[name], modules[name]), PlannedLayer):
            converted_layer.common = common
            if layer.fused:
                converted_layer.fused_weights = groups.setdefault(layer.fused, FusedWeights())
                converted_layer.fused_weights.add(converted_layer)
    # A module may appear in several places; all are replaced by the same new module.
    for parent in list(model.modules()):
        for attribute, child in parent._modules.items():
            if child in converted:
                parent._modules[attribute] = converted[child]
    model = converted.get(model, model)
    _leave_fast_paths(model)
    summary = report(model, layers).summary()
    if summary:
        _log.warning("%s: %s", type(model).__name__, summary)
    return model


def _checked_layers(model: nn.Module) -> dict[str, Layer]:
    if not isinstance(model, nn.Module):
        raise TypeError(
            "convert takes a model (torch.nn.Module) and changes it in place, not "
            f"{type(model).__name__}"
        )
    hold_experts(model)
    layers = find_layers(model)
    what = type(model).__name__
    if not layers:
        raise ValueError(f"{what} has no nn.Linear: there is nothing to convert")
    for name in layers:
        module = model.get_submodule(name)
        if is_uninitialised(module):
            raise ValueError(
                f"{name or what} is a {type(module).__name__} without weights yet: run one "
                "batch through the "
                "model first, then convert it"
            )
    left = {name: layer.unconverted for name, layer in layers.items() if layer.unconverted}
    if len(left) == len(layers):
        some = "; ".join(f"{name or what}: {why}" for name, why in list(left.items())[:3])
        raise ValueError(
            f"{what} has no nn.Linear that can be converted "
            f"({some}{'; …' if len(left) > 3 else ''})"
        )
    return layers


# Subclasses of nn.Linear, and Conv1D


def _class_for(kind: type[nn.Module], name: str, module: nn.Module) -> type[LinearLayer]:
    """The class of fp4train's layer that is also a subclass of `kind`."""
    theirs = {
        key for base in kind.__mro__ if base not in nn.Linear.__mro__ for key in vars(base)
    } | vars(module).keys()
    if taken := sorted(_needed() & theirs):
        raise TypeError(
            f"{name or type(module).__name__} ({kind.__name__}) has {', '.join(taken)}, which "
            "fp4train's layer needs "
            "for itself: rename it"
        )
    return _subclass(kind)  # type: ignore[arg-type]  # a class is hashable


@cache
def _needed() -> frozenset[str]:
    """Attribute names of fp4train's layer that nn.Linear does not have."""
    ours, plain = (kind(1, 1, device="meta") for kind in (Linear, nn.Linear))
    return frozenset(
        {*vars(Linear), *vars(LinearLayer), *vars(PlannedLayer), *vars(ours)}
        - {*vars(nn.Linear), *vars(plain)}
    )


@cache
def _subclass(kind: type[nn.Module]) -> type[LinearLayer]:
    if kind is nn.Linear:
        return Linear

    def reduce(self: LinearLayer, protocol: Any) -> tuple[Any, ...]:
        # Pickle cannot import this class by name; it is made again from `kind`.
        return _new, (kind,), *super(subclass, self).__reduce_ex__(max(2, int(protocol)))[2:]

    if issubclass(kind, nn.Linear):
        ours: type[LinearLayer] = Linear
    else:
        ours = TransposedLinear
    subclass: type[LinearLayer] = type(
        kind.__name__, (ours, kind), {"__module__": kind.__module__, "__reduce_ex__": reduce}
    )
    return subclass


def _new(kind: type[nn.Module]) -> LinearLayer:
    subclass = _subclass(kind)  # type: ignore[arg-type]
    return subclass.__new__(subclass)


# torch's layers that multiply the weights of their submodules without calling them


def _leave_fast_paths(model: nn.Module) -> None:
    """Make torch's Transformer encoder layers call their linear layers in eval mode too.

    Their fast path is one fused kernel that reads the weights of the linear layers directly. It
    supports ReLU and GELU only, so a layer that declares another activation takes the training
    path, which computes the same values.
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
