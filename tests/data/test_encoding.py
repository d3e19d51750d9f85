"""The ids of documents of any length are those of the whole document, for every kind of tokenizer and every border."""

import inspect
import json
import random
import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import KEEPS, KINDS, TEXT, tokenizer, tokenizer_json

from fp4train.data import Text
from fp4train.data import encoding as encoding_module
from fp4train.data.encoding import Windows, encode_document, encode_documents, encoding_key
from fp4train.data.tokenizers import Bytes, Pretrained
from fp4train.data.tokens import Ids, Piece
from fp4train.errors import DataError

SMALL = Windows(length=200, overlap=100, agree=24)
PARTS = [
    *"abXY019.,;:'\"()<>-_=\té漢字。\u0301\u200d😀",
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "'ll", "return", "<think>", "</s>", "<unk>", "▁", "ﬁ", "123456"),
    *("def ", "self.", "the ", "import", "    return text\n"),
]


def pieces(text: str, borders: list[int]) -> list[Piece]:
    places = [0, *sorted(place % (len(text) + 1) for place in borders), len(text)]
    parts = [text[start:stop] for start, stop in pairwise(places)]
    return [Piece(part, ends_document=number == len(parts) - 1) for number, part in enumerate(parts)]


texts = st.one_of(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=700).map("".join),
    st.tuples(st.integers(0, len(TEXT) // 2), st.integers(1, 2500)).map(lambda at: TEXT[at[0] : at[0] + at[1]]),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(text=texts, borders=st.lists(st.integers(0, 5000), max_size=4))
def test_a_document_in_windows_has_the_ids_of_the_whole(kind: str, text: str, borders: list[int]) -> None:
    ids = encode_document(pieces(text, borders), tokenizer(kind), SMALL)
    assert ids.tolist() == tokenizer(kind).encode(text)


@pytest.mark.parametrize("kind", KEEPS)
def test_decoding_gives_the_text_of_a_long_document(kind: str) -> None:
    text = TEXT * 8 + inspect.getsource(json.encoder)
    assert len(text) > 2 * Windows().length
    ids = encode_document(pieces(text, [70_000, 140_000]), tokenizer(kind))
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
@pytest.mark.parametrize("kind", ["byte level, Llama 3", "prepend"])
def test_long_runs_have_the_ids_of_the_whole(kind: str, run: str) -> None:
    assert encode_document([Piece(RUNS[run])], tokenizer(kind)).tolist() == tokenizer(kind).encode(RUNS[run])


def test_digits_that_are_counted_from_the_right_have_the_ids_of_the_whole() -> None:
    """The end of a number decides how it begins."""
    text = "and " * 40 + "1234567890" * 45 + " and" * 40
    kind = tokenizer("byte level, digits from the right")
    assert encode_document([Piece(text)], kind, Windows(length=200, overlap=100, agree=24)).tolist() == kind.encode(
        text
    )


def test_documents_keep_their_order_among_long_ones() -> None:
    chosen = random.Random(0)
    documents = [TEXT[: chosen.choice((3, 900, 2000))] for _ in range(90)]
    found: list[list[Ids]] = [[]]
    for ids, ends in encode_documents(map(Piece, documents), tokenizer("prepend"), SMALL):
        found[-1].append(ids)
        if ends:
            found.append([])
    assert not found.pop()
    assert [np.concatenate(parts).tolist() for parts in found] == [tokenizer("prepend").encode(d) for d in documents]


def test_a_tokenizer_of_somebody_else_gets_whole_documents() -> None:
    class Reversed(Bytes):
        concatenates = False

        def encode_batch(self, texts: list[str]) -> list[Ids]:  # type: ignore[override]
            return super().encode_batch([text[::-1] for text in texts])

    assert bytes(encode_document(pieces("abcdef", [2, 4]), Reversed()).tolist()) == b"fedcba"


def test_text_that_cannot_be_encoded_in_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_module, "LONGEST", 1000)
    with pytest.raises(DataError, match=r"holds 1,\d\d\d characters that the tokenizer joins.*Divide the document"):
        encode_document([Piece("ab" * 2000)], tokenizer("WordPiece"), SMALL)


def test_ids_cached_in_another_way_are_not_taken(tmp_path: Path) -> None:
    """Bytes have the same ids in both ways, and keep their key."""
    assert encoding_key(Bytes()) == {"tokenizer": "bytes"} and encoding_key(tokenizer("first"))["encoding"] == 2


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
