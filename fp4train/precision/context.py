"""The context in which linear layers run: which recipe, and the position in the run that keys the random bits.

    with autocast(NVFP4(), policy=LayerPolicy(last=0.15)):
        loss = model(tokens)
    loss.backward()

As with Transformer Engine's autocast, an inner context overrides an outer one, and backward runs outside of it in the
precision of its forward. One thread-local variable holds the state; nothing else is global.

Activation recomputation runs a forward pass inside backward, where the context of the first pass is over. `recompute`,
or torch's own checkpoint with `context_fn=recompute_contexts`, restores it together with what the layers drew in it
(the number of a call, a delayed scale). A layer that is recomputed without its context raises an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch

from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import Recipe

T = TypeVar("T")


class GraphInput(type):
    """Metaclass of objects that compiled graphs take as inputs.

    torch.compile accepts such objects only if their class has a private metaclass of torch's. That one is assigned in
    this one's place when a graph is traced (`compile_opaque`), so that a process that compiles nothing needs no
    private part of torch.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Context(metaclass=GraphInput):
    """What a linear layer needs to know when it runs; see `autocast` for the fields."""

    recipe: Recipe
    policy: LayerPolicy | None = None
    seed: int = 0
    step: int | None = None
    token_offset: int = 0
    shared: dict[str, Any] = field(default_factory=dict, repr=False)
    """What layers that read the same input share in one forward pass; empty again when the context is left."""
    compiled_calls: dict[object, list[Any]] = field(default_factory=dict, repr=False)
    """By layer, its calls out of compiled graphs, which those graphs' recomputations must find again."""

    def activation_dtype(self) -> torch.dtype:
        """In which a model carries its activations."""
        return self.recipe.torch_dtype

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """For the compiler's cache keys, to which all contexts are alike: graphs hold nothing of one but its dtype."""
        return str, (Context.__qualname__,)


class State(NamedTuple):
    """What a thread holds: the context, where it was entered, and the records of recomputed regions around it."""

    context: Context | None = None
    backward: int = -1
    """The backward pass (autograd's graph task) inside of which the context was entered; -1: none."""
    recording: tuple[dict[object, list[object]], ...] = ()
    replaying: dict[object, Iterator[object]] | None = None


_OUTSIDE = State()
_THREAD = threading.local()


def state() -> State:
    """This thread's."""
    if torch.compiler.is_dynamo_compiling():
        _make_opaque()
    found: State = getattr(_THREAD, "state", _OUTSIDE)
    return found


def _make_opaque() -> None:
    """Make contexts inputs of graphs, before the tracer sees the first one, where this torch knows such inputs."""
    from fp4train.precision import compile_context  # noqa: F401


def current() -> Context | None:
    """The innermost enabled context, or None."""
    return state().context


def backward_pass() -> int:
    """The backward pass that is being carried out, or -1."""
    return torch._C._current_graph_task_id()


def is_stray_recomputation(now: State) -> bool:
    """Whether this runs inside a backward pass under a context, or the lack of one, that comes from outside of it."""
    return backward_pass() not in (-1, now.backward)


def once(owner: object, make: Callable[[], T]) -> T:
    """`make()`; when a region is recomputed, what the same call of `owner` made in the first pass."""
    now = state()
    made = make() if now.replaying is None else cast(T, next(now.replaying[owner]))
    for record in now.recording:
        record.setdefault(owner, []).append(made)
    return made


@contextmanager
def _enter(entered: State) -> Iterator[None]:
    outer, _THREAD.state = state(), entered
    try:
        yield
    finally:
        _THREAD.state = outer
        if entered.context is not None:
            entered.context.shared.clear()


@contextmanager
def _use(context: Context | None) -> Iterator[None]:
    with _enter(state()._replace(context=context, backward=backward_pass())):
        yield


def autocast(
    recipe: Recipe,
    *,
    policy: LayerPolicy | None = None,
    enabled: bool = True,
    seed: int = 0,
    step: int | None = None,
    token_offset: int = 0,
) -> AbstractContextManager[None]:
    """Run the fp4train linear layers called inside in `recipe`.

    Args:
        recipe: precision of the three GEMMs.
        policy: which layers keep high precision; None quantises every layer.
        enabled: False runs plain linear layers, whatever an outer context says.
        seed: of stochastic rounding's random bits.
        step: of the optimizer. It keys the random bits, together with the layer and the element's index, so that a
            resumed run draws the same ones; and it promises that weights stay as they are within a step, so that each
            is quantised once however many microbatches there are. None: layers count their calls, and keep nothing.
        token_offset: index within the step's global batch of the first token that the layers will see; makes the random
            bits independent of how a batch is cut into microbatches and spread over ranks, as long as it is a multiple
            of 8 (other offsets draw other bits for wgrad, which are as good).

    Raises:
        TypeError: `recipe` or `policy` is a class or something else than such an object.
    """
    if not isinstance(recipe, Recipe):
        hint = f"{recipe.__name__}()" if isinstance(recipe, type) else "a recipe object such as NVFP4()"
        raise TypeError(f"autocast needs {hint}, not {recipe!r}")
    if policy is not None and not isinstance(policy, LayerPolicy):
        raise TypeError(f"autocast's policy is a LayerPolicy object or None, not {policy!r}")
    context = Context(recipe=recipe, policy=policy, seed=seed, step=step, token_offset=token_offset)
    return _use(context if enabled else None)


def activation_dtype(default: torch.dtype) -> torch.dtype:
    """The dtype in which a model carries its activations here: the current recipe's, or `default` outside autocast."""
    context = current()
    return default if context is None else context.activation_dtype()


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a region's first pass and of its recomputation: `context_fn` of `torch.utils.checkpoint`.

    Hugging Face: `model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})`.
    """
    outer = state()
    record: dict[object, list[object]] = {}

    @contextmanager
    def again() -> Iterator[None]:
        replaying = {owner: iter(calls) for owner, calls in record.items()}
        # `recording` starts anew: the outer regions are over, or are being recomputed around this one.
        with _enter(outer._replace(backward=backward_pass(), recording=(), replaying=replaying)):
            yield

    return _enter(outer._replace(recording=(*outer.recording, record))), again()


def recompute(function: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    """`function(*args)`, keeping only `args` for backward, which computes the activations again.

    This is `torch.utils.checkpoint` whose recomputation sees the context of the forward pass: the activations have the
    bits of the first ones, stochastic rounding and dropout included. Under torch.compile the region is a graph of its
    own.
    """
    if torch.compiler.is_dynamo_compiling():
        from fp4train.precision import untraced

        result: torch.Tensor = untraced.recompute(function, *args)
        return result
    return recompute_eagerly(function, *args)


def recompute_eagerly(function: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    """`recompute`, outside of torch.compile."""
    from torch.utils.checkpoint import checkpoint

    result = checkpoint(function, *args, use_reentrant=False, context_fn=recompute_contexts)
    assert isinstance(result, torch.Tensor)
    return result
