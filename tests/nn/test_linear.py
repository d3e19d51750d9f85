"""Inputs, outputs and gradients of the linear layer: every shape, stride, dtype and use that a
model may make of it.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from linear_layers import RECIPES, each_recipe, gradients, layer, rand, same
from torch import Tensor, nn

import fp4train as f4
from fp4train.precision import FP16, FP32, NVFP4, Recipe, autocast


@each_recipe
@pytest.mark.parametrize("shape", [(32,), (6, 32), (2, 3, 32), (1, 2, 3, 32)])
def test_leading_dimensions_are_those_of_the_input(recipe: Recipe, shape: tuple[int, ...]) -> None:
    module = layer()
    x = rand(6, 32)[: torch.Size(shape[:-1]).numel()].reshape(shape)
    y, dx, dw, db = gradients(module, x, recipe)
    assert y.shape == (*shape[:-1], 48)
    assert y._base is None  # FSDP2 warns of views
    assert dx.shape == shape
    flat = gradients(module, x.reshape(-1, 32), recipe)
    assert torch.equal(y.reshape(-1, 48), flat[0])
    assert db.shape == (48,) and dw.shape == (48, 32)


@each_recipe
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
@pytest.mark.parametrize("backend", ["auto", "emulate", "reference"])
def test_an_empty_batch_has_empty_output_and_zero_gradients(
    recipe: Recipe, shape: tuple[int, ...], backend: str
) -> None:
    y, dx, dw, db = gradients(layer(backend=backend), torch.empty(shape), recipe)
    assert y.shape == (*shape[:-1], 48)
    assert dx.shape == shape
    assert not dw.any() and not db.any()


@each_recipe
@pytest.mark.parametrize(("tokens", "k", "n"), [(5, 7, 9), (1, 1, 1), (17, 33, 15)])
def test_no_size_is_refused(recipe: Recipe, tokens: int, k: int, n: int) -> None:
    module = layer(k, n)
    x = rand(tokens, k)
    y, dx, dw, db = gradients(module, x, recipe)
    exact = gradients(module, x, FP32())
    for a, b in zip((y, dx, dw, db), exact, strict=True):
        assert float((a - b).norm()) <= 0.35 * float(b.norm()) + 1e-6


@each_recipe
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode_give_the_same_output(
    recipe: Recipe, mode: Callable[[], object]
) -> None:
    module = layer()
    x = rand(4, 32)
    with mode(), autocast(recipe, step=0):  # type: ignore[attr-defined]
        y = module(x)
    assert not y.requires_grad
    assert torch.equal(y, gradients(module, x, recipe)[0]), (
        "and what was prepared there serves training afterwards"
    )


@each_recipe
@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(recipe: Recipe, frozen: str) -> None:
    module = layer()
    x = rand(16, 32)
    _, dx, dw, db = gradients(module, x, recipe)
    module.zero_grad()
    if frozen != "input":
        getattr(module, frozen).requires_grad_(False)
    leaf = x.clone().requires_grad_(frozen != "input")
    with autocast(recipe, step=0, token_offset=0):
        y = module(leaf)
    (y * rand(*y.shape, seed=9)).sum().backward()
    found = {"input": leaf.grad, "weight": module.weight.grad, "bias": module.bias.grad}
    for (name, grad), expected in zip(found.items(), (dx, dw, db), strict=True):
        assert grad is None if name == frozen else torch.equal(grad, expected)  # type: ignore[arg-type]


@each_recipe
def test_gradients_accumulate_over_microbatches(recipe: Recipe) -> None:
    module = layer()
    parts = (rand(16, 32), rand(16, 32, seed=1))
    single = [gradients(module, part, recipe)[2:] for part in parts]
    module.zero_grad()
    for part in parts:
        with autocast(recipe, step=0, token_offset=0):
            y = module(part.clone().requires_grad_())
        (y * rand(*y.shape, seed=9)).sum().backward()
    assert torch.equal(module.weight.grad, single[0][0] + single[1][0])  # type: ignore[arg-type]


@each_recipe
@pytest.mark.parametrize(
    "view",
    [
        lambda: rand(32, 8).T,
        lambda: rand(8, 64)[:, ::2],
        lambda: rand(4, 2, 32).transpose(0, 1),
        lambda: rand(1, 32).expand(8, 32),
        lambda: rand(8, 40)[:, 3:35],
    ],
    ids=["transposed", "strided", "batch transposed", "expanded", "sliced"],
)
def test_strides_do_not_matter(recipe: Recipe, view: Callable[[], Tensor]) -> None:
    module = layer()
    x = view()
    with autocast(recipe, step=0):
        y = module(x)
        contiguous = module(x.contiguous())
    assert torch.equal(y, contiguous)
    leaf = x.detach().clone().requires_grad_()
    found = []
    # an expanded dy, and a dense one
    for y_like in (lambda y: y.sum(), lambda y: (y * torch.ones_like(y)).sum()):
        module.zero_grad()
        leaf.grad = None
        with autocast(recipe, step=0):
            y = module(leaf)
        y_like(y).backward()
        found.append((leaf.grad, module.weight.grad))
    assert same(*found)  # type: ignore[arg-type]


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_output_and_gradient_have_the_inputs_dtype(recipe: Recipe, dtype: torch.dtype) -> None:
    module = layer()
    y, dx, dw, _ = gradients(module, rand(8, 32).to(dtype), recipe)
    assert y.dtype == dx.dtype == dtype
    assert dw.dtype == torch.float32, "gradients of float32 masters are float32"


@each_recipe
def test_under_torchs_autocast_the_output_has_its_dtype(recipe: Recipe) -> None:
    module = layer()
    x = rand(8, 32)
    with torch.autocast("cpu", torch.bfloat16), autocast(recipe, step=0):
        y = module(x)
    assert y.dtype == torch.bfloat16
    with autocast(recipe, step=0):
        assert torch.equal(y, module(x).bfloat16()), (
            "torch.autocast casts none of the operands once more"
        )


QUANTISED = [recipe for recipe in RECIPES if recipe.quantised]


@pytest.mark.parametrize(
    "recipe", [*QUANTISED, NVFP4(row_scaled_activation=True)], ids=lambda r: r.name
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_inside_of_torchs_autocast_is_not_cast(recipe: Recipe, dtype: torch.dtype) -> None:
    found = []
    for enabled in (False, True):
        module = layer()
        x = rand(8, 32).requires_grad_()
        with autocast(recipe, step=0):
            y = module(x)
        with torch.autocast("cpu", dtype, enabled=enabled):
            y.backward(rand(8, 48, seed=2))
        found.append((x.grad, module.weight.grad, module.bias.grad))
    assert same(*found)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modules_in_half_precision_and_moved_afterwards(dtype: torch.dtype) -> None:
    module = layer()
    with autocast(NVFP4(), step=0, token_offset=0):
        module(rand(8, 32))  # caches forms of the old weights
    module.to(dtype)
    _, _, dw, _ = gradients(module, rand(8, 32).to(dtype), NVFP4())
    assert dw.dtype == dtype
    fresh = layer().to(dtype)
    assert torch.equal(dw, gradients(fresh, rand(8, 32).to(dtype), NVFP4())[2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool], ids=str)
def test_an_input_that_is_no_floating_number_is_refused_as_by_nn_linear(dtype: torch.dtype) -> None:
    module = f4.convert(nn.Linear(32, 16))
    x = torch.ones(4, 32).to(dtype)
    with pytest.raises(RuntimeError):
        nn.Linear(32, 16)(x)
    with (
        autocast(NVFP4()),
        pytest.raises(TypeError, match=rf"input has dtype {dtype}; a linear layer takes floating"),
    ):
        module(x)


def test_a_wrong_last_dimension_names_the_layer() -> None:
    for shape in ((4, 31), (), (32, 4)):
        with (
            autocast(NVFP4()),
            pytest.raises(ValueError, match=r"linear: input \(.*\) does not end in in_features=32"),
        ):
            layer()(torch.zeros(shape))


@each_recipe
def test_one_layer_may_run_twice_in_a_forward_pass(recipe: Recipe) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = layer(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.shared(x))

    module = Twice()
    x = rand(8, 32)
    _, dx, dw, db = gradients(module, x, recipe)
    exact = gradients(module, x, FP32())
    for a, b in zip((dx, dw, db), exact[1:], strict=True):
        assert float((a - b).norm()) <= 0.5 * float(b.norm())
    assert same((dx, dw, db), gradients(module, x, recipe)[1:]), "and twice the same"


def test_tied_weights_are_prepared_for_each_layer_and_share_a_gradient() -> None:
    model = nn.Sequential(layer(32, 32), layer(32, 32))
    model[1].weight = model[0].weight
    f4.convert(model)
    assert model[0].weight is model[1].weight
    gradients(model, rand(8, 32), NVFP4())
    assert len(list(model.parameters())) == 3
    exact = copy.deepcopy(model)
    assert exact[0].weight is exact[1].weight


def test_fp16_gradients_overflow_to_infinity_and_do_not_wrap() -> None:
    module = layer(bias=False)
    x = rand(8, 32).half().requires_grad_()
    with autocast(FP16(), step=0):
        y = module(x)
    y.backward(torch.full_like(y, 6e4))
    assert module.weight.grad is not None
    assert module.weight.grad.isinf().any(), "what a loss scaler looks for"


def test_a_second_derivative_is_refused() -> None:
    module = layer()
    x = rand(6, 32).requires_grad_()
    with autocast(NVFP4()):
        y = module(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()
