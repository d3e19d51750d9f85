"""What is seen of a run without its data, weights and directory: its model without weights, its plan
on one device, and whether they can be at all.
"""

import os
import tempfile
from contextlib import suppress
from glob import glob
from pathlib import Path

import torch
from torch import nn

from fp4train.checkpoint import ALONE
from fp4train.config import Config
from fp4train.data.mixture import Mixture
from fp4train.data.source import RunData, planned_tokenizer, planned_vocab_size
from fp4train.data.stdlib import Stdlib
from fp4train.data.token_file import SUFFIXES, Tokens
from fp4train.errors import UserError
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

SMALL = 1 << 24
"""Most bytes of data that a plan reads."""


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


def planned_passes(config: Config) -> str:
    """How often a run shows its data, in words; empty where they are not here, or much must be
    read to know it.
    """
    data = config.data
    train = config.train
    sources: list[object] = [data]
    if isinstance(data, Mixture):
        sources = [part.source for part in data.parts.values()]
    named = [getattr(source, "path", None) or () for source in sources]
    paths = [path for value in named for path in ([value] if isinstance(value, str) else value)]
    opened: RunData | None = None
    with suppress(OSError, UserError), tempfile.TemporaryDirectory() as folder:
        if sum(map(_bytes, paths)) > SMALL:
            return ""
        if isinstance(data, Tokens):
            opened = data.opened(train.seq_len)
        elif (all(named) or isinstance(data, Stdlib)) and (
            planned_tokenizer(data) is not None or getattr(data, "tokenizer", data) is None
        ):
            opened = data.build(Path(folder), train.seq_len, config.run.seed)
        if opened is not None:
            rows = opened.training(batch_size=train.batch_size, seq_len=train.seq_len, seed=0)
            if config.resume is not None:  # data of its own may begin later: nothing is refused
                return rows.lasting(train.steps).passes(train.steps)
    return "" if opened is None else rows.lasting(train.steps).passes(train.steps)


def _bytes(named: str) -> int:
    """The bytes of files, without those of raw ids, which need not be read whole."""
    matches = [Path(match) for match in glob(os.path.expanduser(named), recursive=True)]
    files = [file for match in matches for file in (match, *match.rglob("*"))]
    return sum(file.stat().st_size for file in files if file.suffix not in SUFFIXES)


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
