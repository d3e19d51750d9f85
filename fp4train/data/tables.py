"""Files that are tables: Parquet, and Arrow as a stream or a file; some rows of the columns that are
asked for at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from fp4train.errors import DataError, UserError
from fp4train.stores import native_file
from fp4train.text import first_line

BATCH_BYTES = 1 << 26
BATCH_ROWS = 256
"""Rows of Parquet that are decoded at once, fewer where they may be large."""
UNPACKED = 1 << 28
TIMES = 100
"""A column of this many bytes, and this many times those that it takes in the file, is no text: it
is refused.
"""


class OtherFile(DataError):
    """A file that holds no records with the column, such as statistics beside the data."""


ReadColumns = Callable[[Path, Any], Sequence[int]]
"""The places of the columns to read in the schema of a table, or a DataError where the table has
none that fit.
"""


class Batch(NamedTuple):
    """Some rows of a table.

    Args:
        place: row group or batch of the file.
        first: number of the first row there.
        rows: columns that are read, of pyarrow.
    """

    place: str
    first: int
    rows: Any


class FileStretch(NamedTuple):
    """A stretch of a file: the bytes in which lines of JSON begin, or row groups of Parquet; `end`
    is None at the end of the file.
    """

    start: int
    end: int | None


ALL = FileStretch(0, None)

PARQUET = "a Parquet file"
ARROW_STREAM = "an Arrow stream"
TABLES = (PARQUET, ARROW_STREAM, "an Arrow file")
"""The kinds of files that are tables, as `container_of` names them."""


def table_batches(
    path: Path, kind: str, columns: ReadColumns, stretch: FileStretch = ALL
) -> Iterator[Batch]:
    """The rows of a table of one of the kinds `TABLES`, or of a stretch of it, some at a time.

    Raises:
        DataError: the file is damaged, or lacks the columns; it says where.
    """
    if kind == PARQUET:
        return _parquet(path, columns, stretch)
    return _arrow(path, columns)


def row_groups(path: Path, column: str, size: int) -> Iterator[tuple[int, FileStretch]]:
    """The row groups of Parquet in stretches of which `column` has about `size` bytes.

    Raises:
        DataError: the file is damaged.
    """
    with table_errors(path):
        import pyarrow.parquet

        metadata = pyarrow.parquet.read_metadata(native_file(path))
        sizes = [
            sum(
                chunk.total_uncompressed_size
                for chunk in _chunks(metadata.row_group(group), column)
            )
            for group in range(metadata.num_row_groups)
        ]
    start = total = 0
    for group, bytes_of_group in enumerate(sizes):
        total += bytes_of_group
        if total >= size and group + 1 < len(sizes):
            yield total, FileStretch(start, group + 1)
            start = group + 1
            total = 0
    yield total, FileStretch(start, None)


def _chunks(group: Any, column: str) -> list[Any]:
    """The chunks of a column in a row group."""
    chunks = (group.column(number) for number in range(group.num_columns))
    return [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]


def _parquet(path: Path, columns: ReadColumns, stretch: FileStretch) -> Iterator[Batch]:
    with table_errors(path):
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(native_file(path), buffer_size=1 << 20, pre_buffer=False)
    with file:
        if not file.metadata.num_rows:
            return
        schema = file.schema_arrow
        names = [schema.names[number] for number in columns(path, schema)]
        for group in range(file.metadata.num_row_groups)[stretch.start : stretch.end]:
            place = f"row group {group}"
            at_once = min(
                _rows_at_once(path, file.metadata.row_group(group), name, place) for name in names
            )
            batches = file.iter_batches(
                at_once, row_groups=[group], columns=names, use_threads=False
            )
            row = 0
            after = ""
            while True:
                with table_errors(path, place + after):
                    if (batch := next(batches, None)) is None:
                        break
                yield Batch(place, row, batch)
                row += len(batch)
                after = f", after row {row - 1}"


def _rows_at_once(path: Path, group: Any, column: str, place: str) -> int:
    """How many rows of a row group are decoded at once. A dictionary may hold one value for all
    rows; lists and objects have a chunk for each of their parts.
    """
    chunks = _chunks(group, column)
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    packed = sum(chunk.total_compressed_size for chunk in chunks)
    if size > UNPACKED and size > TIMES * packed:
        raise DataError(
            f"{path}, {place}: its column {column} unpacks from {packed:,} bytes to {size:,}, "
            "which no text does. "
            "Write the file anew with smaller row groups if it is sound"
        )
    repeated = any(chunk.has_dictionary_page for chunk in chunks)
    largest = max(size - packed if repeated else 0, size // max(group.num_rows, 1))
    return int(min(BATCH_ROWS, max(1, BATCH_BYTES // max(largest, 1))))


def _arrow(path: Path, columns: ReadColumns) -> Iterator[Batch]:
    with table_errors(path):
        import pyarrow

        def opened(**options: Any) -> Any:
            file = native_file(path)
            stream = file.read(6) != b"ARROW1"
            file.seek(0)
            if stream:
                open_it = pyarrow.ipc.open_stream
            else:
                open_it = pyarrow.ipc.open_file
            return open_it(file, options=pyarrow.ipc.IpcReadOptions(use_threads=False, **options))

        numbers = columns(path, opened().schema)
        reader = opened(included_fields=list(numbers))
    if hasattr(reader, "num_record_batches"):
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        batches = iter(reader)
    for index in count():
        place = f"batch {index}"
        with table_errors(path, place):
            if (batch := next(batches, None)) is None:
                return
            batch.validate(full=True)
        yield Batch(place, 0, batch)


def table_rows(path: Path, batches: Iterable[Batch]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the values of each row of batches."""
    for place, first, batch in batches:
        for index in range(len(batch)):
            row = f"{place}, row {first + index}"
            with table_errors(path, row):
                values = [column[index].as_py() for column in batch.columns]
            yield row, dict(zip(batch.schema.names, values, strict=True))


def column_place(path: Path, schema: Any, column: str) -> int:
    """The place of a column in a table's schema.

    Raises:
        DataError: there is none of this name.
    """
    if column not in schema.names:
        raise no_column(path, column, schema.names)
    if (columns := schema.names.count(column)) > 1:
        raise DataError(
            f"{path} has {columns} columns of the name data.column={column}: nobody says which is "
            "meant. Write it anew with one"
        )
    return int(schema.names.index(column))


def text_column(path: Path, schema: Any, column: str) -> list[int]:
    """The place of a column of text.

    Raises:
        DataError: there is none of this name, or it holds something else.
    """
    number = column_place(path, schema, column)
    kind = schema.field(number).type
    if not holds_text(kind):
        raise DataError(f"data.column={column} of {path} holds {kind}, not text")
    return [number]


def holds_text(kind: Any) -> bool:
    """Whether a column of this type of pyarrow holds text, or nothing."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    return any(test(kind) for test in tests)


@contextmanager
def table_errors(path: Path, place: str = "") -> Iterator[None]:
    """Errors of pyarrow, which raises several kinds for a damaged file."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{path} needs the package pyarrow ({error}): pip install datasets"
        ) from error
    except (UserError, MemoryError):
        raise
    except Exception as error:
        at = f", {place}" if place else ""
        raise DataError(f"{path}{at} cannot be read: {first_line(error).rstrip('.')}") from error


def no_column(path: Path, column: str, columns: Sequence[str]) -> OtherFile:
    listing = ", ".join(columns[:50]) or "none"
    return OtherFile(f"data.column={column} is not in {path}. Its columns: {listing}.")
