"""The context in which linear layers run: which recipe, and the position in the run that keys the random bits.

    with autocast(NVFP4(), policy=LayerPolicy(last=0.15)):
        loss = model(tokens)
    loss.backward()

As with Transformer Engine's autocast, an inner context overrides an outer one, and backward runs outside of it in the
precision of its forward. One thread-local variable holds the state; nothing else is global.

Activation recomputation runs a forward pass inside backward, where the context of the first one is over. `checkpoint`,
or torch's own with `context_fn=checkpoint_contexts`, brings it back together with what the layers drew in it (the
number of a call, a delayed scale); a layer that is recomputed without it raises instead of computing something else.

To torch.compile a context is an opaque object that a graph takes as an input: a graph reads the context that is current
when it runs, and holds for others whose `activation_dtype` is the same. The graph's backward has that input too, so
that what it recomputes needs nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch._compile import _disable_dynamo
from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBase

from fp4train.precision.layers import Layer
from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import Recipe

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Context(OpaqueBase):
    """What a linear layer needs to know when it runs; see `autocast` for the fields."""

    recipe: Recipe
    policy: LayerPolicy | None = None
    seed: int = 0
    step: int | None = None
    token_offset: int = 0
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What layers leave for the next ones of the same forward pass; empty again when the context is left."""
    compiled_calls: dict[object, list[Any]] = field(default_factory=dict, repr=False, compare=False)
    """By layer, its calls out of compiled graphs, which those graphs' recomputations must find again."""
    _recipes: dict[Layer, Recipe] = field(default_factory=dict, repr=False, compare=False)

    def recipe_for(self, layer: Layer) -> Recipe:
        """The recipe of `layer` here: the context's, or the policy's for kept layers.

        Raises:
            ValueError: a pattern of the policy matches no layer of the model.
        """
        if self.policy is None:
            return self.recipe
        if layer not in self._recipes:
            if not self._recipes and layer.names:
                self.policy.check(layer.names)
            self._recipes[layer] = self.policy.recipe_for(layer, self.recipe)
        return self._recipes[layer]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """For the compiler's cache keys, to which all contexts are alike: graphs hold nothing of one but its dtype."""
        return str, (Context.__qualname__,)

    def activation_dtype(self) -> torch.dtype:
        """In which a model carries its activations."""
        return self.recipe.torch_dtype


register_opaque_type(
    Context,
    typ="reference",
    guard_fn=lambda context: [context.activation_dtype()],
    members={"activation_dtype": MemberType.USE_REAL},
)


class _State(NamedTuple):
    """What a thread holds: the context, where it was entered, the memory of checkpointed regions around it."""

    context: Context | None = None
    backward: int = -1
    """The backward pass (autograd's graph task) inside of which the context was entered; -1: none."""
    recording: tuple[dict[object, list[object]], ...] = ()
    replaying: dict[object, Iterator[object]] | None = None


_OUTSIDE = _State()
_THREAD = threading.local()


def _current() -> _State:
    state: _State = getattr(_THREAD, "state", _OUTSIDE)
    return state


def current() -> Context | None:
    """The innermost enabled context, or None."""
    return _current().context


def _backward() -> int:
    """The backward pass that is being carried out, or -1."""
    return torch._C._current_graph_task_id()


def in_stray_recomputation() -> bool:
    """Whether this runs inside a backward pass under a context, or the lack of one, that comes from outside of it."""
    return _backward() not in (-1, _current().backward)


def once(owner: object, make: Callable[[], T]) -> T:
    """`make()`; when a checkpointed region is recomputed, what the same call of `owner` made in the first pass."""
    state = _current()
    made = make() if state.replaying is None else cast(T, next(state.replaying[owner]))
    for record in state.recording:
        record.setdefault(owner, []).append(made)
    return made


@contextmanager
def _enter(state: _State) -> Iterator[None]:
    outer, _THREAD.state = _current(), state
    try:
        yield
    finally:
        _THREAD.state = outer
        if state.context is not None:
            state.context.memo.clear()


@contextmanager
def _use(context: Context | None) -> Iterator[None]:
    with _enter(_current()._replace(context=context, backward=_backward())):
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


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a region's first pass and of its recomputation: `context_fn` of torch's `checkpoint`.

    Hugging Face: `model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": checkpoint_contexts})`.
    """
    outer = _current()
    record: dict[object, list[object]] = {}

    @contextmanager
    def again() -> Iterator[None]:
        replaying = {owner: iter(calls) for owner, calls in record.items()}
        # `recording` starts anew: the outer regions are over, or are being recomputed around this one.
        with _enter(outer._replace(backward=_backward(), recording=(), replaying=replaying)):
            yield

    return _enter(outer._replace(recording=(*outer.recording, record))), again()


@_disable_dynamo(recursive=False)
def checkpoint(function: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    """`torch.utils.checkpoint` whose recomputation, which runs in backward, sees the context of the forward pass.

    The recomputed activations then have the bits of the first ones, stochastic rounding and dropout included. Under
    torch.compile the region is a graph of its own.
    """
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    result = torch_checkpoint(function, *args, use_reentrant=False, context_fn=checkpoint_contexts)
    assert isinstance(result, torch.Tensor)
    return result
