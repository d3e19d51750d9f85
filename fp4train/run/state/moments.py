"""The moments of the optimizer, by parameter, and which parameters have weight decay.

An optimizer may count its steps elsewhere than in the state of its parameters: in its groups of
parameters, whose values are constants otherwise, or in its state under keys of its own. Values of
groups that it changed since it was built are saved with each parameter of the group.

A moment of another shape would make torch's fused optimizers read memory that is not theirs, and
one of another dtype would be taken in silence: both are refused before anything is taken over.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.config import Config
from fp4train.optim import DECAYS, moment_bytes
from fp4train.run.finite import first_non_finite
from fp4train.run.state.base import RunState, Trained, check_tensor

GROUP = "param_group"
"""Entry of a parameter: the values of its group that the optimizer changed."""
BESIDE = ""
"""Entry beside those of parameters: what the optimizer keeps under other keys."""
_SET = frozenset(("params", "lr"))
"""Entries of a group that are not the optimizer's to change: every step sets the rate."""


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of the values of each group of parameters, without parameters and rate."""
    return [
        {key: copied(value) for key, value in group.items() if key not in _SET}
        for group in optimizer.param_groups
    ]


def put_back(optimizer: torch.optim.Optimizer, values: list[dict[str, Any]]) -> None:
    """Give each group of parameters the values that `group_values` gave."""
    for group, saved in zip(optimizer.param_groups, values, strict=True):
        for key in set(group) - set(saved) - _SET:
            del group[key]
        group |= {key: copied(value) for key, value in saved.items()}


def copied(value: Any) -> Any:
    """A copy of numbers, texts, tensors, and tables and lists of them; other objects themselves."""
    return deepcopy(value) if isinstance(value, (Tensor, list, tuple, dict)) else value


class Moments(RunState):
    """The optimizer's state; its constants are the configuration's, which a resume may change."""

    key = "optimizer"
    title = "moments"

    def __init__(self, run: Trained) -> None:
        super().__init__(run)
        names = {id(parameter): name for name, parameter in run.model.named_parameters()}
        groups = run.optimizer.param_groups
        self.names = [names[id(parameter)] for group in groups for parameter in group["params"]]
        """Names of the parameters in the optimizer's order, in which it numbers them."""

    @classmethod
    def bytes_per_parameter(cls, config: Config, model: nn.Module) -> float:
        """See `optim.moment_bytes`."""
        return moment_bytes(config.optim, model) / sum(w.numel() for w in model.parameters())

    def saved(self) -> Mapping[str, Any]:
        """See `RunState.saved`."""
        state = self.run.optimizer.state_dict()["state"]
        decays = self._decays()
        changes = self._changed_values()
        table = {
            name: {**state.get(number, {}), DECAYS: decays[name], **changes.get(name, {})}
            for number, name in enumerate(self.names)
        }
        beside = {key: entry for key, entry in state.items() if not isinstance(key, int)}
        return {**table, BESIDE: beside} if beside else table

    def check(self, saved: Any) -> None:
        """See `RunState.check`."""
        if not isinstance(saved, dict) or not all(isinstance(e, dict) for e in saved.values()):
            raise ValueError("it holds no state of an optimizer")
        decays = self._decays()
        if strange := sorted((set(saved) - {BESIDE}) ^ set(decays)):
            have = "it has" if strange[0] in saved else "it lacks"
            raise ValueError(f"its optimizer has other parameters: {have} {strange[0]}")
        beside = saved.get(BESIDE, {})
        for key in self.run.optimizer.state:
            if not isinstance(key, Tensor) and key not in beside:
                raise ValueError(f"it lacks what the optimizer keeps under {key!r}")
        for name in decays:
            entries = saved[name]
            group = entries.get(GROUP, {})
            if not isinstance(group, dict) or _SET & set(group):
                raise ValueError(f"it has strange values of the group of {name}")
            if entries.get(DECAYS) != decays[name]:
                raise ValueError(
                    f"its optimizer chose otherwise whether {name} has weight decay: the code that "
                    "wrote it was another (filters of Mamba-2's convolutions had, and have none "
                    "now). Go on with that code, or begin a new run with the weights: init=RUN"
                )
        for name, parameter in zip(self.names, self._parameters(), strict=True):
            self._check_moments(name, parameter, saved[name])

    def load(self, saved: Any) -> None:
        """See `RunState.load`."""
        optimizer = self.run.optimizer
        moments = {number: _moments(saved[name]) for number, name in enumerate(self.names)}
        state = {number: entries for number, entries in moments.items() if entries}
        rates = [group["lr"] for group in optimizer.param_groups]
        built = {key: optimizer.state[key] for key in optimizer.state if not torch.is_tensor(key)}
        beside = placed(saved.get(BESIDE, {}), built, self.run.world.device)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {**state, **beside}})
        put_back(optimizer, self.run.built_groups)
        names = iter(self.names)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            of_group = [next(names) for _ in group["params"]]
            changes = saved[of_group[0]].get(GROUP, {}) if of_group else {}
            group |= placed(changes, group, self.run.world.device)
            group["lr"] = rate

    def must_be_finite(self, path: str) -> bool:
        """All moments must be."""
        return True

    def _changed_values(self) -> dict[str, dict[str, Any]]:
        """Parameter → the entry of what changed in its group since the optimizer was built."""
        names = iter(self.names)
        changes: dict[str, dict[str, Any]] = {}
        for group, built in zip(
            self.run.optimizer.param_groups, self.run.built_groups, strict=True
        ):
            changed = {
                key: value
                for key, value in group.items()
                if key not in _SET and not (key in built and _same(value, built[key]))
            }
            of_group = [next(names) for _ in group["params"]]
            if changed:
                changes |= {name: {GROUP: changed} for name in of_group}
        return changes

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.run.optimizer.param_groups for p in group["params"]]

    def _decays(self) -> dict[str, bool]:
        """Parameter → whether its group is one of those with weight decay (`Constants.groups`)."""
        groups = self.run.optimizer.param_groups
        decays = [bool(group.get(DECAYS)) for group in groups for _ in group["params"]]
        return dict(zip(self.names, decays, strict=True))

    def _check_moments(self, name: str, parameter: Tensor, entries: dict[str, Any]) -> None:
        """Raises ValueError where the moments are not those of the parameter in this optimizer."""
        optimizer = self.run.optimizer
        moments = _moments(entries)
        tensors = {k: v for k, v in moments.items() if isinstance(v, Tensor)}
        adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
        if adam and moments and not {"step", "exp_avg", "exp_avg_sq"} <= set(tensors):
            raise ValueError(f"{name} lacks a moment")
        fused = any(group.get("fused") for group in optimizer.param_groups)
        for moment, tensor in tensors.items():
            what = f"{moment} of {name}"
            if adam:
                if moment == "step":
                    shape = torch.Size()
                else:
                    shape = parameter.shape
                check_tensor(what, tensor, shape)
                halves = (torch.bfloat16,) if moment != "step" else ()
                if tensor.dtype not in (parameter.dtype, torch.float32, *halves):
                    raise ValueError(f"{what} has dtype {tensor.dtype}, not {parameter.dtype}")
            elif fused and tensor.numel() != 1:
                check_tensor(what, tensor, parameter.shape)
        if bad := first_non_finite(tensors):
            raise ValueError(f"{bad} of {name} is not finite")


def _moments(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if key not in (DECAYS, GROUP)}


def _same(value: Any, built: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(built, Tensor):
        return value.dtype == built.dtype and torch.equal(value, built)
    if isinstance(value, (list, tuple)) and isinstance(built, (list, tuple)):
        return len(value) == len(built) and all(map(_same, value, built))
    if isinstance(value, dict) and isinstance(built, dict):
        return value.keys() == built.keys() and all(_same(value[k], built[k]) for k in value)
    return value is built or (type(value) is type(built) and bool(value == built))


def placed(value: Any, built: Any, device: torch.device) -> Any:
    """A copy of a saved value, with each tensor where `built`, that of the built optimizer, has it.
    What the built optimizer does not have yet goes to `device`; numbers (0-D) of it stay on the
    host, where they serve tensors of every device.
    """
    if isinstance(value, Tensor):
        if isinstance(built, Tensor):
            return value.to(built.device, copy=True)
        return value.to(device if value.dim() else "cpu", copy=True)
    if isinstance(value, dict):
        table = built if isinstance(built, dict) else {}
        return {key: placed(entry, table.get(key), device) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = built if isinstance(built, (list, tuple)) else ()
        return type(value)(
            placed(entry, entries[place] if place < len(entries) else None, device)
            for place, entry in enumerate(value)
        )
    return value
