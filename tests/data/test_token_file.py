"""data=tokens: nanoGPT's, llm.c's and Megatron's files, and files that are none of them."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp4train.data import DataError, TokenData, Tokens, cache
from fp4train.data.tokens import same_data

IDS = np.arange(1000) % 500


def build(path: Path, *, vocab_size: int = 500, **settings: Any) -> TokenData:
    settings = {"val": 0.1} | settings
    return Tokens(path=str(path), vocab_size=vocab_size, **settings).build(path.parent / "run", 16, 0)


def write_megatron(prefix: Path, dtype: str = "int32", code: int = 4, lengths: tuple[int, ...] = (600, 400)) -> None:
    prefix.with_suffix(".bin").write_bytes(IDS.astype(dtype).tobytes())
    itemsize = np.dtype(dtype).itemsize
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(lengths) + 1)
    index += np.array(lengths, dtype="<i4").tobytes()
    index += (np.cumsum((0, *lengths[:-1])) * itemsize).astype("<i8").tobytes()
    index += np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index)


def write_llmc(path: Path, magic: int = 20240520, dtype: str = "uint16", count: int = 1000) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, count
    path.write_bytes(header.tobytes() + IDS.astype(dtype).tobytes())


def test_nanogpt_files_are_mapped_and_cut_in_two(tmp_path: Path) -> None:
    IDS.astype("<u2").tofile(tmp_path / "train.bin")
    data = build(tmp_path / "train.bin", val=0.1)
    assert isinstance(data.train.ids, np.memmap)
    assert (len(data.train), len(data.val), data.vocab_size, data.tokenizer) == (900, 100, 500, None)
    assert np.array_equal(np.concatenate([data.train.ids, data.val.ids]), IDS)


def test_a_validation_file_of_its_own_is_used_whole(tmp_path: Path) -> None:
    IDS.astype("<u4").tofile(tmp_path / "train.bin")
    IDS[:300].astype("<u4").tofile(tmp_path / "val.bin")
    data = build(tmp_path / "train.bin", val_path=str(tmp_path / "val.bin"), dtype="uint32")
    assert (len(data.train), len(data.val)) == (1000, 300)


@pytest.mark.parametrize("named", ["corpus.bin", "corpus.idx", "corpus"])
@pytest.mark.parametrize(("dtype", "code"), [("int32", 4), ("uint16", 8), ("int64", 5)])
def test_megatron_files_bring_their_own_type(tmp_path: Path, named: str, dtype: str, code: int) -> None:
    write_megatron(tmp_path / "corpus", dtype, code)
    data = build(tmp_path / named)
    assert data.train.ids.dtype == np.dtype(dtype)
    assert np.array_equal(data.train.ids, IDS[: len(data.train)])


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_the_header_of_llmc_files_is_no_token(tmp_path: Path, magic: int, dtype: str) -> None:
    write_llmc(tmp_path / "fineweb.bin", magic, dtype)
    assert np.array_equal(build(tmp_path / "fineweb.bin").train.ids[:5], IDS[:5])


def test_odd_sizes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(2001))
    with pytest.raises(DataError, match=r"2,001 bytes, which is no whole number of uint16 tokens"):
        build(tmp_path / "train.bin")


def test_empty_files_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        build(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"Did you mean .*train\.bin\?"):
        build(tmp_path / "trains.bin")
    with pytest.raises(DataError, match="is a folder"):
        build(tmp_path)
    with pytest.raises(DataError, match=r"data\.val_path=.* does not exist"):
        IDS.astype("<u2").tofile(tmp_path / "train.bin")
        build(tmp_path / "train.bin", val_path=str(tmp_path / "nothing.bin"))


def test_ids_beyond_the_vocabulary_are_refused_before_training(tmp_path: Path) -> None:
    IDS.astype("<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"token id 499, but the vocabulary has 400 ids .* Set data\.vocab_size"):
        build(tmp_path / "train.bin", vocab_size=400)
    (IDS - 1).astype("<i4").tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match="token id -1"):
        build(tmp_path / "train.bin", dtype="int32")


def test_files_shorter_than_a_sequence_are_refused(tmp_path: Path) -> None:
    IDS[:20].astype("<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match="validation text is 2 tokens long"):
        build(tmp_path / "train.bin")
    with pytest.raises(DataError, match="training text is 10 tokens long"):
        build(tmp_path / "train.bin", val=10)


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "corpus", lengths=(600, 399))
    with pytest.raises(DataError, match=r"counts 3,996 bytes .* \.bin file has 4,000"):
        build(tmp_path / "corpus.bin")
    write_megatron(tmp_path / "corpus", code=6)
    with pytest.raises(DataError, match="type code 6; supported are"):
        build(tmp_path / "corpus.bin")
    write_megatron(tmp_path / "corpus")
    with pytest.raises(DataError, match=r"data\.dtype=uint16, but .* says that it holds int32"):
        build(tmp_path / "corpus.bin", dtype="uint16")
    index = tmp_path / "corpus.idx"
    index.write_bytes(index.read_bytes()[:-44])
    with pytest.raises(DataError, match=r"cut off or belongs"):
        build(tmp_path / "corpus.bin")
    index.write_bytes(b"something else")
    with pytest.raises(DataError, match="no Megatron index"):
        build(tmp_path / "corpus.bin")


def test_a_truncated_llmc_file_is_refused(tmp_path: Path) -> None:
    write_llmc(tmp_path / "fineweb.bin", count=2000)
    with pytest.raises(DataError, match="its header counts 2,000 tokens"):
        build(tmp_path / "fineweb.bin")


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.dtype=float32: allowed are uint8"):
        Tokens(path="x", vocab_size=1, dtype="float32")
    with pytest.raises(ValueError, match=r"data\.vocab_size=0"):
        Tokens(path="x", vocab_size=0)


def test_a_file_that_cannot_be_opened_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    IDS.astype("<u2").tofile(tmp_path / "train.bin")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("numpy.memmap", refuse)
    with pytest.raises(DataError, match=r"train\.bin cannot be read: Permission denied"):
        build(tmp_path / "train.bin")


def test_one_changed_token_anywhere_gives_another_fingerprint(tmp_path: Path) -> None:
    path, ids = tmp_path / "train.bin", np.arange(200_000, dtype=np.uint16) % 500
    ids.tofile(path)
    first = build(path).fingerprint
    assert build(path).fingerprint == first
    for place in (70, 100_001, 199_990):
        changed = ids.copy()
        changed[place] ^= 1
        changed.tofile(path)
        assert build(path).fingerprint != first, f"token {place}"


def test_a_file_that_has_not_changed_is_read_once_per_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.bin"
    (np.arange(2000, dtype=np.uint16) % 500).tofile(path)
    first = build(path).fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(cache, "digests", lambda ids: pytest.fail("it is read again"))
        assert build(path).fingerprint == first
    for damage in (b"", b"[]", b'{"x": 1}', b"\xff"):
        (tmp_path / "run" / cache.KEPT).write_bytes(damage)
        assert build(path).fingerprint == first


def test_a_checkpoint_from_before_files_had_a_digest_is_of_the_same_data() -> None:
    assert same_data("a1-b2", "a1-b2-c3") and same_data("a1-b2", "a1-b2") and same_data("a1-b2-c3", "a1-b2-c3")
    assert not same_data("a1-b2-c4", "a1-b2-c3") and not same_data("a1-b3", "a1-b2-c3") and not same_data(3, "a1-b2")
    assert not same_data("a1-b2-c3", "a1-b2")
