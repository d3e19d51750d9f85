"""Activation recomputation repeats the forward pass in every bit, or raises an error."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fp4train as f4
from fp4train.nn import Experts, Linear
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    Custom,
    FP8Delayed,
    Operands,
    Recipe,
    autocast,
    recompute,
    recompute_contexts,
)
from fp4train.quantize import QuantSpec

STOCHASTIC = QuantSpec(rounding="stochastic")
EVERYWHERE = Custom(
    label="stochastic everywhere",
    fprop=Operands(first=STOCHASTIC, second=STOCHASTIC),
    dgrad=Operands(first=STOCHASTIC, second=STOCHASTIC),
    wgrad=Operands(first=STOCHASTIC, second=STOCHASTIC),
)
DEQUANTISED = FP8Delayed(history=3, backward="dequantised")
RECIPES = [NVFP4(), MXFP8(), BF16(), FP8Delayed(history=3), EVERYWHERE, DEQUANTISED]
X = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(2)
    )
    return f4.convert(model)


Region = Callable[..., Tensor]


def plainly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def ours(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return recompute(function, x)


def torchs_with_contexts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch_checkpoint(function, x, use_reentrant=False, context_fn=recompute_contexts)  # type: ignore[no-any-return]


def nested(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return recompute(lambda t: recompute(function, t), x)


def train(region: Region, recipe: Recipe, step: int | None, passes: int = 3) -> Iterator[Tensor]:
    """Gradients and scaling state of three passes; the last two forwards precede their backwards,
    as in a pipeline.
    """
    model = blocks()

    def forward(number: int) -> Tensor:
        x = (X * (number + 1)).requires_grad_()
        with autocast(
            recipe, step=None if step is None else step + number, token_offset=32 * number
        ):
            for block in model:  # type: ignore[attr-defined]
                x = x + region(block, x)
        return x.square().mean()

    forward(0).backward()
    losses = [forward(number) for number in range(1, passes)]
    for loss in losses:
        loss.backward()
    yield from (p.grad for p in model.parameters())  # type: ignore[misc]
    for module in model.modules():
        if isinstance(module, Linear):
            yield from module.scaling_state().values()


@pytest.mark.parametrize("region", [ours, torchs_with_contexts, nested], ids=lambda f: f.__name__)
@pytest.mark.parametrize("step", [None, 4])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_gradients_and_histories_are_those_without_recomputation(
    recipe: Recipe, step: int | None, region: Region
) -> None:
    expected = list(train(plainly, recipe, step))
    found = list(train(region, recipe, step))
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_context_entered_inside_the_region_is_entered_again_with_it() -> None:
    def mixed(block: nn.Module, x: Tensor) -> Tensor:
        with autocast(MXFP8()):
            x = block[0](x)  # type: ignore[index]
        return block[2](x)  # type: ignore[index,no-any-return]

    found = []
    for region in (plainly, ours, torchs_with_contexts):
        model = blocks()
        with autocast(EVERYWHERE):
            y = region(lambda t: mixed(model[0], t), X.clone().requires_grad_())  # type: ignore[index] # noqa: B023
        y.square().sum().backward()
        found.append([p.grad for p in model[0].parameters()])  # type: ignore[index]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("backward_in", [None, NVFP4(), MXFP8()], ids=["outside", "same", "other"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", [NVFP4(), BF16()], ids=lambda r: r.name)
def test_torchs_own_checkpoint_raises_instead_of_computing_something_else(
    recipe: Recipe, reentrant: bool, backward_in: Recipe | None
) -> None:
    model = blocks()
    with autocast(recipe, step=0):
        y = torch_checkpoint(model[0], X.clone().requires_grad_(), use_reentrant=reentrant)  # type: ignore[index]
    with (
        autocast(backward_in or BF16(), enabled=backward_in is not None),
        pytest.raises(
            RuntimeError,
            match=r"0\.0 is recomputed in backward without .*context_fn=.*recompute_contexts",
        ),
    ):
        y.sum().backward()


def test_experts_that_are_recomputed_in_another_context_raise_as_linear_layers_do() -> None:
    experts = Experts(2, 16, 16)
    x = torch.randn(8, 16, requires_grad=True)
    with autocast(NVFP4(), step=0):
        y = torch_checkpoint(lambda rows: experts(rows, [5, 3]), x, use_reentrant=False)
    with pytest.raises(
        RuntimeError, match="experts is recomputed in backward without the autocast context"
    ):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_never_met_a_context_is_recomputed_as_ever(reentrant: bool) -> None:
    model = blocks()
    torch_checkpoint(model[0], X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()  # type: ignore[index]
    found = [p.grad.clone() for p in model[0].parameters()]  # type: ignore[index]
    model.zero_grad()
    model[0](X.clone().requires_grad_()).sum().backward()  # type: ignore[index]
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model[0].parameters(), strict=True))  # type: ignore[index]


def test_a_context_entered_in_a_custom_backward_holds_there() -> None:
    """Reversible layers run their forward pass in backward themselves, in the context that they
    enter.
    """
    model = blocks()

    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
            ctx.save_for_backward(x)
            return model[0](x)  # type: ignore[index,no-any-return]

        @staticmethod
        def backward(ctx, dy: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
            (x,) = ctx.saved_tensors
            with torch.enable_grad(), autocast(NVFP4(), step=0):
                x = x.detach().requires_grad_()
                y = model[0](x)  # type: ignore[index]
            return torch.autograd.grad(y, x, dy)[0]

    x = X.clone().requires_grad_()
    with autocast(NVFP4(), step=0):
        y = Reversible.apply(x)  # type: ignore[no-untyped-call]
    y.sum().backward()
    other = X.clone().requires_grad_()
    with autocast(NVFP4(), step=0):
        model[0](other).sum().backward()  # type: ignore[index]
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]


def test_recomputation_keeps_fewer_bytes() -> None:
    sizes = []
    for region in (plainly, ours):
        model = blocks()
        kept = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        x = X.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(NVFP4(), step=0):
            region(model[0], x)  # type: ignore[index]
        sizes.append(kept)
    assert sizes[1] < sizes[0]
