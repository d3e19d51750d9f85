"""The model of a run as it is stored: its configuration and the tensors of a checkpoint; no model
is built.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4train import checkpoint
from fp4train.checkpoint.source import WeightSource
from fp4train.checkpoint.tensors import StreamedTensor
from fp4train.config import Config, to_config
from fp4train.errors import UserError, user_errors
from fp4train.models.families import Family, family_of
from fp4train.parameters import Stored
from fp4train.run.record import directory as run_directory
from fp4train.run.record.trust import check_belongs
from fp4train.run.states import how_to_have
from fp4train.text import first_few

PIECE_BYTES = 1 << 22
"""Bytes of a tensor that are held at a time. Larger pieces leave gaps in the heap: 1 GB for codes
of 1 G weights.
"""
EMBEDDING = "embed.weight"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of a checkpoint, or a matrix of one [E, N, K].

    Args:
        name: name in `transformers`.
        tensor: name of the tensor in the checkpoint.
        start: position at which the matrix begins, (e, row); None: all of the tensor.
        shape: shape of the part.
    """

    name: str
    tensor: str
    start: tuple[int, int] | None
    shape: tuple[int, ...]

    @property
    def expert(self) -> int | None:
        """The index of the expert whose matrix it is; None: it is of no expert."""
        if self.start is None:
            return None
        return self.start[0]


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """The weights of a run at one of its checkpoints.

    A weight of experts is a part per matrix of an expert, any other tensor is one part under its
    own name.

    Args:
        source: run, step and kind of the weights.
        saved: checkpoint; weights are read when they are asked for.
        family: form of the model in `transformers`.
        parts: parts that are stored, by their names here; each name in `transformers` once.
    """

    source: WeightSource
    config: Config
    saved: checkpoint.Checkpoint = field(repr=False)
    family: Family
    parts: dict[str, Part] = field(repr=False)

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.source.path

    @property
    def parameters(self) -> int:
        """Parameters of the model; tied ones once."""
        copies = self.family.copies_of(self.config.model)
        return sum(math.prod(part.shape) for part in self.parts.values() if part.name not in copies)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padded ones included."""
        return self.saved.tensors.shape(self.path(EMBEDDING))[0]

    def path(self, name: str) -> str:
        """The path in the checkpoint of the tensor that the model calls `name`."""
        return f"{self.source.key}/{checkpoint.escaped(name)}"

    def described(self) -> dict[str, Any]:
        """The `config.json`, without dtype and ids of tokens.

        Raises:
            UserError: `transformers` has no such model.
        """
        with user_errors(ValueError):
            seq_len = self.config.train.seq_len
            return self.family.config_of(
                self.config.model, vocab_size=self.vocab_size, seq_len=seq_len
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a part."""
        return self.parts[name].shape

    def parts_of(self, tensor: str) -> list[str]:
        """The parts of a tensor of the checkpoint; none of a tied one, which is stored under
        another name.
        """
        return [name for name, part in self.parts.items() if part.tensor == tensor]

    def module_of(self, name: str) -> str:
        """The name in `transformers` of the module whose weight a part is."""
        return self.parts[name].name.removesuffix(".weight")

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a part."""
        return self.saved.tensors.dtype(self.parts[name].tensor)

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Some rows of a part."""
        part = self.parts[name]
        if part.start is None:
            return self.saved.tensors.read(
                name, (start, *(0 for _ in part.shape[1:])), (count, *part.shape[1:])
            )
        expert, above = part.start
        return self.saved.tensors.read(
            part.tensor, (expert, above + start, 0), (1, count, part.shape[1])
        )[0]

    def streamed(self, name: str, dtype: torch.dtype) -> StreamedTensor:
        """A part under its name in `transformers`, in another dtype, some rows at a time; in its
        own where other software keeps it so (`exact` of the family).
        """
        part = self.parts[name]
        if part.name.endswith(self.family.exact):
            dtype = self.dtype(name)
        pieces = partial(self._pieces, name, dtype)
        return StreamedTensor(name=part.name, shape=part.shape, dtype=dtype, pieces=pieces)

    def _pieces(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        if not self.shape(name):
            yield self.saved.tensors[name].to(dtype)
            return
        rows, *inner = self.shape(name)
        step = max(1, PIECE_BYTES // max(1, math.prod(inner) * self.dtype(name).itemsize))
        for start in range(0, rows, step):
            yield self.rows(name, start, min(step, rows - start)).to(dtype)


def open_stored(named: WeightSource | Path) -> StoredModel:
    """The weights of a run that are named; of the newest checkpoint where no step is, and no older
    one in its place.

    Raises:
        UserError: there is no run or no such checkpoint, or its weights are damaged; or the model
            has no form in `transformers`.
    """
    source = WeightSource.of(named)
    run = source.path
    step = source.step
    config = to_config(run_directory.read_trained(run_directory.require_run(run)))
    with user_errors(ValueError, before=f"{run}: "):
        family = family_of(config.model)
    folder = run / run_directory.CHECKPOINTS
    steps = checkpoint.steps(folder)
    newest = step is None and bool(steps)
    if newest:
        step = steps[-1]
    try:
        saved = checkpoint.load(folder, step, kind=source.kind)
    except UserError as error:
        cure = ""
        if newest:
            cure = _older(folder, steps[:-1], source.kind)
        raise UserError(f"{error}{cure or how_to_have(source.kind, config)}") from error
    check_belongs(saved, run, mend=False)
    with user_errors(ValueError, before=f"{run}: "):
        described = family.names_of(config.model)
    above = f"{source.key}/"
    expected = {
        f"{above}{checkpoint.escaped(parameter)}": theirs for parameter, theirs in described.items()
    }
    if strange := sorted(expected.keys() ^ set(saved.tensors)):
        if strange[0] in expected:
            what = "lacks"
        else:
            what = "holds, beside the weights of its model,"
        raise UserError(f"{saved.path} {what} {first_few(strange, 1).removeprefix(above)}")
    parts: dict[str, Part] = {}
    seen: set[str] = set()
    for tensor, theirs in expected.items():
        for name, part in _parts(tensor, theirs, saved.tensors.shape(tensor)):
            if part.name not in seen:
                parts[name] = part
                seen.add(part.name)
    return StoredModel(
        source=source.at(saved.step),
        config=config,
        saved=saved,
        family=family,
        parts=parts,
    )


def _older(folder: Path, steps: Sequence[int], kind: str) -> str:
    """The end of an error about the newest checkpoint: the option that takes the newest of those at
    `steps` whose weights of `kind` can be read; empty where there is none.
    """
    for step in reversed(steps):
        try:
            checkpoint.load(folder, step, kind=kind)
        except UserError:
            continue
        if step == steps[-1]:
            return f"; step={step} takes the one before"
        return f"; step={step} takes the newest that can be read"
    return ""


def _parts(tensor: str, theirs: Stored, shape: tuple[int, ...]) -> Iterator[tuple[str, Part]]:
    """The parts of one tensor of the checkpoint by their names."""
    if isinstance(theirs, str):
        yield tensor, Part(name=theirs, tensor=tensor, start=None, shape=shape)
        return
    for expert, matrices in enumerate(theirs):
        rows = shape[1] // len(matrices)
        for number, name in enumerate(matrices):
            row = number * rows
            part = Part(name=name, tensor=tensor, start=(expert, row), shape=(rows, *shape[2:]))
            yield f"{tensor}[{expert}, {row}:{row + rows}]", part
