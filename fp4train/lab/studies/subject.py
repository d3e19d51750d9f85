"""The subject of a study: the model of a run at one of its checkpoints, or as it was initialised,
with the run's data.

A subject is opened as a run is resumed, by the same functions and with the same checks, and nothing
is written into the run's own files: the study may stand beside a process that trains in the same
directory.

What a record of measurements is of is described in a form that a later version of fp4train reads
alike: a dataclass by its class and the fields that differ from their defaults. A field that a later
version adds is then absent from the description until somebody sets it: an object older than an
option has that option's default.
"""

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4train import checkpoint
from fp4train.config import Config
from fp4train.config.binding import default_of, differing_keys, flattened
from fp4train.errors import UserError
from fp4train.keys import MayDiffer, in_sections
from fp4train.parallel.world import World
from fp4train.run.build import assemble
from fp4train.run.find import Command, check_source, find_checkpoint
from fp4train.run.host import choose_device
from fp4train.run.initial import open_init
from fp4train.run.record import directory as run_directory
from fp4train.run.record.trust import check_belongs
from fp4train.run.run import Run, data_begun
from fp4train.run.timeline import build_timeline

STUDIES = "studies"
"""The folder of a run directory that holds its studies."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to study.

    Args:
        source: the run directory; None: a configuration that no run has, and its model as it is
            initialised.
        run: the run at the step of the checkpoint: model, loaders, optimizer, plan. It has no
            tracker, and its saver has not begun: `train_step` may be called on it, checkpoints are
            not written.
        start: the checkpoint, whose state `run.restore` puts back; None for a model as it was
            initialised.
        weights: checksum of the model's weights.
        settings: the keys of the configuration that decide about model, batches and arithmetic,
            where they differ from their defaults.
    """

    source: Path | None
    run: Run = field(repr=False)
    start: checkpoint.Checkpoint | None = field(repr=False)
    weights: str
    settings: Mapping[str, Any] = field(repr=False)

    @property
    def step(self) -> int:
        """Optimizer steps done at the checkpoint; 0 for a model as it was initialised."""
        return 0 if self.start is None else self.start.step

    @property
    def title(self) -> str:
        """The origin of the model: the run directory, or the name of the configuration."""
        if self.source is None:
            return f"{self.run.config.run.name}, not trained"
        return str(self.source)

    @property
    def name(self) -> str:
        """`title` without folders."""
        if self.source is None:
            return self.title
        return self.source.name

    @property
    def studies(self) -> Path:
        """The folder of its studies."""
        if self.source is None:
            return self.run.config.run.dir.parent / STUDIES
        return self.source / STUDIES

    @property
    def identity(self) -> dict[str, Any]:
        """The values with which a record of measurements on this subject must agree."""
        return {
            "run": None if self.source is None else run_directory.identity(self.source),
            "step": self.step,
            "weights": self.weights,
            "settings": dict(self.settings),
            "data": self.run.data.fingerprint,
            "device": str(self.run.device),
        }


def open_subject(command: Command, *, fresh: bool = False, optimizer: bool = False) -> Subject:
    """The run that `config.resume` of a command names, at the checkpoint `config.resume_step`
    (None: the newest); where it names none, the model of the configuration as it is initialised.

    Args:
        command: the configuration, that of the run with changes that a resume allows.
        fresh: True: the model as the run initialised it, without a checkpoint.
        optimizer: True keeps the moments, so that `run.restore(start)` puts everything back.

    Raises:
        UserError: there is no usable checkpoint, it is of another run, model or data; or what it
            needs is missing.
    """
    config = command.config
    if config.resumed is None:
        source = None
    else:
        source = _source(command, config.resumed.path, fresh)
    world = World(device=choose_device(config.device))
    if fresh or source is None:
        start = None
    else:
        start = find_checkpoint(command, world)
    if start is not None and source is not None:
        check_belongs(start, source, mend=False)
    timeline = build_timeline(config, source)
    with tempfile.TemporaryDirectory() as place:
        if source is not None:
            run_directory.copy_files(source, Path(place), run_directory.TOKENIZER)
        begun = 0 if start is None else data_begun(start)
        run = assemble(config, Path(place), timeline, world, begun=begun)
    if start is not None:
        run.restore(start)
        run.course.plan = run.course.plan.since(run.step)
    elif (init := open_init(config, world.ranks)) is not None:
        init.load(run.model)
    if not optimizer:
        run.optimizer.state.clear()
    run.model.train()
    settings = described(config)
    varied = differing_keys(settings, Config, MayDiffer.STUDIED)
    return Subject(
        source=source,
        run=run,
        start=start,
        weights=_checksum_of_weights(run.model),
        settings={
            key: value for key, value in flattened(settings).items() if not in_sections(key, varied)
        },
    )


def _source(command: Command, source: Path, fresh: bool) -> Path:
    """The run directory, which has what is asked for.

    Raises:
        UserError: it has not, or the configuration is not that of its model and data.
    """
    source = run_directory.require_run(source)
    if command.config.run.dir.resolve() != source.resolve():
        raise UserError(
            f"run.name and run.dir name a run that trains; a study of {source} trains none: "
            "leave them out"
        )
    if not fresh and not checkpoint.steps(source / run_directory.CHECKPOINTS):
        raise UserError(
            f"{source} has no checkpoint yet; step=0 studies its model as it was initialised"
        )
    if fresh:
        check_source(source, command.cfg, command.saved)
    return source


def _checksum_of_weights(model: nn.Module) -> str:
    checksum = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            checksum.update(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
    return checksum.hexdigest()


def described(value: Any) -> Any:
    """A configuration value, or an object made of dataclasses, as JSON values."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        changed = {
            field.name: described(getattr(value, field.name))
            for field in dataclasses.fields(kind)
            if field.init and getattr(value, field.name) != default_of(field)
        }
        return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **changed}
    if isinstance(value, Mapping):
        return {str(key): described(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(entry) for entry in value]
    if isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def digest(value: Any) -> str:
    """Checksum of a description, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(described(value), sort_keys=True).encode()).hexdigest()
