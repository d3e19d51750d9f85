"""Context parallelism: ranks that each have a chunk of every sequence.

Of n ranks the one with index r has the tokens r·T/n … (r + 1)·T/n − 1. What acts on each token
alone needs no others.

Attention: before the product of attention the keys and values of all chunks
are gathered along time, as in Llama 3 (arXiv:2407.21783, section 3.3.2); a rank takes those up to
its own last token. They are freed after the product and gathered again in backward. Each rank then
sends every other one the gradients for that one's keys and values, which adds up the chunks' from
the last to the first: the order in which autograd adds those of one process that passes the chunks
one after another. So n ranks have its bits.

Recurrences: ranks gather their states after their chunks, from zeros before them, with the factors
of what was before, and each combines those of the chunks before its own (arXiv:2405.21060, section
8.2). Convolutions of a few taps get the last inputs before a chunk. Those that are as long as the
sequence exchange all tokens of a rank in all channels for all of the sequence in channels of its
own (arXiv:2503.01868).
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
from fp4train.models.common.untraced import untraced
from fp4train.nn.ranks import Ranks


class SequenceRanks:
    """The ranks that share every sequence.

    Args:
        recomputes: whether backward runs the blocks again, so that nothing gathered is kept.
    """

    def __init__(self, ranks: Ranks, *, recomputes: bool) -> None:
        self.ranks = ranks
        self._recomputes = recomputes

    def first(self, x_BT: Tensor) -> int:
        """The position in the whole sequence of the first token of this rank's chunk [B, T, …]."""
        return self.ranks.rank * x_BT.shape[1]

    @untraced
    def whole_rows(self, x_BT: Tensor) -> Tensor:
        """x [B, n·T] of all chunks, without gradients."""
        return self.ranks.gather_rows(x_BT[None]).movedim(0, 1).flatten(1)

    def until_here(self, x_BT: Tensor | None) -> Tensor | None:
        """bool [B, (r + 1)·T]: x of the chunks up to this rank's, from bool [B, T] of each."""
        if x_BT is None:
            return None
        return self.whole_rows(x_BT.byte())[:, : self.first(x_BT) + x_BT.shape[1]].bool()

    @untraced
    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of this rank's queries [B, H, T, E] over the tokens up to each; keys and values
        [B, H', T, E] are those of its chunk.

        Args:
            mask: bool [B, 1, T, (r + 1)·T], of the tokens that each one attends to; None: all.
        """
        again = None
        if torch.is_grad_enabled() and not self._recomputes:
            again = _GatheredAgain(k.detach(), v.detach(), self.ranks)
        keys, values = _joined(_chunks(torch.stack((k, v)), self.ranks, again))
        with nullcontext() if again is None else _freed(keys, values, again):
            if mask is None and self.ranks.rank:
                return widened(attend_last, q, keys, values)
            return attend(q, keys, values, mask, causal=mask is None)

    @untraced
    def window(self, x_BTC: Tensor, size: int) -> Tensor:
        """The `size` inputs [B, size, C] before this rank's chunk x of them; zeros before the first."""
        ends = self._before(x_BTC[:, -size:]).movedim(0, 1).flatten(1, 2)
        return F.pad(ends, (0, 0, size, 0))[:, -size:]

    @untraced
    def entering(self, state: Tensor, decay: Tensor) -> Tensor:
        """The state of a recurrence before this rank's chunk.

        Args:
            state: after this chunk, from zeros before it, [B, H, …].
            decay: the factor of the state before this chunk in that after it, [B, H].
        """
        carried: Tensor
        carried, *chunks = self._before(torch.cat((decay[..., None], state.flatten(2)), 2))
        for chunk in chunks:
            carried = carried * chunk[..., :1] + chunk
        return carried[..., 1:].view_as(state)

    def _before(self, x: Tensor) -> Tensor:
        """Zeros, and x of the chunks before this rank's: [r + 1, …]. On the first rank, too, it
        depends on the gathered chunks: all ranks take part in the backward pass.
        """
        return torch.cat((torch.zeros_like(x)[None], _chunks(x, self.ranks)))[:-1]

    @untraced
    def channels(self, x_BTC: Tensor, unit: int) -> Tensor:
        """x [B, n·T, c] of all tokens in this rank's channels of `unit` elements each, from [B, T, C]
        of its tokens in all channels. The last ranks may have channels of zeros.
        """
        return self._exchanged(self._padded(x_BTC, unit), 2, 1)

    @untraced
    def tokens(self, x_BTC: Tensor, width: int) -> Tensor:
        """x [B, T, width] of this rank's tokens in all channels, from [B, n·T, c] of all tokens in
        its channels.
        """
        return self._exchanged(x_BTC, 1, 2)[..., :width]

    def part(self, x: Tensor, unit: int) -> Tensor:
        """The rows of x for this rank's channels, `unit` of each."""
        padded = self._padded(x.movedim(0, -1), unit)
        return padded.chunk(self.ranks.size, -1)[self.ranks.rank].movedim(-1, 0)

    def _padded(self, x: Tensor, unit: int) -> Tensor:
        return F.pad(x, (0, -x.shape[-1] % (unit * self.ranks.size)))

    def _exchanged(self, x: Tensor, cut: int, joined: int) -> Tensor:
        """The parts of x along `cut` go to the ranks; those from them are joined along `joined`."""
        parts = torch.stack(x.chunk(self.ranks.size, cut))
        parts = _Exchanged.apply(parts, self.ranks)  # type: ignore[no-untyped-call]
        return torch.cat(parts.unbind(), joined)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    sequence: SequenceRanks | None = None,
) -> Tensor:
    """Attention [B, H, T, E] of queries to keys and values [B, H', S, E]; H' divides H.

    Args:
        mask: bool, of the tokens that each one attends to.
        causal: whether those are the ones up to itself.
        sequence: the ranks that have a chunk of every sequence each.
    """
    if sequence is not None:
        return sequence.attended(q, k, v, mask)
    return widened(
        F.scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
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
            self._both = _joined(_gathered(torch.stack(self._own), self._ranks))
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


def _gathered(x: Tensor, ranks: Ranks) -> Tensor:
    """x [r + 1, …] of the chunks up to this rank's."""
    return ranks.gather_rows(x[None])[: ranks.rank + 1]


def _joined(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, (r + 1)·T, E] from [r + 1, 2, B, H, T, E]."""
    keys, values = chunks.movedim(0, 3).flatten(3, 4)
    return keys, values


def _chunks(x: Tensor, ranks: Ranks, again: _GatheredAgain | None = None) -> Tensor:
    """`_gathered`, differentiable."""
    chunks: Tensor = _Gathered.apply(x, ranks, again)  # type: ignore[no-untyped-call]
    return chunks


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, again: _GatheredAgain | None) -> Tensor:
        ctx.ranks = ranks
        ctx.again = again
        return _gathered(x, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        if ctx.again is not None:
            ctx.again.end()
        rank: int = ctx.ranks.rank
        later: int = ctx.ranks.size - rank
        sent = [1] * (rank + 1) + [0] * (later - 1)
        *earlier, total = ctx.ranks.exchange(dx, sent, [0] * rank + [1] * later)
        for chunk in reversed(earlier):
            total = total + chunk
        return total, None, None


class _Exchanged(torch.autograd.Function):
    """Each rank gets the parts [n, …] that the ranks have for it."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        one_each = [1] * ranks.size
        return ranks.exchange(parts, one_each, one_each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, parts: Tensor) -> tuple[Tensor, None]:
        return _Exchanged.forward(ctx, parts, ctx.ranks), None
