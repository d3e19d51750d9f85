"""The residual stream: what blocks hand to each other, and the norms that read it.

A layer's result changes the stream. The norm that reads the stream next adds the change, so that a
kernel of the norm can do so (`nn/normed_linears.py`): within a block, and at the beginning of the next
one, to which a block hands both terms.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp4train.models.common.cut import TokenRanks
from fp4train.nn.fused_layers import NamesKernel


class StreamTerms(NamedTuple):
    """The residual stream x + change, each [..., width], which nobody has added up yet."""

    x: Tensor
    change: Tensor


def summed(stream: Tensor | StreamTerms) -> Tensor:
    """The residual stream as one tensor."""
    if isinstance(stream, StreamTerms):
        return stream.x + stream.change
    return stream


def handed_on(x: Tensor, change: Tensor) -> Tensor | StreamTerms:
    """What a block returns: both terms of the stream, or their sum where torch.compile has the
    block.
    """
    if torch.compiler.is_compiling():
        return x + change
    return StreamTerms(x, change)


class StreamNorm(NamesKernel, nn.RMSNorm):
    """A norm of a residual stream, which a subclass computes (`normalised`)."""

    tensor: TokenRanks | None = None
    """The tensor-parallel ranks, each with the whole weight; with `sequence` they normalise the
    other tokens.
    """

    def of_stream(self, stream: Tensor | StreamTerms) -> tuple[Tensor, Tensor]:
        """(The norm of the stream, the stream), each [..., width].

        A kernel may add and normalise at once, so whoever reads the stream next takes it from here.
        """
        x = summed(stream)
        return self(x), x

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., width]."""
        return self.normalised(x)

    @abstractmethod
    def normalised(self, x: Tensor) -> Tensor:
        """The norm of x [..., width], of its shape and dtype, by operators."""
