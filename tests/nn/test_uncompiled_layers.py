"""torch.compile on a torch that cannot take layers into its graphs: they run outside, with the same
bits.

Torch 2.11, which GPU images carry, is one; scripts/test_torch.sh runs the tests there. Elsewhere
the lack is pretended.
"""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fp4train as f4
from fp4train.models.llama import Llama
from fp4train.nn import compile as compiled_layers
from fp4train.precision import BF16, MXFP8, NVFP4, LayerPolicy, Recipe, autocast

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def no_operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(compiled_layers, "OPERATOR", None)
    yield
    torch._dynamo.reset()


def step(module: nn.Module, model: nn.Module, recipe: Recipe, at: int) -> list[Tensor]:
    """Loss and gradients of one step."""
    drawn = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(at))
    model.zero_grad()
    with autocast(recipe, step=at, token_offset=0, seed=5, policy=LayerPolicy(last=1)):
        loss = module(drawn[:, :-1], drawn[:, 1:])
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_outside_of_the_graphs_have_the_bits_of_eager_mode(
    backend: str, recompute: bool
) -> None:
    shape = Llama(layers=3, width=32, heads=2, kv_heads=1, recompute=recompute)
    model = f4.convert(shape.build(vocab_size=64, seq_len=16))
    compiled = torch.compile(model, backend=backend)
    for at, recipe in enumerate((NVFP4(), MXFP8(), BF16(), NVFP4().with_high_precision("wgrad"))):
        ours = step(compiled, model, recipe, at)
        eager = step(model, model, recipe, at)
        assert len(ours) == len(eager)
        assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True)), recipe


def test_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        compiled_layers, "UNAVAILABLE", "torch 2.11 has no operators on opaque objects"
    )
    compiled_layers._operator.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert compiled_layers._operator() is compiled_layers._operator() is None
    compiled_layers._operator.cache_clear()
    (record,) = [each for each in caplog.records if each.name == compiled_layers.__name__]
    assert "run outside of the graphs: torch 2.11 has no operators" in record.getMessage()
