"""Token ids in a column of Parquet or Arrow files, as `datasets` and its `save_to_disk` write them.

A row holds a list of ids, or one id; rows are read one after another, as they are. They are copied
to the token cache, because a compressed column cannot be read at any place. Memory holds some rows
at a time.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp4train.data.cache import cached_tokens
from fp4train.data.files import container_of, stamp
from fp4train.data.records import arrow_batches, column_place, rows_at_once, table_errors
from fp4train.data.stored import CheckedFile, Ids, StoredIds
from fp4train.data.tokens import ids_dtype
from fp4train.errors import DataError

SUFFIXES = (".parquet", ".arrow")
"""Of the files of a folder that are read."""
_PARQUET = "a Parquet file"
_KINDS = (_PARQUET, "an Arrow file", "an Arrow stream")


def hold_tables(paths: Sequence[Path], key: str) -> bool:
    """Whether files are tables.

    Raises:
        DataError: some are, and others are not.
    """
    tables = [path for path in paths if container_of(path) in _KINDS]
    raw = [path for path in paths if path not in tables]
    if tables and raw:
        raise DataError(
            f"{key} names {tables[0]}, a table, and {raw[0]}, which is none: name files of one kind"
        )
    return bool(tables)


def table_ids(
    paths: Sequence[Path], column: str, vocab_size: int, cache_dir: str
) -> StoredIds[CheckedFile]:
    """The ids in `column` of tables, from the cache or copied there.

    Raises:
        DataError: a table is damaged, has no such column of ids, or holds one that the vocabulary
            lacks.
    """
    entry = {
        "source": "token tables",
        "files": stamp(paths),
        "column": column,
        "vocab_size": vocab_size,
    }

    def chunks() -> Iterator[Ids]:
        for path in paths:
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

    return cached_tokens(cache_dir, entry, chunks, dtype=ids_dtype(vocab_size))


def _ids(path: Path, column: str) -> Iterator[tuple[str, Ids]]:
    """The ids of some rows at a time, and where in the file they are."""
    for place, values in (
        _parquet(path, column) if container_of(path) == _PARQUET else _arrow(path, column)
    ):
        with table_errors(path, place):
            while hasattr(values.type, "value_type"):
                values = values.flatten()
            missing = values.null_count
            ids = values.to_numpy(zero_copy_only=False)
        if missing:
            raise DataError(
                f"{path}, {place}: data.column={column} holds {missing:,} ids that are null"
            )
        yield place, np.asarray(ids)


def _parquet(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    with table_errors(path):
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    with file:
        _check_column(path, file.schema_arrow, column)
        for group in range(file.metadata.num_row_groups):
            place = f"row group {group}"
            count = rows_at_once(path, file.metadata.row_group(group), column, place)
            with table_errors(path, place):
                for batch in file.iter_batches(
                    count, row_groups=[group], columns=[column], use_threads=False
                ):
                    yield place, batch.column(0)


def _arrow(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    for index, batch in enumerate(
        arrow_batches(path, lambda schema: [_check_column(path, schema, column)])
    ):
        yield f"batch {index}", batch.column(0)


def _check_column(path: Path, schema: Any, column: str) -> int:
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
    return number
