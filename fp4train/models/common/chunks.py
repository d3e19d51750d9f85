"""Context parallelism: ranks that each have a chunk of every sequence.

Of n ranks the one with index r has the tokens r·T/n … (r + 1)·T/n − 1. All parts of a model but
attention act on each token alone. Before the product of attention the keys and values of all chunks
are gathered along time, as in Llama 3 (arXiv:2407.21783, section 3.3.2); a rank takes those up to
its own last token. They are freed after the product and gathered again in backward. Each rank then
sends every other one the gradients for that one's keys and values, which adds up the chunks' from
the last to the first: the order in which autograd adds those of one process that passes the chunks
one after another. So n ranks have its bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import widened
from fp4train.models.common.lower_right import attend_last
from fp4train.nn.ranks import Ranks


class SequenceRanks:
    """The ranks that share every sequence.

    Args:
        recomputes: whether backward runs the blocks again, so that nothing gathered is kept.
    """

    def __init__(self, ranks: Ranks, *, recomputes: bool) -> None:
        self.ranks = ranks
        self._recomputes = recomputes

    def until_here(self, x_BT: Tensor | None) -> Tensor | None:
        """bool [B, (r + 1)·T]: x of the chunks up to this rank's, from bool [B, T] of each."""
        if x_BT is None:
            return None
        chunks = self.ranks.gather_rows(x_BT.byte()[None])[: self.ranks.rank + 1]
        return chunks.movedim(0, 1).flatten(1).bool()

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of this rank's queries [B, H, T, E] over the tokens up to each; keys and values
        [B, H', T, E] are those of its chunk.

        Args:
            mask: bool [B, 1, T, (r + 1)·T], of the tokens that each one attends to; None: all.
        """
        if torch.compiler.is_dynamo_compiling():
            from fp4train.precision import compile_context

            compiled: Tensor = compile_context.call(self._attended, q, k, v, mask)
            return compiled
        return self._attended(q, k, v, mask)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        again = None
        if torch.is_grad_enabled() and not self._recomputes:
            again = _GatheredAgain(k.detach(), v.detach(), self.ranks)
        keys, values = _Gathered.apply(k, v, self.ranks, again)  # type: ignore[no-untyped-call]
        with nullcontext() if again is None else _freed(keys, values, again):
            if mask is None and self.ranks.rank:
                return widened(attend_last, q, keys, values)
            return widened(
                F.scaled_dot_product_attention,
                q,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=q.shape[1] != k.shape[1],
            )


class _GatheredAgain:
    """Keys (0) or values (1) of all chunks for one backward pass, in whatever order an operator asks
    for them, until its `end`. They are gathered once, also where the operator of this rank kept other
    tensors: those of other ranks, which have no masks or other ones, may ask.
    """

    def __init__(self, k: Tensor, v: Tensor, ranks: Ranks) -> None:
        self._own = (k, v)
        self._ranks = ranks
        self._both: tuple[Tensor, Tensor] | None = None

    def __call__(self, which: int) -> Tensor:
        if self._both is None:
            self._both = _gathered(*self._own, self._ranks)
        return self._both[which]

    def end(self) -> None:
        self(0)
        self._both = None


@contextmanager
def _freed(keys: Tensor, values: Tensor, again: _GatheredAgain) -> Iterator[None]:
    """A context of the product, which keeps `again` in place of the gathered keys and values."""
    kind = keys.shape, keys.dtype
    gathered = weakref.ref(keys), weakref.ref(values)  # what autograd keeps may have `pack`

    def pack(x: Tensor) -> Tensor | Callable[[], Tensor]:
        if (x.shape, x.dtype) == kind:
            for which, reference in enumerate(gathered):
                if (tensor := reference()) is not None and x.is_set_to(tensor):
                    return partial(again, which)
        return x

    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _gathered(k: Tensor, v: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, (r + 1)·T, E] of the chunks up to this rank's."""
    chunk = torch.stack((k, v))
    chunks = ranks.gather_rows(chunk).view(ranks.size, *chunk.shape)
    keys, values = chunks[: ranks.rank + 1].movedim(0, 3).flatten(3, 4)
    return keys, values


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, ranks: Ranks, again: _GatheredAgain | None
    ) -> tuple[Tensor, Tensor]:
        ctx.ranks = ranks
        ctx.again = again
        return _gathered(k, v, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.again is not None:
            ctx.again.end()
        rank: int = ctx.ranks.rank
        later: int = ctx.ranks.size - rank
        chunks = torch.stack(torch.stack((dk, dv)).chunk(rank + 1, 3))
        sent = [1] * (rank + 1) + [0] * (later - 1)
        *earlier, total = ctx.ranks.exchange(chunks, sent, [0] * rank + [1] * later)
        for chunk in reversed(earlier):
            total = total + chunk
        return total[0], total[1], None, None
