"""Faults planted into a live run elsewhere than in operands and products: in its weights and moments,
its steps, its plan, its checkpoints. `audit_planting` has those of operands and products.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import adam as adam_module

import fp4train.train as loop
from fp4train.data.stream import Rows
from fp4train.hardware import Device
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.weights import PreparedWeights
from fp4train.optim import Constants
from fp4train.precision.layer_plan import resolve
from fp4train.run import step as run_step
from fp4train.run.step import EagerSteps
from fp4train.run.supervise import sums
from fp4train.run.supervise.run_audits import RunAudits
from fp4train.run.supervise.saving import Saver

STEP = 4
"""Step after or in which faults that happen once do."""

Plant = Callable[[], AbstractContextManager[Any]]


# -- faults of programs that are planted elsewhere than in operands --------------------------------


@contextmanager
def rounded_weights() -> Iterator[None]:
    """Weights arrive in BF16."""
    prepared = PreparedWeights.prepared

    def form(weights: PreparedWeights, w_NK: Tensor, *more: Any, **options: Any) -> Any:
        return prepared(PreparedWeights(False), w_NK.bfloat16().float(), *more, **options)

    with mock.patch.object(PreparedWeights, "prepared", form):
        yield


@contextmanager
def after_step(act: Callable[[Any], None], step: int = STEP) -> Iterator[None]:
    """`act(run)` is called when the run has done so many steps."""
    original = loop.train_step

    def train_step(run: Any, recipe: Any) -> Any:
        queued = original(run, recipe)
        if run.step + 1 == step:
            act(run)
        return queued

    with mock.patch.object(loop, "train_step", train_step):
        yield


@contextmanager
def small_blocks(plant: Plant) -> Iterator[None]:
    """The fault, in a model whose norms make one block of x too small for a scale."""
    original = loop.train_step

    def train_step(run: Any, recipe: Any) -> Any:
        for name, parameter in run.model.named_parameters():
            if name.endswith("norm.weight"):
                with torch.no_grad():
                    parameter[:16] = 1e-8
        return original(run, recipe)

    with plant(), mock.patch.object(loop, "train_step", train_step):
        yield


def bypass(run: Any) -> None:
    """A layer's weight is multiplied by other code from now on."""
    layer = run.planned_layers[2]
    layer.forward = lambda x: F.linear(x, layer.weight.to(x.dtype))


@contextmanager
def without_policy() -> Iterator[None]:
    """The layers that the policy keeps are quantised."""
    original = PlannedLayer.apply_plan

    def apply_plan(layer: Any, plan: Any, recipe: Any, policy: Any, device: Any) -> None:
        other = resolve(layer.layer, recipe, None, layer.backend, Device.of(device))
        original(layer, other, recipe, policy, device)

    with mock.patch.object(PlannedLayer, "apply_plan", apply_plan):
        yield


# -- faults of memory, which happen once -----------------------------------------------------------


def flip(tensor: Tensor, bit: int, place: int | None = None) -> None:
    """Change one bit of an element of a float32 tensor; None: of the middle one."""
    bits = tensor.detach().view(torch.int32).view(-1)
    mask = 1 << bit if bit < 31 else -(1 << 31)
    bits[len(bits) // 2 if place is None else place] ^= mask


def weight(run: Any) -> Tensor:
    """A weight of a layer: of experts where the model has some."""
    layers = [layer for layer in run.planned_layers if layer.layer.experts] or run.planned_layers
    tensor: Tensor = layers[1].weight
    return tensor


def norm_weight(run: Any) -> Tensor:
    tensor: Tensor = next(p for name, p in run.model.named_parameters() if "norm" in name)
    return tensor


def moment(run: Any) -> Tensor:
    tensor: Tensor = run.optimizer.state[weight(run)]["exp_avg"]
    return tensor


def flipped(bit: int, of: Callable[[Any], Tensor] = weight) -> Plant:
    return lambda: after_step(lambda run: flip(of(run), bit))


def filled(value: float, of: Callable[[Any], Tensor] = weight) -> Plant:
    def fill(run: Any) -> None:
        with torch.no_grad():
            of(run).view(-1)[5] = value

    return lambda: after_step(fill)


def zeroed_moment() -> AbstractContextManager[None]:
    def zero(run: Any) -> None:
        moment(run).zero_()

    return after_step(zero)


@contextmanager
def left_out() -> Iterator[None]:
    """The optimizer's update of one step is left out."""
    original = run_step.step_unless
    calls: list[int] = []

    def step_unless(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) != STEP:
            original(*arguments)

    with mock.patch.object(run_step, "step_unless", step_unless):
        yield


@contextmanager
def copied_wrongly(kind: str) -> Iterator[None]:
    """A bit of the copy that becomes a checkpoint is flipped."""
    original = Saver._copy

    def copy(saver: Saver, parts: Any) -> Any:
        copies = original(saver, parts)
        if saver.run.step == 6:
            name = next(name for name in copies if name.startswith(kind))
            flip(copies[name].tensor, 20)
        return copies

    with mock.patch.object(Saver, "_copy", copy):
        yield


@contextmanager
def in_one_computation(
    plant: Callable[[Any], AbstractContextManager[Any]], index: int = STEP
) -> Iterator[None]:
    """The fault of a run acts the first time that the step of this index is computed, and never
    again.
    """
    original = EagerSteps.step
    done: list[int] = []

    def step(runner: EagerSteps, recipe: Any, rows: Any) -> Any:
        if runner.run.step != index or done:
            return original(runner, recipe, rows)
        done.append(1)
        with plant(runner.run):
            return original(runner, recipe, rows)

    with mock.patch.object(EagerSteps, "step", step):
        yield


@contextmanager
def higher_rate() -> Iterator[None]:
    """The rate of one step is ten times too high."""
    original = run_step.step_unless
    calls: list[int] = []

    def step_unless(optimizer: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == STEP:
            for group in optimizer.param_groups:
                group["lr"] *= 10
        original(optimizer, *arguments)

    with mock.patch.object(run_step, "step_unless", step_unless):
        yield


@contextmanager
def other_token() -> Iterator[None]:
    """One token of one batch is another one, whenever it is read."""
    original = run_step.microbatch

    def microbatch(run: Any, recipe: Any, rows: Rows, **options: Any) -> Any:
        tokens, targets = rows
        if run.step == STEP:
            tokens = tokens.clone()
            tokens[0, 3] = (tokens[0, 3] + 1) % 100
        return original(run, recipe, (tokens, targets), **options)

    with mock.patch.object(run_step, "microbatch", microbatch):
        yield


# -- faults of optimizers and of the accumulation of gradients -------------------------------------


@contextmanager
def _kernel(change: Callable[[list[Any], dict[str, Any]], None]) -> Iterator[None]:
    """The kernel of AdamW gets lists and options that `change` has changed."""
    original = adam_module.adam

    def adam(*lists: Any, **options: Any) -> None:
        counts = lists[5]
        after = [count + 1 for count in counts]
        changed = [*lists]
        change(changed, options)
        original(*changed, **options)
        for count, value in zip(counts, after, strict=True):
            count.copy_(value)

    with mock.patch.object(adam_module, "adam", adam):
        yield


def option(name: str, change: Callable[[Any], Any]) -> Plant:
    def changed(lists: list[Any], options: dict[str, Any]) -> None:
        options[name] = change(options[name])

    return lambda: _kernel(changed)


def _instead(at: int, change: Callable[[Tensor], Tensor]) -> Plant:
    """The kernel gets other tensors in its list of this number."""

    def changed(lists: list[Any], options: dict[str, Any]) -> None:
        lists[at] = [change(tensor) for tensor in lists[at]]

    return lambda: _kernel(changed)


def _without_first(lists: list[Any], options: dict[str, Any]) -> None:
    lists[:] = [tensors[1:] for tensors in lists]


def _step(name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Plant:
    """A function of `run/step.py` is replaced."""
    return lambda: mock.patch.object(run_step, name, replacement(getattr(run_step, name)))


def _at_microbatches(change: Callable[[Tensor], object]) -> Plant:
    """The gradients so far change where a microbatch begins."""

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def microbatch(run: Any, *arguments: Any, **options: Any) -> Any:
            for parameter in run.model.parameters():
                if parameter.grad is not None:
                    change(parameter.grad)
            return original(run, *arguments, **options)

        return microbatch

    return _step("microbatch", replacement)


def _larger_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def gradient_norms(gradients: Any, *arguments: Any) -> Any:
        torch._foreach_mul_(gradients, 1.5)
        return original(gradients, *arguments)

    return gradient_norms


def _clip_at_twice(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(optimizer: Any, gradients: Any, most: float, *more: Any, **options: Any) -> Any:
        return original(optimizer, gradients, 2 * most, *more, **options)

    return clip


def _twice(original: Callable[..., Any]) -> Callable[..., Any]:
    def step_unless(*arguments: Any) -> None:
        original(*arguments)
        original(*arguments)

    return step_unless


def _embedding_spared() -> AbstractContextManager[Any]:
    original = Constants.groups

    def groups(optim: Any, parameters: Iterable[Any], spared: Any = ()) -> Any:
        embedding, *others = parameters
        return original(optim, (embedding, *others), {*spared, embedding})

    return mock.patch.object(Constants, "groups", groups)


def _kept_gradients() -> AbstractContextManager[Any]:
    return mock.patch.object(torch.optim.Optimizer, "zero_grad", lambda *_, **options: None)


UPDATE = "is not that of optim and schedule"
GRADIENT = "another gradient than the clipped sum"
UPDATE_FAULTS: dict[str, tuple[Plant, str]] = {
    "no weight decay": (option("weight_decay", lambda decay: 0.0), UPDATE),
    "ten times the weight decay": (option("weight_decay", lambda decay: 10 * decay), UPDATE),
    "weight decay of norms": (option("weight_decay", lambda decay: 0.1), UPDATE),
    "weight decay in the gradient": (option("decoupled_weight_decay", lambda _: False), UPDATE),
    "another first beta": (option("beta1", lambda beta: 0.8), UPDATE),
    "another second beta": (option("beta2", lambda beta: 0.999), UPDATE),
    "another eps": (option("eps", lambda eps: 1e-3), UPDATE),
    "another rate in the kernel": (option("lr", lambda rate: 1.5 * rate), UPDATE),
    "no bias correction": (_instead(5, lambda count: count + 1000), UPDATE),
    "a second moment that stays": (_instead(3, Tensor.clone), UPDATE),
    "every update twice": (_step("step_unless", _twice), UPDATE),
    "no weight decay of the embedding": (_embedding_spared, UPDATE),
    "a weight never updated": (lambda: _kernel(_without_first), "did not change it"),
    "no clipping": (_step("clip", lambda _: lambda *arguments, **options: None), GRADIENT),
    "clipping at twice the norm": (_step("clip", _clip_at_twice), GRADIENT),
    "the last microbatch alone": (_at_microbatches(Tensor.zero_), GRADIENT),
    "the first microbatch twice": (_at_microbatches(lambda sums: sums.mul_(2)), GRADIENT),
    "gradients times 1.5": (_step("gradient_norms", _larger_gradients), GRADIENT),
    "gradients of the step before": (_kept_gradients, GRADIENT),
    "a loss that is not divided": (
        _step("microbatch_share", lambda original: lambda run: 2 * original(run)),
        "",
    ),
}
"""Fault → (what plants it, words of what finds it; empty: nothing does)."""


# -- bits that flip at random moments --------------------------------------------------------------


@dataclass
class Moment:
    """A bit that flips at a moment uniform in the wall time of a step.

    Args:
        share: its place in that time, from 0 to 1.
        draw: numbers that choose tensor, byte and bit.
        tensor: path of the tensor, once it has flipped.
        step: optimizer steps done when it flipped.
        hidden: whether that was in an update, between the sums before it and those after it.
    """

    share: float
    draw: random.Random
    tensor: str = ""
    step: int = -1
    hidden: bool = False


@contextmanager
def flips_at(moments: list[Moment]) -> Iterator[None]:
    """A timer flips one bit after another, as memory does: no operation of torch writes it. After
    the step that follows the state is put back, and audits are given its sums.
    """
    original = loop.train_step
    before, after = sums.StateSums._before_update, sums.StateSums.after_step
    begun: list[Moment] = []
    began: list[float] = []
    copies: dict[str, Tensor] = {}
    updating = threading.Event()  # from the sums before an update to the end of those after it

    def before_update(audits: Any, versions: Any) -> None:
        updating.set()
        before(audits, versions)

    def after_step(audits: Any, step: Any) -> Any:
        faults = after(audits, step)
        updating.clear()
        return faults

    def begin(run: Any, moment: Moment) -> None:
        state = sums._stored(run)
        if copies:
            with torch.no_grad():
                for name, tensor in state.items():
                    tensor.copy_(copies[name])
            run.companions.of(RunAudits).sums._after = sums.state_sums(run)
        copies.update({name: tensor.detach().clone() for name, tensor in state.items()})
        usual = statistics.median(b - a for a, b in itertools.pairwise(began[-6:]))
        threading.Timer(moment.share * usual, _flip_in, (run, state, moment, updating)).start()

    def train_step(run: Any, recipe: Any) -> Any:
        began.append(time.perf_counter())
        waits = begun and not (begun[-1].tensor and run.step >= begun[-1].step + 2)
        if len(began) > 2 and not waits and len(begun) < len(moments):
            begun.append(moments[len(begun)])
            begin(run, begun[-1])
        return original(run, recipe)

    with (
        mock.patch.object(loop, "train_step", train_step),
        mock.patch.object(sums.StateSums, "_before_update", before_update),
        mock.patch.object(sums.StateSums, "after_step", after_step),
    ):
        yield


def _flip_in(run: Any, state: dict[str, Tensor], moment: Moment, updating: threading.Event) -> None:
    moment.step = run.step
    moment.hidden = updating.is_set()
    names = [name for name, tensor in state.items() if tensor.numel() > 1]
    sizes = [state[name].nbytes for name in names]
    moment.tensor = moment.draw.choices(names, sizes)[0]
    place = moment.draw.randrange(state[moment.tensor].nbytes)
    byte = ctypes.c_uint8.from_address(state[moment.tensor].data_ptr() + place)
    byte.value ^= 1 << moment.draw.randrange(8)
