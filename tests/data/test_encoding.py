"""The ids of documents of any length are those of the whole document, for every kind of tokenizer
and every border.
"""

import inspect
import json
import random
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from lengths import long_but
from limits import set_limit
from tokenizer_kinds import KEEPS, KINDS, TEXT, tokenizer, tokenizer_json

from fp4train.data import (
    Encoded,
    Ids,
    Piece,
    Text,
    Tokenizer,
    Windows,
    encode_document,
    encode_documents,
    encoding_key,
)
from fp4train.data.tokenizers import Bytes, Pretrained
from fp4train.errors import DataError

SMALL = Windows(length=200, overlap=100, agree=24)
PARTS = [
    *"abXY019.,;:'\"()<>-_=\té漢字。\u0301\u200d😀",
    " ",
    "  ",
    "    ",
    "\n",
    "\n\n",
    "\r\n",
    "'ll",
    "return",
    "<think>",
    "</s>",
    "<unk>",
    "▁",
    "ﬁ",
    "123456",
    "def ",
    "self.",
    "the ",
    "import",
    "    return text\n",
]


def pieces(text: str, borders: list[int]) -> list[Piece]:
    places = [0, *sorted(place % (len(text) + 1) for place in borders), len(text)]
    parts = [text[start:stop] for start, stop in pairwise(places)]
    return [
        Piece(part, ends_document=number == len(parts) - 1) for number, part in enumerate(parts)
    ]


texts = st.one_of(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=700).map("".join),
    st.tuples(st.integers(0, len(TEXT) // 2), st.integers(1, 2500)).map(
        lambda at: TEXT[at[0] : at[0] + at[1]]
    ),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(text=texts, borders=st.lists(st.integers(0, 5000), max_size=4))
def test_a_document_in_windows_has_the_ids_of_the_whole(
    kind: str, text: str, borders: list[int]
) -> None:
    ids = encode_document(pieces(text, borders), tokenizer(kind), SMALL)
    assert ids.tolist() == tokenizer(kind).encode(text)


@pytest.mark.parametrize("kind", long_but(("always", "byte level, Llama 3"), KEEPS))
def test_decoding_gives_the_text_of_a_long_document(kind: str) -> None:
    text = TEXT * 8 + inspect.getsource(json.encoder)
    windows = Windows(length=1 << 16)
    assert len(text) > 2 * windows.length
    ids = encode_document(pieces(text, [70_000, 140_000]), tokenizer(kind), windows)
    assert tokenizer(kind).decode(ids.tolist()) == text


RUNS = {
    "spaces": " " * 150_000 + "x",
    "a letter": "a" * 90_000,
    "digits": "1234567890" * 9_000,
    "lines": "\n" * 90_000,
    "no spaces": "漢字仮名" * 25_000,
    "a quote": '"' + "a b " * 25_000,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", long_but(["prepend"], ["byte level, Llama 3", "prepend"]))
def test_long_runs_have_the_ids_of_the_whole(kind: str, run: str) -> None:
    windows = Windows(length=1 << 15)
    ids = encode_document([Piece(RUNS[run])], tokenizer(kind), windows)
    assert ids.tolist() == tokenizer(kind).encode(RUNS[run])


COUNTED = [
    "byte level",
    "byte level, Llama 3",
    "prepend",
    "first",
    "always",
    "Gemma",
    "Unigram",
    "WordPiece",
]


@pytest.mark.parametrize("kind", long_but(("always",), COUNTED))
def test_a_document_of_a_megabyte_costs_what_its_text_costs(kind: str) -> None:
    """Characters are counted: those of tokens cost about three times the tokens, and are asked for
    at edges alone.
    """

    class Counting:
        splits_words = tokenizer(kind).splits_words
        plain = 0
        with_spans = 0

        def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
            self.plain += sum(map(len, texts))
            return tokenizer(kind).encode_batch(texts)

        def encode_spans(self, texts: Sequence[str]) -> list[Encoded]:
            self.with_spans += sum(map(len, texts))
            return tokenizer(kind).encode_spans(texts)

    text = (inspect.getsource(inspect) * 12)[:1_000_000]
    counting = Counting()
    ids = encode_document([Piece(text)], cast(Tokenizer, counting))
    assert counting.plain < 1.05 * len(text) and counting.with_spans < 0.05 * len(text)
    assert ids.tolist() == tokenizer(kind).encode(text)


@pytest.mark.parametrize("megabytes", [0.6, 1.0, 3.0])
def test_a_document_whose_windows_never_agree_costs_a_few_times_its_text(megabytes: float) -> None:
    """Without any border tokens are those of the whole alone: windows are encoded as one, twice as
    much each time, and their characters are asked for no more often than the text has them.
    """
    size = int(megabytes * 1_000_000)

    class Unlike:
        """Every text has ids of its own."""

        splits_words = True
        plain = 0
        with_spans = 0

        def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
            self.plain += sum(map(len, texts))
            return [np.full(len(text), len(text), np.uint32) for text in texts]

        def encode_spans(self, texts: Sequence[str]) -> list[Encoded]:
            self.with_spans += sum(map(len, texts))
            places = [np.arange(len(text)) for text in texts]
            ids = [np.full(len(text), len(text), np.uint32) for text in texts]
            return [
                Encoded(number, place, place + 1, np.ones(len(place), np.bool_))
                for number, place in zip(ids, places, strict=True)
            ]

    counting = Unlike()
    ids = encode_document([Piece("a" * size)], cast(Tokenizer, counting))
    assert np.array_equal(ids, np.full(size, size))
    assert counting.plain < 3.1 * size and counting.with_spans < 1.1 * size


def test_digits_that_are_counted_from_the_right_have_the_ids_of_the_whole() -> None:
    """The end of a number decides how it begins."""
    text = "and " * 40 + "1234567890" * 45 + " and" * 40
    kind = tokenizer("byte level, digits from the right")
    assert encode_document(
        [Piece(text)], kind, Windows(length=200, overlap=100, agree=24)
    ).tolist() == kind.encode(text)


def test_documents_keep_their_order_among_long_ones() -> None:
    chosen = random.Random(0)
    documents = [TEXT[: chosen.choice((3, 900, 2000))] for _ in range(90)]
    found: list[list[Ids]] = [[]]
    for ids, ends in encode_documents(map(Piece, documents), tokenizer("prepend"), SMALL):
        found[-1].append(ids)
        if ends:
            found.append([])
    assert not found.pop()
    assert [np.concatenate(parts).tolist() for parts in found] == [
        tokenizer("prepend").encode(d) for d in documents
    ]


def test_a_tokenizer_of_somebody_else_gets_whole_documents() -> None:
    class Reversed(Bytes):
        concatenates = False

        def encode_batch(self, texts: list[str]) -> list[Ids]:  # type: ignore[override]
            return super().encode_batch([text[::-1] for text in texts])

    assert bytes(encode_document(pieces("abcdef", [2, 4]), Reversed()).tolist()) == b"fedcba"


def test_text_that_cannot_be_encoded_in_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, "characters encoded as one", 1000)
    with pytest.raises(
        DataError, match=r"holds 1,\d\d\d characters that the tokenizer joins.*Divide the document"
    ):
        encode_document([Piece("ab" * 2000)], tokenizer("WordPiece"), SMALL)


def test_ids_cached_in_another_way_are_not_taken(tmp_path: Path) -> None:
    """Bytes have the same ids in both ways, and keep their key."""
    assert (
        encoding_key(Bytes()) == {"tokenizer": "bytes"}
        and encoding_key(tokenizer("first"))["encoding"] == 2
    )


def test_a_long_file_is_learned_as_the_tokenizer_writes_it(tmp_path: Path) -> None:
    """Through the source: files are read in pieces of 65,536 characters."""
    text = inspect.getsource(textwrap) * 10
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json("prepend"))
    source = Text(
        path=str(tmp_path / "a.txt"),
        tokenizer=Pretrained(name=str(tmp_path / "tokenizer.json")),
        cache_dir=str(tmp_path / "cache"),
        val=0.1,
    )
    data = source.build(tmp_path / "run", 32, 0)
    ids = np.concatenate([data.train.ids, data.val.ids]).tolist()
    assert ids == [*tokenizer("prepend").encode(text), tokenizer("prepend").end_of_document]
