"""Bytes, byte pairs trained on the data, ready-made tokenizers; what a run keeps of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_kinds import tokenizer_json

from fp4train.data import DataError, HuggingFace, Piece, Text, Texts, encoding_key, token_chunks
from fp4train.data.tokenizers import BytePairs, Bytes, Pretrained

TEXT = "the quick brown fox jumps over the lazy dog, naïvely — twice.\n" * 50


def documents() -> Iterator[Piece]:
    yield Piece(TEXT)
    yield Piece(TEXT.upper())


def nothing() -> Iterator[Piece]:
    yield from ()


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A tokenizer.json."""
    BytePairs(vocab_size=300).build(documents, tmp_path / "elsewhere")
    return tmp_path / "elsewhere/tokenizer.json"


def test_bytes_come_back_as_they_were(tmp_path: Path) -> None:
    tokenizer = Bytes().build(documents, tmp_path)
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode([*tokenizer.encode(TEXT), tokenizer.end_of_document]) == TEXT
    assert tokenizer.encode_batch(["é"])[0].tolist() == tokenizer.encode("é") == [0xC3, 0xA9]


def test_documents_are_packed_with_their_ends(tmp_path: Path) -> None:
    pieces = [Piece("ab", ends_document=False), Piece("c"), Piece("d")]
    assert np.concatenate([*token_chunks(pieces, Bytes())]).tolist() == [97, 98, 99, 256, 100, 256]
    assert list(token_chunks([], Bytes())) == []


def test_no_text_is_too_short_for_a_sequence() -> None:
    with pytest.raises(DataError, match="the training text is 0 tokens long"):
        Texts(documents=nothing, val=0.05, description="nothing").tokens(Bytes(), 8)


def test_corpora_of_several_sources_share_a_tokenizer(tmp_path: Path, trained: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text("".join(f'{{"text": "{i} foxes"}}\n' for i in range(200)))
    settings: dict[str, Any] = {"val": 0.5, "cache_dir": str(tmp_path / "cache")}
    sources = (
        Text(path=str(tmp_path / "a.txt"), **settings),
        HuggingFace(path=str(tmp_path / "b.jsonl"), **settings),
    )
    tokenizer = Pretrained(name=str(trained), end_of_document="<|endoftext|>").build(
        nothing, tmp_path / "shared"
    )
    for source in sources:
        data = source.corpus(tmp_path).tokens(tokenizer, 8)
        ids = np.concatenate([data.train.ids, data.val.ids]).tolist()
        pieces = source.corpus(tmp_path).documents()
        texts = "".join(piece.text for piece in pieces)
        assert tokenizer.decode([i for i in ids if i != tokenizer.end_of_document]) == texts
        assert data.tokenizer is tokenizer and data.vocab_size == tokenizer.vocab_size


def test_more_pieces_than_are_encoded_at_once_stay_in_order() -> None:
    ids = np.concatenate([*token_chunks((Piece(str(i)) for i in range(200)), Bytes())])
    assert bytes(ids[ids != 256].astype(np.uint8)).decode() == "".join(map(str, range(200)))


def test_byte_pairs_are_trained_on_the_data_and_come_back_as_they_were(tmp_path: Path) -> None:
    tokenizer = BytePairs(vocab_size=300).build(documents, tmp_path)
    assert tokenizer.vocab_size == 300
    ids = tokenizer.encode("the lazy dog, \x00 ünïcödé 🦊")
    assert tokenizer.decode(ids) == "the lazy dog, \x00 ünïcödé 🦊"
    assert len(tokenizer.encode(TEXT)) < 0.7 * len(TEXT)
    assert tokenizer.encode_batch([TEXT, "fox"])[1].tolist() == tokenizer.encode("fox")


def test_byte_pairs_are_the_same_every_time(tmp_path: Path) -> None:
    for run in ("a", "b"):
        BytePairs(vocab_size=400).build(documents, tmp_path / run)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (
        tmp_path / "b/tokenizer.json"
    ).read_bytes()


def test_only_the_sample_is_learned_from(tmp_path: Path) -> None:
    tokenizer = BytePairs(vocab_size=1000, sample=len(TEXT)).build(documents, tmp_path)
    assert len(tokenizer.encode("the quick brown fox")) < len(
        tokenizer.encode("THE QUICK BROWN FOX")
    )


def test_text_that_spells_a_special_token_is_only_text(trained: Path, tmp_path: Path) -> None:
    tokenizer = Pretrained(name=str(trained)).build(documents, tmp_path)
    assert tokenizer.end_of_document not in tokenizer.encode("a <|endoftext|> b")
    assert tokenizer.end_of_document not in tokenizer.encode_batch(["a <|endoftext|> b"])[0]


def test_a_resumed_run_uses_its_own_tokenizer_and_trains_none(tmp_path: Path) -> None:
    first = BytePairs(vocab_size=300).build(documents, tmp_path)
    second = BytePairs(vocab_size=300).build(nothing, tmp_path)
    assert first.identity == second.identity
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tokenizer.json",
        "tokenizer_origin.json",
    ]


def test_a_resumed_run_needs_the_original_no_more(trained: Path, tmp_path: Path) -> None:
    first = Pretrained(name=str(trained)).build(documents, tmp_path / "run")
    trained.unlink()
    assert (
        Pretrained(name=str(trained)).build(documents, tmp_path / "run").identity == first.identity
    )


def test_a_run_that_has_its_copy_reads_nothing_where_the_tokenizer_came_from(
    trained: Path, tmp_path: Path
) -> None:
    """A template that lies there now is neither read nor written into the run."""
    run = tmp_path / "run"
    settings = Pretrained(name=str(trained))
    settings.build(documents, run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    (trained.parent / "chat_template.jinja").write_text("theirs")
    settings.build(nothing, run)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_run_with_another_tokenizer_is_not_taken_over(tmp_path: Path) -> None:
    BytePairs(vocab_size=300).build(documents, tmp_path)
    with pytest.raises(
        DataError,
        match=r"holds the tokenizer bpe of 300 ids .* not bpe of 301 .* another run\.name",
    ):
        BytePairs(vocab_size=301).build(documents, tmp_path)


def test_a_damaged_copy_in_the_run_is_named(tmp_path: Path) -> None:
    BytePairs(vocab_size=300).build(documents, tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(DataError, match=r"tokenizer in .* is damaged \(its checksum differs\)"):
        BytePairs(vocab_size=300).build(documents, tmp_path)
    (tmp_path / "tokenizer_origin.json").write_text(
        '{"origin": "bpe of 300 ids from 20000000 characters"}'
    )
    # from before there were checksums
    with pytest.raises(DataError, match=r"tokenizer\.json is no tokenizer file"):
        BytePairs(vocab_size=300).build(documents, tmp_path)
    (tmp_path / "tokenizer_origin.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer in .* cannot be read"):
        BytePairs(vocab_size=300).build(documents, tmp_path)


def test_training_on_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text to train"):
        BytePairs(vocab_size=300).build(nothing, tmp_path)
    with pytest.raises(ValueError, match="at least 257"):
        BytePairs(vocab_size=256)


def test_a_whole_data_set_in_byte_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT * 10)
    source = Text(
        path=str(tmp_path / "a.txt"),
        tokenizer=BytePairs(vocab_size=300),
        cache_dir=str(tmp_path / "c"),
        val=0.1,
    )
    data = source.build(tmp_path / "run", 16, 0)
    assert data.train.ids.dtype == np.uint16
    assert data.tokenizer is not None
    assert (
        data.tokenizer.decode(np.concatenate([data.train.ids, data.val.ids]).tolist()) == TEXT * 10
    )


def test_a_folder_with_a_tokenizer_is_as_good_as_the_file(trained: Path, tmp_path: Path) -> None:
    assert Pretrained(name=str(trained.parent)).build(documents, tmp_path / "run").vocab_size == 300


def edited(trained: Path, **changes: Any) -> str:
    trained.write_text(json.dumps(json.loads(trained.read_text()) | changes))
    return str(trained)


def test_truncation_and_padding_set_in_the_file_do_not_cut_documents(
    trained: Path, tmp_path: Path
) -> None:
    truncation = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Pretrained(name=edited(trained, truncation=truncation)).build(
        documents, tmp_path / "run"
    )
    assert len(tokenizer.encode_batch([TEXT])[0]) > 100


def test_the_token_that_ends_documents_can_be_named_and_must_exist(
    trained: Path, tmp_path: Path
) -> None:
    assert (
        Pretrained(name=str(trained), end_of_document="a")
        .build(documents, tmp_path / "run")
        .end_of_document
        < 257
    )
    with pytest.raises(
        DataError, match=r"has no token <eot> .* data\.tokenizer\.end_of_document.*<\|endoftext\|>"
    ):
        Pretrained(name=str(trained), end_of_document="<eot>").build(documents, tmp_path / "other")


def test_a_token_that_begins_documents_makes_another_entry_of_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer_json("byte level"))
    plain = Pretrained(name=str(file), end_of_document="</s>").open()
    begun = Pretrained(name=str(file), end_of_document="</s>", begin_of_document="<unk>").open()
    assert begun.begin_of_document == 1 and encoding_key(plain) != encoding_key(begun)
    with pytest.raises(
        DataError, match=r"has no token <b> to begin a document with .* special tokens: </s>, <unk>"
    ):
        Pretrained(name=str(file), end_of_document="</s>", begin_of_document="<b>").open()
    with pytest.raises(DataError, match="begin_of_document=</s> ends each document already"):
        Pretrained(name=str(file), end_of_document="</s>", begin_of_document="</s>").open()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"version": "1.0", ', "is no tokenizer file of the `tokenizers` library"),
        (b"\xff\xfe\x00", "is no JSON file"),
        (b'{"some": "thing"}', "is no tokenizer file of the `tokenizers` library"),
        (b'{"model":' * 100_000, "recursion limit"),
    ],
)
def test_a_corrupt_tokenizer_file_is_one_message(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "tok.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        Pretrained(name=str(tmp_path / "tok.json")).build(documents, tmp_path / "run")
    assert not (tmp_path / "run/tokenizer.json").exists()


def test_a_missing_tokenizer_file_suggests_the_near_miss(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Did you mean .*tokenizer\.json\?"):
        Pretrained(name=str(trained.with_name("tokeniser.json"))).build(documents, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        Pretrained(name=str(tmp_path / "empty")).build(documents, tmp_path)


def test_a_hub_name_without_a_network_says_what_else_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no_token"))
    with pytest.raises(
        DataError,
        match=r"somebody/nothing: .* it cannot be had: .*Give the path .* data/tokenizer=bpe",
    ):
        Pretrained(name="somebody/nothing").build(documents, tmp_path)
    with pytest.raises(DataError, match="from the hub it cannot be had"):
        Pretrained(name="not a name!").build(documents, tmp_path)


def test_a_run_directory_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(DataError, match="tokenizer cannot be kept in"):
        BytePairs(vocab_size=300).build(documents, tmp_path / "run")
