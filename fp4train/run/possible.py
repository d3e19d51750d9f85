"""Whether a configuration can run at all, as far as that is seen without its data, weights and run
directory.
"""

import tempfile
from pathlib import Path

import torch

from fp4train.checkpoint import ALONE
from fp4train.config import Config
from fp4train.data.source import planned_vocab_size
from fp4train.hardware import Device
from fp4train.parallel.config import Mesh
from fp4train.precision.layers import find_layers
from fp4train.run.build import build_model, build_plan
from fp4train.run.checks import check_cut, check_oscillation, check_repeat
from fp4train.run.host import choose_device
from fp4train.run.initial import open_init
from fp4train.run.teacher import check_teacher_source
from fp4train.run.timeline import build_timeline


def check_possible(config: Config) -> None:
    """Refuse a configuration that no directory would make possible.

    Raises:
        UserError: a path of the data or the teacher is missing, or the model, the batch, the mesh
            or the plan cannot be as asked for.
    """
    check_cut(config, Mesh())
    _check_data(config)
    init = open_init(config, ALONE, verify=False)
    tokenizer_of = None if init is None else init.run
    check_teacher_source(config, Mesh(), tokenizer_of)
    vocab_size = planned_vocab_size(
        config.data, getattr(config.model, "vocab_size", None), tokenizer_of
    )
    model = build_model(config, vocab_size, torch.device("meta"))
    if init is not None:
        init.check(model)
    device = Device.of(choose_device(config.device))
    check_repeat(config, device.type)
    check_oscillation(
        config, build_plan(config, find_layers(model), build_timeline(config), device)
    )


def _check_data(config: Config) -> None:
    """Let the data say why it cannot be read, where a path of it leads nowhere."""
    named = [getattr(config.data, key, None) for key in ("path", "val_path")]
    paths = [
        path for value in named if value for path in ([value] if isinstance(value, str) else value)
    ]
    if any(not Path(path).exists() and not set(str(path)) & set("*?[") for path in paths):
        with tempfile.TemporaryDirectory() as folder:
            config.data.build(Path(folder), config.train.seq_len, config.run.seed)
