"""The moments of the optimizer, by parameter, and which parameters have weight decay.

A moment of another shape would make torch's fused optimizers read memory that is not theirs, and
one of another dtype would be taken in silence: both are refused before anything is taken over.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.config import Config
from fp4train.optim import DECAYS, moment_bytes
from fp4train.run.finite import first_non_finite
from fp4train.run.state.base import RunState, Trained, check_tensor


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
        moments = self.run.optimizer.state_dict()["state"]
        decays = self._decays()
        return {
            name: {**moments.get(number, {}), DECAYS: decays[name]}
            for number, name in enumerate(self.names)
        }

    def check(self, saved: Any) -> None:
        """See `RunState.check`."""
        if not isinstance(saved, dict) or not all(isinstance(e, dict) for e in saved.values()):
            raise ValueError("it holds no state of an optimizer")
        decays = self._decays()
        if strange := sorted(set(saved) ^ set(decays)):
            have = "it has" if strange[0] in saved else "it lacks"
            raise ValueError(f"its optimizer has other parameters: {have} {strange[0]}")
        for name, entries in saved.items():
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
        constants = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        moments = {number: _moments(saved[name]) for number, name in enumerate(self.names)}
        state = {number: entries for number, entries in moments.items() if entries}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        for group, values in zip(optimizer.param_groups, constants, strict=True):
            group |= values

    def must_be_finite(self, path: str) -> bool:
        """All moments must be."""
        return True

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
    return {key: value for key, value in entries.items() if key != DECAYS}
