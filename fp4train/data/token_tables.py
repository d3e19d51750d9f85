"""Token ids in a column of Parquet or Arrow files, as `datasets` and its `save_to_disk` write them.

A row holds a list of ids, or one id; rows are read one after another, as they are. They are copied
to the token cache, because a compressed column cannot be read at any place. Memory holds some rows
at a time.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fp4train.data.cache import CacheEntry
from fp4train.data.files import container_of, stamp
from fp4train.data.stored import Ids
from fp4train.data.tables import TABLES, column_place, table_batches, table_errors
from fp4train.data.tokens import ids_dtype
from fp4train.errors import DataError

SUFFIXES = (".parquet", ".arrow")
"""Of the files of a folder that are read."""


def hold_tables(paths: Sequence[Path], key: str) -> bool:
    """Whether files are tables.

    Raises:
        DataError: some are, and others are not.
    """
    tables = [path for path in paths if container_of(path) in TABLES]
    raw = [path for path in paths if path not in tables]
    if tables and raw:
        raise DataError(
            f"{key} names {tables[0]}, a table, and {raw[0]}, which is none: name files of one kind"
        )
    return bool(tables)


def table_entry(paths: Sequence[Path], column: str, vocab_size: int, cache_dir: str) -> CacheEntry:
    """The ids in `column` of tables, in the cache, to which they are copied.

    Raises:
        DataError: a table is damaged, has no such column of ids, or holds one that the vocabulary
            lacks.
    """
    key = {
        "source": "token tables",
        "files": stamp(paths),
        "column": column,
        "vocab_size": vocab_size,
    }

    def chunks(path: Path) -> Iterator[Ids]:
        for place, ids in _ids(path, column):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
                raise DataError(
                    f"{path}, {place}: data.column={column} holds the id {wrong}, but the "
                    "vocabulary has "
                    f"{vocab_size} ids (0 … {vocab_size - 1}). Set data.vocab_size to "
                    "that of the tokenizer that "
                    "wrote them"
                )
            yield ids

    readers = [partial(chunks, path) for path in paths]
    return CacheEntry.of_ids(cache_dir, key, readers, ids_dtype(vocab_size))


def _ids(path: Path, column: str) -> Iterator[tuple[str, Ids]]:
    """The ids of some rows at a time, and where in the file they are."""
    kind = container_of(path)
    assert kind is not None
    for place, _, rows in table_batches(path, kind, partial(_id_column, column=column)):
        with table_errors(path, place):
            values = rows.column(0)
            while hasattr(values.type, "value_type"):
                values = values.flatten()
            missing = values.null_count
            ids = values.to_numpy(zero_copy_only=False)
        if missing:
            raise DataError(
                f"{path}, {place}: data.column={column} holds {missing:,} ids that are null"
            )
        yield place, np.asarray(ids)


def _id_column(path: Path, schema: Any, column: str) -> list[int]:
    """The place of a column of ids.

    Raises:
        DataError: there is none of this name, or it holds something else.
    """
    import pyarrow.types as types

    number = column_place(path, schema, column)
    kind = schema.field(number).type
    values = kind
    while types.is_list(values) or types.is_large_list(values) or types.is_fixed_size_list(values):
        values = values.value_type
    if not types.is_integer(values):
        text = types.is_string(values) or types.is_large_string(values)
        if text:
            cure = f": data=hf data.path={path} data.column={column} reads text"
        else:
            cure = ""
        raise DataError(f"data.column={column} of {path} holds {kind}, not token ids{cure}")
    return [number]
