"""The gradient of a norm's result: the sum of those of the layers that read it."""

import copy
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from linear_layers import layer, rand
from torch import Tensor

import fp4train as f4
from fp4train.models.llama import Llama
from fp4train.nn import Executor, LayerFunction, NormedCall, TensorForms
from fp4train.nn.fused_norm import parameters_of
from fp4train.precision import NVFP4
from fp4train.quantize import SourceTensors


class CountedLayer:
    """An executor's passes in BF16; `living` has, for each backward pass, how many of the gradients
    of x are alive when it begins.
    """

    adds = False

    def __init__(self, gradients: list[Any], living: list[int]) -> None:
        self.gradients = gradients
        self.living = living

    def forward(
        self, x_MK: Tensor, w_NK: Tensor, bias_N: None, call: Any, codes_of: Any
    ) -> tuple[Tensor, Any]:
        row, column = codes_of(x_MK)
        return row @ w_NK.T, (w_NK, column)

    def backward(
        self, dy_MN: Tensor, saved: Any, call: Any, total: None, codes_of: None
    ) -> tuple[Tensor, Tensor, None]:
        w_NK, x_MK = saved
        self.living.append(alive(self.gradients))
        dx_MK = dy_MN @ w_NK
        self.gradients.append(weakref.ref(dx_MK))
        return dx_MK, dy_MN.T @ x_MK, None


class IdentityNorm:
    """n = x."""

    def __init__(self, gradients: list[Any], living: list[int]) -> None:
        self.gradients = gradients
        self.living = living

    def codes(self, x: Tensor, change: None, weight_K: Tensor) -> tuple[Any, Tensor, Tensor]:
        return (x.detach(), x.detach()), x, x.new_ones(x.shape[0])

    def source(self, h: Tensor, weight_K: Tensor, rstd_M: Tensor) -> SourceTensors:
        return SourceTensors("norm", (h, weight_K, rstd_M))

    def backward(
        self, dn: Tensor, h: Tensor, weight_K: Tensor, rstd_M: Tensor, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.living.append(alive(self.gradients))
        return dn.clone(), torch.zeros_like(weight_K)


def alive(tensors: list[Any]) -> int:
    return sum(tensor() is not None for tensor in tensors)


def test_the_gradients_of_many_readers_are_summed_in_autograds_order_in_one_tensor() -> None:
    """That of the last reader first, each rounded to BF16: another order has other bits."""
    torch.manual_seed(0)
    x = torch.randn(16, 8).bfloat16().requires_grad_()
    weight_K = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(4, 8).bfloat16().requires_grad_() for _ in range(4)]
    dys = [torch.randn(16, 4).bfloat16() for _ in range(4)]
    gradients: list[Any] = []
    living: list[int] = []
    counted_layer = CountedLayer(gradients, living)
    calls: Any = [SimpleNamespace(executor=counted_layer, wants=lambda *_: None) for _ in weights]
    parameters = [tensor for w_NK in weights for tensor in (w_NK, None)]
    norm = IdentityNorm(gradients, living)
    normed = NormedCall(norm, calls)
    *outputs, _ = LayerFunction.apply(normed, x, None, weight_K, *parameters)  # type: ignore[no-untyped-call]
    torch.autograd.backward(outputs, dys)
    leaf = x.detach().requires_grad_()
    torch.autograd.backward([leaf @ w_NK.detach().T for w_NK in weights], dys)
    assert x.grad is not None and leaf.grad is not None
    assert torch.equal(x.grad, leaf.grad)
    assert living == [0, 1, 1, 1, 1]


def test_layers_without_a_norm_quantise_an_input_that_is_not_contiguous_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gate and up read one matrix, whose forms they share."""
    layers = [layer(64, 48, bias=False) for _ in range(2)]
    x = rand(64, 32).bfloat16().T.requires_grad_()
    quantised: list[Tensor] = []
    real = TensorForms.prepare

    def counted(forms: TensorForms, tensor: Tensor, *arguments: Any) -> Any:
        quantised.append(tensor)
        return real(forms, tensor, *arguments)

    monkeypatch.setattr(TensorForms, "prepare", counted)
    recipe = NVFP4(hadamard=False, stochastic_rounding=False)
    with f4.autocast(recipe, step=0, token_offset=0):
        calls = []
        for linear in layers:
            executor, now = linear.executor_now(x.device, x.dtype)
            assert executor is not None
            calls.append(linear.call_in(now, executor, len(x)))
        *outputs, _ = LayerFunction.apply(  # type: ignore[no-untyped-call]
            NormedCall(None, calls), x, None, None, *parameters_of(layers)
        )
        assert len(quantised) == 1
        for y_MN, linear in zip(outputs, layers, strict=True):
            assert torch.equal(y_MN, linear(x))


def test_what_watches_a_layer_is_not_held_by_the_norm_before_it() -> None:
    block = f4.convert(Llama(width=64, layers=1, heads=2).build(vocab_size=60, seq_len=8)).blocks[0]
    block.attention_in.enabled = True
    watched: Any = block.attention.get_submodule(block.attention.input_layers[0])
    x = torch.randn(1, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    copies: list[Any] = []

    def observer(executor: Executor) -> Executor:
        observed = copy.copy(executor)
        copies.append(weakref.ref(observed))
        return observed

    watched.observer = observer
    with f4.autocast(NVFP4(), step=0):
        block.attention_in.ready(x)
    watched.observer = None
    assert copies and alive(copies) == 0
