"""What token files say of themselves: NumPy's headers, and containers and text that are no array of
ids.
"""

import bz2
import gzip
import json
import lzma
import os
import pickle
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file

from fp4train.data import DataError, TokenData, Tokens

IDS = np.arange(1000) % 500


def build(path: Path, *, vocab_size: int = 500, **settings: Any) -> TokenData:
    settings = {"val": 0.1} | settings
    return Tokens(path=str(path), vocab_size=vocab_size, **settings).build(
        path.parent / "run", 16, 0
    )


def everything(data: TokenData) -> np.ndarray:
    return np.concatenate([data.train.ids, data.val.ids])


INTEGERS = st.sampled_from(
    ["<u1", "<i1", "<u2", ">u2", "<i2", "<u4", ">u4", "<i4", "<u8", "<i8", ">i8"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    dtype=INTEGERS,
    rows=st.sampled_from([(120,), (1, 120), (5, 24), (2, 3, 20)]),
    version=st.sampled_from([1, 2, 3]),
)
def test_an_array_of_numpy_is_read_as_its_header_says(
    tmp_path: Path, dtype: str, rows: tuple[int, ...], version: int
) -> None:
    ids = (np.arange(120) % 127).astype(dtype).reshape(rows)
    for name in ("x.npy", "x.bin"):
        with (tmp_path / name).open("wb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.lib.format.write_array(file, ids, version=(version, 0))
        data = Tokens(path=str(tmp_path / name), vocab_size=127, val=40).build(
            tmp_path / "run", 16, 0
        )
        assert np.array_equal(everything(data), ids.ravel())


def test_raw_ids_stay_raw_whatever_they_are_called(tmp_path: Path) -> None:
    for name in ("part-0-00000.npy", "tokens.u16", "ids"):
        IDS.astype("<u2").tofile(tmp_path / name)
        assert np.array_equal(everything(build(tmp_path / name)), IDS)


def archived(path: Path, write: Callable[..., object]) -> None:
    with path.open("wb") as file:
        write(file, ids=IDS)


def extended(path: Path) -> None:
    np.save(path, IDS)
    path.write_bytes(path.read_bytes() + b"abc")


def tarred(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "ids.bin")


TFRECORD = (800).to_bytes(8, "little") + bytes.fromhex("335d19e7") + b"\n\x9d\6\n\x9a\6"
"""A length, its masked CRC-32C, and the beginning of an example with features."""
RAW = np.random.default_rng(0).integers(0, 60_000, 20_000).astype("<u2")


MARKS = {
    TFRECORD: "a TFRecord file",
    b"MMIDIDX\0\0": "a Megatron index",
    b"\x50\x2a\x4d\x18\4\0\0\0\1\0\0\0\x28\xb5\x2f\xfd": "compressed by zstd",
}
OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "npz": (lambda path: archived(path, np.savez), r"an archive of NumPy arrays \(\.npz\)"),
    "tar": (tarred, "a tar archive"),
    "gzip": (lambda path: path.write_bytes(gzip.compress(RAW.tobytes())), "compressed by gzip"),
    "bzip2": (lambda path: path.write_bytes(bz2.compress(RAW.tobytes())), "compressed by bzip2"),
    "xz": (lambda path: path.write_bytes(lzma.compress(RAW.tobytes())), "compressed by xz"),
    "torch": (lambda path: torch.save(torch.from_numpy(IDS), path), r"a file of torch\.save"),
    "safetensors": (
        lambda path: save_file({"ids": torch.from_numpy(IDS)}, path),
        "a safetensors file",
    ),
    "json": (lambda path: path.write_text(json.dumps(IDS.tolist())), "text, no array"),
    "json lines": (
        lambda path: path.write_text('{"input_ids": [5, 6, 7]}\n' * 99),
        r"text, no array of token ids\. .* data=hf JSON",
    ),
    "utf-16": (lambda path: path.write_text("käse und wein\n" * 1000, encoding="utf-16"), "text"),
    **{
        f"pickle {protocol}": (
            lambda path, p=protocol: path.write_bytes(pickle.dumps(IDS.tolist(), p)),
            "a pickle",
        )
        for protocol in (0, 2, 4)
    },
    **{
        codec: (
            lambda path, codec=codec: path.write_bytes(
                pyarrow.compress(RAW.tobytes(), codec, asbytes=True)
            ),
            f"compressed by {codec}",
        )
        for codec in ("zstd", "lz4")
    },
    **{
        words: (lambda path, mark=mark: path.write_bytes(mark + RAW.tobytes()), words)
        for mark, words in MARKS.items()
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_containers_and_text_are_refused_by_what_they_are(tmp_path: Path, kind: str) -> None:
    write, words = OTHERS[kind]
    write(tmp_path / "x.npy")
    with pytest.raises(DataError, match=rf"x\.npy is {words}") as refused:
        build(tmp_path / "x.npy", vocab_size=65536, val=20)
    assert any(
        cure in str(refused.value)
        for cure in ("tofile", "data=hf", "Unpack it first", "data=text", "a Megatron index")
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mark=st.sampled_from(
        [
            b"\x1f\x8b\x08",
            b"\x80\x04\x95",
            b"\x80\x02",
            b"BZh9",
            b"\xff\xff\xff\xff",
            b"PK\x03\x04",
            b"\x78\x9c",
            b"\x5d\0\0\x80",
            b"\x50\x2a\x4d\x18",
            b"\x64\0\0\0",
            b"PAR1",
            b"\x04\x22\x4d\x18",
            b"",
        ]
    ),
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(60, 4000),
)
def test_raw_ids_that_begin_as_a_container_does_are_ids(
    tmp_path: Path, mark: bytes, seed: int, size: int
) -> None:
    """Three or four bytes are one pair of ids: what follows them has to be right, too."""
    ids = np.random.default_rng(seed).integers(2000, 50_000, size).astype("<u2")
    content = mark + ids.tobytes()[len(mark) :]
    (tmp_path / "train.bin").write_bytes(content)
    data = build(tmp_path / "train.bin", vocab_size=65536, val=20)
    assert everything(data).astype("<u2").tobytes() == content


def test_a_parquet_file_that_is_cut_off_is_no_array_of_ids(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": RAW}), tmp_path / "whole.parquet")
    (tmp_path / "x.bin").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"x\.bin cannot be read"):
        build(tmp_path / "x.bin", vocab_size=65536)


BAD_ARRAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "floats": (lambda path: np.save(path, IDS.astype("f4")), "of float32, not of token ids"),
    "objects": (
        lambda path: np.save(path, np.array([1, "a"] * 99, object)),
        "of object, not of token ids",
    ),
    "columns": (
        lambda path: np.save(path, np.asfortranarray(IDS.reshape(10, 100))),
        "whose rows do not lie one after another",
    ),
    "nothing": (lambda path: np.save(path, IDS[:0]), "is empty"),
    "cut off": (lambda path: (np.save(path, IDS), os.truncate(path, 999)), "but its header says"),
    "more": (extended, r"has 8,131 bytes, but its header says"),
    "a huge shape": (
        lambda path: path.write_bytes(
            b"\x93NUMPY\x01\x00\x76\x00"
            + b"{'descr': '<u2', 'fortran_order': False, 'shape': (4611686018427387904,)}".ljust(
                117
            )
            + b"\n"
            + bytes(200)
        ),
        "but its header says",
    ),
}


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_an_array_that_holds_no_row_of_ids_is_refused_by_its_header(
    tmp_path: Path, kind: str
) -> None:
    write, words = BAD_ARRAYS[kind]
    write(tmp_path / "x.npy")
    with pytest.raises(DataError, match=rf"x\.npy .*{words}"):
        build(tmp_path / "x.npy", vocab_size=65536)


@pytest.mark.parametrize(("dtype", "named"), [("<u4", "uint32"), ("<i8", "int64")])
def test_wider_ids_are_not_taken_for_uint16_unasked(tmp_path: Path, dtype: str, named: str) -> None:
    (1 + IDS).astype(dtype).tofile(tmp_path / "train.bin")
    with pytest.raises(
        DataError,
        match=r"every second uint16 is at most 0, .*data\.dtype=uint32 or int64",
    ):
        build(tmp_path / "train.bin", vocab_size=501)
    assert np.array_equal(
        everything(build(tmp_path / "train.bin", vocab_size=501, dtype=named)), IDS + 1
    )
    assert len(everything(build(tmp_path / "train.bin", vocab_size=501, dtype="uint16"))) > len(IDS)


def test_wider_ids_are_seen_between_zeros(tmp_path: Path) -> None:
    """Where the beginning, the middle and the end of the file are padding."""
    ids = np.zeros(3_000_000, "<u4")
    ids[750_000:1_000_000] = 777
    ids.tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match="every second uint16 is at most 0, as halves of wider ids"):
        build(tmp_path / "train.bin", vocab_size=50_257)


LARGE = np.random.default_rng(2).integers(0, 100_278, 300_000)
FREQUENT_FIRST = np.minimum(np.random.default_rng(3).zipf(1.2, 300_000), 65_535)


@pytest.mark.parametrize(
    ("ids", "dtype", "said"),
    [
        (FREQUENT_FIRST % 200, "u1", r"as in an array of uint8: give data\.dtype=uint8"),
    ],
)
def test_other_ids_than_uint16_are_seen_where_every_pair_of_bytes_is_in_the_vocabulary(
    tmp_path: Path, ids: np.ndarray, dtype: str, said: str
) -> None:
    ids.astype(dtype).tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=said):
        build(tmp_path / "train.bin", vocab_size=65_536)
    assert len(everything(build(tmp_path / "train.bin", vocab_size=65_536, dtype="uint16")))
    for right in (ids, np.full(1000, 257), LARGE % 65_536):
        right.astype("<u2").tofile(tmp_path / "right.bin")
        assert len(everything(build(tmp_path / "right.bin", vocab_size=65_536))) == len(right)


def test_raw_ids_of_a_large_vocabulary_have_four_bytes(tmp_path: Path) -> None:
    name = "part-0-00000.npy"
    LARGE.astype("<u4").tofile(tmp_path / name)
    assert np.array_equal(everything(build(tmp_path / name, vocab_size=100_278)), LARGE)
    assert np.array_equal(everything(build(tmp_path, vocab_size=100_278)), LARGE)
    (LARGE % 65536).astype("<u2").tofile(tmp_path / name)
    with pytest.raises(DataError, match=r"vocabulary has 100278 ids .* or set data\.dtype"):
        build(tmp_path / name, vocab_size=100_278)
    (LARGE % 65535).astype("<u2").tofile(tmp_path / name)
    assert len(everything(build(tmp_path / name, vocab_size=65536))) == len(LARGE)


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "said"),
    [
        ("<u4", 65_536, "every second uint16 is at most 1, "),
        ("<i8", 65_536, "every second uint16 is at most 1, "),
        ("<i8", 100_278, "every second uint32 is at most 0, .* data.dtype=int64, "),
        (">u4", 65_536, "every second uint16 is at most 256, "),
        (">i8", 100_278, "every second uint32 is at most 0, "),
    ],
)
@pytest.mark.parametrize("zeros", [0, 1 << 15], ids=["at the beginning", "behind zeros"])
def test_ids_of_another_width_are_never_read_in_silence(
    tmp_path: Path, dtype: str, vocab_size: int, said: str, zeros: int
) -> None:
    ids = np.concatenate([np.zeros(zeros, int), LARGE])
    ids.astype(dtype).tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=said):
        build(tmp_path / "train.bin", vocab_size=vocab_size)


def test_halves_of_wider_ids_are_seen_behind_marks(tmp_path: Path) -> None:
    """Ids of which no loss is taken, or that pad, are -100 or -1."""
    for mark in (-100, -1):
        ids = LARGE.astype("<i4")
        ids[::50] = mark
        ids.tofile(tmp_path / "train.bin")
        with pytest.raises(DataError, match="as halves of wider ids are"):
            build(tmp_path / "train.bin", vocab_size=65_536)


@pytest.mark.parametrize(("dtype", "vocab_size"), [("<u2", 501), ("<u4", 70_000)])
def test_one_id_outside_of_the_vocabulary_makes_no_halves_of_the_others(
    tmp_path: Path, dtype: str, vocab_size: int
) -> None:
    ids = np.tile(IDS, 2)
    ids[100] = most = np.iinfo(dtype).max
    ids.astype(dtype).tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=rf"token id {most}, but the vocabulary has"):
        build(tmp_path / "train.bin", vocab_size=vocab_size)


def test_few_ids_one_of_which_is_large_are_of_their_width(tmp_path: Path) -> None:
    ids = np.arange(1, 201)
    ids[0] = 60_000
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    data = build(tmp_path / "train.bin", vocab_size=65_536, val=20)
    assert np.array_equal(everything(data), ids)


def test_metadata_of_datatrove_says_the_width(tmp_path: Path) -> None:
    path = tmp_path / "000_tok.ds"
    metadata = tmp_path / "000_tok.ds.metadata"
    ids = LARGE % 500
    ids.astype("<u4").tofile(path)
    for text in ("gpt2|4\n300000\n300 KT", "gpt2\n300000\n300 KT"):
        metadata.write_text(text)
        assert np.array_equal(everything(build(path)), ids)
    with pytest.raises(DataError, match=r"data\.dtype=uint16, but .* says that it holds uint32"):
        build(path, dtype="uint16")
    for text in ("gpt2|2\n300000\n", "gpt2|4\n299999\n", "gpt2|8\n150000\n", "gpt2|4\n0\n"):
        metadata.write_text(text)
        with pytest.raises(DataError, match=r"metadata counts \d+ ids .* has 1,200,000 bytes"):
            build(path)
    metadata.write_text("gpt2")
    with pytest.raises(DataError, match=r"000_tok\.ds\.metadata cannot be read"):
        build(path)


def test_bytes_of_text_are_ids_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "bytes.bin").write_text("to be or not to be, " * 100)
    data = build(tmp_path / "bytes.bin", vocab_size=256, dtype="uint8", val=100)
    assert bytes(everything(data).astype(np.uint8)).startswith(b"to be or not")
