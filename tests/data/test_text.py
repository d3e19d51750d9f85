"""data=text: files and folders, packing, the held-out part, the cache, and everything wrong that a
path can be.
"""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from fp4train.data import PIECE_CHARACTERS, DataError, Text, TokenData, read_pieces

LINES = "".join(f"line {i} of the text\n" for i in range(200))


def build(path: Path | str, tmp_path: Path, *, seq_len: int = 16, **settings: Any) -> TokenData:
    return Text(path=str(path), cache_dir=str(tmp_path / "cache"), **settings).build(
        tmp_path / "run", seq_len, 0
    )


def whole(data: TokenData) -> bytes:
    """All text, with documents ended by a zero byte."""
    ids = np.concatenate([data.train.ids, data.val.ids])
    return bytes(0 if i == 256 else int(i) for i in ids)


@pytest.mark.parametrize("name", ["a.csv", "a.ndjson", "a.jsonl.gz"])
def test_records_that_a_pattern_finds_are_refused_as_those_that_are_named(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "a").mkdir()
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / "a" / name, "wb") as file:
        file.write(LINES.encode())
    for path in (tmp_path / "a/*", tmp_path / "a" / name):
        with pytest.raises(DataError, match="holds records, whose syntax would be trained on"):
            build(path, tmp_path)
    suffix = Path(name.removesuffix(".gz")).suffix
    assert whole(build(tmp_path / "a/*", tmp_path, suffixes=[suffix])).startswith(b"line 0")


def test_a_folder_is_read_in_the_order_of_names_each_file_a_document(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name, text in (
        ("c.txt", "third" * 20),
        ("a.md", "first" * 20),
        ("b/z.TXT", "second" * 20),
        ("empty.txt", ""),
        ("x.py", "no"),
        (".hidden/y.txt", "no"),
    ):
        (folder / name).write_text(text)
    data = build(folder, tmp_path, val=0.2)
    assert whole(data).split(b"\0") == [b"first" * 20, b"second" * 20, b"third" * 20, b""]
    assert "3 files" in data.description


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: bytes(pyarrow.compress(data, "zstd", asbytes=True)),
}


@pytest.mark.parametrize("suffix", PACKED)
def test_packed_files_and_lists_of_paths_are_read_in_the_order_in_which_they_are_named(
    tmp_path: Path, suffix: str
) -> None:
    (tmp_path / "more").mkdir()
    texts = {
        "b.txt": LINES,
        "more/c.md": "third\n" * 50,
        "more/d.txt": "fourth\n" * 50,
        "a.txt": "last\n" * 50,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}{suffix}").write_bytes(PACKED[suffix](text.encode()))
    named = [
        str(tmp_path / f"b.txt{suffix}"),
        str(tmp_path / "more"),
        str(tmp_path / f"a*{suffix}"),
    ]
    data = Text(path=named, cache_dir=str(tmp_path / "cache")).build(tmp_path / "run", 16, 0)
    assert whole(data).decode().split("\0") == [*texts.values(), ""]
    with pytest.raises(DataError, match=r"data\.path names .*b\.txt.* twice"):
        Text(path=[*named, named[0]]).build(tmp_path / "run", 16, 0)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_file_that_is_cut_off_or_lies_beside_its_text_is_refused(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"a.txt{suffix}"
    whole_text = "".join(f"{number} {number**2}\n" for number in range(90_000)).encode()
    path.write_bytes(PACKED[suffix](whole_text)[:-9])
    with pytest.raises(DataError, match=rf"a\.txt\{suffix} cannot be read: "):
        build(path, tmp_path)
    path.write_bytes(PACKED[suffix](whole_text))
    (tmp_path / "a.txt").write_bytes(whole_text)
    with pytest.raises(
        DataError, match="have one name: what is held out for validation would be trained on"
    ):
        build(tmp_path, tmp_path)


def test_a_file_of_any_suffix_is_read_when_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.log").write_text(LINES)
    assert whole(build(tmp_path / "notes.log", tmp_path)) == LINES.encode() + b"\0"


def test_other_suffixes_can_be_chosen_with_or_without_the_dot(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.py").write_text(LINES)
    assert len(build(tmp_path / "texts", tmp_path, suffixes=["py"]).train) > 1000
    with pytest.raises(ValueError, match=r"data\.suffixes='py': a list is needed"):
        Text(path="x", suffixes="py")


def test_a_large_file_is_one_document_though_it_is_read_in_pieces(tmp_path: Path) -> None:
    text = "".join(f"{i} äöü €\r\n" for i in range(30_000)) + "x" * (3 * PIECE_CHARACTERS)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    pieces = list(read_pieces(tmp_path / "a.txt"))
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_training_and_validation_share_no_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    total = len(LINES) + 1
    data = build(tmp_path / "a.txt", tmp_path, val=300)
    assert len(data.val) == 300
    assert len(data.train) == total - 300
    assert bytes(np.asarray(data.train.ids, np.uint8)) == LINES.encode()[: total - 300]
    assert bytes(np.asarray(data.val.ids[:-1], np.uint8)) == LINES.encode()[total - 300 :]


def test_tokenised_once_and_read_from_the_cache_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    first = build(tmp_path / "a.txt", tmp_path)
    monkeypatch.setattr(
        "fp4train.data.source.token_chunks", lambda *_: pytest.fail("tokenised again")
    )
    second = build(tmp_path / "a.txt", tmp_path)
    assert first.fingerprint == second.fingerprint


def test_a_changed_file_is_tokenised_again_and_has_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    first = build(tmp_path / "a.txt", tmp_path)
    (tmp_path / "a.txt").write_text(LINES.upper() + "more")
    second = build(tmp_path / "a.txt", tmp_path)
    assert whole(second).startswith(b"LINE 0")
    assert first.fingerprint != second.fingerprint


def test_every_flipped_byte_of_the_cache_is_noticed_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # longer than the places that a fingerprint looks at
    (tmp_path / "a.txt").write_text(LINES * 20)
    before = whole(build(tmp_path / "a.txt", tmp_path))
    (tokens,) = (tmp_path / "cache").glob("*/*.bin")
    good = tokens.read_bytes()
    for place in range(0, len(good), max(1, len(good) // 7)):
        bad = bytearray(good)
        bad[place] ^= 1
        tokens.write_bytes(bad)
        caplog.clear()
        with pytest.raises(DataError, match=r"00000\.bin was changed after it was written: bytes"):
            whole(build(tmp_path / "a.txt", tmp_path))
        assert whole(build(tmp_path / "a.txt", tmp_path)) == before, place
        assert "is damaged" in caplog.text and tokens.read_bytes() == good


@pytest.mark.parametrize(
    "damage",
    ["truncated", "cut off", "json cut off", "json of another shape", "bin lost", "crc lost"],
)
def test_a_damaged_cache_is_built_anew(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    before = whole(build(tmp_path / "a.txt", tmp_path))
    (tokens,) = (tmp_path / "cache").glob("*/*.bin")
    names = sorted(path.name for path in tokens.parent.iterdir())
    match damage:
        case "truncated":
            tokens.write_bytes(tokens.read_bytes()[:-2])
        case "cut off":
            tokens.with_suffix(".crc").write_bytes(b"")
        case "json cut off":
            tokens.with_name("index.json").write_text('{"dtype": "<u2", "tok')
            tokens.with_suffix(".json").write_text('{"dtype": "<u2", "tok')
        case "json of another shape":
            tokens.with_name("index.json").write_text("[]")
        case "bin lost":
            tokens.unlink()
        case "crc lost":
            tokens.with_suffix(".crc").unlink()
    assert whole(build(tmp_path / "a.txt", tmp_path)) == before
    assert sorted(path.name for path in tokens.parent.iterdir()) == names
    assert "damaged" in caplog.text


def test_an_interrupted_tokenisation_leaves_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(LINES)

    def interrupted(*_: Any) -> Any:
        yield np.zeros(100, dtype=np.uint16)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fp4train.data.source.token_chunks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "a.txt", tmp_path)
    assert not list((tmp_path / "cache").glob("*/*.*"))
    assert whole(build(tmp_path / "a.txt", tmp_path)) == LINES.encode() + b"\0"


def test_a_cache_that_cannot_be_written_says_which_key_to_change(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(
        DataError, match=r"cannot be kept in .*cache: .*Choose another data\.cache_dir"
    ):
        build(tmp_path / "a.txt", tmp_path)


def test_a_missing_path_suggests_the_near_miss(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    with pytest.raises(DataError, match=r"does not exist. Did you mean .*/shakespeare\?"):
        build(tmp_path / "shakespear", tmp_path)
    with pytest.raises(DataError, match=r"Did you mean .*/shakespeare\?"):
        build(tmp_path / "shakespear/a/b.txt", tmp_path)
    (tmp_path / "genome.fa").touch()
    for near in ("genom.fa", "genome.fasta", "genome"):
        with pytest.raises(DataError, match=r"Did you mean .*/genome.fa\?"):
            build(tmp_path / near, tmp_path)
    with pytest.raises(DataError, match=r"holds no nothere\.fa"):
        build(tmp_path / "nothere.fa", tmp_path)


def test_empty_files_and_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        build(tmp_path / "empty.txt", tmp_path)
    with pytest.raises(DataError, match="it holds no files at all"):
        build(tmp_path / "folder", tmp_path)
    (tmp_path / "folder/a.txt").write_text("")
    with pytest.raises(DataError, match="each of its files is empty"):
        build(tmp_path / "folder", tmp_path)


def test_a_folder_without_text_files_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a.py", "b.py", "README"):
        (tmp_path / "folder" / name).write_text("x")
    with pytest.raises(
        DataError, match=r"suffixes \.txt, \.md; it holds 2 with \.py, 1 with no suffix"
    ):
        build(tmp_path / "folder", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9 au lait\n" * 100, r"after line 1: it is not UTF-8 text .*0xe9"),
        (
            b"coffee\n" * 30_000 + b"caf\xe9\n" + b"tea\n" * 9,
            r"after line \d{5}: it is not UTF-8 text .*0xe9",
        ),
        (
            gzip.compress(b"tea\n" * 20_000 + b"caf\xe9\n"),
            r"after line \d+: it is not UTF-8 text .*0xe9",
        ),
        (b"abc\0def" * 100, "line 1: it holds a NUL character: binary data"),
        (b"abc\n" * 50_000 + b"\0", "line 50001: it holds a NUL character: binary data"),
    ],
)
def test_binary_and_other_encodings_are_refused_by_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt, {message}"):
        build(tmp_path / "a.txt", tmp_path)


def test_text_shorter_than_a_sequence_is_refused_for_either_part(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99)
    with pytest.raises(
        DataError, match=r"training text is 9[0-9] tokens long, but .* train.seq_len\+1 = 129"
    ):
        build(tmp_path / "a.txt", tmp_path, seq_len=128)
    with pytest.raises(
        DataError, match=r"validation text is 5 tokens long.*data\.val=0\.05 holds out the last 5"
    ):
        build(tmp_path / "a.txt", tmp_path, seq_len=16)
    with pytest.raises(DataError, match="training text is 0 tokens long"):
        build(tmp_path / "a.txt", tmp_path, seq_len=16, val=1000)


def test_a_tokenizer_given_by_name_says_how_to_choose_one() -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer='bpe': .* data/tokenizer=bpe"):
        Text(path="x", tokenizer="bpe")  # type: ignore[arg-type]
