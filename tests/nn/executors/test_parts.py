"""Outlier channels: who is chosen, what both parts multiply (against numpy, from the paper's
formulas), what it buys.

Bounds: products of equal operands, added in another order, differ by 2e-7 of the norm here (bound
1e-6).
"""

import copy
import zlib

import ml_dtypes
import numpy as np
import pytest
import torch
from double_block import double_block
from linear_layers import own_channels
from prepared import sharing
from torch import Tensor, nn

import fp4train as f4
from fp4train.nn import Linear
from fp4train.nn.executors import ChannelNorms
from fp4train.precision import (
    BF16,
    MXFP8,
    OutlierChannels,
    Recipe,
    TetraJetV2,
    TetraJetV2Outliers,
    recompute,
)
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import RandomKey, quantize

M = 256
N = 96
K = 192
NORMS = "outliers.norms"
STEPS = "outliers.steps"
CHANNELS = 32
LARGE = torch.randperm(K, generator=torch.Generator().manual_seed(9))[:CHANNELS]
"""The outlier channels of every input."""


def tetrajet(**values: object) -> TetraJetV2:
    settings = {"share": CHANNELS / K, "start": 1, "steps": 2, **values}
    return TetraJetV2(
        dtype="float32",
        outliers=OutlierChannels(recipe=TetraJetV2Outliers(), **settings),  # type: ignore[arg-type]
    )


def inputs(seed: int, factor: float = 20.0) -> tuple[Tensor, Tensor]:
    """x [M, K] with large channels, dy [M, N]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=generator)
    dy = torch.randn(M, N, generator=generator)
    x[:, LARGE] *= factor
    return x, dy


def layer() -> Linear:
    torch.manual_seed(3)
    made = f4.convert(nn.Linear(K, N))
    assert isinstance(made, Linear)
    return made


def step(
    module: nn.Module,
    recipe: Recipe,
    number: int,
    x: Tensor,
    dy: Tensor,
    constant: ConstantWeights | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, dw) of one step."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    with f4.autocast(recipe, seed=5, step=number), sharing(constant):
        y = module(x)
    y.backward(dy)
    (weight,) = (p for p in module.parameters() if p.dim() == 2)
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad.clone()


def chosen(made: Linear) -> tuple[Tensor, Tensor]:
    """The other channels and the outlier channels of the last call."""
    norms = made.states["outliers"]
    own = own_channels(made)
    assert isinstance(norms, ChannelNorms) and len(own) < K
    rest, top = norms.channels(K - len(own), "cpu")
    assert torch.equal(rest, own)
    return rest, top


def trained(recipe: Recipe, steps: int) -> Linear:
    """A layer after so many steps on inputs of seeds 0, 1, …."""
    made = layer()
    for number in range(steps):
        step(made, recipe, number, *inputs(number))
    return made


def mxfp8(x: np.ndarray) -> np.ndarray:
    """x [R, C] in blocks of 32: 2^⌈log2(amax / 448)⌉ times E4M3 to nearest, from the OCP's
    definition alone.
    """
    out = np.zeros_like(x)
    for start in range(0, x.shape[1], 32):
        block = x[:, start : start + 32]
        amax = np.abs(block).max(axis=1, keepdims=True).astype(np.float64)
        scale = np.exp2(np.ceil(np.log2(np.where(amax > 0, amax, 448) / 448)))
        out[:, start : start + 32] = (block / scale).astype(ml_dtypes.float8_e4m3fn).astype(
            np.float64
        ) * scale
    return out


def relative(found: Tensor, wanted: np.ndarray | Tensor) -> float:
    wanted = torch.as_tensor(wanted).double()
    return float((found.double() - wanted).norm() / wanted.norm())


def test_the_channels_with_the_largest_norms_over_the_recorded_steps_are_chosen() -> None:
    made = layer()
    sums = torch.zeros(K, dtype=torch.float64)
    recipe = tetrajet()
    for number in range(4):
        x, dy = inputs(number)
        step(made, recipe, number, x, dy)
        assert (len(own_channels(made)) < K) == (number == 3), (
            "step 0 is before the start, 1 and 2 are recorded"
        )
        if number in (1, 2):
            sums += x.double().square().sum(0).sqrt()
    rest, top = chosen(made)
    assert set(top.tolist()) == set(LARGE.tolist())
    assert torch.cat((top, rest)).tolist() == sums.argsort(descending=True, stable=True).tolist()
    assert (
        torch.allclose(made.scaling_state()[NORMS], sums, rtol=1e-6)
        and int(made.scaling_state()[STEPS]) == 2
    )


def test_until_the_choice_a_layer_is_the_plain_recipe_to_the_bit() -> None:
    with_outliers = layer()
    plain = layer()
    for number in range(3):
        found = step(with_outliers, tetrajet(), number, *inputs(number))
        wanted = step(plain, TetraJetV2(dtype="float32"), number, *inputs(number))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend", ["emulate", "reference"])
def test_both_parts_multiply_the_operands_of_the_paper(backend: str) -> None:
    recipe = tetrajet()
    made = trained(tetrajet(), 3)
    made.rename(made.layer, backend)
    x, dy = inputs(7)
    y, dx, dw = step(made, recipe, 7, x, dy)
    rest, top = chosen(made)
    w = made.weight.detach()
    x_rest, w_rest = (double_block(t[:, rest].numpy()).astype(np.float64) for t in (x, w))
    x_top, w_top = (mxfp8(t[:, top].numpy().astype(np.float64)) for t in (x, w))
    bias = made.bias.detach().double().numpy()
    assert relative(y, x_rest @ w_rest.T + x_top @ w_top.T + bias) <= 1e-6

    dy_top = mxfp8(dy.T.numpy().astype(np.float64))
    assert relative(dw[:, top], dy_top @ mxfp8(np.ascontiguousarray(x_top.T)).T) <= 1e-6

    # What is rounded stochastically takes its bits from the places in the order rest, then top.
    table, top_table = recipe.table(), recipe.outliers.recipe.table()  # type: ignore[union-attr]

    def drawn(t: Tensor, spec: object, operand: int, row: int = 0) -> Tensor:
        layer_key = zlib.crc32(made.layer.name.encode())
        key = RandomKey(seed=5, step=7, layer=layer_key, operand=operand, row_offset=row)
        return quantize(t.contiguous(), spec, key=key).dequantize().double()  # type: ignore[arg-type]

    dy_rows = drawn(dy, table["dgrad"].first, 2)
    wt_rest = drawn(w[:, rest].T, table["dgrad"].second, 3)
    wt_top = drawn(w[:, top].T, top_table["dgrad"].second, 3, row=len(rest))
    assert relative(dx[:, rest], dy_rows @ wt_rest.T) <= 1e-6
    assert relative(dx[:, top], dy_rows @ wt_top.T) <= 1e-6
    dyt = drawn(dy.T, table["wgrad"].first, 4)
    xt = drawn(x[:, rest].T, table["wgrad"].second, 5)
    assert relative(dw[:, rest], dyt @ xt.T) <= 1e-6


def test_the_parts_draw_other_bits() -> None:
    """Two parts with equal columns of w would have equal columns of dx if they drew the same
    bits.
    """
    made = layer()
    x, dy = inputs(0, factor=1.0)
    x[:, K // 2 :] = x[:, : K // 2] * 2
    with torch.no_grad():
        made.weight[:, K // 2 :] = made.weight[:, : K // 2]
    outliers = OutlierChannels(recipe=TetraJetV2(), share=0.5, multiple=1, start=0, steps=1)
    same = TetraJetV2(dtype="float32", outliers=outliers)
    step(made, same, 0, x, dy)
    _, dx, _ = step(made, same, 1, x, dy)
    rest, top = chosen(made)
    assert sorted((top - K // 2).tolist()) == sorted(rest.tolist()), "the second half is chosen"
    assert not torch.equal(dx[:, rest], dx[:, rest + K // 2])


def test_evaluation_records_nothing_and_uses_the_choice() -> None:
    made = trained(tetrajet(), 2)
    recipe = tetrajet()
    before = made.scaling_state()
    with torch.no_grad(), f4.autocast(recipe, seed=5, step=2):
        made(inputs(2)[0] * 100)
    assert all(torch.equal(value, before[name]) for name, value in made.scaling_state().items())
    step(made, recipe, 2, *inputs(2))
    with torch.no_grad(), f4.autocast(recipe, seed=5, step=3):
        made(inputs(3)[0])
    assert len(own_channels(made)) < K


def test_what_looks_at_operands_gets_those_of_the_layers_own_recipe() -> None:
    made, (x, _) = trained(tetrajet(), 3), inputs(0)
    assert (
        torch.equal(made.sampled_operands(x)[0], x)
        and not made.values(made.weight, torch.zeros_like).any()
    )
    step(made, tetrajet(), 3, *inputs(3))
    rest, top = chosen(made)
    x_rest, w_rest, rows = made.sampled_operands(x)
    w = made.weight.detach()
    assert (
        torch.equal(x_rest, x[:, rest]) and torch.equal(w_rest, w[:, rest]) and rows == slice(None)
    )
    values = made.values(w, torch.zeros_like)
    assert torch.equal(values[:, top], w[:, top]) and not values[:, rest].any()


def test_recomputation_repeats_the_bits_and_records_once() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer()

        def forward(self, x: Tensor) -> Tensor:
            return recompute(self.inner, x)

    again = Block()
    once = layer()
    again.inner.rename(once.layer, "emulate")
    for number in range(5):
        x, dy = inputs(number)
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                step(again, tetrajet(), number, x, dy),
                step(once, tetrajet(), number, x, dy),
                strict=True,
            )
        ), number
        assert again.inner.scaling_state().keys() == once.scaling_state().keys()
        assert all(
            torch.equal(v, once.scaling_state()[k]) for k, v in again.inner.scaling_state().items()
        )


def test_microbatches_record_the_norms_of_the_step() -> None:
    whole = layer()
    parts = layer()
    x, dy = inputs(0)
    recipe = tetrajet(start=0, steps=1)
    step(whole, recipe, 0, x, dy)
    for rows in range(0, M, 64):
        step(parts, recipe, 0, x[rows : rows + 64], dy[rows : rows + 64])
    one = whole.scaling_state()
    other = parts.scaling_state()
    assert int(one[STEPS]) == int(other[STEPS]) == 1
    assert torch.allclose(one[NORMS], other[NORMS], rtol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_restored_layer_goes_on_to_the_bit(steps: int) -> None:
    made = trained(tetrajet(), steps)
    other = layer()
    other.load_scaling_state({k: v.clone() for k, v in made.scaling_state().items()})
    copied = copy.deepcopy(made)
    for number in range(steps, 6):
        x, dy = inputs(number)
        wanted = step(made, tetrajet(), number, x, dy)
        for each in (other, copied):
            assert all(
                torch.equal(a, b)
                for a, b in zip(step(each, tetrajet(), number, x, dy), wanted, strict=True)
            )


def test_another_recipe_in_between_leaves_the_recording_as_it_is() -> None:
    made = trained(tetrajet(), 2)
    before = made.scaling_state()
    for recipe in (BF16(), MXFP8(), tetrajet().with_high_precision("fprop", "dgrad", "wgrad")):
        step(made, recipe, 2, *inputs(2))
    assert all(torch.equal(value, before[name]) for name, value in made.scaling_state().items())
    step(made, tetrajet(), 3, *inputs(3))
    step(made, tetrajet().with_high_precision("fprop"), 4, *inputs(4))
    assert set(chosen(made)[1].tolist()) == set(LARGE.tolist())


def test_weights_that_are_prepared_once_for_several_calls_give_the_bits_of_each_call() -> None:
    made = trained(tetrajet(), 3)
    fresh = trained(tetrajet(), 3)
    x, dy = inputs(4)
    step(made, tetrajet(), 3, x, dy)
    step(fresh, tetrajet(), 3, x, dy)
    fresh.keeps_forms = False
    constant = ConstantWeights()
    for _ in range(2):
        found = step(made, tetrajet(), 4, x, dy, constant)
        wanted = step(fresh, tetrajet(), 4, x, dy)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
