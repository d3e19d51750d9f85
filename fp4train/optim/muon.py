"""Muon (Jordan 2024; arXiv:2502.16982): torch's, for the matrices of the blocks, and AdamW for
everything else.

A matrix moves along its momentum with all singular values brought near one. The step is scaled by
0.2·√(larger side): its size is that of AdamW's (arXiv:2502.16982, section 2.2), and one learning
rate serves both.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn

from fp4train.optim import trainable, trainable_elements
from fp4train.optim.adamw import MOMENT_BYTES, AdamW
from fp4train.precision.layers import elementwise, find_layers


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """The constants of Muon, beside those of `AdamW`, which serve embeddings, head, norms and
    biases.

    Args:
        momentum: decay rate of the mean of gradients.
        nesterov: whether the step looks ahead along it.
        iterations: number of steps of Newton and Schulz.
    """

    needs_whole: ClassVar[str] = (
        "optim=muon multiplies whole matrices, and these are cut over ranks: take "
        "parallel.dp_replicate, or optim=adamw"
    )

    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optim.momentum={self.momentum} must lie in [0, 1)")
        if not 1 <= self.iterations < 100:
            raise ValueError(f"optim.iterations={self.iterations} must lie between 1 and 99")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters.

        Raises:
            ValueError: the model has no trainable parameter, no matrix in its blocks, or matrices
                cut over ranks.
        """
        parameters = trainable(model)
        matrices = _matrices(model)
        if not matrices:
            raise ValueError(
                f"optim=muon needs linear layers in the blocks of {type(model).__name__}; "
                "take optim=adamw"
            )
        if any(_is_cut(p) for p in matrices):
            raise ValueError(self.needs_whole)
        taken = {id(p) for p in matrices}
        remaining = {name: p for name, p in parameters.items() if id(p) not in taken}
        muon = torch.optim.Muon(
            self.groups(matrices),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.iterations,
            adjust_lr_fn="match_rms_adamw",
        )
        if remaining:
            return Joined(muon, self.over(remaining, elementwise(model)))
        return muon

    def moment_bytes(self, model: nn.Module) -> int:
        """Bytes of the mean of gradients, float32, of matrices in the blocks of `model`, and of
        AdamW's moments of its other trainable parameters.
        """
        in_matrices = sum(matrix.numel() for matrix in _matrices(model))
        in_others = trainable_elements(model) - in_matrices
        return 4 * in_matrices + MOMENT_BYTES[self.moments] * in_others


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights of linear layers in the blocks of `model`, but for those of groups."""
    inside = [name for name, layer in find_layers(model).items() if layer.block is not None]
    weights = {id(model.get_submodule(name).weight) for name in inside}
    return [p for p in model.parameters() if p.requires_grad and id(p) in weights and p.dim() == 2]


def _is_cut(parameter: Any) -> bool:
    placements = getattr(parameter, "placements", ())
    return any(
        placement.is_shard() and parameter.device_mesh.size(axis) > 1
        for axis, placement in enumerate(placements)
    )


class Joined(torch.optim.Optimizer):
    """Several optimizers as one: their parameter groups one after another, and one state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let each part load its own, of which it may keep some in a dtype of its own."""
        groups = iter(state_dict["param_groups"])
        for part in self._parts:
            part_groups = list(islice(groups, len(part.param_groups)))
            numbers = {number for group in part_groups for number in group["params"]}
            state = {n: entries for n, entries in state_dict["state"].items() if n in numbers}
            part.load_state_dict({"state": state, "param_groups": part_groups})
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        self.state = defaultdict(
            dict, {p: part.state[p] for part in self._parts for p in part.state}
        )
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()
