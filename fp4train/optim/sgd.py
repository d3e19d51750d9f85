"""Stochastic gradient descent with momentum, and decay on matrices only."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fp4train.optim import Constants, has_fused, trainable_elements
from fp4train.shards import local


@dataclass(frozen=True, kw_only=True)
class SGD(Constants):
    """The constants of SGD, beside those of `Constants`.

    Args:
        momentum: decay rate of the mean of gradients; 0: none is kept.
        nesterov: whether the step looks ahead along it.
    """

    lr: float = 0.1
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optim.momentum={self.momentum} must lie in [0, 1)")
        if self.nesterov and not self.momentum:
            raise ValueError("optim.nesterov=true needs optim.momentum above 0")

    def over(
        self, parameters: Mapping[str, nn.Parameter], spared: Collection[nn.Parameter]
    ) -> torch.optim.SGD:
        """SGD over some parameters, by name."""
        groups = self.groups(parameters.values(), spared)
        fused = has_fused(parameters)
        return _LocalSGD(
            groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, fused=fused
        )

    def moment_bytes(self, model: nn.Module) -> int:
        """Bytes of the mean of gradients, float32, of the trainable parameters of `model`."""
        return 4 * trainable_elements(model) if self.momentum else 0


class _LocalSGD(torch.optim.SGD):
    """torch's SGD, whose kernel takes what this rank holds: torch has none for DTensors.

    The means of gradients begin at zero. torch leaves them as memory that nothing wrote where the
    first step is one that `found_inf` skips.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See `torch.optim.Optimizer.step`; a closure is not called."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            means: list[Tensor | None] = [None] * len(parameters)
            if group["momentum"]:
                means = [local(self._mean(parameter)) for parameter in parameters]
            sgd(
                [local(parameter) for parameter in parameters],
                [local(parameter.grad) for parameter in parameters],
                means,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                foreach=group["foreach"],
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )

    def _mean(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean: Tensor = state["momentum_buffer"]
        return mean
