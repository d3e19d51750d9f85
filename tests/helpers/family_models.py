"""Checks of the model of any family: tokens in pieces, documents told apart, weights drawn later,
recomputed blocks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4train.models import Architecture
from fp4train.models.common import materialise
from fp4train.precision import FP32, NVFP4, autocast


class FamilyChecks:
    """Tests of every family, inherited by a class of its own file: `model` builds one of 60 ids,
    `tokens` makes its input, 3 rows of 40 tokens of which documents of one row are told apart.
    """

    model: Callable[..., Any]
    tokens: Callable[..., Tensor]

    @pytest.mark.parametrize(
        "sizes", [[40], [1] * 40, [10, 1, 17, 12]], ids=["whole", "each", "mixed"]
    )
    def test_tokens_in_pieces_have_the_logits_of_the_whole(self, sizes: list[int]) -> None:
        check_pieces(type(self).model(), type(self).tokens(), sizes)

    def test_documents_that_are_told_apart_are_those_by_themselves(self) -> None:
        check_documents(type(self).model(), type(self).tokens(1))

    def test_recomputed_blocks_give_the_same_gradients(self) -> None:
        check_recomputed(lambda again: type(self).model(recompute=again), type(self).tokens())


@torch.no_grad()
def check_pieces(built: Any, x: Tensor, sizes: list[int]) -> None:
    """Tokens that come in pieces of `sizes` have the logits of the whole."""
    cache = built.fp4train_cache(x.shape[1])
    with autocast(FP32()):
        whole = built(x)
        found = torch.cat([built(piece, cache=cache) for piece in x.split(sizes, dim=1)], dim=1)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def check_documents(built: Any, x: Tensor) -> None:
    """Documents of 8, 1, 21 and 10 tokens that are told apart have the logits of each by itself; id
    59 ends one.
    """
    x = x.clamp(max=58)
    x[0, [7, 8, 29]] = 59
    with autocast(FP32()):
        apart = torch.cat([built(part) for part in x.split([8, 1, 21, 10], dim=1)], dim=1)
        together = built(x)
        built.documents = 59
        torch.testing.assert_close(built(x), apart, rtol=1e-5, atol=1e-5)
    assert (together - apart).abs().max() > 1e-3


def parameters(shape: Architecture, vocab_size: int) -> int:
    """Parameters of the model that a shape is."""
    with torch.device("meta"):
        return sum(
            each.numel() for each in shape.build(vocab_size=vocab_size, seq_len=64).parameters()
        )


def check_drawn(shape: Architecture, built: Any, length: int) -> None:
    """A model of `shape` that is made without memory and then drawn has the weights of `built`; 60
    ids, seed 0.
    """
    with torch.device("meta"):
        born = shape.build(vocab_size=60, seq_len=length)
    materialise(born, torch.device("cpu"), seed=0)
    for name, weight in born.state_dict().items():
        assert torch.equal(weight, built.state_dict()[name]), name


def check_recomputed(build: Callable[[bool], Any], x: Tensor) -> None:
    """The model with recomputed blocks, `build(True)`, has the gradients of that without."""
    grads = []
    for again in (False, True):
        built = build(again).train()
        with autocast(NVFP4(), step=0):
            loss = built(x, x)
        loss.backward()
        grads.append({name: parameter.grad for name, parameter in built.named_parameters()})
    for name, grad in grads[0].items():
        assert grad is not None and torch.equal(grad, grads[1][name]), name
