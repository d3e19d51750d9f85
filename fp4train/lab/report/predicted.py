"""What a named GPU would take for the linear layers of a run, by the cost model (`fp4train.lab.costs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from omegaconf import OmegaConf

from fp4train.config import to_config
from fp4train.data.source import planned_vocab_size
from fp4train.errors import UserError
from fp4train.hardware import Device, Gpu
from fp4train.lab.costs.estimate import estimate
from fp4train.lab.report.sources import UNREADABLE, Source
from fp4train.precision.layers import find_layers
from fp4train.run.build import build_model, build_plan, build_timeline
from fp4train.run.record import directory as run_directory
from fp4train.run.record.trust import check_paths

LARGEST = 1 << 20
"""A model with a larger number in its configuration is none."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Of one run.

    Args:
        seconds: of its linear layers, over all planned steps, in their recipes, quantising included.
        bf16: the same in BF16.
        steps: planned.
        emulated: whether some GEMMs have no kernel there and are emulated.
    """

    seconds: float
    bf16: float
    steps: int
    emulated: bool


def predict(sources: Sequence[Source], gpu: Gpu) -> tuple[dict[Source, Predicted], list[str]]:
    """The runs that can be estimated, and a sentence for each that cannot."""
    found: dict[Source, Predicted] = {}
    problems: list[str] = []
    for source in sources:
        try:
            found[source] = _predict(source, gpu)
        except UNREADABLE as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            problems.append(f"{source.name}: its time on {gpu} is not estimated: {said}")
    return found, problems


def _predict(source: Source, gpu: Gpu) -> Predicted:
    path = source.metrics.path
    for key, value in (source.config or {}).items():
        if key.startswith("model.") and isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{key}={value} is no size of a model")
    saved = run_directory.read_config(path)
    # All that the estimate reads of the data is the size of the vocabulary.
    check_paths(OmegaConf.create({"resume": str(path), "data": {"tokenizer": saved.data.get("tokenizer")}}), ())
    config = to_config(saved)
    model = build_model(config, planned_vocab_size(config.data), torch.device("meta"))
    plan = build_plan(config, find_layers(model), build_timeline(config, path), Device.elsewhere(gpu))
    microbatches = config.train.batch_size // (config.train.microbatch or config.train.batch_size)
    cost = estimate(plan, gpu, microbatches=microbatches)
    return Predicted(
        seconds=cost.total,
        bf16=cost.bf16,
        steps=sum(each.steps for each in cost.stretches),
        emulated=any(row.emulated is not None for each in cost.stretches for row in each.rows),
    )
