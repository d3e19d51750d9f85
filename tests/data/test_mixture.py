"""Sources in the shares of their weights: a pure function of the position, as of one source."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from fp4train.data import (
    Chat,
    DataError,
    Loader,
    Mixture,
    Stdlib,
    Text,
    TokenArray,
    TokenPart,
    Weighted,
)
from fp4train.data.mixture import CYCLE
from fp4train.data.tokenizers import BytePairs, Bytes

T = 4


def array(counts: list[int], shares: list[int]) -> TokenArray:
    """Ids that are their places, in parts of so many sequences."""
    ends = np.cumsum([count * T + 1 for count in counts]).tolist()
    parts = tuple(
        TokenPart(name=str(i), first=end - count * T - 1, end=end, share=share)
        for i, (end, count, share) in enumerate(zip(ends, counts, shares, strict=True))
    )
    return TokenArray(np.arange(ends[-1], dtype=np.uint32), ends[-1], "train", parts=parts)


def part_of(tokens: TokenArray, starts: Any) -> Any:
    return np.searchsorted([part.end for part in tokens.parts], starts, side="right")


@settings(max_examples=50)
@given(
    weights=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    seed=st.integers(0, 2**63 - 1),
    first=st.integers(0, 5000),
    count=st.integers(1, 300),
)
@example(weights=[17, 8, 26, 8, 38], seed=0, first=322, count=8)
def test_every_stretch_has_the_parts_in_their_shares(
    weights: list[int], seed: int, first: int, count: int
) -> None:
    tokens = array([7] * len(weights), weights)
    starts = Loader(tokens, batch_size=1, seq_len=T, seed=seed).starts(first, count)
    seen = np.bincount(part_of(tokens, starts), minlength=len(weights))
    shares = np.array(weights) / sum(weights)
    # at either end a part is less than 1 from its share of the cycle, and so are all others
    bound = 2 * ((1 - shares) + shares * (len(weights) - 1))
    assert (np.abs(seen - count * shares) <= bound + 1e-9).all()


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_no_sequence_comes_again_before_all_of_its_part_were_shown(
    counts: list[int], data: st.DataObject, seed: int
) -> None:
    shares = [data.draw(st.integers(1, 9)) for _ in counts]
    tokens = array(counts, shares)
    loader = Loader(tokens, batch_size=1, seq_len=T, seed=seed)
    starts = loader.starts(0, 200)
    for number, count in enumerate(counts):
        shown = starts[part_of(tokens, starts) == number]
        part = tokens.parts[number]
        for epoch in range(len(shown) // count):
            now = np.sort(shown[epoch * count : (epoch + 1) * count])
            assert now.tolist() == [part.first + i * T for i in range(count)]
    fresh = next((i for i in range(200) if starts[i] in starts[:i]), 200)
    assert min(loader.batches_per_epoch, 200) == fresh


def test_a_position_has_the_same_rows_however_it_is_asked_for() -> None:
    tokens = array([50, 20, 3], [5, 2, 1])
    loader = Loader(tokens, batch_size=8, seq_len=T, seed=3)
    rows = [loader.rows(first, 1)[0][0].tolist() for first in reversed(range(64))][::-1]
    again = Loader(tokens, batch_size=16, seq_len=T, seed=3)
    assert rows == [row for step in range(4) for row in again.batch(step)[0].tolist()]
    assert rows != Loader(tokens, batch_size=8, seq_len=T, seed=4).rows(0, 64)[0].tolist()
    inputs, targets = loader.rows(0, 64)
    assert bool((targets == inputs + 1).all()), "a row lies in one part"


def test_parts_are_spread_in_another_order_by_each_seed() -> None:
    tokens = array([50, 50], [CYCLE // 2, CYCLE // 2])
    orders = [
        part_of(tokens, Loader(tokens, batch_size=1, seq_len=T, seed=seed).starts(0, 64)).tolist()
        for seed in (0, 1)
    ]
    assert orders[0] != orders[1] and orders[0] != [0, 1] * 32


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Text]:
    """Two sources of one letter each."""
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / f"{name}.txt").write_text(letter * 5000)
    return {
        name: Text(path=str(tmp_path / f"{name}.txt"), cache_dir=str(tmp_path / "cache"), val=0.2)
        for name in "ab"
    }


def mixture(texts: dict[str, Text], *weights: float, **settings: Any) -> Mixture:
    parts = zip(texts.items(), weights, strict=True)
    return Mixture(
        parts={name: Weighted(source=text, weight=weight) for (name, text), weight in parts},
        **settings,
    )


def test_training_and_validation_have_the_shares_of_the_weights(
    texts: dict[str, Text], tmp_path: Path
) -> None:
    data = mixture(texts, 3, 1).build(tmp_path / "run", 16, 0)
    assert "a 75.00% of" in data.description and "b 25.00% of" in data.description
    training = data.training(batch_size=1, seq_len=16, seed=0)
    assert training.passes(500) == "1.5 passes over the part shown most"
    for loader in (
        data.training(batch_size=8, seq_len=16, seed=0),
        data.validation(batch_size=8, seq_len=16),
    ):
        rows = loader.rows(0, 400)[0].numpy()
        assert abs(int((rows[:, 0] == ord("a")).sum()) - 300) <= 1
        assert set(np.unique(rows)) <= {ord("a"), ord("b"), 256}
    other = mixture(texts, 3, 1).build(tmp_path / "run", 16, 0)
    assert other.fingerprint == data.fingerprint


def test_one_tokenizer_is_trained_on_all_parts_by_their_weights(
    texts: dict[str, Text], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("an apple a day\n" * 500)
    (tmp_path / "b.txt").write_text("xylophones\n" * 500)
    shared = BytePairs(vocab_size=280, sample=12_000)
    data = mixture(texts, 1, 1, tokenizer=shared).build(tmp_path / "run", 16, 0)
    assert data.tokenizer is not None
    assert all(len(data.tokenizer.encode(word)) < len(word) for word in ("apple", "xylophones"))


def test_answers_count_and_other_text_counts_whole(texts: dict[str, Text], tmp_path: Path) -> None:
    talk = '{"messages": [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}]}'
    (tmp_path / "talks.jsonl").write_text(f"{talk}\n" * 20)
    chat = Chat(path=str(tmp_path / "talks.jsonl"), cache_dir=str(tmp_path / "cache"), val=0.2)
    mixed = Mixture(parts={"a": Weighted(source=texts["a"]), "talks": Weighted(source=chat)})
    assert mixed.answers_only
    loader = mixed.build(tmp_path / "run", 128, 0).training(batch_size=4, seq_len=128, seed=0)
    inputs, targets = loader.rows(0, 8)
    text = inputs[:, 0] == ord("a")
    assert bool((targets[text] >= 0).all()) and int(text.sum()) in (3, 4, 5)
    assert not bool((targets[~text] >= 0).all()) and bool((targets[~text] >= 0).any())


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(texts: dict[str, Text], weight: float) -> None:
    with pytest.raises(ValueError, match=r"data\.parts\.b\.weight=.*finite numbers above 0"):
        mixture(texts, 1, weight)


def test_what_cannot_be_mixed_is_refused(texts: dict[str, Text], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one source"):
        Mixture(parts={})
    with pytest.raises(ValueError, match=r"data\.parts\.b\.weight=1 is less than 1/4096"):
        mixture(texts, 1e6, 1)
    own = Stdlib(tokenizer=BytePairs())
    with pytest.raises(ValueError, match=r"data\.parts\.s\.source\.tokenizer: .* data\.tokenizer"):
        Mixture(parts={"s": Weighted(source=own)}, tokenizer=Bytes())
    chats = {name: Weighted(source=Chat(path=name)) for name in "xy"}
    with pytest.raises(ValueError, match=r"two parts are data=chat"):
        Mixture(parts=chats)
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(DataError, match=r"^data\.parts\.b: the training text is"):
        mixture(texts, 1, 1).build(tmp_path / "run", 16, 0)
