"""The operations between a model's products, and what computes them: torch's operators, which are
those here, Liger's kernels on NVIDIA GPUs (`liger.py`), or C kernels on CPUs (`on_cpu.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Queries or keys [B, heads, T, E], rotated by the angles with the given cosines and sines."""
    lower, upper = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-upper, lower), dim=-1) * sin_TE


class Operators:
    """torch's operators."""

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
        """x / √(mean(x²) + ε) ⊙ w over the last dimension D of x, in its dtype."""
        return F.rms_norm(x, x.shape[-1:], weight_D, eps)

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) ⊙ up."""
        return F.silu(gate) * up

    def rotate(
        self, q_BHTE: Tensor, k_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys."""
        return rotate(q_BHTE, cos_TE, sin_TE), rotate(k_BHTE, cos_TE, sin_TE)


OF_TORCH = Operators()


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation between products, which other kernels than torch's may compute.

    Args:
        kind: "norm", "gate" or "rotation", which C kernels may compute (`on_cpu.why_not`); or
            another.
        width: number of features.
        software: the program that computes it instead on a type of device, deterministic or not, in
            words; None: `Operators` do.
    """

    kind: str
    width: int
    software: Callable[[str, bool], str] | None = None


class Fusible:
    """A module that has such operations, its own or those of a part that cannot know of them."""

    operators: Operators = OF_TORCH

    def fp4train_operations(self) -> Sequence[Operation]:
        """Its own operations."""
        return ()


def operations_of(model: nn.Module) -> Iterator[Operation]:
    """The operations of a model, as its modules name them in `fp4train_operations`."""
    for module in model.modules():
        operations = getattr(module, "fp4train_operations", None)
        if operations is not None:
            yield from operations()


def use(model: nn.Module, operators: Operators, *, spare: Iterable[nn.Module] = ()) -> None:
    """Compute the operations of `model` so, but for those inside of the modules `spare`."""
    left = {inner for module in spare for inner in module.modules()}
    for module in model.modules():
        if isinstance(module, Fusible) and module not in left:
            module.operators = operators
