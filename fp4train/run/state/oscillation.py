"""Weights that are watched for oscillation (`optim.oscillation`), and reset at the end of a
watch.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fp4train.config import Config
from fp4train.optim.oscillation import (
    JUMPED,
    MOVED,
    SEEN,
    Paths,
    Watched,
    follow,
    values_of,
    why_not,
)
from fp4train.run.finite import first_non_finite
from fp4train.run.queued import Step
from fp4train.run.state.base import RunState, Trained, check_tensor
from fp4train.shards import local


class Oscillation(RunState):
    """The paths of the watched weights and of their quantised values; empty between two watches."""

    key = "oscillation"
    title = "watched weights"

    def __init__(self, run: Trained) -> None:
        super().__init__(run)
        self.paths: Paths = {}

    @classmethod
    def used(cls, config: Config) -> bool:
        """Whether weights are watched at all."""
        return config.oscillation.every > 0

    @classmethod
    def bytes_per_parameter(cls, config: Config, model: nn.Module) -> float:
        """12 in a watch: three float32 tensors of the weight's shape."""
        return 12

    def saved(self) -> Mapping[str, Any]:
        """See `RunState.saved`."""
        return self.paths

    def check(self, saved: Any) -> None:
        """See `RunState.check`."""
        parameters = dict(self.run.model.named_parameters())
        if not isinstance(saved, dict):
            raise ValueError("it holds no paths of weights")
        for name, path in saved.items():
            if name not in parameters or not isinstance(path, dict) or len(path) != 3:
                raise ValueError(f"it has the path of a weight {name}")
            for entry in (SEEN, MOVED, JUMPED):
                what = f"{entry} of {name}"
                check_tensor(what, path.get(entry), parameters[name].shape, torch.float32)
            if bad := first_non_finite(path):
                raise ValueError(f"{bad} of {name} is not finite")

    def load(self, saved: Any) -> None:
        """See `RunState.load`."""
        device = next(self.run.model.parameters()).device
        self.paths = {
            name: {entry: local(tensor).to(device) for entry, tensor in path.items()}
            for name, path in saved.items()
        }

    def must_be_finite(self, path: str) -> bool:
        """All paths must be."""
        return True

    def after_step(self, run: Trained, step: Step) -> None:
        """Watch the weights, and reset those that oscillate where that is due."""
        assert run.failed is not None
        settings = run.config.oscillation
        weights = watched(run, step.names)
        share = follow(settings, self.paths, weights, step.index + 1, run.failed)
        if share is not None:
            step.values["train/oscillating"] = share


def watched(run: Trained, trained: Iterable[str]) -> Iterator[Watched]:
    """The weights among `trained`, names of parameters, that the current stretch quantises for
    fprop with fixed thresholds. Weights stored as [in_features, out_features] (`Conv1D`) and those
    of experts are left alone.
    """
    layers = run.course.plan.at(run.step).layers
    names = {id(p): name for name, p in run.model.named_parameters()}
    trained = set(trained)
    for layer in run.planned_layers:
        spec = layers[layer.layer.name].fprop.operands.second
        if layer.layer.experts or layer.transposed or spec is None or why_not(spec) is not None:
            continue
        if (name := names.get(id(layer.weight))) is not None and name in trained:
            assert isinstance(layer.weight, nn.Parameter)
            yield name, layer.weight, partial(layer.values, quantised=partial(values_of, spec=spec))
