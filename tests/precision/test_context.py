"""autocast: the recipe of a layer in nested contexts, in other threads, and in backward."""

import threading

import pytest
import torch

from fp4train.models.llama import Llama
from fp4train.nn import Linear, convert
from fp4train.precision import BF16, FP32, MXFP8, NVFP4, LayerPolicy, autocast
from fp4train.precision.context import activation_dtype, current

X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def layer() -> Linear:
    torch.manual_seed(0)
    return Linear(32, 48)


def run(layer: Linear, recipe: object) -> torch.Tensor:
    with autocast(recipe, step=0):  # type: ignore[arg-type]
        return layer(X)


def test_outside_of_a_context_the_layer_is_torchs(layer: Linear) -> None:
    assert torch.equal(layer(X), torch.nn.functional.linear(X, layer.weight, layer.bias))


def test_an_inner_context_overrides_and_the_outer_one_returns(layer: Linear) -> None:
    nvfp4, mxfp8, plain = run(layer, NVFP4()), run(layer, MXFP8()), layer(X)
    assert not torch.equal(nvfp4, mxfp8)
    with autocast(NVFP4(), step=0):
        assert torch.equal(layer(X), nvfp4)
        with autocast(MXFP8(), step=0):
            assert torch.equal(layer(X), mxfp8)
            with autocast(MXFP8(), enabled=False):
                assert torch.equal(layer(X), plain)
            assert torch.equal(layer(X), mxfp8)
        assert torch.equal(layer(X), nvfp4)
    assert current() is None


def test_a_context_ends_when_an_error_passes_through(layer: Linear) -> None:
    with pytest.raises(RuntimeError, match="stop"), autocast(NVFP4()):
        raise RuntimeError("stop")
    assert current() is None


def test_backward_runs_in_the_precision_of_its_forward_whatever_is_active_then(layer: Linear) -> None:
    def gradients(before: object, during: object) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        y = run(layer, before)
        with autocast(before, step=0, token_offset=0):
            y = layer(x)
        if during is None:
            (y * X.sum(1, keepdim=True)).sum().backward()
        else:
            with autocast(during, step=7):
                (y * X.sum(1, keepdim=True)).sum().backward()
        found = [x.grad.clone(), layer.weight.grad.clone()]
        layer.zero_grad()
        return found

    for recipe in (NVFP4(), MXFP8(), BF16()):
        expected = gradients(recipe, None)
        for other in (MXFP8(), FP32(), NVFP4(hadamard=False)):
            assert all(torch.equal(a, b) for a, b in zip(gradients(recipe, other), expected, strict=True))


def test_another_thread_has_a_context_of_its_own(layer: Linear) -> None:
    seen: list[object] = []
    with autocast(NVFP4()):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert seen == [None]
        assert current() is not None


def test_a_class_instead_of_an_object_is_answered_with_the_object_to_write() -> None:
    with pytest.raises(TypeError, match=r"autocast needs NVFP4\(\), not <class"):
        autocast(NVFP4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a recipe object such as NVFP4\(\), not 'nvfp4'"):
        autocast("nvfp4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="LayerPolicy object or None"):
        autocast(NVFP4(), policy=LayerPolicy)  # type: ignore[arg-type]


def test_it_decorates_functions_too(layer: Linear) -> None:
    decorated = autocast(NVFP4(), step=0)(layer.forward)  # type: ignore[operator]
    assert torch.equal(decorated(X), run(layer, NVFP4()))
    assert torch.equal(decorated(X), run(layer, NVFP4())), "and more than once"


def test_models_carry_their_activations_in_the_recipes_dtype() -> None:
    assert activation_dtype(torch.float64) == torch.float64
    with autocast(BF16()):
        assert activation_dtype(torch.float64) == torch.bfloat16
        with autocast(FP32()):
            assert activation_dtype(torch.float64) == torch.float32
    model = convert(Llama(width=16, layers=1, heads=2, kv_heads=1).build(vocab_size=8, seq_len=4))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for recipe, dtype in ((None, torch.float32), (BF16(), torch.bfloat16), (NVFP4(dtype="float16"), torch.float16)):
        if recipe is None:
            assert model(tokens).dtype == dtype
            continue
        with autocast(recipe):
            assert model(tokens).dtype == dtype
