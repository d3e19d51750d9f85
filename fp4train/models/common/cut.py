"""How tensor parallelism cuts a model family: what its `parallel.py` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fp4train.nn.ranks import Ranks, local, with_summed_gradient


@dataclass(frozen=True, kw_only=True)
class TensorCut:
    """Names of modules by how they are cut over p ranks.

    Args:
        out: linear layers [N, K] cut into [N/p, K]; they read activations that every rank has whole.
        in_: linear layers cut into [N, K/p]; they read what the layers of `out` made.
        vocabulary: modules with a weight [vocabulary, width], cut along the vocabulary.
        tokens: modules that act on each token alone (norms). Their parameters stay whole, and their attribute `tensor`
            is set: if tokens are cut, their gradients are sums over the ranks.
        counts: (module, attribute, key of the configuration) of numbers that are divided by p.
    """

    out: tuple[str, ...]
    in_: tuple[str, ...]
    vocabulary: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    counts: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRanks:
    """The ranks that share a model's vocabulary and, with `sequence`, the tokens of its residual stream."""

    ranks: Ranks
    sequence: bool

    def stream(self, batch: int, time: int, width: int) -> tuple[int, ...]:
        """The shape of the residual stream on a rank: its share of the tokens, or all of them."""
        return (batch * time // self.ranks.size, width) if self.sequence else (batch, time, width)


class TensorParallel(Protocol):
    """A model that tensor parallelism can cut. Its `tensor` is set when it is cut."""

    tensor: TokenRanks | None

    def fp4train_tensor_cut(self) -> TensorCut:
        """How it is cut."""
        ...

    def get_submodule(self, target: str) -> nn.Module: ...


def shared_by(tensor: TokenRanks, parameter: Tensor) -> Tensor:
    """A parameter that every rank has whole, for use on this rank's tokens; differentiable.

    torch.compile breaks the graph here: the backward pass adds the gradients of the ranks.
    """
    if torch.compiler.is_dynamo_compiling():
        from fp4train.models.common import untraced

        result: Tensor = untraced.shared_by(tensor, parameter)
        return result
    whole = local(parameter)
    return with_summed_gradient(whole, tensor.ranks) if tensor.sequence else whole
