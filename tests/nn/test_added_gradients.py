"""dw in high precision is added to the gradient within its product (on GPUs; emulated here by
`adding`): in recomputed layers too, with the bits of autograd's sums, and never by passes that
leave gradients as they are.
"""

from collections.abc import Callable
from typing import Any

import adding
import pytest
import torch
from torch import Tensor, nn

import fp4train as f4
from fp4train.hardware import Device
from fp4train.nn import PlannedLayer
from fp4train.parameters import ParameterSpec
from fp4train.precision import (
    BF16,
    NVFP4,
    Context,
    OutlierChannels,
    Recipe,
    Timeline,
    find_layers,
    make_plan,
    recompute,
    use,
)
from fp4train.quantize import Position, RunStep

K = 256
SIZES = (256, 128, 128)
TOKENS = 128
ADDING_RECIPES = pytest.mark.parametrize(
    "recipe", [BF16(), NVFP4(fused_scales=True).with_high_precision("wgrad")], ids=["all", "wgrad"]
)
"""Recipes whose products add dw: wgrad is in high precision."""


class Readers(nn.Module):
    """Three layers of one x."""

    def fp4train_parameters(self) -> list[ParameterSpec]:
        """The three layers are one group."""
        return [ParameterSpec(name=f"w{letter}.weight", fused="qkv") for letter in "qkv"]

    def __init__(self) -> None:
        super().__init__()
        for name, size in zip(("wq", "wk", "wv"), SIZES, strict=True):
            setattr(self, name, nn.Linear(K, size, bias=name != "wk"))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.wq(x), self.wk(x), self.wv(x)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planned(recipe: Recipe, *, in_product: bool = True) -> Any:
    """The layers, which run an applied plan and sum the gradients of microbatches."""
    model: Any = f4.convert(Readers())
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed))
    options: dict[str, Any] = {"tokens": TOKENS, "device": Device(type="cpu"), "backend": "auto"}
    layers = find_layers(model).values()
    plan = make_plan(layers, Timeline(recipe=recipe, steps=9), None, **options)
    for module in model.modules():
        if isinstance(module, PlannedLayer):
            module.sum_gradients(True, in_product=in_product)
            of_layer = plan.stretches[0].layers[module.layer.name]
            module.apply_plan(of_layer, recipe, None, torch.device("cpu"))
    return model


def applied(recipe: Recipe, step: int = 0) -> Context:
    position = Position(RunStep(1, step))
    return Context(recipe=recipe, position=position, counts="nothing", applied=True)


def results(
    model: nn.Module,
    recipe: Recipe,
    *,
    calls: Callable[..., tuple[Tensor, ...]] | None = None,
    microbatches: int = 1,
    step: int = 0,
) -> dict[str, Tensor]:
    """The outputs of the last microbatch, dx, and the gradients of the parameters."""
    model.zero_grad()
    x = normal(microbatches, TOKENS, K, seed=11).to(recipe.torch_dtype).requires_grad_()
    for number, own in enumerate(x.unbind()):
        with use(applied(recipe, step)):
            ys = (calls or model)(own)
        used = [(y, normal(*y.shape, seed=20 + number).to(y.dtype)) for y in ys]
        torch.autograd.backward([y for y, _ in used], [dy for _, dy in used])
    assert x.grad is not None
    found = {"x": x.grad} | {f"y{i}": y.detach() for i, y in enumerate(ys)}
    return found | {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert set(one) == set(other)
    return {name for name in one if not torch.equal(one[name], other[name])}


@ADDING_RECIPES
def test_recomputed_layers_add_dw_within_their_gemms_too_and_all_ways_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    """Recomputation saves no weights: what backward gets in their place has no gradient to add
    to.
    """
    added = adding.begin(monkeypatch)
    found = []
    for again, in_product in ((False, False), (False, True), (True, True)):
        model = planned(recipe, in_product=in_product)

        def calls(x: Tensor, model: Any = model, again: bool = again) -> tuple[Tensor, ...]:
            def joined(x: Tensor) -> Tensor:
                return torch.cat(model(x), dim=1)

            return (recompute(joined, x) if again else joined(x),)

        found.append(results(model, recipe, calls=calls, microbatches=3))
        assert sorted(added) == sorted([(size, K) for size in SIZES] * 2 * in_product), (
            again,
            in_product,
        )
        added.clear()
    assert not differing(found[0], found[1]) and not differing(found[0], found[2])


def test_gradients_of_outlier_channels_are_added_with_the_bits_of_autograds_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the channels are chosen within the product, then after the products of both parts."""
    outliers = OutlierChannels(recipe=NVFP4(), share=0.25, multiple=8, start=0, steps=1)
    recipe = NVFP4(outliers=outliers).with_high_precision("wgrad")
    added = adding.begin(monkeypatch)
    sums = []
    for in_product in (False, True):
        model = planned(recipe, in_product=in_product)
        together = results(model, recipe, microbatches=3, step=0)
        assert sorted(added) == sorted([(size, K) for size in SIZES] * 2 * in_product)
        added.clear()
        sums.append((together, results(model, recipe, microbatches=3, step=1)))
        assert not added and differing(*sums[-1])
    for first, second in zip(*sums, strict=True):
        assert not differing(first, second)


@ADDING_RECIPES
def test_passes_that_leave_gradients_as_they_are_add_nothing_to_them(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    """`torch.autograd.grad` of weights that have gradients, of x alone, and backward with
    `inputs`.
    """
    added = adding.begin(monkeypatch)
    model = planned(recipe)
    once = {name: each.clone() for name, each in results(model, recipe).items()}
    names = ("wq.weight", "wk.weight", "wv.weight")
    weights = [model.get_parameter(name) for name in names]
    x = normal(1, TOKENS, K, seed=11)[0].bfloat16().requires_grad_()
    dys = [normal(TOKENS, size, seed=20).bfloat16() for size in SIZES]

    def ys() -> Any:
        with use(applied(recipe)):
            return model(x)

    assert all(
        map(torch.equal, torch.autograd.grad(ys(), weights, dys), (once[name] for name in names))
    )
    assert torch.equal(torch.autograd.grad(ys(), x, dys)[0], once["x"][0])
    torch.autograd.backward(ys(), dys, inputs=[x, weights[1]])
    assert added == ([(SIZES[1], K)])
    for name, each in zip(names, weights, strict=True):
        assert each.grad is not None and torch.equal(
            each.grad, once[name] * (2 if name == names[1] else 1)
        )
