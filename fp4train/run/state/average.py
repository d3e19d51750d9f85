"""An exponential moving average of the weights (`train.ema`, β):

    a ← a + (1 − β) (w − a)        after each step that changed weights; a = w after the first

in the dtype of the weights, each rank of its shards; buffers are those of the model. Three
operations that round alike on every device and for every cut, so that the bits of a do not depend
on the ranks. A run evaluates it beside its weights (val/loss_ema), and RUN:ema names it wherever
weights are named.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp4train.config import Config
from fp4train.run.queued import Step
from fp4train.run.state.base import Trained
from fp4train.run.state.weights import WeightState
from fp4train.shards import like, local


class Average(WeightState):
    """The average; the weights themselves until the first step."""

    key = "ema"
    file = "ema"
    title = "average of weights"
    option = "train.ema=0.999"

    def __init__(self, run: Trained) -> None:
        super().__init__(run)
        self.parts: dict[str, Tensor] = {}
        """This rank's part of each parameter's average, by the parameter's name."""

    @classmethod
    def used(cls, config: Config) -> bool:
        """Whether an average is kept."""
        return config.train.ema is not None

    def state_dict(self) -> dict[str, Any]:
        """That of a model that has the average as its weights."""
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

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Move the average towards the weights."""
        decay = self.run.config.train.ema
        failed = self.run.failed
        assert decay is not None and failed is not None
        share = torch.where(failed, 0.0, 1.0 - decay)
        for name, parameter in self.run.model.named_parameters():
            weight = local(parameter)
            average = self.parts.get(name)
            if average is None:
                self.parts[name] = weight.clone()
            else:
                average.add_((weight - average).mul_(share))

    def weights(self) -> Mapping[str, Tensor]:
        """See `RunState.weights`."""
        return self.parts
