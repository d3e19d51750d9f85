"""Sources in the shares of their weights: a pure function of the position, as of one source."""

from dataclasses import replace
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
    MixtureStage,
    Stdlib,
    Text,
    TokenArray,
    TokenPart,
    Tokens,
    Weighted,
)
from fp4train.data.mixture import CYCLE
from fp4train.data.schedule import MASK64, PartSchedule, splitmix64
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


STAGES = [
    (0, (3072, 0, 1024)),
    (300_001, (1, 2, 3)),
    (300_007, (0, 4096, 0)),
    (500_000, (1365, 1366, 1365)),
    (900_000, (3072, 0, 1024)),
]


def brute_force(seed: int, count: int) -> tuple[list[int], list[int]]:
    """The part of each position and the number of its sequence, counted one after another."""
    parts: list[int] = []
    for (first, shares), (end, _) in zip(STAGES, [*STAGES[1:], (count, ())], strict=True):
        order = []
        for part, share in enumerate(shares):
            key = splitmix64(splitmix64(seed) + part)
            for k in range(share):
                u = splitmix64(((k ^ key) - 0x9E3779B97F4A7C15) & MASK64) / 2**64
                order.append(((k + u) / share, part))
        order.sort()
        parts += [order[place % len(order)][1] for place in range(end - first)]
    counts = [0, 0, 0]
    numbers = []
    for part in parts:
        numbers.append(counts[part])
        counts[part] += 1
    return parts, numbers


def test_a_million_positions_over_stages_are_those_that_are_counted_one_by_one() -> None:
    parts, numbers = brute_force(5, 1_000_000)
    schedule = PartSchedule(STAGES, 5)
    at = np.random.default_rng(0).permutation(200) * 5000  # in any order, from anywhere
    for first in at.tolist():
        got_parts, got_numbers = schedule.at(first, 5000)
        assert got_parts.tolist() == parts[first : first + 5000]
        assert got_numbers.tolist() == numbers[first : first + 5000]
    for position in (0, 1, 299_999, 300_001, 300_006, 300_007, 500_000, 899_999, 999_999):
        assert schedule.position(parts[position], numbers[position]) == position
        taken = schedule.stage(position).taken(position)
        assert taken.tolist() == np.bincount(parts[:position], minlength=3).tolist()


def staged(counts: list[int], *stages: tuple[float, list[int]], epochs: Any = None) -> Loader:
    """Batches of 4 of parts of equal shares, until the stages."""
    tokens = array(counts, [1] * len(counts))
    planned = tuple((start, tuple(shares)) for start, shares in stages)
    parts = tuple(replace(part, epochs=epochs) for part in tokens.parts)
    tokens = replace(tokens, stages=planned, parts=parts)
    return Loader(tokens, batch_size=4, seq_len=T, seed=3)


def test_a_stage_begins_with_the_batch_of_its_step() -> None:
    loader = staged([50, 50], (10, [0, 1]), (0.75, [1, 0])).lasting(20)
    parts = part_of(loader.tokens, loader.starts(0, 80)).reshape(20, 4)
    assert parts[10:15].all() and not parts[15:].any() and 0 < parts[:10].mean() < 1
    assert loader.drawn(0) == {"0": [0.5, 0.0], "1": [0.5, 0.0]}
    assert loader.drawn(60) == {"0": [0.0, 0.4], "1": [1.0, 0.8]}
    assert loader.drawn(61) == {"0": [1.0, 0.42], "1": [0.0, 0.8]}
    assert loader.passes(20) == "passes: 0.8 of 0, 0.8 of 1"
    branched = staged([50, 50], (10, [0, 1]), (0.75, [1, 0])).lasting(20, 12)
    parts = part_of(branched.tokens, branched.starts(0, 32))
    assert parts[:12].all() and not parts[12:].any()
    shown = loader.starts(40, 20).tolist()
    assert not set(shown) & set(loader.starts(0, 40).tolist()), "a part goes on"


@pytest.mark.parametrize(
    ("stages", "epochs", "said"),
    [
        ([(9, [1, 1]), (4, [1, 0])], None, r"stages\[1\]\.start=4 is step 4.*begins at step 9"),
        ([(0.5, [1, 1]), (10, [1, 0])], None, r"stages\[1\]\.start=10 is step 10.*at step 10"),
        ([], 1, r"data\.parts\.[01] is exhausted at step 15: it has 30 .*epochs=1 bounds"),
        ([(5, [0, 1])], 1, r"data\.parts\.1 is exhausted at step 10"),
        ([(5, [0, 1])], 1.7, r"data\.parts\.1 is exhausted at step 15"),
    ],
)
def test_stages_that_cannot_be_are_refused(stages: Any, epochs: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        staged([30, 30], *stages, epochs=epochs).lasting(20)
    assert staged([30, 30], (5, [0, 1]), epochs=3).lasting(20).stages[1] == (20, (0, 1))


def test_a_part_that_a_batch_shows_twice_is_refused() -> None:
    assert staged([2, 30]).lasting(20)
    with pytest.raises(DataError, match=r"data\.parts\.0 has 2 training .* a batch takes 4 of it"):
        staged([2, 30], (9, [1, 0])).lasting(20)


def test_more_batches_than_planned_end_where_a_part_is_exhausted() -> None:
    loader = staged([30, 30], epochs=1).lasting(15)
    assert len(loader.starts(0, 60)) == 60
    with pytest.raises(DataError, match="exhausted before the run ends, as batches were skipped"):
        loader.rows(60, 4)


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
    assert training.passes(500) == "passes: 1.5 of a, 0.5 of b"
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


@pytest.mark.parametrize("weight", [-1, 1e308, float("nan")])
def test_a_weight_that_is_none_is_refused(texts: dict[str, Text], weight: float) -> None:
    with pytest.raises(ValueError, match=r"^weight=.*numbers from 0 to 1e\+300"):
        mixture(texts, 1, weight)
    with pytest.raises(ValueError, match=r"^weights\.a=.*numbers from 0 to 1e\+300"):
        MixtureStage(start=1, weights={"a": weight})


def test_what_cannot_be_mixed_is_refused(texts: dict[str, Text], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one source"):
        Mixture(parts={})
    with pytest.raises(ValueError, match=r"data\.parts\.b: its weight 1 is less than 1/4096"):
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
    with pytest.raises(ValueError, match=r"parts\.m\.source is a mixture"):
        Mixture(parts={"m": Weighted(source=mixture(texts, 1, 1))})
    with pytest.raises(ValueError, match=r"epochs=0: allowed"):
        Weighted(source=texts["a"], epochs=0)
    with pytest.raises(ValueError, match=r"data\.parts: all weights are 0"):
        mixture(texts, 0, 0)


@pytest.mark.parametrize(
    ("start", "weights", "said"),
    [
        (2, {"c": 1}, r"data\.stages\[1\]\.weights\.c: there is no such part; .* a, b"),
        (2, {"a": 0.5, "b": 0.4}, r"^weights sum to 0\.9: shares below 1 sum to 1"),
        (2, {}, r"^weights sum to 0"),
        (2, {"a": 1, "b": 1e-6}, r"data\.stages\[1\]\.weights\.b: its weight 1e-06 is less"),
        (-1, {"a": 1}, r"^start=-1: allowed are a step"),
        (1.5, {"a": 1}, r"^start=1\.5: allowed are a step"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(
    texts: dict[str, Text], start: float, weights: dict[str, float], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        before = MixtureStage(start=1, weights={"a": 1 / 3, "b": 0.67})
        mixture(texts, 1, 1, stages=(before, MixtureStage(start=start, weights=weights)))


def test_token_files_are_parts(texts: dict[str, Text], tmp_path: Path) -> None:
    np.full(4000, 7, np.uint16).tofile(tmp_path / "sevens.bin")
    np.full(4000, 8, np.uint16).tofile(tmp_path / "eights.bin")

    def ids(name: str, **settings: Any) -> Weighted:
        values = {"vocab_size": 257, "val": 0.2, **settings}
        return Weighted(source=Tokens(path=str(tmp_path / f"{name}.bin"), **values))

    parts = {"a": Weighted(source=texts["a"]), "ids": ids("sevens")}
    data = Mixture(parts=parts).build(tmp_path / "run", 16, 0)
    rows = data.training(batch_size=8, seq_len=16, seed=0).rows(0, 100)[0]
    assert abs(int((rows[:, 0] == 7).sum()) - 50) <= 1 and data.borders.end == 256
    by_part = data.validation(batch_size=8, seq_len=16).by_part()
    assert {name: rows.fresh for name, rows in by_part.items()} == {"a": 62, "ids": 49}
    assert bool((by_part["ids"].rows(0, 49)[0] == 7).all())
    for wrong, said in (
        ({"vocab_size": 300}, r"data\.parts\.ids has 300 token ids, and data\.parts\.a has 257"),
        ({"end_id": 5}, r"data\.parts\.a: end_id=256 .* 5 and None those of the mixture"),
    ):
        with pytest.raises(DataError, match=said):
            Mixture(parts={**parts, "ids": ids("sevens", **wrong)}).build(tmp_path / "run", 16, 0)
    alone = Mixture(
        parts={name: ids(name, vocab_size=9, end_id=1) for name in ("sevens", "eights")}
    )
    assert alone.tokenizer is None and alone.vocab_size == 9
    data = alone.build(tmp_path / "run", 16, 0)
    assert (data.vocab_size, data.borders.end, data.tokenizer) == (9, 1, None)
