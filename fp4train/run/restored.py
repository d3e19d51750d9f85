"""The state of a checkpoint for a run: read as the run holds its own, asked whether it fits, and
taken over.

Every tensor is read in this rank's part alone. Whether it fits (its name, shape, dtype, and that it
is finite) is asked before anything is taken over: a moment of another shape would make torch's
fused optimizers read memory that is not theirs, and one of another dtype would be taken in silence.
Shapes are those of whole tensors; of values a rank looks at those that it holds, without a
collective.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.checkpoint import Checkpoint, StoredTensors, escaped, unflatten
from fp4train.nn.executors import saved_tensor
from fp4train.parallel.held import Inventory
from fp4train.run.finite import first_non_finite
from fp4train.shards import RowOrder, order_of, row_orders


def restored(
    found: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    inventory: Inventory | None = None,
) -> dict[str, Any]:
    """State of a run as `Run.state` gave it, or without `optimizer` its weights alone; the checks
    say whether it fits.

    A weight takes the placement of the model's parameter of the same name and shape, and so does a
    moment of its shape; all other tensors are whole.

    Args:
        inventory: inventory of the whole model, where `model` holds some stages of it; only what is
            read.

    Raises:
        LookupError, TypeError, ValueError, OSError: it is not the state of a run, or its files
            changed.
    """
    layout: dict[str, Tensor] = {
        f"model/{escaped(name)}": tensor
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    if inventory is None:
        elsewhere = set()
    else:
        elsewhere = {f"model/{escaped(n)}" for n in inventory.away(model)}
    if optimizer is None:
        placed = _Placed(found.tensors, layout, {}, elsewhere, state_orders(model))
        state = unflatten(placed, {"model": found.state["model"]})
        if inventory is None:
            return state
        return {"model": inventory.own_weights(state["model"], model)}
    numbers = [
        number for group in optimizer.state_dict()["param_groups"] for number in group["params"]
    ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if inventory is not None:
        of_whole = inventory.numbers_of(model, optimizer)
        numbers = [of_whole[number] for number in numbers]
        elsewhere |= {
            f"optimizer/state/{n}" for n in set(inventory.numbers.values()) - set(numbers)
        }
    moments = {f"optimizer/state/{escaped(n)}": p for n, p in zip(numbers, parameters, strict=True)}
    orders = state_orders(model, optimizer, inventory)
    state = unflatten(_Placed(found.tensors, layout, moments, elsewhere, orders), found.state)
    if inventory is None:
        return state
    return inventory.own(state, model, optimizer)


def state_orders(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    inventory: Inventory | None = None,
) -> dict[str, RowOrder]:
    """The orders of rows (`shards.order_of`) in what `Run.state` gives: of weights, and of all
    moments of a parameter.

    Args:
        inventory: see `restored`.
    """
    by_name = row_orders(model)
    orders = {f"model/{escaped(name)}": order for name, order in by_name.items()}
    if optimizer is None or not by_name:
        return orders
    of_parameter = {
        id(parameter): by_name.get(name) for name, parameter in model.named_parameters()
    }
    numbers = [
        number for group in optimizer.state_dict()["param_groups"] for number in group["params"]
    ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if inventory is None:
        of_whole = {}
    else:
        of_whole = inventory.numbers_of(model, optimizer)
    for number, parameter in zip(numbers, parameters, strict=True):
        if (order := of_parameter.get(id(parameter))) is not None:
            orders[f"optimizer/state/{escaped(of_whole.get(number, number))}"] = order
    return orders


class _Placed(Mapping[str, Tensor]):
    """Stored tensors, each as the one of its name in `layout` lies, or as the parameter in
    `moments` that has it; those that are held `elsewhere` are empty.
    """

    def __init__(
        self,
        stored: StoredTensors,
        layout: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        elsewhere: Collection[str],
        orders: Mapping[str, RowOrder],
    ) -> None:
        self.stored = stored
        self.layout = layout
        self.moments = moments
        self.elsewhere = elsewhere
        self.orders = orders

    def __getitem__(self, name: str) -> Tensor:
        own = self.layout.get(name)
        above = name.rpartition("/")[0]
        if name in self.elsewhere or above in self.elsewhere:
            return torch.empty(0)
        if own is None:
            own = self.moments.get(above)
        if own is None or tuple(own.shape) != self.stored.shape(name):
            return self.stored[name]
        return self.stored.read_like(name, own, order_of(name, own, self.orders))

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


# -- whether it fits -------------------------------------------------------------------------------


def check_model(model: nn.Module, saved: Any) -> None:
    """Raises ValueError, which names the first tensor that does not fit or is not finite."""
    check_layout(model, saved)
    check_finite(model, saved)


def check_layout(model: nn.Module, saved: Any) -> None:
    """Raises ValueError, which names the first tensor that the model lacks, or has in another shape
    or dtype.
    """
    wanted = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    if not isinstance(saved, dict):
        raise ValueError("it holds no weights")
    if strange := sorted(set(saved) ^ set(wanted)):
        have = "it has" if strange[0] in saved else "it lacks"
        raise ValueError(
            f"{have} {strange[0]}"
            + (f", and {len(strange) - 1} more differ" if len(strange) > 1 else "")
        )
    for name, tensor in wanted.items():
        _check(name, saved[name], tensor.shape, tensor.dtype)


def check_finite(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raises ValueError, which names the first parameter of the model that is not finite."""
    parameters = {name for name, _ in model.named_parameters()}
    if bad := first_non_finite(
        {name: tensor for name, tensor in saved.items() if name in parameters}
    ):
        raise ValueError(f"{bad} is not finite")


def check_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Raises ValueError, which names the first parameter and moment that does not fit."""
    own = optimizer.state_dict()
    if (
        not isinstance(saved, dict)
        or set(saved) != {"state", "param_groups"}
        or not isinstance(saved["state"], dict)
    ):
        raise ValueError("it holds no state of an optimizer")
    groups = saved["param_groups"]
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        raise ValueError("its optimizer has no groups of parameters")
    if (theirs := [g["params"] for g in groups]) != (
        ours := [g["params"] for g in own["param_groups"]]
    ):
        there, here = ([len(numbers) for numbers in numbered] for numbered in (theirs, ours))
        if sum(there) == sum(here):
            raise ValueError(
                f"its optimizer has groups of {_counts(there)} parameters and this one of "
                f"{_counts(here)}: the code "
                "that wrote it chose otherwise which have weight decay (filters of Mamba-2's "
                "convolutions had, and "
                "have none now). Go on with that code, or begin a new run with the weights: "
                "init=RUN"
            )
        raise ValueError("its optimizer has other groups of parameters")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in own["param_groups"] for number in group["params"]]
    adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    for number, moments in saved["state"].items():
        if number not in numbers or not isinstance(moments, dict):
            raise ValueError(f"its optimizer has a parameter {number!r}")
        parameter = parameters[numbers.index(number)]
        tensors = {k: v for k, v in moments.items() if isinstance(v, Tensor)}
        if adam and not {"step", "exp_avg", "exp_avg_sq"} <= set(tensors):
            raise ValueError(f"parameter {number} lacks a moment")
        for name, tensor in tensors.items():
            what = f"{name} of parameter {number}"
            if adam:
                _check(what, tensor, torch.Size() if name == "step" else parameter.shape, None)
                if tensor.dtype not in (parameter.dtype, torch.float32) and (
                    name == "step" or tensor.dtype != torch.bfloat16
                ):
                    raise ValueError(f"{what} has dtype {tensor.dtype}, not {parameter.dtype}")
            elif (
                any(group.get("fused") for group in optimizer.param_groups) and tensor.numel() != 1
            ):
                _check(what, tensor, parameter.shape, None)
        if bad := first_non_finite(tensors):
            raise ValueError(f"{bad} of parameter {number} is not finite")


def check_scaling(own: Mapping[str, Mapping[str, Tensor]], saved: Any) -> None:
    """Raises ValueError, which names the first layer that is not there, or amax that is none."""
    if not isinstance(saved, dict):
        raise ValueError("it holds no scales")
    for layer, entries in saved.items():
        if layer not in own or not isinstance(entries, dict):
            raise ValueError(f"it has scales of a layer {layer}")
        for name, tensor in entries.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} of {layer} is no tensor")
            if (known := saved_tensor(name)) is not None:
                dtype, dimensions, finite = known
                if tensor.dtype != dtype or tensor.dim() != dimensions:
                    raise ValueError(
                        f"{name} of {layer} is {tensor.dtype} of shape {list(tensor.shape)}"
                    )
                if finite and not tensor.isfinite().all():
                    raise ValueError(f"{name} of {layer} is not finite")


def checked_scale(value: Any) -> float:
    """A loss scale. Raises ValueError where it is none."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and value > 0)
    ):
        raise ValueError(f"its loss scale is {value!r}")
    return float(value)


def checked_count(value: Any) -> int:
    """A number of steps. Raises ValueError where it is none."""
    if type(value) is not int or value < 0:
        raise ValueError(f"its number of good steps is {value!r}")
    return value


def _counts(counts: list[int]) -> str:
    return " and ".join(map(str, counts))


def _check(name: str, found: Any, shape: torch.Size, dtype: torch.dtype | None) -> None:
    if not isinstance(found, Tensor):
        raise ValueError(f"{name} is no tensor")
    if found.shape != shape:
        raise ValueError(f"{name} has shape {list(found.shape)}, not {list(shape)}")
    if dtype is not None and found.dtype != dtype:
        raise ValueError(f"{name} has dtype {found.dtype}, not {dtype}")
