"""Recomputation of activations: a forward pass that runs again inside backward, after the context of
the first pass has ended.

`recompute` (`recompute.py`), or `torch.utils.checkpoint` with `context_fn=recompute_contexts`,
restores that context and what each layer took from it in the first pass (its call number, its
delayed scales). A layer that is recomputed without its context raises an error.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from fp4train.precision.context import Region, State, backward_pass, current, state
from fp4train.precision.replay import ReplayRecord, replay_of

T = TypeVar("T")


def is_stray_recomputation(now: State) -> bool:
    """Whether a backward pass is running and the current state (a context or none) was set outside
    it.
    """
    return backward_pass() not in (-1, now.backward)


def once(owner: object, make: Callable[[], T]) -> T:
    """See `Replay.once`, of this thread."""
    return state().replay.once(owner, make)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a region's first pass and of its recomputation: `context_fn` of
    `torch.utils.checkpoint`.

    Hugging Face: `model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn":
        recompute_contexts})`.
    """
    outer = state()
    record: ReplayRecord = {}

    def first_pass(_: State) -> State:
        return outer._replace(replay=outer.replay.recorded(record))

    def second_pass(_: State) -> State:
        return outer._replace(backward=backward_pass(), replay=replay_of(record))

    return Region(first_pass), Region(second_pass)


def recompute_eagerly(function: Callable[..., T], *args: object) -> T:
    """`recompute` outside torch.compile.

    With `counters` the state of torch's generator, which the host would read, is left alone: see
    `autocast`.
    """
    from torch.utils.checkpoint import checkpoint

    context = current()
    kept = context is None or context.position.counters is None
    options: dict[str, Any] = {
        "use_reentrant": False,
        "context_fn": recompute_contexts,
        "preserve_rng_state": kept,
    }
    return cast(T, checkpoint(function, *args, **options))
