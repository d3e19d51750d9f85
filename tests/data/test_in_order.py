"""Rows that are read one after another are those of their positions, whatever is asked for, and go
on from the place that a checkpoint keeps.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fp4train.data import DataError, InOrder, Loader, Stream, TokenArray
from fp4train.data.passes import Passes
from fp4train.errors import UserError

SEQ_LEN = 3
LENGTH = 500


class Walk:
    """Numbers of a random walk, of which a row alone says nothing of the next one.

    Args:
        end: number of rows.
    """

    def __init__(self, end: int = LENGTH) -> None:
        self.end = end
        self.read = 0

    def __call__(self, place: Any) -> Iterator[tuple[Any, Any]]:
        place = place or {"row": 0, "at": [7]}
        for row in range(place["row"], self.end):
            at = place["at"][0]
            ids = [(at + step) % 100 for step in range(SEQ_LEN + 1)]
            # the same objects each time: what is kept of them must be a copy
            place["row"] = row + 1
            place["at"][0] = (at * 31 + 11) % 101
            self.read += 1
            yield ids, place


def stream(read: Callable[[Any], Iterator[Any]]) -> InOrder:
    return InOrder(read, vocab_size=100, name="train", batch_size=4, seq_len=SEQ_LEN)


ALL = [ids for ids, _ in Walk()(None)]


def expected(first: int, count: int) -> list[list[int]]:
    return [ids[:-1] for ids in ALL[first : first + count]]


def test_inputs_and_targets_are_the_row_but_for_an_end() -> None:
    inputs, targets = stream(Walk()).rows(5, 2)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(torch.cat((inputs, targets[:, -1:]), 1), torch.tensor(ALL[5:7]))


@settings(max_examples=40)
@given(asked=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), min_size=1, max_size=9))
def test_rows_are_those_of_their_positions_in_any_order(asked: list[tuple[int, int]]) -> None:
    rows = stream(Walk())
    for first, count in asked:
        assert rows.rows(first, count)[0].tolist() == expected(first, count)


@pytest.mark.parametrize("position", [0, 4, 60, 62])
def test_another_process_goes_on_from_the_place_and_reads_no_row_twice(position: int) -> None:
    before = stream(Walk())
    before.rows(position, 8)
    saved = json.loads(json.dumps(before.state(position)))
    walk = Walk()
    after = stream(walk)
    after.load(saved)
    assert after.rows(position, 8)[0].tolist() == expected(position, 8)
    assert walk.read == 8 + position % 4


def test_a_run_that_went_back_keeps_the_places_that_it_passes_again() -> None:
    walk = Walk()
    rows = stream(walk)
    rows.rows(396, 4)
    saved = stream(Walk()).state(0)
    rows.load(saved)
    for position in range(0, 40, 4):
        rows.rows(position, 4)
    assert rows.state(40)["position"] == 40
    before = walk.read
    rows.rows(36, 4)
    assert walk.read == before + 4


def test_the_end_is_told_each_time_and_what_lies_before_it_can_be_had() -> None:
    rows = stream(Walk(end=10))
    for _ in range(2):
        with pytest.raises(DataError, match="row 10 of the train data is asked for, and the data"):
            rows.rows(8, 4)
    assert rows.rows(8, 2)[0].tolist() == expected(8, 2)


def unreadable(place: Any) -> Iterator[Any]:
    yield ALL[0], None
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda place: iter([([1, 2], None)]), r"row 0 .* shape \(2,\): .*seq_len \+ 1 = 4 whole"),
        (lambda place: iter([(np.zeros(4), None)]), "row 0 of the train data is float64"),
        (lambda place: iter([([1, 2, 3, 100], None)]), "token id 100, but the vocabulary has 100"),
        (lambda place: iter([([1, 2, 3, 4], {1})] * 4), "row 3 .* kept in JSON: .*set"),
        (unreadable, "row 1 of the train data cannot be read: Input/output error"),
    ],
)
def test_what_is_no_row_is_told_with_its_number(
    read: Callable[[Any], Iterator[Any]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        stream(read).rows(0, 4)


@pytest.mark.parametrize(
    "saved", [{"position": -1, "place": "null"}, {"position": 4, "place": "{"}, {"position": 1.0}]
)
def test_a_place_that_none_is_is_refused(saved: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        stream(Walk()).load(saved)


def test_an_evaluation_of_rows_without_a_length_needs_a_number_of_batches() -> None:
    assert Passes(loader=stream(Walk()), rows=2, batches=3).sequences == 12
    with pytest.raises(UserError, match="train tokens have no known length: give batches="):
        _ = Passes(loader=stream(Walk()), rows=2, batches=None).sequences


def test_token_ids_keep_no_state() -> None:
    loader: Stream = Loader(
        TokenArray(np.arange(50), vocab_size=50, name="train"), batch_size=2, seq_len=4, seed=0
    )
    assert loader.state(3) is None
    with pytest.raises(ValueError, match="train data keep no state"):
        loader.load({})
