"""Calls of a layer within one step: each draws random bits of its own, and what repeats a call
repeats its bits.
"""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from compiled_layers import needs_graphs
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import fp4train as f4
from fp4train.nn import Linear
from fp4train.precision import NVFP4, autocast, recompute, recompute_contexts

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    torch.manual_seed(0)
    return f4.convert(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)))


def gradients(found: nn.Module) -> list[Tensor]:
    grads = [p.grad.clone() for p in found.parameters() if p.grad is not None]
    found.zero_grad()
    return grads


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def accumulate(
    found: nn.Module, offsets: list[int | None], call: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    for offset in offsets:
        with autocast(NVFP4(), step=3, token_offset=offset):
            loss = (call or found)(X).square().mean()
        loss.backward()
    return gradients(found)


def test_microbatches_of_ones_own_loop_draw_the_bits_of_their_places_in_the_batch() -> None:
    counted = accumulate(model(), [None, None, None])
    assert same(counted, accumulate(model(), [0, 16, 32]))
    assert not same(counted, accumulate(model(), [0, 0, 0]))


def test_one_context_over_several_microbatches_counts_them_too() -> None:
    found = model()
    with autocast(NVFP4(), step=3):
        losses = [found(X).square().mean() for _ in range(3)]
    for loss in losses:
        loss.backward()
    assert same(gradients(found), accumulate(model(), [0, 16, 32]))


def test_the_next_step_and_a_copy_count_from_the_beginning() -> None:
    found = model()
    first = accumulate(found, [None, None])
    with autocast(NVFP4(), step=4):
        found(X).sum().backward()
    found.zero_grad()
    assert same(accumulate(found, [None, None]), first), "another step in between"
    copied = copy.deepcopy(found)
    assert same(accumulate(copied, [None, None]), first)


def test_a_weight_used_twice_in_a_forward_pass_draws_twice() -> None:
    torch.manual_seed(0)
    shared = Linear(32, 32, bias=False)
    with autocast(NVFP4(), step=0):
        calls = [shared(X), shared(X)]
    one, other = (torch.autograd.grad(y, shared.weight, torch.sin(y))[0] for y in calls)
    assert torch.equal(*calls), "nothing is drawn forward"
    assert not torch.equal(one, other)


def test_evaluation_between_microbatches_shifts_no_bits_and_draws_the_same_wherever_it_stands() -> (
    None
):
    found = model()
    seen = []

    def evaluated(x: Tensor) -> Tensor:
        with torch.no_grad():
            seen.append(found(x))
        return found(x)  # type: ignore[no-any-return]

    assert same(accumulate(found, [None, None], evaluated), accumulate(model(), [None, None]))
    assert torch.equal(*seen)


def regions() -> Iterator[tuple[str, Callable[..., Tensor]]]:
    yield "ours", lambda part, x: recompute(part, x)
    yield (
        "torchs",
        lambda part, x: checkpoint(part, x, use_reentrant=False, context_fn=recompute_contexts),
    )
    yield "nested", lambda part, x: recompute(lambda t: recompute(part, t), x)


@pytest.mark.parametrize("region", [r for _, r in regions()], ids=[n for n, _ in regions()])
def test_recomputed_microbatches_repeat_the_bits_of_their_own_forward_pass(
    region: Callable[..., Tensor],
) -> None:
    found = model()

    def called(x: Tensor) -> Tensor:
        for part in found.children():
            x = region(part, x.requires_grad_())
        return x

    expected = accumulate(model(), [None, None, None])
    assert same(accumulate(found, [None, None, None], called), expected)

    def pipelined(forward: Callable[..., Tensor], module: nn.Module) -> list[Tensor]:
        with autocast(NVFP4(), step=4):
            losses = [forward(X.clone()).square().mean() for _ in range(3)]
        for loss in losses:
            loss.backward()
        return gradients(module)

    plain = model()
    assert same(pipelined(called, found), pipelined(plain, plain))


def test_a_backward_pass_with_a_context_of_its_own_repeats_the_only_call_and_is_refused_after_several() -> (
    None
):
    found = model()

    def inside(x: Tensor) -> Tensor:
        with autocast(NVFP4(), step=3):
            return found(x)  # type: ignore[no-any-return]

    def step() -> list[Tensor]:
        checkpoint(
            inside, X.clone().requires_grad_(), use_reentrant=False
        ).square().mean().backward()
        return gradients(found)

    assert same(step(), accumulate(model(), [None]))
    with pytest.raises(
        RuntimeError, match=r"0 is called in backward .* after 2 calls in this step.*token_offset"
    ):
        step()


@needs_graphs
def test_compiled_microbatches_draw_the_bits_of_eager_ones_and_compile_nothing_new() -> None:
    torch._dynamo.reset()
    found = model()
    counter = CompileCounter()
    compiled = torch.compile(found, backend=counter, fullgraph=True)
    expected = accumulate(model(), [0, 16, 32])
    assert same(accumulate(found, [None, None, None], compiled), expected)
    assert counter.frame_count == 1
    torch._dynamo.reset()
