"""The residual stream: what blocks hand to each other, and the norms that read it.

A layer's result changes the stream. The norm that reads the stream next adds the change, so that a
kernel of the norm can do so (`nn/produced.py`): within a block, and at the beginning of the next
one, to which a block hands both terms.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fp4train.models.common.cut import TokenRanks
from fp4train.nn.planned import is_watched

if TYPE_CHECKING:
    from fp4train.nn.produced import NormProducer


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


class StreamNorm(nn.RMSNorm):
    """A norm of a residual stream, which a subclass computes (`normalised`).

    Where its producer runs, what it gives is a carrier of codes, which the producer's readers take
    and nothing else.
    """

    tensor: TokenRanks | None = None
    """The tensor-parallel ranks, each with the whole weight; with `sequence` they normalise the
    other tokens.
    """

    producer: "NormProducer | None" = None
    """The producer that quantises the norm for the layers that read it; None: there is none."""

    def of_stream(self, stream: Tensor | StreamTerms) -> tuple[Tensor, Tensor]:
        """(The norm of the stream, the stream), each [..., width].

        Where the producer runs, one kernel adds, normalises and quantises. Whoever reads the stream
        next takes it from here: its gradient is added in the norm's kernel, then.
        """
        return self._produced(stream) or self._unfused(stream)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., width], without the sums of its stream."""
        produced = self._produced(x)
        if produced is None:
            return self.normalised(x)
        return produced[0]

    @abstractmethod
    def normalised(self, x: Tensor) -> Tensor:
        """The norm of x [..., width], of its shape and dtype, by operators."""

    def _produced(self, stream: Tensor | StreamTerms) -> tuple[Tensor, Tensor] | None:
        """`of_stream` by the producer; None: it does not run."""
        if self.producer is None or self.eps is None:
            return None
        self.producer.asked = True  # though hooks watch the norm
        if is_watched(self):
            return None
        x, change = stream if isinstance(stream, StreamTerms) else (stream, None)
        return self.producer(x, self.weight, self.eps, change)

    def _unfused(self, stream: Tensor | StreamTerms) -> tuple[Tensor, Tensor]:
        """`of_stream` without the producer."""
        x = summed(stream)
        return self(x), x
