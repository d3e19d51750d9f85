"""Passes of an evaluation: each sequence once, in rows of one shape, weighted by the targets that count."""

import numpy as np
import pytest

from fp4train.data import Loader, TokenArray, TokenPart
from fp4train.data.passes import Passes

T = 4


def passes(sequences: int, rows: int, batches: int | None = None, batch_size: int = 4) -> Passes:
    ids = np.arange(sequences * T + 1, dtype=np.uint32)
    scored = (ids % 7 == 0).astype(np.uint8)
    tokens = TokenArray(ids, len(ids), "val", scored=scored)
    loader = Loader(tokens, batch_size=batch_size, seq_len=T, seed=0)
    return Passes(loader=loader, rows=rows, batches=batches)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("sequences", [1, 5, 8, 23])
def test_each_sequence_is_read_once_in_rows_of_one_shape(sequences: int, rows: int) -> None:
    found = passes(sequences, rows)
    begins: list[int] = []
    mean = 0.0
    for number, part in enumerate(found.parts):
        tokens, targets = found.read(number)
        assert tokens.shape == targets.shape == (rows, T)
        assert sorted(tokens[:, 0].tolist()) == sorted(
            tokens[: len(part), 0].tolist() * (rows // len(part))
        )
        begins += tokens[: len(part), 0].tolist()
        # a model's loss: the sum over the targets that count, divided by all
        mean += found.weight(number) * targets.clamp(min=0).double().mean().item()
    assert sorted(begins) == list(range(0, sequences * T, T))
    assert found.loader.fresh == sequences
    counting = [id for id in range(1, sequences * T + 1) if id % 7 == 0]
    assert sum(found.targets) == len(counting)
    expected = np.mean(counting) if counting else 0.0
    assert mean / len(found.parts) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("batches", "batch_size", "read"), [(2, 4, 8), (6, 4, 23), (23, 1, 23), (1, 40, 23)]
)
def test_batches_are_a_bound(batches: int, batch_size: int, read: int) -> None:
    found = passes(23, 4, batches, batch_size)
    assert found.sequences == sum(map(len, found.parts)) == read


def test_a_mixture_is_read_in_its_shares_until_a_part_would_be_shown_again() -> None:
    parts = (
        TokenPart(name="a", first=0, end=3 * T + 1, share=1),
        TokenPart(name="b", first=3 * T + 1, end=13 * T + 2, share=1),
    )
    tokens = TokenArray(np.arange(13 * T + 2, dtype=np.uint32), 60, "val", parts=parts)
    loader = Loader(tokens, batch_size=32, seq_len=T, seed=0)
    found = Passes(loader=loader, rows=4, batches=9)
    starts = loader.starts(0, found.sequences + 1)
    assert len(set(starts[:-1].tolist())) == found.sequences in (6, 7)
    assert starts[-1] in starts[:-1], "the next one is shown again"
