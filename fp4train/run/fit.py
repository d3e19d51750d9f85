"""Whether a checkpoint fits the run that would go on from it: every tensor's name, shape, dtype, and that it is finite.

Asked before anything is taken over. A moment of another shape would make torch's fused optimizers read memory that is
not theirs, and one of another dtype would be taken in silence.

Shapes are those of whole tensors; of values a rank looks at those that it holds, without a collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.nn.executors import STATE_TENSORS
from fp4train.run.supervise.guard import first_non_finite
from fp4train.shards import local

Tensors = Mapping[str, Tensor]


def check_model(model: nn.Module, saved: Any) -> None:
    """Raises ValueError, which names the first tensor that does not fit."""
    wanted = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    if not isinstance(saved, dict):
        raise ValueError("it holds no weights")
    if strange := sorted(set(saved) ^ set(wanted)):
        have = "it has" if strange[0] in saved else "it lacks"
        raise ValueError(f"{have} {strange[0]}" + (f", and {len(strange) - 1} more differ" if len(strange) > 1 else ""))
    for name, tensor in wanted.items():
        _check(name, saved[name], tensor.shape, tensor.dtype)
    parameters = {name for name, _ in model.named_parameters()}
    if bad := first_non_finite({name: local(tensor) for name, tensor in saved.items() if name in parameters}):
        raise ValueError(f"{bad} is not finite")


def check_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Raises ValueError, which names the first parameter and moment that does not fit."""
    own = optimizer.state_dict()
    if not isinstance(saved, dict) or set(saved) != {"state", "param_groups"} or not isinstance(saved["state"], dict):
        raise ValueError("it holds no state of an optimizer")
    groups = saved["param_groups"]
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        raise ValueError("its optimizer has no groups of parameters")
    if [g["params"] for g in groups] != [g["params"] for g in own["param_groups"]]:
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
                if tensor.dtype not in (parameter.dtype, torch.float32):
                    raise ValueError(f"{what} has dtype {tensor.dtype}, not {parameter.dtype}")
            elif any(group.get("fused") for group in optimizer.param_groups) and tensor.numel() != 1:
                _check(what, tensor, parameter.shape, None)
        if bad := first_non_finite({name: local(tensor) for name, tensor in tensors.items()}):
            raise ValueError(f"{bad} of parameter {number} is not finite")


def check_scaling(own: Mapping[str, Tensors], saved: Any) -> None:
    """Raises ValueError, which names the first layer that is not there, or amax that is none."""
    if not isinstance(saved, dict):
        raise ValueError("it holds no scales")
    for layer, entries in saved.items():
        if layer not in own or not isinstance(entries, dict):
            raise ValueError(f"it has scales of a layer {layer}")
        for name, tensor in entries.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} of {layer} is no tensor")
            known = STATE_TENSORS.get(name) or STATE_TENSORS.get(name.partition(".")[0])
            if known is not None:
                dtype, dimensions, finite = known
                if tensor.dtype != dtype or tensor.dim() != dimensions:
                    raise ValueError(f"{name} of {layer} is {tensor.dtype} of shape {list(tensor.shape)}")
                if finite and not tensor.isfinite().all():
                    raise ValueError(f"{name} of {layer} is not finite")


def checked_scale(value: Any) -> float:
    """A loss scale. Raises ValueError where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"its loss scale is {value!r}")
    return float(value)


def checked_count(value: Any) -> int:
    """A number of steps. Raises ValueError where it is none."""
    if type(value) is not int or value < 0:
        raise ValueError(f"its number of good steps is {value!r}")
    return value


def _check(name: str, found: Any, shape: torch.Size, dtype: torch.dtype | None) -> None:
    if not isinstance(found, Tensor):
        raise ValueError(f"{name} is no tensor")
    if found.shape != shape:
        raise ValueError(f"{name} has shape {list(found.shape)}, not {list(shape)}")
    if dtype is not None and found.dtype != dtype:
        raise ValueError(f"{name} has dtype {found.dtype}, not {dtype}")
