"""An exponential moving average of the weights (`train.ema`, β):

    a ← a + (1 − β) (w − a)        after each step that changed weights; a = w after the first

in the dtype of the weights, each rank of its shards. Three operations that round alike on every
device and for every cut, so that the bits of a do not depend on the ranks.
"""

import torch

from fp4train.config import Config
from fp4train.run.queued import Step
from fp4train.run.state.base import Trained
from fp4train.run.state.weights import OtherWeights
from fp4train.shards import local


class ExponentialAverage(OtherWeights):
    """The average of the weights after each step."""

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
