"""The residual stream: the norms that read it, and its way from block to block.

Within a block a norm adds up the stream and its change (`StreamNorm.of_stream`). Between two blocks
the stream alone goes: shards, recomputation, stages and graphs of blocks rely on that. So a block
returns the memory of its last sum, and leaves the terms to the norm that the next block begins
with, whose kernel writes it. What another would read before is not written: so it is where
`in_turn` hands the stream from one block of ours to the next, no hook looks on, and the norm
quantises its result (`nn/produced.py`). Elsewhere, and for the last block, torch adds.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fp4train.models.common.cut import TokenRanks
from fp4train.nn.planned import is_watched
from fp4train.precision.context import current

if TYPE_CHECKING:
    from fp4train.nn.produced import LeftSum, NormProducer

Produced = Sequence[tuple[nn.Module, Sequence[nn.Module], Sequence[nn.Module]]]
"""Modules that may get a `producer` (`nn/produced.py`): each with all that reads its result, and
the layers that made what a gate is computed from.
"""


def produced_norms(*pairs: tuple[nn.Module, nn.Module]) -> Produced:
    """The norms of (norm, the module that takes its result and nothing else does), each with what
    reads it there: the submodules that the module names in `reads`. One that names none has no
    producer.
    """
    found = [
        (norm, [part.get_submodule(name) for name in getattr(part, "reads", ())], ())
        for norm, part in pairs
    ]
    return [each for each in found if each[1]]


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

    def of_stream(self, x: Tensor, change: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(The norm of the stream, the stream): of x + change, or of x, each [..., width].

        Where the producer runs, one kernel adds, normalises and quantises; x may be a sum that the
        block before has left to it. Whoever reads the stream next takes it from here: its gradient
        is added in the norm's kernel, then.

        Raises:
            RuntimeError: the block before has left its sum to a norm, and x is another tensor.
        """
        return self._produced(x, change) or self._unfused(x, change)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., width], without the sums of its stream."""
        made = self._produced(x, None)
        return self.normalised(x) if made is None else made[0]

    @abstractmethod
    def normalised(self, x: Tensor) -> Tensor:
        """The norm of x [..., width], of its shape and dtype, by operators."""

    def leave(self, x: Tensor, change: Tensor) -> "LeftSum | None":
        """x + change, which this norm writes before anything reads it; None: it would not."""
        producer = self._producing()
        if producer is None:
            return None
        return producer.leave(x, change)

    def _producing(self) -> "NormProducer | None":
        if self.producer is None or self.eps is None:
            return None
        self.producer.asked = True  # though hooks watch the norm
        return None if is_watched(self) else self.producer

    def _produced(self, x: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """`of_stream` by the producer; None: it does not run."""
        left = _taken(x)
        producer = self._producing()
        if left is not None and left.producer is not producer:
            left.write()
            left = None
        if producer is None:
            made = None
        else:
            made = producer(x, self.weight, cast(float, self.eps), change, left)
        if made is None and left is not None:
            left.write()
        return made

    def _unfused(self, x: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """`of_stream` without the producer."""
        stream = x if change is None else x + change
        return self(stream), stream


def in_turn(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The blocks, for a loop that calls each with what the one before returned, and does nothing
    else with that.

    Raises:
        RuntimeError: a block has left its sum to the norm of the next one, which was not made.
    """
    context = None if torch.compiler.is_compiling() else current()
    # A function that torch.compile leaves may call others that it compiles.
    if context is None or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
        return iter(blocks)
    return _in_turn(list(blocks), context.stream)


def _in_turn(blocks: Sequence[nn.Module], stream: dict[str, Any]) -> Iterator[nn.Module]:
    stream.clear()  # of a pass that has failed
    # Hooks on what is saved for backward would read the input of a recomputed block before it is
    # written.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    for block, norm in zip_longest(
        blocks, () if hooked else readers_between(blocks, producing=True)
    ):
        stream["norm"] = norm
        yield block
    if stream.pop("sum", None) is not None:
        raise RuntimeError(
            "a block has left its sum to the norm of the next block, which has not read it"
        )


def readers_between(
    blocks: Sequence[nn.Module], *, producing: bool = False
) -> list[StreamNorm | None]:
    """The norms that alone read what each block but the last returns, before they have written it;
    None: others may.

    A class of blocks whose forward pass begins with a norm of its input, the first to read it, and
    ends in `end_of_block`, names the norm in `entrance`.

    Args:
        producing: None, too, for norms without a producer: 3 µs of the host less per block.
    """
    return [_reader_between(block, after, producing) for block, after in pairwise(blocks)]


def _reader_between(block: nn.Module, after: nn.Module, producing: bool) -> StreamNorm | None:
    (_, ends), (name, begins) = (_entrance(type(each).__mro__) for each in (block, after))
    if not (ends and begins and name):
        return None
    norm = getattr(after, name)
    if not isinstance(norm, StreamNorm) or (producing and norm.producer is None):
        return None
    for each, methods in ((block, ends), (after, begins)):
        if (
            is_watched(each)
            or each._compiled_call_impl is not None
            or not methods.isdisjoint(vars(each))
        ):
            return None
    return norm


@cache
def _entrance(classes: tuple[type, ...]) -> tuple[str, frozenset[str]]:
    """(The norm that the forward pass begins with, the names of the class that has it): a subclass
    with another forward pass names the norm again; none where that class names none.
    """
    own = next(vars(each) for each in classes if "forward" in vars(each))
    if "entrance" in own:
        return (own["entrance"], frozenset(own))
    return ("", frozenset())


def end_of_block(x: Tensor, change: Tensor) -> Tensor:
    """x + change, what a block returns."""
    context = None if torch.compiler.is_compiling() else current()
    norm: StreamNorm | None = None if context is None else context.stream.pop("norm", None)
    left = None if norm is None else norm.leave(x, change)
    if context is None or left is None:
        return x + change
    context.stream["sum"] = left
    return left.h


def _taken(x: Tensor) -> "LeftSum | None":
    """The sum that the block before has left, which is x; None: there is none."""
    context = None if torch.compiler.is_compiling() else current()
    left: LeftSum | None = None if context is None else context.stream.pop("sum", None)
    if left is not None and left.h is not x and not left.h.is_set_to(x):
        raise RuntimeError(
            "a block has left its sum to the norm of the next block, which is called with "
            "another tensor: something "
            "reads or copies the stream between the two, before it is written. Let it be a "
            "forward hook of a block, "
            "with which torch adds, or use train.kernels=torch"
        )
    return left
