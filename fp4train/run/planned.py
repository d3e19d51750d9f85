"""What is seen of a run without its data, weights and directory: its model without weights, its plan
on one device, and whether they can be at all.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from fp4train.checkpoint import ALONE
from fp4train.config import Config
from fp4train.data.source import planned_tokenizer, planned_vocab_size
from fp4train.hardware import Device
from fp4train.parallel.config import Mesh
from fp4train.precision import Timeline
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import Plan
from fp4train.run.build import build_model, build_plan
from fp4train.run.checks import check_cut, check_oscillation
from fp4train.run.host import choose_device
from fp4train.run.initial import open_init
from fp4train.run.teacher import check_teacher
from fp4train.run.timeline import build_timeline


def planned_model(config: Config, source: Path | None = None) -> nn.Module:
    """The model of a run, without weights.

    Args:
        source: the run directory that the run goes on from; None: it begins.

    Raises:
        UserError: there is no such model, or the weights that it begins with, or its teacher, are
            missing or do not fit it.
    """
    init = None if source is not None else open_init(config, ALONE, verify=False)
    tokenizer_of = source if init is None else init.run
    vocab_size = planned_vocab_size(
        config.data, getattr(config.model, "vocab_size", None), tokenizer_of
    )
    model = build_model(config, vocab_size, torch.device("meta"))
    if init is not None:
        init.check(model)
    if config.teacher is not None:
        tokenizer = planned_tokenizer(config.data, tokenizer_of)
        check_teacher(config, model, vocab_size, tokenizer)
    return model


def plan_on(
    device: Device, config: Config, model: nn.Module, timeline: Timeline, start: int = 0
) -> Plan:
    """The plan of a run on one device, from step `start` on.

    Raises:
        UserError: the batch or the plan cannot be as asked for.
    """
    check_cut(config, Mesh())
    plan = build_plan(config, find_layers(model), timeline, device).since(start)
    check_oscillation(config, plan)
    return plan


def check_possible(config: Config) -> None:
    """Refuse a configuration that no directory would make possible.

    Raises:
        UserError: a path of the data or the teacher is missing, or the model, the batch, the mesh
            or the plan cannot be as asked for.
    """
    _check_data(config)
    device = Device.of(choose_device(config.device))
    plan_on(device, config, planned_model(config), build_timeline(config))


def _check_data(config: Config) -> None:
    """Let the data say why it cannot be read, where a path of it leads nowhere."""
    named = [getattr(config.data, key, None) for key in ("path", "val_path")]
    paths = [
        path for value in named if value for path in ([value] if isinstance(value, str) else value)
    ]
    if any(not Path(path).exists() and not set(str(path)) & set("*?[") for path in paths):
        with tempfile.TemporaryDirectory() as folder:
            config.data.build(Path(folder), config.train.seq_len, config.run.seed)
