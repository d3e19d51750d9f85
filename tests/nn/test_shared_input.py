"""Layers that read the same result of autograd quantise it once, and keep one copy of its codes for
backward.
"""

import pytest
import torch
from torch import Tensor, nn

import fp4train as f4
from fp4train.hardware import Device
from fp4train.nn import Linear
from fp4train.nn.executors import gemms
from fp4train.precision import MXFP8, NVFP4, FP8Delayed, Recipe, Timeline, current
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import make_plan
from fp4train.quantize import Decoded, Quantized, Quantizer, quantizer


class Pair(nn.Module):
    """Two layers with one input, like gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gate(x) * self.up(x)
        return y


def pair() -> Pair:
    torch.manual_seed(0)
    model = Pair()
    f4.convert(model)
    return model


def result(values: Tensor) -> Tensor:
    """The values as a result of autograd, like those of a norm."""
    return values.requires_grad_() * 1


def kept_bytes(model: Pair, x: Tensor, recipe: Recipe) -> int:
    """Bytes of the distinct tensors that the two layers keep, besides weights and the factors of
    the product.
    """
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.uint8:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), f4.autocast(recipe, step=0):
        model(x)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("recipe", "bits"), [(NVFP4(), 4.5), (MXFP8(), 8.25)], ids=["NVFP4", "MXFP8"]
)
def test_two_layers_keep_one_copy_of_their_input(recipe: Recipe, bits: float) -> None:
    x = result(torch.randn(128, 64, dtype=torch.bfloat16))
    assert kept_bytes(pair(), x, recipe) == bits / 8 * x.numel()


@pytest.mark.parametrize("recipe", [NVFP4(), FP8Delayed()], ids=lambda r: r.name)
def test_sharing_changes_no_bit(recipe: Recipe) -> None:
    found = []
    for together in (True, False):
        model = pair()
        leaf = torch.linspace(-2, 2, 32 * 64).view(32, 64).requires_grad_()
        x = leaf * 1
        with f4.autocast(recipe, step=0):
            gate = model.gate(x)
            if not together:
                current().shared.clear()  # type: ignore[union-attr]
            y = gate * model.up(x)
        y.sum().backward()
        found.append((y, leaf.grad, model.gate.weight.grad, model.up.weight.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


def test_a_tensor_that_changed_in_place_is_quantised_again() -> None:
    layer = pair().gate
    x = result(torch.randn(32, 64))
    assert isinstance(layer, Linear)
    with f4.autocast(NVFP4(), step=0):
        before = layer(x)
        x.mul_(2)
        after = layer(x)
    with torch.no_grad(), f4.autocast(NVFP4(), step=0):
        assert torch.equal(after, layer(x)) and not torch.equal(before, after)


def test_nothing_is_held_after_the_context() -> None:
    layer = pair().gate
    with f4.autocast(NVFP4(), step=0):
        context = current()
        layer(result(torch.randn(32, 64)))
        assert context is not None and context.shared
    assert not context.shared


def gradients(model: Pair, recipe: Recipe) -> list[Tensor | None]:
    leaf = torch.linspace(-2, 2, 128 * 64).view(128, 64).bfloat16().requires_grad_()
    with f4.autocast(recipe, step=0):
        model(leaf * 1).sum().backward()
    return [leaf.grad, *(parameter.grad for parameter in model.parameters())]


def test_layers_of_one_input_decode_it_once_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Tensor] = []

    def count(quantizer: Quantizer, codes: Quantized) -> Decoded:
        decoded.append(codes.codes)
        return codes.decoded()

    kind = type(quantizer(NVFP4().table()["wgrad"].second, "cpu"))  # type: ignore[arg-type]
    monkeypatch.setattr(kind, "decode", count)
    gradients(pair(), NVFP4())
    assert len(decoded) == 1


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8()], ids=lambda r: r.name)
def test_values_that_are_kept_are_those_of_the_codes_and_nothing_is_decoded(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(pair(), recipe)
    model = pair()
    layers = find_layers(model)
    timeline = Timeline(recipe=recipe, steps=1)
    options = {"tokens": 128, "device": Device.of("cpu"), "backend": "emulate"}
    kept = make_plan(layers.values(), timeline, None, keep_values=True, **options)  # type: ignore[arg-type]
    monkeypatch.delattr(gemms, "decoded_once")
    for name, plan in kept.stretches[0].layers.items():
        assert plan.keeps_values
        model.get_submodule(name).apply_plan(plan, recipe, None, torch.device("cpu"))  # type: ignore[operator]
    for found, wanted in zip(gradients(model, recipe), expected, strict=True):
        assert torch.equal(found, wanted)  # type: ignore[arg-type]
