"""The weights of a model, with its buffers, as they are trained, and others that a run keeps beside
them. The biases that balance experts, which follow the load after each step, are among the buffers.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp4train.checkpoint import escaped
from fp4train.checkpoint.layout import MODEL, WEIGHTS
from fp4train.config import Config
from fp4train.run.experts import Routed, even_out
from fp4train.run.finite import first_non_finite
from fp4train.run.queued import Step
from fp4train.run.state.base import RunState, Trained, check_tensor
from fp4train.shards import like, local


class WeightState(RunState):
    """A state dict of the model, whose weights are float32."""

    def __init__(self, run: Trained) -> None:
        super().__init__(run)
        self._parameters = {escaped(name) for name, _ in run.model.named_parameters()}

    @classmethod
    def bytes_per_parameter(cls, config: Config, model: nn.Module) -> float:
        """4: float32."""
        return 4

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The weights and buffers that this rank has, by name."""

    def saved(self) -> Mapping[str, Any]:
        """See `RunState.saved`; a tied weight is the first stage's."""
        weights = self.state_dict()
        inventory = self.run.inventory
        if inventory is None:
            return weights
        return inventory.weights(weights)

    def check(self, saved: Any) -> None:
        """See `RunState.check`."""
        check_weights(self.run.model, saved)

    def must_be_finite(self, path: str) -> bool:
        """Parameters must be; buffers may hold what was not computed yet."""
        return path in self._parameters


class OtherWeights(WeightState):
    """Weights that a run keeps beside the trained ones: evaluated as `val/loss_KEY`, and named
    RUN:KEY wherever weights are named. Files of a checkpoint have the key as their kind, too.

    Attributes:
        option: a setting of a run that keeps them.
    """

    option: ClassVar[str]

    def __init__(self, run: Trained) -> None:
        super().__init__(run)
        self.parts: dict[str, Tensor] = {}
        """This rank's part (`shards.local`) of each parameter, by name; buffers are the model's."""

    def state_dict(self) -> dict[str, Any]:
        """That of a model with these weights."""
        table = self.run.model.state_dict()
        names = {id(p): name for name, p in self.run.model.named_parameters()}
        for name, parameter in self.run.model.named_parameters(remove_duplicate=False):
            if (part := self.parts.get(names[id(parameter)])) is not None:
                table[name] = like(parameter, part)
        return table

    def load(self, saved: Any) -> None:
        """See `RunState.load`."""
        parameters = self.run.model.named_parameters()
        self.parts = {name: local(saved[name]).to(p.device) for name, p in parameters}

    def weights(self) -> Mapping[str, Tensor] | None:
        """See `RunState.weights`; None before there are any."""
        return self.parts or None


class ModelWeights(WeightState):
    """The model's weights as they are trained."""

    key = MODEL
    file = WEIGHTS
    title = "weights, float32"

    def __init__(self, run: Trained) -> None:
        super().__init__(run)
        self._routed = isinstance(run.model, Routed)

    def state_dict(self) -> dict[str, Any]:
        return self.run.model.state_dict()

    def load(self, saved: Any) -> None:
        """See `RunState.load`."""
        self.run.model.load_state_dict(saved)

    def after_step(self, run: Trained, step: Step) -> None:
        """Balance the experts, if there are any."""
        if self._routed:
            even_out(run, step)


def check_weights(model: nn.Module, saved: Any) -> None:
    """Raises ValueError, which names the first tensor that does not fit or is not finite."""
    check_layout(model, saved)
    check_finite(model, saved)


def check_layout(model: nn.Module, saved: Any) -> None:
    """Raises ValueError, which names the first tensor that the model lacks, or has in another shape
    or dtype."""
    expected = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    if not isinstance(saved, dict):
        raise ValueError("it holds no weights")
    if strange := sorted(set(saved) ^ set(expected)):
        have = "it has" if strange[0] in saved else "it lacks"
        if len(strange) > 1:
            more = f", and {len(strange) - 1} more differ"
        else:
            more = ""
        raise ValueError(f"{have} {strange[0]}{more}")
    for name, tensor in expected.items():
        check_tensor(name, saved[name], tensor.shape, tensor.dtype)


def check_finite(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raises ValueError, which names the first parameter of the model that is not finite."""
    parameters = {name for name, _ in model.named_parameters()}
    weights = {name: tensor for name, tensor in saved.items() if name in parameters}
    if bad := first_non_finite(weights):
        raise ValueError(f"{bad} is not finite")


class ExponentialAverage(OtherWeights):
    """The average of the weights after each step (`train.ema`, β):

        a ← a + (1 − β) (w − a)        after each step that changed weights; a = w after the first

    in the dtype of the weights, each rank of its shards. Three operations that round alike on every
    device and for every cut, so that the bits of a do not depend on the ranks.
    """

    key = "ema"
    file = "ema"
    title = "exponential average of weights"
    option = "train.ema=0.999"

    @classmethod
    def used(cls, config: Config) -> bool:
        """Whether an average is kept."""
        return config.train.ema is not None

    @torch.no_grad()
    def after_step(self, run: Trained, step: Step) -> None:
        """Move the average towards the weights."""
        decay = run.config.train.ema
        failed = run.failed
        assert decay is not None and failed is not None
        share = torch.where(failed, 0.0, 1.0 - decay)
        for name, parameter in run.model.named_parameters():
            weight = local(parameter)
            average = self.parts.get(name)
            if average is None:
                self.parts[name] = weight.clone()
            else:
                average.add_((weight - average).mul_(share))
