"""The weights that a new run begins with: those of another run's checkpoint, or of a Hugging Face folder (`init`)."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from fp4train.checkpoint import Checkpoint, CheckpointGroup, StoredTensors, load
from fp4train.checkpoint.model_folder import open_weights
from fp4train.config import Config
from fp4train.config.from_folder import names_folder
from fp4train.errors import UserError, user_errors
from fp4train.models import Architecture
from fp4train.models.hf import family_of
from fp4train.models.weightless import build_weightless
from fp4train.parallel.held import Inventory
from fp4train.paths import is_hub_name
from fp4train.run.record import directory as run_directory
from fp4train.run.restored import check_model, restored
from fp4train.shards import local, row_orders
from fp4train.text import first_few, near_miss

_ROWS = 1024
_listed = partial(first_few, most=3, joined="; ", rest="; and {} more")


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Weights to begin with, opened and not read.

    Args:
        path: of the checkpoint, or the folder.
        checkpoint: of another run; None: they are a folder's.
        tensors, names: of a folder, and for each name of the model's state dict the name there.
    """

    path: Path
    checkpoint: Checkpoint | None = None
    tensors: StoredTensors | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Path | None:
        """The run directory that they come from; None: they come from a folder."""
        return None if self.checkpoint is None else self.path.parent.parent


def load_init(config: Config, ranks: CheckpointGroup) -> InitialWeights | None:
    """The weights that a new run begins with, opened and not read; None: it draws its own.

    Raises:
        UserError: `init` is neither a run directory with a usable checkpoint, nor a folder with the model's weights.
    """
    if config.init is None:
        return None
    source = Path(config.init)
    if names_folder(config.init):
        return open_folder(source, config.model)
    if not (source / run_directory.CONFIG).is_file() and not source.is_dir():
        raise UserError(f"init={source}: there is no such folder{_advice(source)}")
    with user_errors(UserError, before="init: ", after="; a Hugging Face folder would have a config.json"):
        run = run_directory.require_run(source)
    found = load(run / run_directory.CHECKPOINTS, config.init_step, ranks=ranks)
    return InitialWeights(path=found.path, checkpoint=found)


def _advice(source: Path) -> str:
    """What to do about a folder that is not there: the folder beside it with a similar name, or the hub's command."""
    beside = [str(path) for path in source.parent.iterdir() if path.is_dir()] if source.parent.is_dir() else []
    if alike := near_miss(str(source), beside):
        return alike
    sentence = ". It is a run directory or a Hugging Face folder on this machine"
    if is_hub_name(str(source)) and not source.parent.is_dir():
        return f"{sentence}; a model of the hub is downloaded first: hf download {source} --local-dir FOLDER"
    return sentence


def open_folder(folder: Path, shape: Architecture) -> InitialWeights:
    """The weights of a Hugging Face folder for a model, of which it has each and no others.

    Raises:
        UserError: they are not there, or are no files that are read (`open_weights`).
    """
    with user_errors(ValueError, before=f"init={folder}: "):
        family = family_of(shape)
    copies = family.copies_of(shape)
    # A folder that software reads which ties no weights has a copy, any other has the tied weight alone.
    described = {
        own: copies.get(name, name) if isinstance(name, str) else name for own, name in family.names_of(shape).items()
    }
    listed = [each for name in described.values() for each in ([name] if isinstance(name, str) else chain(*name))]
    stored = open_weights(folder, listed, spare=lambda name: name in copies or family.computed(name))
    names = {
        own: name if isinstance(name, str) else f"{name[0][0]} to {name[-1][-1]}" for own, name in described.items()
    }
    with user_errors(ValueError, before=f"{folder}: "):
        for own, name in described.items():
            if not isinstance(name, str):
                stored.stack(names[own], name)
    _check_shapes(folder, shape, stored, names)
    for copy, original in copies.items():
        if copy in stored and not _equal(stored, copy, original):
            raise UserError(
                f"{folder}: {copy} and {original} differ, and tie_word_embeddings in config.json says that they are "
                "one: correct what is wrong in a copy of the folder"
            )
    return InitialWeights(path=folder, tensors=stored, names=names)


def _check_shapes(folder: Path, shape: Architecture, stored: StoredTensors, names: Mapping[str, str]) -> None:
    """Raises UserError where the folder's tensors do not have the shapes of its model, before any memory is taken for
    these: a configuration of one line can ask for more than the machine has."""
    with suppress(RuntimeError), user_errors(ValueError, before=f"{folder}: "):
        model = build_weightless(shape, vocab_size=1, seq_len=1)
        _compare(folder, model.state_dict(), stored, names)


def _compare(path: Path, own: Mapping[str, Tensor], stored: StoredTensors, names: Mapping[str, str]) -> None:
    """Raises UserError where tensors of a model and of a folder differ in shape."""
    shapes = {names[name]: (stored.shape(names[name]), tuple(tensor.shape)) for name, tensor in own.items()}
    wrong = [f"{name} is {_shape(a)} and should be {_shape(b)}" for name, (a, b) in shapes.items() if a != b]
    if wrong:
        raise UserError(f"{path}: the weights do not have the shapes of config.json: {_listed(wrong)}")


def _equal(stored: StoredTensors, a: str, b: str) -> bool:
    """Whether two matrices are equal, compared some rows at a time."""
    shape = stored.shape(a)
    if (shape, stored.dtype(a)) != (stored.shape(b), stored.dtype(b)) or len(shape) != 2:
        return False
    parts = ((at, min(_ROWS, shape[0] - at)) for at in range(0, shape[0], _ROWS))
    return all(torch.equal(*(stored.read(name, (at, 0), (rows, shape[1])) for name in (a, b))) for at, rows in parts)


def load_weights(model: nn.Module, init: InitialWeights, inventory: Inventory | None = None) -> None:
    """Give `model` the weights.

    Args:
        inventory: of the whole model, of which `model` is a part.

    Raises:
        UserError: a weight is missing, has no place, has another shape or dtype, or is not finite.
    """
    if init.checkpoint is not None:
        _load_checkpoint(model, init.checkpoint, inventory)
    elif init.tensors is not None:
        _load_folder(model, init.path, init.tensors, init.names)


@torch.no_grad()
def _load_folder(model: nn.Module, path: Path, stored: StoredTensors, names: Mapping[str, str]) -> None:
    """Fill the weights of `model` one after another, each rank its part, in the dtypes that they have here."""
    own = model.state_dict()
    _compare(path, own, stored, names)
    orders = row_orders(model)
    for name, tensor in own.items():
        with user_errors(OSError, ValueError, before=f"{path}: {names[name]} cannot be read: "):
            part = stored.read_like(names[name], tensor, orders.get(name))
        if not local(part).isfinite().all():
            raise UserError(f"{path}: {names[name]} is not finite")
        tensor.copy_(part.to(tensor.dtype))


def _load_checkpoint(model: nn.Module, found: Checkpoint, inventory: Inventory | None) -> None:
    strange = (LookupError, TypeError, ValueError, OSError, RuntimeError, AttributeError)
    with user_errors(*strange, before=f"init: {found.path} holds no weights: "):
        saved = restored(found, model, inventory=inventory)["model"]
        if not isinstance(saved, dict) or not all(isinstance(each, torch.Tensor) for each in saved.values()):
            raise TypeError("they are no tensors by name")
    own = model.state_dict()
    problems = [
        f"{name} is {_shape(saved[name].shape)} there and {_shape(own[name].shape)} here"
        for name in own
        if name in saved and saved[name].shape != own[name].shape
    ]
    problems += [f"{name} is missing there" for name in own if name not in saved]
    problems += [f"{name} has no place here" for name in saved if name not in own]
    if problems:
        raise UserError(
            f"init: the weights of {found.path} do not fit this model: {_listed(problems)}. Give the "
            "model and the tokenizer that the run had (model=…, data/tokenizer=…)"
        )
    with user_errors(ValueError, before=f"init: the weights of {found.path} do not fit this model: "):
        check_model(model, saved)
    model.load_state_dict(saved)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a number"
