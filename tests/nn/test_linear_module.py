"""The linear layer as a module: state dict, copies, devices, inference mode, torch.compile,
backends.
"""

import copy
import io

import pytest
import torch
from linear_layers import gradients, layer, rand, same
from torch import Tensor, nn

import fp4train as f4
from fp4train.nn import Linear
from fp4train.precision import BF16, MXFP8, NVFP4, Recipe, autocast


def test_a_model_made_in_inference_mode_runs() -> None:
    with torch.inference_mode():
        module = layer()
        with autocast(NVFP4(), step=0):
            assert torch.equal(module(rand(4, 32)), module(rand(4, 32)))


def test_the_state_dict_is_that_of_nn_linear() -> None:
    module = layer()
    plain = nn.Linear(32, 48)
    with autocast(NVFP4(), step=0):
        module(rand(4, 32))
    assert list(module.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(module.state_dict())
    module.load_state_dict(plain.state_dict())


def test_copies_and_pickles_are_independent_and_leave_the_cache_behind() -> None:
    module = layer()
    x = rand(8, 32)
    base = gradients(module, x, NVFP4())
    module.zero_grad()
    small = io.BytesIO()
    torch.save(nn.Linear(32, 48), small)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    assert buffer.tell() < small.tell() + 6000, "no prepared weights inside"
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(module), loaded):
        assert same(gradients(other, x, NVFP4()), base)
        with torch.no_grad():
            other.weight.zero_()
        with autocast(NVFP4(), step=0):
            assert torch.equal(other(x), other.bias.bfloat16().float().expand(8, 48))
    assert same(gradients(module, x, NVFP4()), base)


def test_it_shows_its_backend() -> None:
    assert "backend=reference" in repr(layer(backend="reference"))
    with pytest.raises(
        ValueError, match="backend='cuda' is not one of auto, te, native, emulate, reference"
    ):
        layer(backend="cuda")


def test_a_transform_of_torch_func_is_refused() -> None:
    """Calls outside of one take a way past torch's check."""
    with autocast(NVFP4(), step=0), pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: layer()(x).sum())(rand(4, 32))


def test_a_layer_on_the_meta_device_can_be_materialised() -> None:
    module = Linear(32, 48, device="meta")
    with autocast(NVFP4(), step=0):
        assert module(torch.empty(4, 32, device="meta")).shape == (4, 48)
    module.to_empty(device="cpu")
    module.load_state_dict(layer().state_dict())
    assert same(gradients(module, rand(8, 32), NVFP4()), gradients(layer(), rand(8, 32), NVFP4()))
    other = Linear(32, 48, device="meta")
    other.load_state_dict(layer().state_dict(), assign=True)
    assert same(gradients(other, rand(8, 32), NVFP4()), gradients(layer(), rand(8, 32), NVFP4()))


# dynamo's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_leaves_the_numbers_alone_in_every_context(backend: str) -> None:
    """A graph compiled outside a context must not be reused inside one, or vice versa."""
    torch._dynamo.reset()
    model = f4.convert(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))
    compiled = torch.compile(model, backend=backend)
    x = rand(8, 16)

    def run(module: nn.Module, recipe: Recipe | None) -> tuple[Tensor, ...]:
        model.zero_grad()
        with autocast(recipe or BF16(), step=0, token_offset=0, enabled=recipe is not None):
            y = module(x)
        y.square().sum().backward()
        return (y.detach(), *(p.grad.clone() for p in model.parameters()))  # type: ignore[union-attr]

    for recipe in (None, NVFP4(), MXFP8(), None, NVFP4()):
        assert same(run(compiled, recipe), run(model, recipe))
    torch._dynamo.reset()


def test_backend_te_without_a_gpu_is_refused_with_what_would_run() -> None:
    module = layer(backend="te")
    with (
        autocast(NVFP4(), step=0),
        pytest.raises(
            ValueError, match=r"needs an NVIDIA GPU, not cpu\. backend=auto would run it by emulate"
        ),
    ):
        module(rand(4, 32))
    with autocast(BF16(), step=0):
        assert module(rand(4, 32)).isfinite().all(), "what is not quantised is torch's"
