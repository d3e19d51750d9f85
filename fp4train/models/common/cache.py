"""The cache of the tokens that a model has seen, so that the tokens after them need not run these
again.

`model(tokens_BT, cache=cache)` returns the logits of the tokens that follow those in the cache, and
adds them to it. The same tokens without a cache give the same logits, but for the order of sums;
where a scale of the recipe covers all tokens of a call (NVFP4's global scale of the activations),
it covers fewer of them, and other values round.

A family says in `fp4train_cache` what each of its blocks keeps: attention keeps keys and values
(`KeyValues`), a recurrence keeps its state. All sequences of a batch have the same length, so that
no block sees padding.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


class KeyValues:
    """Keys and values of one attention layer for up to `length` tokens: [B, kv_heads, length, E]
    each.

    Their memory has the dtype and device of the first ones and is taken when these come.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen = 0
        self._held: tuple[Tensor, ...] = ()

    def extended(self, k_BHTE: Tensor, v_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """(Keys, values) of all tokens [B, kv_heads, S, E], the given ones last."""
        batch, heads, time, _ = k_BHTE.shape
        if not self._held:
            self._held = tuple(
                x.new_empty((batch, heads, self.length, x.shape[-1])) for x in (k_BHTE, v_BHTE)
            )
        start = self.seen
        self.seen = self.seen + time
        for stored, new in zip(self._held, (k_BHTE, v_BHTE), strict=True):
            stored[:, :, start : self.seen] = new
        keys, values = (stored[:, :, : self.seen] for stored in self._held)
        return keys, values


@dataclass
class DecodeCache:
    """The caches of a model's blocks.

    Args:
        blocks: caches of the blocks, in order.
        seen: tokens of each sequence so far.
    """

    blocks: list[Any]
    seen: int = field(default=0, init=False)


@runtime_checkable
class Cached(Protocol):
    """A model that goes on from a cache. Its forward pass takes `cache=` and raises its `seen`."""

    seq_len: int

    def fp4train_cache(self, length: int) -> DecodeCache:
        """An empty cache for sequences of up to `length` tokens."""


def seen_mask(time: int, seen: int, device: torch.device) -> Tensor | None:
    """Mask of the keys that the last `time` queries attend to, bool [time, seen]; None: all, or all
    before each query where no key is older (causal attention).
    """
    if time in (1, seen):
        return None
    return torch.ones(time, seen, dtype=torch.bool, device=device).tril(seen - time)
