"""dw that is one term of a sum is not rounded before it is added."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from prepared import sharing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fp4train.hardware import Device
from fp4train.nn import GradientDtypes, Linear, engine
from fp4train.nn.executors import TorchLayer
from fp4train.precision import BF16, FP32, MXFP8, NVFP4, FP8Current, Recipe, autocast, resolve
from fp4train.precision.settings import ConstantWeights

RECIPES = [BF16(), NVFP4(), MXFP8(), FP8Current()]


def gradient(layer: Linear, recipe: Recipe, x_MK: Tensor, dy_MN: Tensor) -> Tensor:
    layer.weight.grad = None
    with autocast(recipe, seed=1, step=2, token_offset=0):
        y = layer(x_MK)
    y.backward(dy_MN)
    assert layer.weight.grad is not None
    return layer.weight.grad


@pytest.fixture
def tensors() -> Iterator[tuple[Linear, Tensor, Tensor]]:
    torch.manual_seed(0)
    yield (
        Linear(64, 32),
        torch.randn(96, 64).bfloat16().requires_grad_(),
        torch.randn(96, 32).bfloat16(),
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_term_of_a_sum_is_the_product_before_it_is_rounded(
    tensors: tuple[Linear, Tensor, Tensor], recipe: Recipe
) -> None:
    layer, x, dy = tensors
    rounded = gradient(layer, recipe, x, dy)
    dx = x.grad
    assert torch.equal(rounded, rounded.bfloat16().float())
    x.grad = None
    layer.sum_gradients(True)
    exact = gradient(layer, recipe, x, dy)
    assert not torch.equal(exact, exact.bfloat16().float())
    # Two float32 products may differ in the order of their sums: by one BF16 rounding, seldom.
    assert (exact.bfloat16().float() != rounded).float().mean() < 0.01
    torch.testing.assert_close(exact, rounded, rtol=2**-7, atol=1e-3)
    assert dx is not None and x.grad is not None and torch.equal(dx, x.grad)


def test_sums_of_microbatches_come_closer_to_the_whole_batch(
    tensors: tuple[Linear, Tensor, Tensor],
) -> None:
    layer, x, dy = tensors
    whole = dy.double().T @ x.detach().double()
    errors = []
    for sums in (False, True):
        layer.sum_gradients(sums)
        total = sum(
            gradient(layer, BF16(), x[n : n + 8], dy[n : n + 8]).double() for n in range(0, 96, 8)
        )
        errors.append(float((total - whole).norm() / whole.norm()))
    assert errors[1] < 1e-5 < 1e-4 < errors[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_else_of_a_high_precision_layer_is_torchs(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Linear(48, 40, bias=bias)
    x = torch.randn(24, 48).to(dtype)
    dy = torch.randn(24, 40).to(dtype)
    found = []
    for sums in (False, True):
        layer.sum_gradients(sums)
        layer.zero_grad()
        own = x.clone().requires_grad_()
        with autocast(BF16() if dtype == torch.bfloat16 else FP32()):
            y = layer(own)
        y.backward(dy)
        found.append([y, own.grad, *([] if layer.bias is None else [layer.bias.grad])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Casts(TorchDispatchMode):
    """Counts the casts of matrices of a shape to BF16."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_bf16 = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16
        self.count += to_bf16 and args[0].shape == self.shape
        return func(*args, **kwargs)


def test_microbatches_that_share_constant_weights_round_them_once(
    tensors: tuple[Linear, Tensor, Tensor],
) -> None:
    """Forward and backward, of microbatches that are in flight together as in a pipeline; others
    anew.
    """
    layer, x, dy = tensors
    layer.sum_gradients(True)
    with Casts((32, 64)) as casts:
        for step in (0, 1):
            with autocast(BF16(), seed=1, step=0), sharing(ConstantWeights()):
                outputs = [layer(x[n : n + 24]) for n in range(0, 96, 24)]
            for n, y in enumerate(outputs):
                y.backward(dy[24 * n : 24 * n + 24])
            assert casts.count == step + 1
            with torch.no_grad():
                layer.weight.mul_(2.0)
    assert layer.bias is not None
    whole = F.linear(x[:24], (layer.weight.detach() / 2).bfloat16(), layer.bias.bfloat16())
    assert torch.equal(outputs[0], whole)


@pytest.mark.parametrize("hooked", [False, True])
def test_on_a_gpu_the_gemm_adds_dw_of_later_microbatches_to_the_gradient(
    hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of float32 weights a sum by autograd writes dw, and reads it and the gradient again: twice
    the bytes. The calls are recorded on tensors without data. A hook must see each gradient, so
    autograd adds them then.
    """
    added: list[bool] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.ops.aten.addmm.dtype_out:
                added.append(kwargs["out"] is args[0] is w.grad)
                return kwargs["out"]
            return function(*args, **(kwargs or {}))

    plan = resolve(Linear(64, 32, bias=False).layer, BF16(), None, "auto", Device(type="cpu"))
    executor = TorchLayer(plan, "cuda", sums="product")
    gradients = GradientDtypes(w=torch.float32)
    call: Any = SimpleNamespace(executor=executor, gradients=gradients)
    context: Any = SimpleNamespace(call=call)
    with FakeTensorMode(), torch.no_grad(), Recorded():
        x, dy = (torch.empty(16, n, dtype=torch.bfloat16, device="cuda") for n in (64, 32))
        w = torch.empty(32, 64, device="cuda").requires_grad_()
        if hooked:
            w.register_post_accumulate_grad_hook(lambda parameter: None)
        context.saved_tensors, context.kinds = engine.flatten((None, x))
        context.summed = w
        context.next_functions = (None, 0), (object(), 0)
        monkeypatch.setattr(engine, "accumulates", lambda node: True)
        returned = []
        for _ in range(3):
            dw = engine.LayerFunction.backward(context, dy)[2]
            returned.append(dw is not None)
            w.grad = dw if w.grad is None else w.grad
    assert w.grad is not None and w.grad.dtype == torch.float32
    assert (added, returned) == (([], [True] * 3) if hooked else ([True] * 2, [True, False, False]))
