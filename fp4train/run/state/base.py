"""What a state of a run is, and how this rank's part of one is read from a checkpoint.

A state is a table: the name of a parameter, buffer or layer of the whole model → a tensor, or a
table of tensors and numbers by entry. Names do not depend on ranks, so that any number of ranks, in
shards, stages or both, reads what any other number wrote: a tensor that has the shape of the
parameter of its name is placed as the parameter is, all others are read whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fp4train.checkpoint import Checkpoint, escaped, unflatten
from fp4train.checkpoint.layout import TENSORS
from fp4train.companion import Companion
from fp4train.config import Config
from fp4train.data.loader import RunRows
from fp4train.nn.planned import PlannedLayer
from fp4train.parallel.held import Inventory
from fp4train.parallel.world import World
from fp4train.run.record.run_record import RunRecord
from fp4train.run.supervise.loss_history import Divergence
from fp4train.run.timeline import Course
from fp4train.shards import RowOrder, order_of, row_orders


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss before backward.

    Args:
        scaling: fields of the recipe's `loss_scaling` under which it was reached; None: it has
            none, and the factor is 1.
        good_steps: good steps since it last changed.
    """

    value: float = 1.0
    scaling: Mapping[str, Any] | None = None
    good_steps: int = 0


class Trained(Protocol):
    """The parts of a run that states read and set; see `Run`."""

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    course: Course
    data: RunRows
    step: int
    failed: Tensor | None
    built_groups: list[dict[str, Any]]
    loss_scale: LossScale
    divergence: Divergence
    record: RunRecord
    world: World

    @property
    def batch_index(self) -> int: ...

    @property
    def inventory(self) -> Inventory | None: ...

    @property
    def planned_layers(self) -> Sequence[PlannedLayer]: ...

    def scaling(self) -> dict[str, dict[str, Tensor]]: ...

    def load_scaling(self, state: dict[str, dict[str, Tensor]]) -> None: ...


class RunState(Companion, ABC):
    """A part of what the future of a run depends on; saved, restored, resharded and counted alike.
    Many follow the steps: `after_step`.

    Attributes:
        key: its name in a checkpoint.
        file: the kind of file of its tensors. One that stands for weights of the model has files of
            its own, so that they are read alone (RUN@STEP:KIND); their kind is its key.
        title: its name in a plan's memory and in help, which no other state has.
    """

    key: ClassVar[str]
    file: ClassVar[str] = TENSORS
    title: ClassVar[str] = ""

    def __init__(self, run: Trained) -> None:
        self.run = run

    @classmethod
    def used(cls, config: Config) -> bool:
        """Whether a run of this configuration has the state."""
        return True

    @property
    def kept(self) -> bool:
        """Whether a run that uses the state has something to keep."""
        return True

    @classmethod
    def bytes_per_parameter(cls, config: Config, model: nn.Module) -> float:
        """Bytes that a rank keeps, and a checkpoint holds, per parameter of the model, which may be
        on the meta device.
        """
        return 0

    @abstractmethod
    def saved(self) -> Mapping[str, Any]:
        """The table that a checkpoint holds, of a pipeline that of this rank's stages."""

    @abstractmethod
    def check(self, saved: Any) -> None:
        """Compare what `saved_part` read with this run; nothing is changed. `run.step` is that
        of the checkpoint.

        Raises:
            ValueError: it does not fit, or is not finite; the message names the first tensor.
        """

    @abstractmethod
    def load(self, saved: Any) -> None:
        """Take over what `check` accepted; `run.step` is that of the checkpoint."""

    def must_be_finite(self, path: str) -> bool:
        """Whether a checkpoint is worthless if the tensor of this path below `key` is not
        finite.
        """
        return False

    def weights(self) -> Mapping[str, Tensor] | None:
        """Weights that are evaluated beside the trained ones: name of a parameter → this rank's
        part (`shards.local`). None: the state is none of weights.
        """
        return None


class PlainState(RunState):
    """A state of plain numbers, alike on all ranks; the first stage's ranks save them."""


def saved_part(
    checkpoint: Checkpoint, key: str, model: nn.Module, inventory: Inventory | None = None
) -> Any:
    """This rank's part of the state of `key`; nothing says yet that it fits.

    Args:
        inventory: names of the whole model, where `model` holds some stages of it.

    Raises:
        LookupError, TypeError, ValueError, OSError: it is no state of a run, or its files changed.
    """
    table = checkpoint.state[key]
    if inventory is not None and isinstance(table, dict):
        elsewhere = inventory.elsewhere(model)
        table = {name: entries for name, entries in table.items() if name not in elsewhere}
    placed = _Placed(checkpoint, key, model)
    return unflatten(placed, {key: table})[key]


def orders_of(key: str, model: nn.Module) -> dict[str, RowOrder]:
    """Path of a parameter's tensors in the state of `key` → their order of rows
    (`shards.order_of`).
    """
    return {f"{key}/{escaped(name)}": order for name, order in row_orders(model).items()}


class _Placed(Mapping[str, Tensor]):
    """The tensors of a checkpoint by path, each placed as the model's parameter of its name."""

    def __init__(self, checkpoint: Checkpoint, key: str, model: nn.Module) -> None:
        self.stored = checkpoint.tensors
        tensors = {**model.state_dict(), **dict(model.named_parameters())}
        self.places = {
            f"{key}/{escaped(name)}": tensor
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor)
        }
        self.orders = orders_of(key, model)

    def __getitem__(self, path: str) -> Tensor:
        place = self.places.get(path)
        if place is None:
            place = self.places.get(path.rpartition("/")[0])
        if place is None or tuple(place.shape) != self.stored.shape(path):
            return self.stored[path]
        return self.stored.read_like(path, place, order_of(path, place, self.orders))

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def check_tensor(
    name: str, tensor: Any, shape: torch.Size, dtype: torch.dtype | None = None
) -> None:
    """Raises ValueError where `tensor` is none, or has another shape or dtype (None: any)."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is no tensor")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}, not {dtype}")
