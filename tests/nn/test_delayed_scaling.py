"""Delayed scaling: the scale of a step comes from the steps before it, as in Transformer Engine's
DelayedScaling.

TE: a forward pass quantises with the scale at hand and notes its amax; when it ends, the new scale
is made from the maximum over the history (or its newest entry); amax 0 or not finite leaves the
scale as it was; it begins with 1.
"""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp4train.nn import DelayedScaling, Linear
from fp4train.precision import NVFP4, FP8Current, FP8Delayed, Recipe, autocast
from fp4train.quantize import Quantizer, RunStep, delayed_amax, initial_delayed_amax, quantizer


class TheirScaling:
    """TE's recipe for one tensor, from its documentation: the scale of the next pass."""

    def __init__(self, recipe: FP8Delayed, largest: float) -> None:
        self.recipe = recipe
        self.largest = largest
        self.scale = 1.0
        self.history: list[float] = [0.0] * recipe.history  # the newest first

    def step(self, amax: float) -> float:
        """The scale that quantises a tensor with this amax."""
        used = self.scale
        self.history = [amax, *self.history][: self.recipe.history]
        chosen = max(self.history) if self.recipe.algorithm == "max" else self.history[0]
        if chosen > 0 and chosen != float("inf"):
            self.scale = self.largest / chosen / 2**self.recipe.margin
        return used


def layer(k: int = 16, n: int = 16) -> Linear:
    torch.manual_seed(0)
    return Linear(k, n, bias=False)


def call(
    module: Linear, recipe: Recipe, x: Tensor, dy: Tensor, step: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    with autocast(recipe, step=step):
        y = module(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad, module.weight.grad  # type: ignore[return-value]


def quantised(tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-largest, largest).to(dtype).double() / scale


@pytest.mark.parametrize("step_given", [True, False])
@pytest.mark.parametrize(
    "recipe",
    [
        FP8Delayed(history=3),
        FP8Delayed(history=1),
        FP8Delayed(history=4, algorithm="most_recent"),
        FP8Delayed(history=3, margin=2),
        FP8Delayed(history=3, element="e4m3"),
    ],
    ids=lambda r: r.name,
)
def test_scales_follow_te_step_by_step(recipe: FP8Delayed, step_given: bool) -> None:
    module = layer()
    e5m2 = torch.float8_e5m2 if recipe.element == "hybrid" else torch.float8_e4m3fn
    theirs = {"x": TheirScaling(recipe, 448.0), "w": TheirScaling(recipe, 448.0)}
    theirs["dy"] = TheirScaling(recipe, torch.finfo(e5m2).max)
    generator = torch.Generator().manual_seed(3)
    for step, (size, grad_size) in enumerate(
        [(1, 1), (8, 1e-3), (0.5, 0), (0.25, 2e-3), (0, 1e-4), (3, 5), (1, 1)]
    ):
        x = (torch.randn(8, 16, generator=generator) * size).bfloat16()
        dy = (torch.randn(8, 16, generator=generator) * grad_size).bfloat16()
        w = module.weight.detach()
        scales = {
            n: theirs[n].step(float(t.abs().max())) for n, t in (("x", x), ("w", w), ("dy", dy))
        }
        q_x = quantised(x, scales["x"], torch.float8_e4m3fn)
        q_w = quantised(w, scales["w"], torch.float8_e4m3fn)
        q_dy = quantised(dy, scales["dy"], e5m2)
        y, dx, dw = call(module, recipe, x, dy, step if step_given else None)
        for found, expected in ((y, q_x @ q_w.T), (dx, q_dy @ q_w), (dw, q_dy.T @ q_x)):
            bound = 2.0**-8 * expected.abs() + 1e-5 * expected.abs().max()
            assert bool(((found.double() - expected).abs() <= bound).all()), step
        with torch.no_grad():
            module.weight.mul_(1.5)  # the weight grows, as by an optimizer


def test_each_tensor_has_a_history_and_both_its_forms_share_a_scale() -> None:
    module = layer()
    call(module, FP8Delayed(history=5), torch.ones(8, 16), torch.ones(8, 16) * 2, 0)
    state = module.scaling_state()
    assert set(state) == {
        f"{kind}.{name}" for kind in ("history", "used") for name in ("x", "w", "dy")
    }
    assert state["history.x"].tolist() == [1, 0, 0, 0, 0], (
        "one entry for the row-wise and the column-wise form together"
    )
    assert state["history.dy"].tolist() == [2, 0, 0, 0, 0]
    assert state["used.dy"] == torch.finfo(torch.float8_e5m2).max, "a scale of 1 to begin with"


def test_evaluation_reads_and_does_not_write() -> None:
    """The next training step still writes its amax: the run must not depend on how often it was
    evaluated.
    """
    recipe = FP8Delayed(history=5)
    histories = []
    for evaluate in (False, True):
        module = layer()
        for step in range(3):
            if evaluate:
                before = {k: v.clone() for k, v in module.scaling_state().items()}
                with torch.no_grad(), autocast(recipe, step=step):
                    module(torch.ones(8, 16) * 100)
                assert all(torch.equal(v, before[k]) for k, v in module.scaling_state().items())
            call(module, recipe, torch.ones(8, 16) * (step + 1), torch.ones(8, 16), step)
        histories.append(module.scaling_state())
    assert histories[0].keys() == histories[1].keys()
    assert all(torch.equal(histories[0][k], histories[1][k]) for k in histories[0])
    assert (histories[0]["history.w"] > 0).sum() == 3


def test_the_microbatches_of_a_step_share_one_entry_and_one_scale() -> None:
    """So that a step does not depend on how its batch is split over microbatches or ranks."""
    module = layer()
    recipe = FP8Delayed(history=4)
    scales = []
    for step in range(2):
        for offset in range(4):
            with autocast(recipe, step=step, token_offset=8 * offset):
                y = module(torch.full((8, 16), float(offset + 1 + step)).requires_grad_())
            y.sum().backward()
            scales.append(float(module.scaling_state()["used.x"]))
    state = module.scaling_state()
    assert state["history.x"].tolist() == [5, 4, 0, 0], "the largest amax of each step"
    assert scales == [448.0] * 4 + [4.0] * 4, "the second step uses what the first one left"
    for name in ("w", "dy"):
        assert (state[f"history.{name}"] > 0).sum() == 2


def test_the_state_makes_another_layer_go_on_the_same_way() -> None:
    recipe = FP8Delayed(history=3)
    one = layer()
    other = layer()
    for step in range(4):
        call(one, recipe, torch.ones(8, 16) * (step + 1), torch.ones(8, 16), step)
    other.load_scaling_state({k: v.clone() for k, v in one.scaling_state().items()})
    for step in range(4, 8):
        x = torch.ones(8, 16) / step
        dy = torch.ones(8, 16) * step
        for a, b in zip(
            call(one, recipe, x, dy, step), call(other, recipe, x, dy, step), strict=True
        ):
            assert torch.equal(a, b)
    copied = copy.deepcopy(one)
    assert all(torch.equal(v, copied.scaling_state()[k]) for k, v in one.scaling_state().items())


def test_a_longer_or_shorter_history_keeps_the_newest_entries() -> None:
    module = layer()
    for step in range(3):
        call(module, FP8Delayed(history=3), torch.ones(8, 16) * (step + 1), torch.ones(8, 16), step)
    call(module, FP8Delayed(history=5), torch.ones(8, 16) * 9, torch.ones(8, 16), 3)
    assert module.scaling_state()["history.x"].tolist() == [9, 3, 2, 1, 0]
    call(module, FP8Delayed(history=2), torch.ones(8, 16) * 4, torch.ones(8, 16), 4)
    assert module.scaling_state()["history.x"].tolist() == [4, 9]


def test_other_recipes_leave_no_state() -> None:
    module = layer()
    for recipe in (NVFP4(), FP8Current()):
        call(module, recipe, torch.ones(8, 16), torch.ones(8, 16), 0)
    assert module.scaling_state() == {}


def test_a_non_finite_amax_leaves_the_scale_as_it_was() -> None:
    module = layer()
    recipe = FP8Delayed(history=1)
    call(module, recipe, torch.ones(8, 16), torch.ones(8, 16), 0)
    for step in (1, 2):
        x = torch.ones(8, 16)
        x[0, 0] = float("inf")
        y, *_ = call(module, recipe, x, torch.ones(8, 16), step)
        assert not y[0].isfinite().all(), "the infinity itself is not hidden"
        assert y[1:].isfinite().all()
    y, *_ = call(module, recipe, torch.ones(8, 16), torch.ones(8, 16), 3)
    assert y.isfinite().all(), "one bad step does not spoil the next"


def test_an_empty_batch_is_a_step_of_nothing() -> None:
    module = layer()
    recipe = FP8Delayed(history=2)
    call(module, recipe, torch.empty(0, 16), torch.empty(0, 16), 0)
    assert module.scaling_state()["history.x"].tolist() == [0, 0]


def test_a_weights_amax_enters_once_per_step_however_often_the_weight_is_gathered() -> None:
    """As under FSDP2, whose parameters are other tensors after each gather: ranks must make the
    same all-reduces.
    """
    module = layer()
    recipe = FP8Delayed(history=4)
    for step in (0, 1):
        for _ in range(3):
            module.weight = nn.Parameter(module.weight.detach().clone())
            with autocast(recipe, step=step):
                module(torch.ones(8, 16))
    assert int((module.scaling_state()["history.w"] > 0).sum()) == 2


class OneByOne:
    """The histories of a layer, each by itself: what those of a model must be however they are
    rolled.
    """

    def __init__(self) -> None:
        self.held: dict[str, tuple[Tensor, Tensor]] = {}
        self.entered: dict[str, RunStep] = {}

    def amax(
        self, name: str, quantizer: Quantizer, own: Tensor, *, enter: bool, step: RunStep
    ) -> Tensor:
        spec = quantizer.spec
        assert spec.delayed is not None
        begun = torch.zeros(spec.delayed.history), torch.tensor(initial_delayed_amax(spec))
        history, used = self.held.get(name, begun)
        missing = max(0, spec.delayed.history - len(history))
        history = torch.cat((history[: spec.delayed.history], torch.zeros(missing)))
        again = self.entered.get(name) == step
        amax = used if again else delayed_amax(history, used, spec.delayed)
        if enter and again:
            self.held[name] = torch.cat((torch.maximum(own, history[0])[None], history[1:])), used
        elif enter:
            self.held[name] = (torch.cat((own[None], history[:-1])), amax)
            self.entered[name] = step
        return amax

    def state(self) -> dict[str, Tensor]:
        each = [(f"history.{k}", v[0]) for k, v in self.held.items()] + [
            (f"used.{k}", v[1]) for k, v in self.held.items()
        ]
        return dict(each)

    def load_state(self, state: dict[str, Tensor]) -> None:
        names = [key.partition(".")[2] for key in state if key.startswith("history.")]
        self.held = {n: (state[f"history.{n}"], state[f"used.{n}"]) for n in names}
        self.entered = {}


class Largest:
    """Stands for ranks: the maximum with fixed numbers."""

    def __init__(self, others: list[float]) -> None:
        self.others = others

    def largest(self, x: Tensor) -> Tensor:
        return torch.maximum(x, torch.tensor(self.others[: len(x)]))

    def summed_over_data(self, x: Tensor) -> Tensor:
        raise AssertionError("amaxes join by their maximum: their sum would be another scale")


def quantizer_of(recipe: FP8Delayed) -> Quantizer:
    spec = recipe.table()["fprop"].first
    assert spec is not None
    return quantizer(spec, "cpu")


KINDS = [
    quantizer_of(FP8Delayed(history=3)),
    quantizer_of(FP8Delayed(history=3, algorithm="most_recent")),
]
KINDS += [quantizer_of(FP8Delayed(history=h)) for h in (1, 5)]


@pytest.mark.parametrize("seed", range(12))
def test_histories_that_roll_together_are_those_that_roll_alone_in_any_order_of_calls(
    seed: int,
) -> None:
    """Layers that are skipped, steps that take turns, other lengths, evaluations, copies,
    checkpoints within a step and joins over ranks among them; a state that was handed out stays as
    it was.
    """
    draw = random.Random(seed)
    layers = [DelayedScaling() for _ in range(4)]
    alone = [OneByOne() for _ in range(4)]
    for each in layers[1:]:
        each.common = layers[0].common
    kind = KINDS[0]
    kept = [(layer.state(), one.state()) for layer, one in zip(layers, alone, strict=True)]
    steps = [RunStep(0, 0)]
    for _ in range(300):
        number = draw.randrange(4)
        layer = layers[number]
        one = alone[number]
        event = draw.random()
        if event < 0.2:
            steps = [RunStep(0, steps[0].number + 1), *steps[: draw.choice([0, 0, 1])]]
        elif event < 0.22:
            kind = draw.choice(KINDS)
        elif event < 0.26:
            kept.append((layer.state(), {k: v.clone() for k, v in one.state().items()}))
        elif event < 0.27:
            layer.load_state(layer.state())
            one.load_state(one.state())
        elif event < 0.28:
            layers = copy.deepcopy(layers)
        elif event < 0.3:
            others = [draw.choice([0.0, 2.0**9]) for _ in range(12)]
            DelayedScaling.join(layers, Largest(others))
            for each in alone:
                for name in sorted(each.held):
                    history, used = each.held[name]
                    largest = torch.maximum(history[0], torch.tensor(others.pop(0)))
                    each.held[name] = torch.cat((largest[None], history[1:])), used
        else:
            name = draw.choice("xwd")
            step = draw.choice(steps)
            tensor = torch.full(
                (2, 16), draw.choice([0.0, 1.0, float("inf")]) + 2.0 ** draw.randrange(-8, 8)
            )
            given: dict[str, Any] = {"enter": draw.random() < 0.8, "step": step}
            found, _ = layer.amax(name, kind, tensor, **given)
            assert torch.equal(found, one.amax(name, kind, tensor[0, 0].clone(), **given))
    for layer, one in [
        *kept,
        *((layer.state(), one.state()) for layer, one in zip(layers, alone, strict=True)),
    ]:
        assert layer.keys() == one.keys() and all(
            torch.equal(layer[name], one[name]) for name in one
        )
