"""The residual stream that blocks hand to each other: two terms, which the next norm adds."""

from typing import Any

import pytest
import torch
from families import SMALL_SHAPES
from torch import Tensor, nn

from fp4train.models.common import Stage, StreamTerms, summed
from fp4train.models.llama import Llama
from fp4train.precision import FP32, autocast

TOKENS = torch.randint(60, (2, 8), generator=torch.Generator().manual_seed(1))
SMALL: dict[str, Any] = {"width": 16, "heads": 2, "hidden": 16}
LLAMA = Llama(layers=3, **SMALL)


def model(shape: Any = LLAMA) -> Any:
    torch.manual_seed(0)
    return shape.build(vocab_size=60, seq_len=8).train()


def trained(built: nn.Module) -> dict[str, Tensor]:
    """The loss and all gradients."""
    with autocast(FP32(), step=0):
        loss = built(TOKENS, TOKENS.flip(1))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in built.named_parameters()}
    return {"loss": loss} | {name: grad for name, grad in gradients.items() if grad is not None}


@pytest.mark.parametrize("shape", SMALL_SHAPES.values(), ids=SMALL_SHAPES)
def test_blocks_that_hand_on_both_terms_train_as_those_that_hand_on_their_sum(shape: Any) -> None:
    """A hook on a block gets both terms, and may return their sum."""
    streams: list[StreamTerms] = []
    plain = model(shape)
    for block in plain.blocks:
        block.register_forward_hook(lambda block, inputs, stream: streams.append(stream))
    added = model(shape)
    for block in added.blocks:
        block.register_forward_hook(lambda block, inputs, stream: summed(stream))
    results = [trained(built) for built in (plain, added)]
    assert len(streams) == len(plain.blocks) and all(
        isinstance(stream, StreamTerms) for stream in streams
    )
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_the_first_norm_of_a_block_gets_both_terms_for_its_kernel() -> None:
    built = model()
    streams: list[Any] = []
    built.blocks[1].attention_in.register_forward_pre_hook(
        lambda module, inputs: streams.append(inputs[0])
    )
    with autocast(FP32(), step=0):
        built(TOKENS)
    x, change = streams[0]
    assert x.shape == change.shape == (2, 8, 16)


def test_recomputed_blocks_keep_one_tensor() -> None:
    built = model(Llama(layers=3, recompute=True, **SMALL))
    inputs: list[Any] = []
    for block in built.blocks:
        block.register_forward_pre_hook(lambda block, given: inputs.append(given[0]))
    results = [trained(each) for each in (model(), built)]
    assert all(isinstance(x, Tensor) for x in inputs)
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_a_stage_sends_one_tensor() -> None:
    built = model()
    built.stage = Stage(first=True, last=False)
    with autocast(FP32(), step=0):
        assert built(TOKENS).shape == (2, 8, 16)
