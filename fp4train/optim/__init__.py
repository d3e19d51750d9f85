"""Optimizers and learning-rate schedules: the protocol of `optim=…`, and what fp4train's optimizers
share.

A new optimizer is one dataclass like AdamW, and one YAML in the group `optim`.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fp4train.optim.oscillation import OscillationReset
from fp4train.optim.schedule import (
    WSD,
    Constant,
    Cosine,
    Schedule,
)
from fp4train.precision.layers import elementwise

DECAYS = "decays"
"""Key of a group of parameters: whether they have weight decay. A checkpoint has it by parameter,
and another choice than the one that a run began with is refused.
"""


class Optimizer(Protocol):
    """The constants of an optimizer.

    One that multiplies whole matrices may have an attribute `needs_whole`, why it does not train
    shards of them. One that keeps something else than two float32 moments of each parameter has a
    method `moment_bytes(model)`, the bytes of what it keeps.
    """

    @property
    def lr(self) -> float:
        """Peak learning rate; every step sets it, times the schedule's factor, in all parameter
        groups.
        """

    @property
    def clip(self) -> float | None:
        """Largest global gradient norm; None does not clip."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters; its `state_dict` is saved with every
        checkpoint.
        """


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of every optimizer; subclasses say in `over` which of torch's optimizers they
    are.

    Args:
        lr: peak learning rate; the schedule multiplies it.
        weight_decay: decay of parameters with two or more dimensions; norms, biases and filters
            (`ParameterSpec.elementwise`) have none.
        clip: largest global gradient norm; None does not clip.
    """

    lr: float = 3e-3
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"optim.lr={self.lr} must be > 0")
        if self.weight_decay < 0:
            raise ValueError(f"optim.weight_decay={self.weight_decay} must be ≥ 0")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"optim.clip={self.clip} must be > 0, or null for no clipping")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters.

        Raises:
            ValueError: the model has no trainable parameter.
        """
        return self.over(trainable(model), elementwise(model))

    def over(
        self, parameters: Mapping[str, nn.Parameter], spared: Collection[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """The optimizer over some parameters, by name, of which those `spared` have no decay,
        whatever their shape.
        """
        raise TypeError(f"{type(self).__name__} has no method over")

    def groups(
        self, parameters: Iterable[nn.Parameter], spared: Collection[nn.Parameter] = ()
    ) -> list[dict[str, Any]]:
        """Groups of parameters with and without decay; fused kernels take those of one mesh of
        ranks at a time.
        """
        parameters = list(parameters)
        groups = []
        for mesh in dict.fromkeys(getattr(p, "device_mesh", None) for p in parameters):
            here = [p for p in parameters if getattr(p, "device_mesh", None) == mesh]
            free = {p for p in here if p.dim() < 2 or p in spared}
            decayed = [p for p in here if p not in free]
            groups.append({"params": decayed, "weight_decay": self.weight_decay, DECAYS: True})
            groups.append(
                {"params": [p for p in here if p in free], "weight_decay": 0.0, DECAYS: False}
            )
        return [group for group in groups if group["params"]]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `model` that require a gradient, by name.

    Raises:
        ValueError: there is none.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no parameter that requires a gradient: nothing to optimise"
        )
    return parameters


def check_built(optimizer: object, model: nn.Module, builder: str) -> None:
    """Whether `build` of the class `builder` gave what a run can train with.

    Raises:
        ValueError: it is no optimizer, its step takes arguments, or it has other parameters than
            the model's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{builder}.build gave an object of {type(optimizer).__name__}; it must return a "
            "torch.optim.Optimizer over parameters of the model"
        )
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise ValueError(
            f"{builder}.build gave {type(optimizer).__name__}, whose step cannot be called without "
            f"arguments ({error}): a run computes loss and gradients once, and then calls step(). "
            "Take an optimizer that needs no closure"
        ) from error
    parameter_ids = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in parameter_ids:
                raise ValueError(
                    f"{builder}.build gave an optimizer of a tensor {list(parameter.shape)} that is "
                    "no parameter of the model: give it those of model.parameters()"
                )


def moment_bytes(optim: Optimizer, model: nn.Module) -> int:
    """Bytes of what an optimizer keeps of the parameters of `model`; two float32 moments of each
    trainable one where the optimizer does not say.
    """
    count: Callable[[nn.Module], int] | None = getattr(optim, "moment_bytes", None)
    if count is None:
        return 8 * trainable_elements(model)
    return count(model)


def trainable_elements(model: nn.Module) -> int:
    """Elements of the parameters of `model` that require a gradient."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def keep_bounds(
    optimizer: torch.optim.Optimizer, model: nn.Module, bounds: Mapping[str, float]
) -> None:
    """Keep every value at or below the bound of its parameter after each step of the optimizer.

    Args:
        model: module with the parameters, whole or shards.
        bounds: name of a parameter → its largest value; other names are of other ranks.
    """
    bounded = [
        (parameter, bounds[name]) for name, parameter in model.named_parameters() if name in bounds
    ]

    @torch.no_grad()
    def keep(*_: object) -> None:
        for parameter, largest in bounded:
            parameter.clamp_(max=largest)

    if bounded:
        optimizer.register_step_post_hook(keep)


def has_fused(parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether torch has a fused kernel for the parameters' device."""
    return next(iter(parameters.values())).device.type in ("cpu", "cuda")


def takes_flags(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernel of a step reads the attributes `found_inf`, where not 0 nothing changes,
    and `grad_scale`, by which gradients are divided: torch's fused optimizers do so for
    `torch.amp.GradScaler`.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def divides_gradients(optimizer: torch.optim.Optimizer, *, on_gpu: bool) -> bool:
    """Whether gradients may be clipped by `grad_scale`. torch's kernels for CPUs divide where a pass
    over the gradients multiplies, which gives other bits; an optimizer that has only the one way
    says so in `scales_gradients`.
    """
    if getattr(optimizer, "scales_gradients", False):
        return True
    return on_gpu and takes_flags(optimizer)
