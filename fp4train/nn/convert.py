"""Replace the linear layers of anyone's model by fp4train's, sharing the weights."""

from __future__ import annotations

from torch import nn

from fp4train.nn.linear import Linear
from fp4train.precision.layers import find_layers


def convert(model: nn.Module, *, backend: str = "auto") -> nn.Module:
    """Turn every `nn.Linear` inside `model` into `fp4train.nn.Linear`, in place, and return the model.

    Parameters are shared, not copied, so an optimizer made before stays valid and tied weights stay tied; hooks stay;
    the state dict keeps its keys. A model that is itself an `nn.Linear` is returned converted. Subclasses of
    `nn.Linear` are left alone, because their forward may differ, as are layers converted before (their place in the
    model is brought up to date).

    Args:
        backend: who multiplies, see `fp4train.nn.Linear`.

    Raises:
        ValueError: the model holds no linear layer.
    """
    layers = find_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} holds no nn.Linear: there is nothing to convert")
    converted: dict[nn.Module, Linear] = {}
    for name, layer in layers.items():
        module = model.get_submodule(name)
        if isinstance(module, Linear):
            module.settle(layer, backend)
        elif type(module) is nn.Linear:
            converted[module] = Linear.from_linear(module, layer, backend)
    # A module may stand in several places; it is replaced in each by the same new one.
    for parent in list(model.modules()):
        for attribute, child in parent._modules.items():
            if child in converted:
                parent._modules[attribute] = converted[child]
    return converted.get(model, model)
