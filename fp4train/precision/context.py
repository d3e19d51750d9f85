"""The autocast context: the recipe that linear layers run in, and the position that keys the random
bits.

    with autocast(NVFP4(), policy=LayerPolicy(last=0.15)):
        loss = model(tokens)
    loss.backward()

As with Transformer Engine's autocast, an inner context overrides an outer one. Backward runs
outside the context, in the precision of its forward. The state is one thread-local variable; there
is no other global state.

A forward pass that is recomputed inside backward has the context of the first pass again
(`recomputation.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import Recipe
from fp4train.precision.replay import NO_REPLAY, Replay
from fp4train.precision.settings import Context as Context, Counts
from fp4train.quantize import Position, RunStep

_log = logging.getLogger(__name__)


class State(NamedTuple):
    """The state of one thread: the context, and where it was entered."""

    context: Context | None = None
    backward: int = -1
    """The backward pass (autograd's graph task) inside which the context was entered; -1: none."""
    replay: Replay = NO_REPLAY
    """What layers take from the context in regions that are recomputed."""
    outer: State | None = None
    """The state that `pop` restores; None: no `push` is open."""


_OUTSIDE = State()
_THREAD = threading.local()


def state() -> State:
    """The state of this thread."""
    if torch.compiler.is_dynamo_compiling():
        # Contexts become graph inputs before the tracer meets the first one, if this torch supports
        # that.
        from fp4train.precision import compile_context  # noqa: F401
    current: State = getattr(_THREAD, "state", _OUTSIDE)
    return current


def current() -> Context | None:
    """The innermost enabled context, or None."""
    return state().context


backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the running backward pass, or -1; torch has no public function for it."""


class Region(ContextDecorator):
    """A region of this thread in the state `entered(the state around it)`. A class, since
    `autocast` is entered in each forward pass, and a generator of contextlib takes several times as
    long.

    Args:
        watched: whether its end is that of a region of `autocast` (`_watched`).
    """

    def __init__(self, entered: Callable[[State], State], *, watched: bool = False) -> None:
        self._entered = entered
        self._watched = watched
        self._open: dict[int, list[tuple[State, State]]] = {}
        """Threads that are in it, which threads that share it (those of a decorated function) do
        not leave in turn.
        """

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            from fp4train.precision import compile_context

            compile_context.call(self.__enter__)
            return
        outer = state()
        _THREAD.state = entered = self._entered(outer)
        self._open.setdefault(threading.get_ident(), []).append((outer, entered))

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            from fp4train.precision import compile_context

            compile_context.call(self.__exit__, error)
            return
        thread = threading.get_ident()
        outer, entered = self._open[thread].pop()
        if not self._open[thread]:
            del self._open[thread]
        _THREAD.state = outer
        context = entered.context
        if context is not None:
            context.forget()
            if (
                self._watched
                and context.called_layers is not None
                and outer.context is None
                and error is None
            ):
                _judge(context, context.called_layers)


def use(context: Context | None) -> AbstractContextManager[None]:
    """Run layers in `context`, without what `autocast` checks."""
    return Region(partial(_within, context))


def _within(context: Context | None, outer: State) -> State:
    return State(context, backward_pass(), outer.replay, outer.outer)


def push(context: Context | None) -> None:
    """Run layers in `context` until `pop`: for hooks, which are two calls and no region."""
    now = state()
    _THREAD.state = now._replace(context=context, backward=backward_pass(), outer=now)


def pop() -> None:
    """Restore what was before the last `push`."""
    now = state()
    if now.outer is not None:
        _THREAD.state = now.outer
        if now.context is not None and now.context is not now.outer.context:
            now.context.forget()


def _watched(context: Context, outer: State) -> State:
    """`_within`; the layers of a thread's first outermost region of a recipe and policy note
    whether they quantise.
    """
    called_layers = None if outer.context is None else outer.context.called_layers
    judged = _THREAD.__dict__.setdefault("judged", set())
    if (
        outer.context is None
        and (context.recipe, context.policy) not in judged
        and context.recipe.quantised
    ):
        called_layers = {}
    return _within(
        context if called_layers is None else replace(context, called_layers=called_layers), outer
    )


def _judge(context: Context, called_layers: dict[object, bool]) -> None:
    """Warn, at the end of an outermost region whose layers noted it, if none of them quantises."""
    _THREAD.judged.add((context.recipe, context.policy))
    if any(called_layers.values()):
        return
    why = (
        "no fp4train layer ran in it; fp4train.convert(model) makes them, "
        "fp4train.conversion(model) lists the others"
    )
    if called_layers:
        kept = f"the policy keeps every layer that ran ({len(called_layers)}) in high precision"
        why = f"{kept}; LayerPolicy(last=0) keeps fewer"
    _log.warning("autocast(%s): nothing is quantised: %s", type(context.recipe).__name__, why)


def autocast(
    recipe: Recipe,
    *,
    policy: LayerPolicy | None = None,
    enabled: bool = True,
    seed: int = 0,
    step: int | None = None,
    token_offset: int | None = None,
    counters: torch.Tensor | None = None,
) -> AbstractContextManager[None]:
    """Run the fp4train linear layers called inside in `recipe`.

    One warning is logged when the first region of a recipe and policy ends and no layer in it was
    quantised.

    Args:
        recipe: precision of the three GEMMs.
        policy: which layers keep high precision; None quantises every layer.
        enabled: False runs plain linear layers, also inside an outer context.
        seed: seed of the random bits of stochastic rounding.
        step: optimizer step. It keys the random bits, together with the layer and the element's
            index, so a resumed run draws the same bits. None: layers count their calls, and draw
            other bits in each.
        token_offset: index of the first token in the global batch of the step. It makes the random
            bits independent of how the batch is split into microbatches and over ranks, if it is a
            multiple of 8. Other offsets draw different bits for wgrad, equally random. None: a
            layer counts its tokens within a step, so microbatches under the same `step` draw
            different bits, as with their offsets. Calls without gradients draw the bits of the
            first tokens and are not counted. 0 in each call repeats the bits; ranks with data of
            their own need offsets of their own.
        counters: `step` on the device, for a pass that is recorded as a CUDA graph and replayed
            with other steps (`quantize.random.write_step_counters`). Regions that are recomputed
            must draw nothing from torch's generator then (dropout), whose state no graph can read.

    Raises:
        TypeError: `recipe` is not a Recipe object, or `policy` is not a LayerPolicy object.
    """
    if not isinstance(recipe, Recipe):
        if isinstance(recipe, type):
            hint = f"{recipe.__name__}()"
        else:
            hint = "a recipe object such as NVFP4()"
        raise TypeError(f"autocast needs {hint}, not {recipe!r}")
    if policy is not None and not isinstance(policy, LayerPolicy):
        raise TypeError(f"autocast's policy is a LayerPolicy object or None, not {policy!r}")
    place = (seed, step, token_offset, counters)
    if torch.compiler.is_dynamo_compiling():
        from fp4train.precision import compile_context

        region: AbstractContextManager[None]
        region = compile_context.call(_region, recipe, policy, enabled, *place)
        return region
    return _region(recipe, policy, enabled, *place)


def _region(
    recipe: Recipe,
    policy: LayerPolicy | None,
    enabled: bool,
    seed: int,
    step: int | None,
    token_offset: int | None,
    counters: torch.Tensor | None,
) -> AbstractContextManager[None]:
    """The region of `autocast`, whose arguments it takes."""
    if not enabled:
        return use(None)
    counts: Counts = "nothing"
    if step is None:
        counts = "calls"
    elif token_offset is None:
        counts = "tokens"
    position = Position(RunStep(seed, step or 0), token_offset or 0, counters)
    context = Context(recipe=recipe, policy=policy, position=position, counts=counts)
    return Region(partial(_watched, context), watched=True)


def activation_dtype(default: torch.dtype) -> torch.dtype:
    """The dtype in which a model carries its activations: that of the current recipe, or `default`
    outside autocast.
    """
    context = current()
    if context is None:
        return default
    return context.activation_dtype()


def auxiliary() -> float:
    """The factor of a loss that a part of a model has of its own in the current pass; 0: it is no
    pass of training.
    """
    context = current()
    return 0.0 if context is None else context.auxiliary
