"""data=tokens: nanoGPT's, llm.c's and Megatron's files, and files that are none of them."""

import os
import resource
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp4train.data import DataError, Loader, StoredIds, TokenData, Tokens, digests

IDS = np.arange(1000) % 500


def build(path: Path, *, vocab_size: int = 500, **settings: Any) -> TokenData:
    settings = {"val": 0.1} | settings
    return Tokens(path=str(path), vocab_size=vocab_size, **settings).build(
        path.parent / "run", 16, 0
    )


def write_megatron(
    prefix: Path, dtype: str = "int32", code: int = 4, lengths: tuple[int, ...] = (600, 400)
) -> None:
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


def test_nanogpt_files_are_read_where_they_are_asked_for_and_cut_in_two(tmp_path: Path) -> None:
    IDS.astype("<u2").tofile(tmp_path / "train.bin")
    data = build(tmp_path / "train.bin", val=0.1)
    assert isinstance(data.train.ids, StoredIds)
    assert (len(data.train), len(data.val), data.vocab_size, data.tokenizer) == (
        900,
        100,
        500,
        None,
    )
    assert np.array_equal(np.concatenate([data.train.ids, data.val.ids]), IDS)


def test_a_validation_file_of_its_own_is_used_whole(tmp_path: Path) -> None:
    IDS.astype("<u4").tofile(tmp_path / "train.bin")
    IDS[:300].astype("<u4").tofile(tmp_path / "val.bin")
    data = build(tmp_path / "train.bin", val_path=str(tmp_path / "val.bin"), dtype="uint32")
    assert (len(data.train), len(data.val)) == (1000, 300)


@pytest.mark.parametrize("named", ["corpus.bin", "corpus.idx", "corpus"])
@pytest.mark.parametrize(("dtype", "code"), [("int32", 4), ("uint16", 8), ("int64", 5)])
def test_megatron_files_bring_their_own_type(
    tmp_path: Path, named: str, dtype: str, code: int
) -> None:
    write_megatron(tmp_path / "corpus", dtype, code)
    data = build(tmp_path / named)
    assert data.train.ids.dtype == np.dtype(dtype)
    assert np.array_equal(np.asarray(data.train.ids), IDS[: len(data.train)])


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_the_header_of_llmc_files_is_no_token(tmp_path: Path, magic: int, dtype: str) -> None:
    write_llmc(tmp_path / "fineweb.bin", magic, dtype)
    assert np.array_equal(np.asarray(build(tmp_path / "fineweb.bin").train.ids[:5]), IDS[:5])


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
    with pytest.raises(DataError, match=r"each of its files is empty"):
        build(tmp_path)
    with pytest.raises(DataError, match=r"data\.val_path=.* does not exist"):
        IDS.astype("<u2").tofile(tmp_path / "train.bin")
        build(tmp_path / "train.bin", val_path=str(tmp_path / "nothing.bin"))


def test_ids_beyond_the_vocabulary_are_refused_before_training(tmp_path: Path) -> None:
    IDS.astype("<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(
        DataError, match=r"token id 499, but the vocabulary has 400 ids .* Set data\.vocab_size"
    ):
        build(tmp_path / "train.bin", vocab_size=400)
    (IDS - 1).astype("<i4").tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"token id -1, .* or set data\.dtype to the type"):
        build(tmp_path / "train.bin", dtype="int32")


@pytest.mark.parametrize(("kind", "least"), [("<i4", -5), ("<i8", -5), ("<u4", 2**20)])
def test_the_type_that_a_header_gives_is_no_cure_for_its_ids(
    tmp_path: Path, kind: str, least: int
) -> None:
    ids = IDS.astype(kind)
    ids[3] = least
    np.save(tmp_path / "train.npy", ids)
    with pytest.raises(DataError, match=f"token id {least}, but") as refused:
        build(tmp_path / "train.npy", vocab_size=65536)
    assert "data.dtype" not in str(refused.value)
    assert ("negative" in str(refused.value)) == (least < 0)


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


def test_one_changed_token_anywhere_gives_another_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    ids = np.arange(200_000, dtype=np.uint16) % 500
    ids.tofile(path)
    os.utime(path, ns=(1, 1))
    first = build(path).fingerprint
    assert build(path).fingerprint == first
    for place in (70, 100_001, 199_990):
        changed = ids.copy()
        changed[place] ^= 1
        changed.tofile(path)
        os.utime(path, ns=(1, 1))
        assert build(path).fingerprint != first, f"token {place}"


def test_a_file_that_has_not_changed_is_read_once_per_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.bin"
    (np.arange(2000, dtype=np.uint16) % 500).tofile(path)
    first = build(path).fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(digests, "digests", lambda ids: pytest.fail("it is read again"))
        assert build(path).fingerprint == first
    for damage in (b"", b"[]", b'{"x": 1}', b"\xff"):
        (tmp_path / "run" / digests.KEPT).write_bytes(damage)
        assert build(path).fingerprint == first


def shards(folder: Path, names: Sequence[str]) -> list[Path]:
    """llm.c's files, each with a part of `IDS`."""
    folder.mkdir()
    paths = [folder / name for name in names]
    for path, part in zip(paths, np.array_split(IDS, len(paths)), strict=True):
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, len(part)
        path.write_bytes(header.tobytes() + part.astype("<u2").tobytes())
    return paths


def everything(data: TokenData) -> np.ndarray:
    return np.concatenate([data.train.ids, data.val.ids])


NAMES = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_train_000010.bin"]


def test_shards_of_a_folder_a_pattern_or_a_list_are_one_stream_in_sorted_order(
    tmp_path: Path,
) -> None:
    paths = shards(tmp_path / "fineweb", NAMES)
    (tmp_path / "fineweb/README.md").write_text("Shards of FineWeb.")
    for path in (
        str(tmp_path / "fineweb"),
        str(tmp_path / "fineweb/*train*.bin"),
        [str(path) for path in paths],
    ):
        data = Tokens(path=path, vocab_size=500, val=0.1).build(tmp_path / "run", 16, 0)
        assert np.array_equal(everything(data), IDS)
        assert "3 files" in data.description
        loader = Loader(data.train, batch_size=4, seq_len=16, seed=0)
        rows = loader.rows(0, sum(loader.sequences))
        starts = loader.starts(0, sum(loader.sequences))
        assert np.array_equal(rows[0].numpy(), IDS[starts[:, None] + np.arange(16)])
        assert np.array_equal(rows[1].numpy(), IDS[starts[:, None] + np.arange(1, 17)])


def test_more_shards_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    for number in range(40):
        np.full(50, number, "<u2").tofile(tmp_path / f"{number:02}.bin")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(20)]  # among those that the process holds
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, limits[1]))
    try:
        ids = build(tmp_path).train.ids
        assert np.array_equal(np.asarray(ids), np.repeat(np.arange(36), 50))
        (tmp_path / "20.bin").unlink()
        np.full(50, 7, "<u2").tofile(tmp_path / "20.bin")
        with pytest.raises(DataError, match=r"20\.bin was changed after the run had opened it"):
            np.asarray(ids)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_one_shard_that_changes_gives_another_fingerprint_and_an_equal_one_the_same(
    tmp_path: Path,
) -> None:
    paths = shards(tmp_path / "fineweb", NAMES)
    first = build(tmp_path / "fineweb").fingerprint
    shutil.copytree(tmp_path / "fineweb", tmp_path / "moved")
    assert build(tmp_path / "moved").fingerprint == first
    content = bytearray(paths[1].read_bytes())
    content[-100] ^= 1
    paths[1].write_bytes(content)
    assert build(tmp_path / "fineweb").fingerprint != first


def test_validation_is_never_trained_on_through_a_folder_or_a_list(tmp_path: Path) -> None:
    shards(tmp_path / "fineweb", ["fineweb_val_000000.bin", *NAMES])
    with pytest.raises(
        DataError, match=r"for training and for validation .* data\.path='.*/\*train\*'"
    ):
        build(tmp_path / "fineweb")
    paths = {
        key: str(tmp_path / f"fineweb/*{part}*")
        for key, part in (("path", "train"), ("val_path", "val"))
    }
    data = Tokens(vocab_size=500, **paths).build(tmp_path / "run", 16, 0)
    assert len(data.val) == 250 and len(data.train) == 750
    twice = [str(tmp_path / "fineweb" / NAMES[0]), str(tmp_path / "fineweb/*train*")]
    with pytest.raises(DataError, match=r"names .*fineweb_train_000001\.bin twice"):
        Tokens(path=twice, vocab_size=500).build(tmp_path / "run", 16, 0)


def test_a_pattern_without_a_match_says_what_is_there(tmp_path: Path) -> None:
    shards(tmp_path / "fineweb", NAMES)
    with pytest.raises(
        DataError, match=r"fineweb/\*valid\* matches nothing; .*/fineweb holds fineweb_train_000001"
    ):
        build(tmp_path / "fineweb/*valid*")
    with pytest.raises(DataError, match=r"matches nothing; .* holds fineweb$"):
        build(tmp_path / "*/nothing/*.bin")
    with pytest.raises(DataError, match=r"data\.path=\[\] names no file"):
        Tokens(path=[], vocab_size=500).build(tmp_path / "run", 16, 0)


@pytest.mark.parametrize(("sequences", "documents"), [(2**63, 2**63), (400, 2**62)])
def test_an_index_that_counts_more_than_it_holds_is_refused_at_once(
    tmp_path: Path, sequences: int, documents: int
) -> None:
    write_megatron(tmp_path / "corpus")
    index = tmp_path / "corpus.idx"
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, sequences, documents)
    index.write_bytes(head + index.read_bytes()[len(head) :])
    with pytest.raises(
        DataError, match=rf"corpus\.idx counts .* in {sequences:,} sequences.* cut off or belongs"
    ):
        build(tmp_path / "corpus")


def test_what_is_no_file_is_refused_as_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    for path in (tmp_path / "pipe.bin", "/dev/zero"):
        with pytest.raises(DataError, match=rf"data\.path={path} is no regular file, and data is"):
            Tokens(path=str(path), vocab_size=9).build(tmp_path / "run", 16, 0)
    with pytest.raises(DataError, match=r"pipe\.bin is no regular file"):
        build(tmp_path)


# -- documents -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "offset"), [("end_id", 1), ("begin_id", 0)])
def test_validation_begins_with_a_document(tmp_path: Path, key: str, offset: int) -> None:
    ids = np.tile(np.arange(50), 40)
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    data = build(tmp_path / "train.bin", vocab_size=50, val=0.2, **{key: 7})
    assert int(np.asarray(data.val.ids)[0]) == 7 + offset
    assert np.array_equal(everything(data), ids)


def test_an_id_that_the_vocabulary_lacks_divides_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"data\.end_id=500: allowed are ids of the vocabulary, 0 … 499"
    ):
        Tokens(path="x", vocab_size=500, end_id=500)
    with pytest.raises(ValueError, match=r"data\.begin_id=-1"):
        Tokens(path="x", vocab_size=500, begin_id=-1)


@pytest.mark.parametrize("reach", [40, 4000], ids=["close to each other", "far from each other"])
def test_ids_at_any_places_are_those_of_the_file(tmp_path: Path, reach: int) -> None:
    """Where there are as many places as ids between them, all of these are read at once."""
    (np.arange(8000) % 251).astype(np.uint8).tofile(tmp_path / "ids.bin")
    data = Tokens(path=str(tmp_path / "ids.bin"), dtype="uint8", vocab_size=256, val=100).build(
        tmp_path / "run", 16, 0
    )
    ids = data.train.ids
    places = np.random.default_rng(0).integers(100, 100 + reach, (8, 16))
    assert np.array_equal(ids.take(places), (places % 251).astype(np.uint8))
    assert ids.take(np.empty((0, 4), int)).shape == (0, 4)
