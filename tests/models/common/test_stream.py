"""Sums that a block leaves to the norm at the entrance of the next one, whose kernel is torch here:
who else would read them before they are written gets sums of torch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fp4train.models.common.cut import Stage
from fp4train.models.common.rotary import RotaryBlock
from fp4train.models.common.stream import in_turn
from fp4train.models.llama import Llama
from fp4train.nn.produced import LeftSum, NormProducer, unwritten_sum
from fp4train.precision import FP32
from fp4train.precision.context import autocast

TOKENS = torch.randint(60, (2, 8), generator=torch.Generator().manual_seed(1))


class Kernel(NormProducer):
    """Memory that is not written holds NaN."""

    able = True

    def __init__(self) -> None:
        self.lefts = list[LeftSum]()

    def leave(self, x: Tensor, change: Tensor) -> LeftSum:
        self.lefts.append(
            LeftSum(self, unwritten_sum(x, change), x.detach(), change.detach(), ([], None))
        )  # type: ignore[arg-type]
        self.lefts[-1].h.data.fill_(torch.nan)
        return self.lefts[-1]

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, change: Any = None, left: Any = None
    ) -> Any:
        assert left is None or left.producer is self
        if not self.able:
            return None
        if left is not None:
            left.write()
        stream = x if change is None else x + change
        return nn.functional.rms_norm(stream, stream.shape[-1:], weight, eps), stream


class Scaled(RotaryBlock):
    """Reads its input first."""

    def forward(self, x: Tensor, *given: Any) -> Tensor:  # type: ignore[override]
        return super().forward(2 * x, *given)


class Misnamed(RotaryBlock):
    """Another norm than the first reads what it names."""

    entrance = "mlp_norm"

    def forward(self, *given: Any) -> Tensor:
        return super().forward(*given)


class Gathers:
    def hook(self, *_: Any) -> None: ...


Gathers.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"


def model(**shape: Any) -> Any:
    torch.manual_seed(0)
    return (
        Llama(width=16, layers=3, heads=2, hidden=16, **shape)
        .build(vocab_size=60, seq_len=8)
        .train()
    )


def trained(built: Any) -> dict[str, Tensor]:
    """The loss and all gradients."""
    with autocast(FP32(), step=0):
        loss = built(TOKENS, TOKENS.flip(1))
    loss.backward()
    return {"loss": loss} | {name: each.grad for name, each in built.named_parameters()}


def nothing(built: Any, seen: list[Tensor]) -> None: ...


def after_a_block(built: Any, seen: list[Tensor]) -> None:
    built.blocks[0].register_forward_hook(
        lambda block, given, made: seen.append(made.detach().clone())
    )


def before_a_block(built: Any, seen: list[Tensor]) -> None:
    built.blocks[2].register_forward_pre_hook(
        lambda block, given: seen.append(given[0].detach().clone())
    )


def before_a_norm(built: Any, seen: list[Tensor]) -> None:
    built.blocks[2].attention_norm.register_forward_pre_hook(
        lambda norm, given: seen.append(given[0].clone())
    )


def of_fsdp(built: Any, seen: list[Tensor]) -> None:
    built.blocks[1].register_forward_hook(Gathers().hook)


def in_another_class(built: Any, seen: list[Tensor]) -> None:
    built.blocks[1].__class__ = Scaled


def by_another_norm(built: Any, seen: list[Tensor]) -> None:
    built.blocks[1].__class__ = Misnamed


def in_another_method(built: Any, seen: list[Tensor]) -> None:
    built.blocks[2].forward = lambda x, *given: RotaryBlock.forward(built.blocks[2], 2 * x, *given)


def in_a_compiled_call(built: Any, seen: list[Tensor]) -> None:
    built.blocks[2]._compiled_call_impl = built.blocks[2]._call_impl


def in_the_norm(built: Any, seen: list[Tensor]) -> None:
    if built.blocks[1].attention_norm.producer:
        built.blocks[1].attention_norm.producer.able = False


@pytest.mark.parametrize(
    ("reads", "lefts"),
    [
        (nothing, 2),
        (of_fsdp, 2),
        (in_the_norm, 2),
        (by_another_norm, 2),
        (after_a_block, 1),
        (before_a_block, 1),
        (before_a_norm, 1),
        (in_another_method, 1),
        (in_a_compiled_call, 1),
        (in_another_class, 0),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_who_reads_between_two_blocks_reads_sums_that_torch_wrote(
    reads: Callable[[Any, list[Tensor]], None], lefts: int, recompute: bool
) -> None:
    """Of two sums between three blocks so many are left; loss, gradients and what is read have the
    bits of torch. A norm that cannot be made by the kernel after all, or has got the sum of
    another, writes it first. Recomputed blocks leave none again.
    """
    plain = model(recompute=recompute)
    fused = model(recompute=recompute)
    made = list[dict[str, Tensor]]()
    kernels = list[Kernel]()
    for norm in (each for block in fused.blocks for each in (block.attention_norm, block.mlp_norm)):
        kernels.append(Kernel())
        norm.producer = kernels[-1]
    seen: tuple[list[Tensor], list[Tensor]] = [], []
    for built, saw in zip((plain, fused), seen, strict=True):
        reads(built, saw)
        made.append(trained(built))
    assert sum(len(each.lefts) for each in kernels) == lefts and not kernels[0].lefts
    assert all(torch.equal(each, made[1][name]) for name, each in made[0].items())
    assert len(seen[0]) == len(seen[1]) and all(map(torch.equal, *seen))


def test_a_stage_sends_a_sum_that_torch_wrote() -> None:
    """A stage shares its blocks with the whole model, whose next block reads what it sends on
    another rank.
    """
    built = model()
    kernels = list[Kernel]()
    for block in built.blocks:
        kernels.append(Kernel())
        block.attention_norm.producer = kernels[-1]
    built.stage = Stage(first=True, last=False)
    built.blocks = built.blocks[:2]
    with autocast(FP32(), step=0):
        assert built(TOKENS).isfinite().all()
    assert [len(each.lefts) for each in kernels] == [0, 1, 0]


def test_hooks_of_all_modules_read_sums_of_torch() -> None:
    built = model()
    seen = list[bool]()
    kernel = built.blocks[1].attention_norm.producer = Kernel()
    handle = register_module_forward_hook(
        lambda module, given, made: seen.append(bool(given[0].isfinite().all()))
    )
    try:
        trained(built)
    finally:
        handle.remove()
    assert seen and all(seen) and not kernel.lefts


def test_what_hooks_copy_for_backward_is_written() -> None:
    """The inputs of recomputed blocks, say to the memory of the host."""
    made = []
    for kernel in (None, Kernel()):
        built = model(recompute=True)
        built.blocks[1].attention_norm.producer = kernel
        with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda copied: copied):
            made.append(trained(built))
    assert all(torch.equal(each, made[1][name]) for name, each in made[0].items())


def test_a_loop_that_copies_or_drops_the_stream_is_an_error_and_the_next_pass_is_right() -> None:
    built = model()
    x = torch.randn(2, 8, 16)
    wanted = trained(built)["loss"]
    built.blocks[1].attention_norm.producer = Kernel()
    given = built.positions(0, 8, torch.float32)
    with autocast(FP32(), step=0):
        with pytest.raises(RuntimeError, match="which is called with another tensor"):
            for block in in_turn(built.blocks):
                x = block(x.clone(), *given)
        x = torch.randn(2, 8, 16)
        with pytest.raises(RuntimeError, match="the norm of the next block, which has not read it"):
            for block in in_turn(built.blocks[:2]):
                x = block(x, *given) if block is built.blocks[0] else x
        next(iter(in_turn(built.blocks)))(x, *given)  # a pass that ends there
        assert torch.equal(built(TOKENS, TOKENS.flip(1)), wanted)
