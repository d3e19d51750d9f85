"""Scales of activations for a folder of codes: the largest |x| of each layer's input, from a model
that runs.

Serving software quantises activations under a fixed global scale, from the largest |x| that was
seen. Both of the tools that write such folders take it over a few batches. A run that measured its
operands has it in `statistics.bin`; else the model runs a few batches of its training text in the
recipe of the stretch.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp4train.errors import UserError
from fp4train.exchange.evaluation import data_of
from fp4train.exchange.packed import PackedModel
from fp4train.exchange.trained import NamedRecipe, TrainedModel
from fp4train.nn.planned import PlannedLayer
from fp4train.precision.settings import ConstantWeights
from fp4train.track.statistics import STATISTICS, read_statistics

MEASURED = 8
"""The last measured steps of a stretch whose amaxes count."""
UNSEEN = 1.0
"""The amax of activations that were zero throughout."""


def calibrated(trained: TrainedModel, named: NamedRecipe, batches: int) -> dict[str, float]:
    """Layer → the largest |x| of its input over so many batches of training text, in a recipe.

    Raises:
        UserError: the data is not there.
    """
    config = trained.config
    train = data_of(trained).training(
        batch_size=config.train.batch_size, seq_len=config.train.seq_len, seed=config.run.seed
    )
    seen: dict[str, Tensor] = {}

    def see(module: PlannedLayer, inputs: tuple[Any, ...]) -> None:
        name = module.layer.name
        amax = inputs[0].detach().abs().amax().float()
        seen[name] = torch.maximum(seen.get(name, amax), amax)

    layers = [layer for layer in trained.model.modules() if isinstance(layer, PlannedLayer)]
    handles = [layer.register_forward_pre_hook(see) for layer in layers]
    try:
        constant = ConstantWeights()
        with trained.masked():
            for batch in range(batches):
                trained.forward(named, *train.batch(batch), constant=constant)
    finally:
        for handle in handles:
            handle.remove()
    return {name: float(amax) for name, amax in seen.items()}


def measured(packed: PackedModel) -> tuple[dict[str, float], int] | None:
    """(layer → the largest |x| of its input in the last measured steps of the stretch, their
    number), from the run's `statistics.bin`; None: it has none of every packed layer. Of experts it
    has those of the busiest one alone.
    """
    run = packed.model.run
    stretch = packed.stretch
    if not (run / STATISTICS).is_file() or any(
        matrix.layer.experts for matrix in packed.layers.values()
    ):
        return None
    columns = read_statistics(run).operands
    steps = columns["step"]
    last = min(stretch.stop, packed.model.saved.step)
    here = (columns["operand"] == "fprop.x") & (steps > stretch.start) & (steps <= last)
    chosen = sorted(set(steps[here].tolist()))[-MEASURED:]
    if chosen:
        here &= steps >= chosen[0]
    amaxes: dict[str, float] = {}
    for name, amax in zip(
        columns["layer"][here].tolist(), columns["amax"][here].tolist(), strict=True
    ):
        amaxes[name] = max(amaxes.get(name, 0.0), amax)
    names = {matrix.layer.name for matrix in packed.layers.values()}
    if names <= amaxes.keys():
        return (amaxes, len(chosen))
    return None


def joint(packed: PackedModel, amaxes: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """The amaxes of packed layers, the largest of each group that is served as one, where the
    experts of a layer share one; and the layers whose input was zero throughout, of which it is
    `UNSEEN`.

    Raises:
        UserError: one is not finite.
    """
    joint_amaxes = {}
    unseen = []
    for name in dict.fromkeys(matrix.layer.name for matrix in packed.layers.values()):
        fused = packed.stretch.layers[name].layer.fused
        amax = max(amaxes.get(other, 0.0) for other in fused or (name,))
        if not amax < math.inf:
            raise UserError(
                f"the largest |x| of {name} is {amax}: no scale of its activations can be made of it"
            )
        if amax == 0:
            unseen.append(name)
        joint_amaxes[name] = amax or UNSEEN
    return joint_amaxes, unseen
