"""Faults planted into a live run elsewhere than in operands and products: in its weights and moments,
its steps, its plan, its checkpoints. `audit_planting` has those of operands and products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import fp4train.train as loop
from fp4train.data.stream import Rows
from fp4train.hardware import Device
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.layer_plan import resolve
from fp4train.run import step as run_step
from fp4train.run.step import EagerSteps
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
def in_one_computation(plant: Plant, index: int = STEP) -> Iterator[None]:
    """A fault acts the first time that the step of this index is computed, and never again."""
    original = EagerSteps.step
    done: list[int] = []

    def step(runner: EagerSteps, recipe: Any, rows: Any) -> Any:
        if runner.run.step != index or done:
            return original(runner, recipe, rows)
        done.append(1)
        with plant():
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
