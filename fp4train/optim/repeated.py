"""One update of a weight again, in float64, by the formulas and the constants of a configuration: what
the kernels of the optimizers are compared with. Of the matrices of Muon the momentum alone.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fp4train.optim.adamw import AdamW
from fp4train.optim.muon import Muon
from fp4train.optim.sgd import SGD

WEIGHT = "weight"
Tensors = Mapping[str, Tensor]
"""A weight and its moments by their names in the optimizer's state, float64."""


def rounding_of(parameter: Tensor) -> float:
    """Error of a result in the dtype of a parameter, as a share of it and of the value before."""
    return max(2**-22, 2 * torch.finfo(parameter.dtype).eps)


def _adamw(
    optim: AdamW, before: Tensors, gradient: Tensor, rate: float, decay: float
) -> dict[str, Tensor]:
    beta1, beta2 = optim.betas
    step = before["step"] + 1
    m = beta1 * before["exp_avg"] + (1 - beta1) * gradient
    v = beta2 * before["exp_avg_sq"] + (1 - beta2) * gradient.square()
    root = (v / (1 - beta2**step)).sqrt() + optim.eps
    weight = before[WEIGHT] * (1 - rate * decay) - rate / (1 - beta1**step) * m / root
    return {WEIGHT: weight, "step": step, "exp_avg": m, "exp_avg_sq": v}


def _sgd(
    optim: SGD, before: Tensors, gradient: Tensor, rate: float, decay: float
) -> dict[str, Tensor]:
    weight = before[WEIGHT]
    direction = gradient + decay * weight
    if not optim.momentum:
        return {WEIGHT: weight - rate * direction}
    mean = optim.momentum * before["momentum_buffer"] + direction
    direction = direction + optim.momentum * mean if optim.nesterov else mean
    return {WEIGHT: weight - rate * direction, "momentum_buffer": mean}


def _muon(
    optim: Muon, before: Tensors, gradient: Tensor, rate: float, decay: float
) -> dict[str, Tensor]:
    if "exp_avg" in before:
        return _adamw(optim, before, gradient, rate, decay)
    mean = torch.lerp(gradient, before["momentum_buffer"], optim.momentum)
    return {"momentum_buffer": mean}


UPDATES: Mapping[type, Callable[..., dict[str, Tensor]]] = {
    AdamW: _adamw,
    SGD: _sgd,
    Muon: _muon,
}
"""Class of a configuration → the update of its optimizers: (configuration, weight and moments before,
clipped gradient, rate, decay) → those after. Subclasses may do otherwise, and have none.
"""
