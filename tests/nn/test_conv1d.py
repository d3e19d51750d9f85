"""`Conv1D` of Hugging Face's GPT-2, y = x·w + b with w [in, out], runs as nn.Linear with the
transposed weight does.
"""

import copy
import io

import pytest
import torch
from compiled_layers import needs_graphs
from prepared import sharing
from torch import Tensor, nn

import fp4train as f4
from fp4train.nn.linear import LinearLayer
from fp4train.precision import BF16, MXFP8, NVFP4, LayerPolicy, OutlierChannels, Recipe, autocast
from fp4train.precision.settings import ConstantWeights


class Conv1D(nn.Module):
    """As in transformers 4 and 5, which the tests do not install."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.nx = nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.randn(nf) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(
            *x.shape[:-1], self.nf
        )


Conv1D.__module__ = "transformers.pytorch_utils"


class Block(nn.Module):
    def __init__(self, width: int, linear: bool) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(a, b) if linear else Conv1D(b, a)
            for a, b in ((width, 3 * width), (3 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    """A model of Conv1D and the same one of nn.Linear."""
    torch.manual_seed(0)
    ours, plain = (
        nn.Sequential(*(Block(32, linear) for _ in range(3))) for linear in (False, True)
    )
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            other = ours.get_parameter(name)
            parameter.copy_(other.T if other.dim() == 2 else other)
    return ours, plain


def step(
    model: nn.Module,
    recipe: Recipe,
    at: int,
    policy: LayerPolicy | None = None,
    constant: ConstantWeights | None = None,
) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(at)).requires_grad_()
    with autocast(recipe, policy=policy, step=at), sharing(constant):
        y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def same(conv: list[Tensor], linear: list[Tensor]) -> bool:
    return len(conv) == len(linear) and all(
        torch.equal(a.T if a.shape != b.shape else a, b) for a, b in zip(conv, linear, strict=True)
    )


def test_conversion_shares_the_weights_and_keeps_the_names_and_shapes_of_the_state_dict() -> None:
    model, _ = pair()
    x = torch.randn(4, 8, 32)
    before = {name: p for name, p in model.named_parameters()}
    expected = model(x)
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    f4.convert(model)
    assert f4.conversion(model).share == 1 and len(f4.conversion(model).layers) == 6
    assert all(model.get_parameter(name) is p for name, p in before.items())
    assert {name: p.shape for name, p in model.state_dict().items()} == shapes
    layer = model[0].up
    assert isinstance(layer, LinearLayer) and isinstance(layer, Conv1D)
    assert not isinstance(layer, nn.Linear), "other code would take its weight for [out, in]"
    assert (layer.in_features, layer.out_features) == (32, 96)
    assert [layer.layer.block for layer in model.modules() if isinstance(layer, LinearLayer)] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4(),
        MXFP8(),
        BF16(),
        NVFP4(outliers=OutlierChannels(recipe=MXFP8(), start=0, steps=1, multiple=8)),
    ],
    ids=["nvfp4", "mxfp8", "bf16", "outliers"],
)
def test_every_bit_is_that_of_a_linear_layer(recipe: Recipe) -> None:
    ours, plain = map(f4.convert, pair())
    for at in range(2):
        assert same(
            step(ours, recipe, at, LayerPolicy(last=1)),
            step(plain, recipe, at, LayerPolicy(last=1)),
        )


@pytest.mark.long
@needs_graphs
def test_copies_pickles_and_compiled_models_keep_the_bits() -> None:
    model = f4.convert(pair()[0])
    expected = step(model, NVFP4(), 0)
    assert same(step(copy.deepcopy(model), NVFP4(), 0), expected)
    torch._dynamo.reset()
    fresh = f4.convert(pair()[0])
    compiled = torch.compile(fresh, backend="aot_eager", fullgraph=True)
    fresh.zero_grad()
    assert same(step(compiled, NVFP4(), 0), expected)
    torch._dynamo.reset()
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    pair()[0].load_state_dict(torch.load(saved, weights_only=True))


def test_another_class_of_that_name_is_not_taken_for_it() -> None:
    other = type("Conv1D", (nn.Module,), {"__module__": "lab"})()
    other.weight = nn.Parameter(torch.ones(32, 32))
    model = f4.convert(nn.Sequential(nn.Linear(32, 32), other))
    assert not isinstance(model[1], LinearLayer)
