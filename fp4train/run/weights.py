"""The weights that a new run begins with where `init` names another run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fp4train import checkpoint
from fp4train.config import Config
from fp4train.errors import UserError
from fp4train.parallel.held import Inventory
from fp4train.run.fit import check_model
from fp4train.run.record import directory as run_directory
from fp4train.run.restored import restored


def load_init(config: Config, ranks: checkpoint.CheckpointGroup) -> checkpoint.Checkpoint | None:
    """The checkpoint whose weights a new run begins with; None: it draws its own.

    Raises:
        UserError: `init` is no run directory, or has no usable checkpoint.
    """
    if config.init is None:
        return None
    source = run_directory.require_run(Path(config.init))
    return checkpoint.load(source / run_directory.CHECKPOINTS, config.init_step, ranks=ranks)


def load_weights(model: nn.Module, found: checkpoint.Checkpoint, inventory: Inventory | None = None) -> None:
    """Give `model` the weights of a checkpoint of another run.

    Args:
        inventory: of the whole model, of which `model` is a part.

    Raises:
        UserError: a weight is missing, has no place, has another shape or dtype, or is not finite.
    """
    try:
        saved = restored(found, model, inventory=inventory)["model"]
        if not isinstance(saved, dict) or not all(isinstance(each, torch.Tensor) for each in saved.values()):
            raise TypeError("they are no tensors by name")
    except (LookupError, TypeError, ValueError, OSError, RuntimeError, AttributeError) as error:
        raise UserError(f"init: {found.path} holds no weights: {error}") from error
    own = model.state_dict()
    problems = [
        f"{name} is {_shape(saved[name])} there and {_shape(own[name])} here"
        for name in own
        if name in saved and saved[name].shape != own[name].shape
    ]
    problems += [f"{name} is missing there" for name in own if name not in saved]
    problems += [f"{name} has no place here" for name in saved if name not in own]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"init: the weights of {found.path} do not fit this model: {'; '.join(problems[:3])}{more}. Give the "
            "model and the tokenizer that the run had (model=…, data/tokenizer=…)"
        )
    try:
        check_model(model, saved)
    except ValueError as error:
        raise UserError(f"init: the weights of {found.path} do not fit this model: {error}") from error
    model.load_state_dict(saved)


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"
