"""Token ids in columns of Parquet and Arrow files, and in folders of save_to_disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fp4train.data import DataError, TokenData, Tokens

IDS = np.arange(1200) % 500
ROWS = [part.tolist() for part in np.split(IDS, (7, 7, 100, 480, 1100))]
EVEN = IDS.reshape(60, 20).tolist()
TYPES: dict[str, tuple[list[Any], Any]] = {
    "lists": (ROWS, pyarrow.list_(pyarrow.int32())),
    "large lists": (ROWS, pyarrow.large_list(pyarrow.int64())),
    "rows of one length": (EVEN, pyarrow.list_(pyarrow.uint16(), 20)),
    "single ids": (IDS.tolist(), pyarrow.uint32()),
    "rows without ids": ([None, *ROWS, None], pyarrow.list_(pyarrow.int32())),
}


def table(rows: list[Any], kind: Any, column: str = "input_ids") -> pyarrow.Table:
    other = pyarrow.array([{"a": n} for n in range(len(rows))])
    return pyarrow.table({"meta": other, column: pyarrow.array(rows, kind)})


def parquet(path: Path, content: pyarrow.Table) -> None:
    pyarrow.parquet.write_table(content, path, row_group_size=3)


def arrow(path: Path, content: pyarrow.Table) -> None:
    with pyarrow.ipc.new_file(str(path), content.schema) as writer:
        writer.write_table(content, max_chunksize=2)


def stream(path: Path, content: pyarrow.Table) -> None:
    with pyarrow.ipc.new_stream(str(path), content.schema) as writer:
        writer.write_table(content, max_chunksize=2)


WRITERS: dict[str, Callable[[Path, pyarrow.Table], None]] = {
    "x.parquet": parquet,
    "x.arrow": arrow,
    "x.bin": stream,
}


def build(path: Path | list[Path], **settings: Any) -> TokenData:
    named = [str(place) for place in path] if isinstance(path, list) else str(path)
    place = (path[0] if isinstance(path, list) else path).parent
    settings = {"val": 0.1, "vocab_size": 500, "cache_dir": str(place / "cache")} | settings
    return Tokens(path=named, **settings).build(place / "run", 16, 0)


def everything(data: TokenData) -> np.ndarray:
    return np.concatenate([data.train.ids, data.val.ids])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", WRITERS)
def test_a_column_of_ids_is_read_row_after_row(tmp_path: Path, name: str, kind: str) -> None:
    WRITERS[name](tmp_path / name, table(*TYPES[kind]))
    data = build(tmp_path / name)
    assert np.array_equal(everything(data), IDS) and data.train.ids.dtype == np.uint16
    os.utime(tmp_path / name, ns=(1, 1))
    assert build(tmp_path / name).fingerprint == data.fingerprint


def test_a_folder_of_save_to_disk_and_a_folder_of_shards_are_read(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"input_ids": EVEN, "n": list(range(60))}).save_to_disk(
        tmp_path / "saved", num_shards=2
    )
    assert np.array_equal(everything(build(tmp_path / "saved")), IDS)
    (tmp_path / "shards").mkdir()
    for number, rows in enumerate((ROWS[:3], ROWS[3:])):
        parquet(tmp_path / f"shards/{number}.parquet", table(rows, pyarrow.list_(pyarrow.int32())))
    assert np.array_equal(everything(build(tmp_path / "shards")), IDS)


def test_ids_of_a_table_end_documents_as_those_of_other_files_do(tmp_path: Path) -> None:
    parquet(tmp_path / "x.parquet", table(ROWS, pyarrow.list_(pyarrow.int32())))
    data = build(tmp_path / "x.parquet", end_id=499, val=0.6)
    assert data.borders.end == 499 and int(data.val.ids[0]) == 0


def altered(rows: list[Any]) -> Callable[[Path], None]:
    return lambda path: parquet(path, table(rows, pyarrow.list_(pyarrow.int32())))


BAD: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "too large": (
        altered([*ROWS, [500]]),
        {},
        r"row group 2: data.column=input_ids holds the id 500, but the vocab",
    ),
    "negative": (
        altered([[-100], *ROWS]),
        {},
        r"row group 0: data.column=input_ids holds the id -100",
    ),
    "null": (
        altered([[1, None], *ROWS]),
        {},
        r"row group 0: data.column=input_ids holds 1 ids that are null",
    ),
    "no column": (
        altered(ROWS),
        {"column": "ids"},
        r"data.column=ids is not in .* Its columns: meta, input_ids",
    ),
    "text": (
        lambda path: parquet(path, table(["a"] * 9, pyarrow.string(), "text")),
        {"column": "text"},
        "holds string, not token ids: data=hf data.path=.* reads text",
    ),
    "a type": (altered(ROWS), {"dtype": "uint16"}, "data.dtype=uint16 is of raw ids"),
    "cut off": (
        lambda path: path.write_bytes(b"PAR1" + bytes(500)),
        {},
        "x.parquet cannot be read",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_table_that_holds_no_ids_is_refused(tmp_path: Path, kind: str) -> None:
    write, settings, words = BAD[kind]
    write(tmp_path / "x.parquet")
    with pytest.raises(DataError, match=words):
        build(tmp_path / "x.parquet", **settings)


def test_a_table_beside_raw_ids_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "x.parquet", table(ROWS, pyarrow.list_(pyarrow.int32())))
    IDS.astype("<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(
        DataError, match=r"x\.parquet, a table, and .*x\.bin, which is none: name files of one kind"
    ):
        build([tmp_path / "x.bin", tmp_path / "x.parquet"])
