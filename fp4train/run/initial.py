"""Weights that a source names (`checkpoint/source.py`), opened, compared with a model and given to
it: those that a new run begins with (`init`), those of a teacher, those of a folder's model.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp4train.checkpoint import (
    ALONE,
    Checkpoint,
    CheckpointGroup,
    StoredTensors,
    layout,
    load,
    unflatten,
)
from fp4train.checkpoint.model_folder import open_weights
from fp4train.checkpoint.source import WeightSource
from fp4train.config import Config
from fp4train.errors import UserError, user_errors
from fp4train.models import Architecture
from fp4train.models.families import family_of
from fp4train.models.weightless import build_weightless
from fp4train.parallel.held import Inventory
from fp4train.paths import is_hub_name
from fp4train.run.record import directory as run_directory
from fp4train.run.state.base import saved_part
from fp4train.run.state.weights import check_finite, check_layout
from fp4train.run.states import how_to_have
from fp4train.shards import local, row_orders
from fp4train.text import first_few, near_miss

_ROWS = 1024
_listed = partial(first_few, most=3, joined="; ", remark="; and {} more")


class InitialWeights(Protocol):
    """Weights to begin with, opened and not read."""

    @property
    def path(self) -> Path:
        """Path of the checkpoint, or of the folder."""

    @property
    def run(self) -> Path | None:
        """The run directory that they come from; None: they come from a folder."""

    def check(self, model: nn.Module) -> None:
        """Compare names, shapes and dtypes with those of a whole model, of which nothing is
        changed.

        Raises:
            UserError: a weight is missing, has no place, or has another shape or dtype.
        """

    def load(self, model: nn.Module, inventory: Inventory | None = None) -> None:
        """Give `model` the weights.

        Args:
            inventory: inventory of the whole model, of which `model` is a part.

        Raises:
            UserError: see `check`; or a weight cannot be read or is not finite.
        """


def open_init(
    config: Config, ranks: CheckpointGroup, *, verify: bool = True
) -> InitialWeights | None:
    """The weights that a new run begins with, opened and not read; None: it draws its own.

    Args:
        verify: see `open_source`.

    Raises:
        UserError: see `open_source`.
    """
    source = config.init_weights
    if source is None:
        return None
    return open_source(source, config.model, ranks, verify=verify)


def open_source(
    source: WeightSource,
    shape: Architecture,
    ranks: CheckpointGroup = ALONE,
    *,
    verify: bool = True,
) -> InitialWeights:
    """The weights that `source` names, opened and not read.

    Args:
        shape: architecture of the model that they are for.
        verify: compare the checkpoint with its checksums, which reads all of it.

    Raises:
        UserError: `source` is neither a run directory with a usable checkpoint, nor a folder with
            the model's weights.
    """
    path = source.path
    if source.is_folder:
        return open_folder(path, shape)
    if not path.exists():
        raise UserError(f"init={path}: there is no such folder{_advice(path)}")
    with user_errors(
        UserError, before="init: ", after="; a Hugging Face folder would have a config.json"
    ):
        run = run_directory.require_run(path)
    saved = load(run / run_directory.CHECKPOINTS, source.step, ranks=ranks, verify=verify)
    return RunWeights(saved, source.key)


def _advice(source: Path) -> str:
    """What to do about a folder that is not there: the one beside it with weights and a similar name,
    or the hub's command.
    """
    folders = {path.parent for path in source.parent.glob(f"*/{run_directory.CHECKPOINTS}")}
    folders |= {path for path in source.parent.glob("*") if WeightSource(path=path).is_folder}
    beside = map(str, folders)
    if alike := near_miss(str(source), beside):
        return alike
    sentence = ". It is a run directory or a Hugging Face folder on this machine"
    if is_hub_name(str(source)) and not source.parent.is_dir():
        return (
            f"{sentence}; a model of the hub is downloaded first: hf download {source} "
            "--local-dir FOLDER"
        )
    return sentence


# -- of a Hugging Face folder ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FolderWeights:
    """Weights of a Hugging Face folder.

    Args:
        path: the folder.
        tensors: tensors in its files.
        names: for each name of the model's state dict the name in `tensors`.
        copies: for each tensor that is there although it is tied to another one, the name of that
            one.
    """

    path: Path
    tensors: StoredTensors
    names: Mapping[str, str]
    copies: Mapping[str, str]

    @property
    def run(self) -> None:
        """No run directory: it is a folder's."""

    def check(self, model: nn.Module) -> None:
        """Compare the shapes; the names and dtypes are those of a model since the folder was
        opened.
        """
        stored = {name: self.tensors.shape(self.names[name]) for name in model.state_dict()}
        wrong = [
            f"{self.names[name]} is {_shape(stored[name])} and should be {_shape(tensor.shape)}"
            for name, tensor in model.state_dict().items()
            if stored[name] != tuple(tensor.shape)
        ]
        if wrong:
            raise UserError(
                f"{self.path}: the weights do not have the shapes of config.json: {_listed(wrong)}"
            )

    @torch.no_grad()
    def load(self, model: nn.Module, inventory: Inventory | None = None) -> None:
        """Fill the weights one after another, each rank its part, in the dtypes that they have
        here.
        """
        self.check(model)
        for copy, original in self.copies.items():
            if not _equal(self.tensors, copy, original):
                raise _not_tied(self.path, copy, original)
        orders = row_orders(model)
        for name, tensor in model.state_dict().items():
            stored = self.names[name]
            with user_errors(OSError, ValueError, before=f"{self.path}: {stored} cannot be read: "):
                part = self.tensors.read_like(stored, tensor, orders.get(name))
            if not local(part).isfinite().all():
                raise UserError(f"{self.path}: {stored} is not finite")
            tensor.copy_(part.to(tensor.dtype))


def open_folder(folder: Path, shape: Architecture) -> FolderWeights:
    """The weights of a Hugging Face folder for a model, of which it has each and no others.

    Raises:
        UserError: they are not there, or are no files that are read (`open_weights`).
    """
    with user_errors(ValueError, before=f"init={folder}: "):
        family = family_of(shape)
    copies = family.copies_of(shape)
    # A folder that software reads which ties no weights has a copy, any other has the tied weight
    # alone.
    described = {
        name_here: copies.get(name, name) if isinstance(name, str) else name
        for name_here, name in family.names_of(shape).items()
    }
    listed = [
        matrix
        for name in described.values()
        for matrix in ([name] if isinstance(name, str) else chain(*name))
    ]
    tensors = open_weights(
        folder, listed, spare=lambda name: name in copies or family.computed(name)
    )
    names = {
        name_here: name if isinstance(name, str) else f"{name[0][0]} to {name[-1][-1]}"
        for name_here, name in described.items()
    }
    with user_errors(ValueError, before=f"{folder}: "):
        for name_here, name in described.items():
            if not isinstance(name, str):
                tensors.stack(names[name_here], name)
    stored_copies = {copy: original for copy, original in copies.items() if copy in tensors}
    weights = FolderWeights(path=folder, tensors=tensors, names=names, copies=stored_copies)
    # Before any memory is taken for the model: a configuration of one line can ask for more than
    # the machine has.
    with suppress(RuntimeError), user_errors(ValueError, before=f"{folder}: "):
        weights.check(build_weightless(shape, vocab_size=1, seq_len=1))
    for copy, original in stored_copies.items():
        shapes = {tensors.shape(name) for name in (copy, original)}
        if len(shapes) > 1 or tensors.dtype(copy) != tensors.dtype(original):
            raise _not_tied(folder, copy, original)
    return weights


def _not_tied(folder: Path, copy: str, original: str) -> UserError:
    return UserError(
        f"{folder}: {copy} and {original} differ, and tie_word_embeddings in config.json says "
        "that they are "
        "one: correct what is wrong in a copy of the folder"
    )


def _equal(stored: StoredTensors, a: str, b: str) -> bool:
    """Whether two matrices are equal, compared some rows at a time."""
    shape = stored.shape(a)
    if (shape, stored.dtype(a)) != (stored.shape(b), stored.dtype(b)) or len(shape) != 2:
        return False
    parts = ((at, min(_ROWS, shape[0] - at)) for at in range(0, shape[0], _ROWS))
    return all(
        torch.equal(*(stored.read(name, (at, 0), (rows, shape[1])) for name in (a, b)))
        for at, rows in parts
    )


# -- of a run's checkpoint -------------------------------------------------------------------------


@dataclass(frozen=True)
class RunWeights:
    """Weights of another run's checkpoint.

    Args:
        key: key of the state that has them.
    """

    checkpoint: Checkpoint
    key: str = layout.MODEL

    @property
    def path(self) -> Path:
        """The checkpoint's."""
        return self.checkpoint.path

    @property
    def run(self) -> Path:
        """The run directory that they come from."""
        return self.checkpoint.run

    def check(self, model: nn.Module) -> None:
        """Compare the headers of the checkpoint's files with the model."""
        tensors = self.checkpoint.tensors
        with self._strange():
            headers = {
                name: torch.empty(tensors.shape(name), dtype=tensors.dtype(name), device="meta")
                for name in tensors
            }
            self._check(model, unflatten(headers, {self.key: self._table()})[self.key])

    def load(self, model: nn.Module, inventory: Inventory | None = None) -> None:
        """Read each tensor in this rank's part alone, and take them over when all of them fit."""
        with self._strange():
            self._table()
            saved = saved_part(self.checkpoint, self.key, model, inventory)
        self._check(model, saved)
        with user_errors(
            ValueError, before=f"init: the weights of {self.path} do not fit this model: "
        ):
            check_finite(model, saved)
        model.load_state_dict(saved)

    def _table(self) -> Any:
        """The names of the weights in the checkpoint.

        Raises:
            LookupError: it has none of this kind.
        """
        if self.key not in self.checkpoint.state:
            raise LookupError(f"the run keeps no {self.key}{how_to_have(self.key)}")
        return self.checkpoint.state[self.key]

    def _strange(self) -> AbstractContextManager[None]:
        """What reading a checkpoint that somebody else wrote may raise, as an error of the
        user's.
        """
        errors = (LookupError, TypeError, ValueError, OSError, RuntimeError, AttributeError)
        return user_errors(*errors, before=f"init: {self.path} holds no weights: ")

    def _check(self, model: nn.Module, saved: Any) -> None:
        """Raises UserError where names, shapes or dtypes of `saved` are not those of the model."""
        with self._strange():
            if not isinstance(saved, dict) or not all(
                isinstance(tensor, Tensor) for tensor in saved.values()
            ):
                raise TypeError("they are no tensors by name")
        model_state = model.state_dict()
        problems = [
            f"{name} is {_shape(saved[name].shape)} there and "
            f"{_shape(model_state[name].shape)} here"
            for name in model_state
            if name in saved and saved[name].shape != model_state[name].shape
        ]
        problems += [f"{name} is missing there" for name in model_state if name not in saved]
        problems += [f"{name} has no place here" for name in saved if name not in model_state]
        if problems:
            raise UserError(
                f"init: the weights of {self.path} do not fit this model: "
                f"{_listed(problems)}. A run brings its model and its tokenizer: leave out model=… "
                "and data/tokenizer=…, or name a tokenizer that lies in a file as the run did"
            )
        with user_errors(
            ValueError, before=f"init: the weights of {self.path} do not fit this model: "
        ):
            check_layout(model, saved)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a number"
