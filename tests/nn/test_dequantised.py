"""The dequantised backward equals autograd through decode(encode(·)) with a straight-through
estimator, in every bit.

The oracle is torch's own linear layer on what the readable reference makes of the codes: it knows
no GEMM of fp4train.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_layers import layer, rand
from torch import Tensor
from torch.testing import assert_close

from fp4train.backends import widened
from fp4train.config import bind
from fp4train.hardware import Device
from fp4train.nn import Linear
from fp4train.precision import (
    BF16,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    Custom,
    FP8Block,
    FP8Current,
    FP8Delayed,
    FP8Row,
    Layer,
    Mixed,
    Operands,
    OutlierChannels,
    QuartetII,
    Recipe,
    TetraJetV2,
    TetraJetV2Outliers,
    autocast,
    resolve,
)
from fp4train.quantize import (
    FPROP_W,
    FPROP_X,
    Hadamard,
    QuantSpec,
    RandomKey,
    packed_bytes,
    quantize,
)

NAME = "blocks.0.mlp.up"
SEED = 3
CPU = Device(type="cpu")
STOCHASTIC = QuantSpec(rounding="stochastic")
RECIPES: list[Recipe] = [
    NVFP4(),
    NVFP4(two_d_weights=False),
    NVFP4(row_scaled_activation=True),
    NVFP4(four_over_six="weights"),
    NVFP4(dtype="float16"),
    NVFP4(dtype="float32"),
    MXFP8(element="hybrid"),
    MXFP8(two_d_weights=True),
    MXFP6(),
    MXFP4(),
    FP8Current(),
    FP8Row(),
    FP8Block(),
    QuartetII(),
    TetraJetV2(),
    Mixed(fprop=MXFP8(), dgrad=NVFP4(), wgrad=NVFP4()),
    Custom(label="x alone", fprop=Operands(first=QuantSpec())),
    Custom(label="w alone", fprop=Operands(second=QuantSpec())),
    Custom(label="stochastic", fprop=Operands(first=STOCHASTIC, second=STOCHASTIC)),
]
SHAPES = {"fills blocks": (32, 64, 48), "fills no block": (5, 7, 9)}


class StraightThrough(torch.autograd.Function):
    """decode(encode(x)) in a dtype, by the readable reference; its gradient is that of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        spec: QuantSpec | None,
        dtype: torch.dtype,
        operand: int,
        amax: Tensor | None,
    ) -> Tensor:
        if spec is None:
            return x.to(dtype)
        key = RandomKey(seed=SEED, step=0, layer=zlib.crc32(NAME.encode()), operand=operand)
        codes = quantize(x.detach(), spec, key=key, amax=amax, kernel="reference")
        return codes.dequantize(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradient, None, None, None, None


def straight_through(
    x_MK: Tensor,
    w_NK: Tensor,
    dy_MN: Tensor,
    recipe: Recipe,
    amaxes: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """dx and dw of the oracle, each in the dtype of what it is the gradient of."""
    x = x_MK.detach().clone().requires_grad_()
    w = w_NK.detach().clone().requires_grad_()
    dtype = recipe.torch_dtype
    of_x, of_w = recipe.table()["fprop"].both
    rounded_x = StraightThrough.apply(x, of_x, dtype, FPROP_X, amaxes[0])  # type: ignore[no-untyped-call]
    rounded_w = StraightThrough.apply(w, of_w, dtype, FPROP_W, amaxes[1])  # type: ignore[no-untyped-call]
    widened(F.linear, rounded_x, rounded_w).backward(dy_MN)
    assert x.grad is not None and w.grad is not None
    return x.grad, w.grad


def tensors(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Linear, Tensor, Tensor]:
    """A layer, x and dy of this many tokens, in features and out features."""
    tokens, k, n = shape
    torch.manual_seed(1)
    place = Layer(name=NAME, in_features=k, out_features=n, block=0, blocks=1)
    linear = Linear(k, n, layer=place, backend="emulate")
    x = rand(tokens, k) * torch.logspace(-2, 2, k)
    return linear, x.to(dtype), rand(tokens, n, seed=2).to(dtype)


def passes(
    linear: Linear, x: Tensor, dy: Tensor, recipe: Recipe, step: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw."""
    linear.zero_grad()
    x = x.detach().clone().requires_grad_()
    with autocast(recipe, seed=SEED, step=step, token_offset=0):
        y = linear(x)
    y.backward(dy)
    assert x.grad is not None and linear.weight.grad is not None
    return y.detach(), x.grad, linear.weight.grad.clone()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_gradients_are_those_of_a_straight_through_estimator_in_every_recipe(
    recipe: Recipe, shape: tuple[int, int, int]
) -> None:
    dequantised = replace(recipe, backward="dequantised")
    linear, x, dy = tensors(shape, recipe.torch_dtype)
    y, dx, dw = passes(linear, x, dy, dequantised)
    expected_dx, expected_dw = straight_through(x, linear.weight, dy, recipe)
    assert torch.equal(y, passes(linear, x, dy, recipe)[0]), "fprop is that of the recipe"
    if recipe.torch_dtype is torch.float32:
        # The product of a layer and that of autograd may add in another order (oneDNN and MKL).
        rounding = {"rtol": 0.0, "atol": 2.0**-22}
        assert_close(dx / dx.norm(), expected_dx / dx.norm(), **rounding)
        assert_close(dw / dw.norm(), expected_dw / dw.norm(), **rounding)
    else:
        assert torch.equal(dx, expected_dx)
        assert torch.equal(dw, expected_dw)
    assert linear.bias is not None
    assert torch.equal(linear.bias.grad, dy.sum(0, dtype=torch.float32))


def test_delayed_scales_of_backward_are_those_that_fprop_took() -> None:
    recipe = FP8Delayed(backward="dequantised")
    linear, x, dy = tensors(SHAPES["fills blocks"], torch.bfloat16)
    passes(linear, x, dy, recipe)
    amaxes = x.abs().amax().float(), linear.weight.detach().abs().amax()
    _, dx, dw = passes(linear, x * 3, dy, recipe, step=1)
    expected = straight_through(x * 3, linear.weight, dy, recipe, amaxes)
    assert torch.equal(dx, expected[0]) and torch.equal(dw, expected[1])


def test_a_custom_table_names_the_operands_one_by_one() -> None:
    """dgrad alone takes values of codes, or takes them beside a quantised dy."""
    fprop = Operands(first=QuantSpec(), second=QuantSpec(block=(16, 16)))
    linear, x, dy = tensors(SHAPES["fills blocks"], torch.bfloat16)
    of_dgrad = Custom(fprop=fprop, dgrad=Operands(dequantised=True))
    _, dx, dw = passes(linear, x, dy, of_dgrad)
    assert torch.equal(dx, straight_through(x, linear.weight, dy, of_dgrad)[0])
    assert torch.equal(dw, passes(linear, x, dy, BF16())[2]), "wgrad takes x as it is"
    quantised_dy = Operands(first=QuantSpec(), dequantised=True)
    _, dx, _ = passes(linear, x, dy, replace(of_dgrad, dgrad=quantised_dy))
    plan = resolve(linear.layer, replace(of_dgrad, dgrad=quantised_dy), None, "emulate", CPU)
    assert plan.dgrad.elements == "E2M1·BF16"
    assert plan.dgrad.why == "backend=emulate; w: values of the codes that fprop multiplies"
    values_of_dy = quantize(dy, QuantSpec()).decoded()
    w = quantize(linear.weight.detach(), fprop.second or QuantSpec()).dequantize(torch.bfloat16)
    exact = (values_of_dy.values.double() * values_of_dy.scale.double()) @ w.double()
    torch.testing.assert_close(dx.double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("recipe", [NVFP4(), FP8Block(), MXFP8()], ids=lambda recipe: recipe.name)
def test_codes_of_fprop_are_saved_for_backward_and_x_is_not(recipe: Recipe) -> None:
    linear, x, _ = tensors((64, 128, 32), torch.bfloat16)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with (
        autocast(replace(recipe, backward="dequantised"), step=0),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        linear(x.requires_grad_())
    spec = recipe.table()["fprop"].first
    assert spec is not None
    of_x = [tensor for tensor in saved if tensor is not linear.weight]
    assert all(not tensor.is_set_to(x) for tensor in of_x)
    amaxes = [tensor for tensor in of_x if tensor.numel() == 1]
    expected = packed_bytes(spec, *x.shape) + sum(tensor.nbytes for tensor in amaxes)
    assert sum(tensor.nbytes for tensor in of_x) == expected


@pytest.mark.parametrize(("recipe", "backend"), [(FP8Current(), "native"), (NVFP4(), "reference")])
def test_codes_that_another_backend_multiplies_have_the_same_values(
    recipe: Recipe, backend: str
) -> None:
    linear, x, dy = tensors(SHAPES["fills blocks"], torch.bfloat16)
    linear.backend = backend
    _, dx, dw = passes(linear, x, dy, replace(recipe, backward="dequantised"))
    expected = straight_through(x, linear.weight, dy, recipe)
    assert torch.equal(dx, expected[0]) and torch.equal(dw, expected[1])


def test_a_table_in_yaml_takes_values_of_codes() -> None:
    spec = {"_target_": "fp4train.quantize.QuantSpec"}
    operands = {"_target_": "fp4train.precision.Operands"}
    written = {
        "_target_": "fp4train.precision.Custom",
        "fprop": {**operands, "first": spec, "second": spec},
        "dgrad": {**operands, "dequantised": True},
        "wgrad": {**operands, "dequantised": True},
    }
    recipe = bind(written, Recipe, "recipe")
    whole = Custom(fprop=Operands(first=QuantSpec(), second=QuantSpec()), backward="dequantised")
    assert recipe.table() == whole.table()


def test_a_shard_that_cuts_blocks_of_fprop_has_a_plain_backward() -> None:
    """There are no codes of fprop whose values it could take; else it is that of the recipe."""
    recipe = NVFP4(backward="dequantised")
    layer_of_model = Layer(name=NAME, in_features=64, out_features=32, block=0, blocks=1)
    whole = resolve(layer_of_model.part("out", 2), recipe, None, "emulate", CPU)
    assert whole.dgrad.operands.dequantised and whole.wgrad.operands.dequantised
    assert whole.wgrad.why == "values of the codes that fprop multiplies"
    cut = resolve(layer_of_model.part("out", 4), recipe, None, "emulate", CPU)
    for gemm in cut.gemms:
        assert gemm.operands == Operands() and gemm.backend == "torch"
    assert "8 is not whole blocks of 16" in cut.fprop.why


def test_where_fprop_is_in_high_precision_backward_is_plain() -> None:
    """The cooldown of the defaults: there are no codes any more."""
    recipe = NVFP4(backward="dequantised").with_high_precision("fprop")
    assert not recipe.quantised
    linear, x, dy = tensors(SHAPES["fills blocks"], torch.bfloat16)
    plain = passes(linear, x, dy, BF16())
    assert all(map(torch.equal, passes(linear, x, dy, recipe), plain))


def test_layers_that_read_one_x_save_one_copy_of_its_codes() -> None:
    recipe = NVFP4(backward="dequantised")
    x = rand(32, 64).bfloat16().requires_grad_() * 1
    first, second = layer(64, 48), layer(64, 48)
    with autocast(recipe, step=0):
        nodes = [linear(x).grad_fn for linear in (first, second)]
    copies = {tensor.data_ptr() for node in nodes for tensor in node.saved_tensors[1:2]}
    assert len(copies) == 1


def test_outlier_channels_are_dequantised_apart() -> None:
    outliers = OutlierChannels(recipe=TetraJetV2Outliers(), start=0, steps=1, multiple=8)
    recipe = TetraJetV2(outliers=outliers, backward="dequantised")
    linear, x, dy = tensors(SHAPES["fills blocks"], torch.bfloat16)
    passes(linear, x, dy, recipe)
    _, dx, dw = passes(linear, x, dy, recipe, step=1)
    norms: Any = linear.states["outliers"]
    parts = norms.channels(outliers.count(64), "cpu")
    apart = recipe.of_outliers()
    assert apart is not None and len(parts[1]) == 8
    for channels, part in zip(parts, (recipe, apart), strict=True):
        weight = linear.weight.detach()[:, channels]
        expected = straight_through(x[:, channels], weight, dy, part)
        assert torch.equal(dx[:, channels], expected[0])
        assert torch.equal(dw[:, channels], expected[1])


def test_frozen_weights_and_inputs_keep_the_other_gradient() -> None:
    recipe = NVFP4(backward="dequantised")
    linear, x, dy = tensors(SHAPES["fills blocks"], torch.bfloat16)
    dx, dw = straight_through(x, linear.weight, dy, recipe)
    with autocast(recipe, step=0):
        linear(x).backward(dy)
    assert linear.weight.grad is not None and torch.equal(linear.weight.grad, dw)
    linear.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    with autocast(recipe, step=0):
        linear(leaf).backward(dy)
    assert leaf.grad is not None and torch.equal(leaf.grad, dx)


FORWARD = Operands(first=QuantSpec(), second=QuantSpec())
TRANSFORMED = Operands(first=QuantSpec(hadamard=Hadamard()), second=QuantSpec(hadamard=Hadamard()))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: BF16(backward="dequantised"),
            "BF16 quantises neither x nor w in fprop.*such as NVFP4",
        ),
        (
            lambda: NVFP4(backward="high_precision"),
            "backward='high_precision'.*quantised, dequantised",
        ),
        (
            lambda: Custom(fprop=TRANSFORMED, backward="dequantised"),
            "w of dgrad.*transformed w.*hadamard=None in fprop",
        ),
        (
            lambda: Custom(fprop=FORWARD, dgrad=Operands(second=QuantSpec(), dequantised=True)),
            "leave second=None",
        ),
        (
            lambda: Custom(fprop=Operands(first=QuantSpec()), dgrad=Operands(dequantised=True)),
            "w of dgrad.*fprop does not quantise w",
        ),
        (
            lambda: Custom(fprop=Operands(dequantised=True)),
            "fprop: dequantised=True is for dgrad and wgrad",
        ),
    ],
)
def test_what_has_no_such_backward_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_the_table_and_the_name_say_what_backward_takes() -> None:
    recipe = NVFP4(backward="dequantised")
    assert recipe.name == "NVFP4 with dequantised backward"
    lines = [line.split() for line in str(recipe).splitlines()]
    assert lines[6][:6] == ["dgrad", "w", "BF16", "of", "E2M1", "16×16"]
    assert lines[8][:6] == ["wgrad", "x", "BF16", "of", "E2M1", "1×16"]
    assert lines[7][:4] == ["wgrad", "dy", "BF16", "-"]
