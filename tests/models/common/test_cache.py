"""A cache of keys and values: what follows in pieces equals the whole at once, in float32 to
1e-5.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fp4train as f4
from fp4train.models.common import KeyValues, RopeScaling, seen_mask
from fp4train.models.llama import Llama, LlamaModel
from fp4train.precision import FP32, autocast

SMALL: dict[str, Any] = {"width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 48}
LONG = 24
LLAMA_3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8)


def model(**changes: Any) -> LlamaModel:
    torch.manual_seed(0)
    converted = f4.convert(Llama(**{**SMALL, **changes}).build(vocab_size=60, seq_len=LONG))
    assert isinstance(converted, LlamaModel)
    return converted.eval()


def tokens(batch: int = 3) -> Tensor:
    return torch.randint(0, 60, (batch, LONG), generator=torch.Generator().manual_seed(0))


def in_pieces(built: LlamaModel, tokens_BT: Tensor, sizes: Sequence[int]) -> Tensor:
    cache = built.fp4train_cache(LONG)
    return torch.cat(
        [built(piece, cache=cache) for piece in tokens_BT.split(list(sizes), dim=1)], dim=1
    )


@torch.no_grad()
@pytest.mark.parametrize(
    "sizes", [[24], [1] * 24, [10, *[1] * 14], [7, 9, 1, 7]], ids=["whole", "each", "then", "mixed"]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 4},
        {"head_dim": 12, "qkv_bias": True, "qk_norm": True},
        {"rope_scaling": LLAMA_3},
    ],
    ids=["grouped", "heads", "qwen", "llama3"],
)
def test_tokens_in_pieces_have_the_logits_of_the_whole(
    changes: dict[str, Any], sizes: list[int]
) -> None:
    built = model(**changes)
    x = tokens()
    with autocast(FP32()):
        whole = built(x)
        found = in_pieces(built, x, sizes)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.argmax(-1), whole.argmax(-1))


@torch.no_grad()
def test_more_tokens_than_the_context_are_refused_with_a_cache_too() -> None:
    built = model()
    x = tokens()
    cache = built.fp4train_cache(LONG)
    built(x, cache=cache)
    with pytest.raises(ValueError, match="25 tokens exceed the model's seq_len=24"):
        built(x[:, :1], cache=cache)


def test_a_query_sees_the_keys_up_to_itself() -> None:
    mask = seen_mask(2, 4, torch.device("cpu"))
    assert mask is not None
    assert mask.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert (
        seen_mask(4, 4, torch.device("cpu")) is None
        and seen_mask(1, 4, torch.device("cpu")) is None
    )


def test_keys_stay_where_they_are() -> None:
    """Memory is taken once: what a cache returns is a view of it."""
    cache = KeyValues(4)
    k = torch.randn(1, 2, 1, 8)
    first, _ = cache.extended(k, k)
    both, _ = cache.extended(2 * k, k)
    assert torch.equal(both, torch.cat((k, 2 * k), dim=2))
    assert torch.equal(first, k) and first.data_ptr() == both.data_ptr()
