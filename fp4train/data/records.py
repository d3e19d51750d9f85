"""Files of records: the value that each has in one column, with the place that it comes from.

| kind, by the first bytes | what is read at a time | place |
|---|---|---|
| Parquet | some rows of a row group, of the column's pages alone | row group and row, from 0 |
| Arrow, stream or file, as `save_to_disk` writes it | the column of one batch | batch and row, from 0 |
| JSON Lines, plain, gzip or zstd | a value | line |

Other columns may hold anything, and differ from file to file.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fp4train.data.compressed import plain_name, unpacked
from fp4train.data.containers import HEAD, is_binary
from fp4train.data.files import container_of
from fp4train.errors import DataError
from fp4train.text import first_line

LONGEST = 1 << 26
"""Bytes of the longest value in JSON."""
LARGE = 1 << 24
MOST_PARTS = 1 << 21
"""Parts of a value in JSON of more than `LARGE` bytes: one takes three bytes of a file, and up to
160 of memory.
"""
BATCH_BYTES = 1 << 26
MOST_EMPTY = 1_000_000
"""Empty lines in a row, of which a small packed file may hold billions."""
BATCH_ROWS = 256
"""Rows of Parquet that are decoded at once, fewer where they may be large."""
UNPACKED = 1 << 28
TIMES = 100
"""A column of this many bytes, and this many times those that it takes in the file, is no text: it
is refused.
"""
LOOKED_AT = 1000
"""Records after which a file whose records all lack the column has none."""


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


def stretches(path: Path, column: str, size: int) -> Iterator[tuple[int, FileStretch]]:
    """The stretches of a file of records that can be read apart, of about `size` bytes, and their
    bytes; one of a packed file, and of Arrow.
    """
    kind = container_of(path)
    total = path.stat().st_size
    if kind is None:
        for start in range(0, total, size):
            last = start + size >= total
            yield min(size, total - start), FileStretch(start, None if last else start + size)
    elif kind == PARQUET:
        yield from _row_groups(path, column, size)
    else:
        yield total, ALL


def read_records(path: Path, column: str, stretch: FileStretch = ALL) -> Iterator[tuple[str, Any]]:
    """The place of each record of a file, or of a stretch of it, in order, and its value in
    `column`; None: it has none.

    Raises:
        DataError: the file holds no records, is damaged, or lacks the column; it says where.
    """
    records = read_objects(path, partial(_text_column, column=column), "data=hf", stretch)
    if stretch.start:
        for place, record in records:
            yield place, _value(path, place, record, column)
        return
    other_columns: dict[str, None] = {}
    head: list[tuple[str, Any]] = []
    has_column = False
    for place, record in records:
        head.append((place, _value(path, place, record, column)))
        other_columns.update(dict.fromkeys(record))
        has_column = column in record
        if has_column or len(head) == LOOKED_AT:
            break
    if head and not has_column:
        raise _no_column(path, column, list(other_columns))
    yield from head
    for place, record in records:
        yield place, _value(path, place, record, column)


def _value(path: Path, place: str, record: Any, column: str) -> Any:
    """The value of a record in a column; None: it has none."""
    if not isinstance(record, dict):
        raise DataError(f"{path}, {place}: it is no JSON object but {name_of(record)}")
    return record.get(column)


def _no_column(path: Path, column: str, columns: Sequence[str]) -> OtherFile:
    listing = ", ".join(columns[:50]) or "none"
    return OtherFile(f"data.column={column} is not in {path}. Its columns: {listing}.")


def read_objects(
    path: Path, columns: ReadColumns, source: str, stretch: FileStretch = ALL
) -> Iterator[tuple[str, Any]]:
    """The place and the value of each record of a file, or of a stretch of it.

    Args:
        columns: columns of a table that an object has; in JSON it is whole.
        source: option that asks, for the message of a refusal.

    Raises:
        DataError: the file holds no records, or is damaged; it says where.
    """
    kind = container_of(path)
    if kind is None:
        # a damaged one, whose reader says what is wrong with it
        kind = {".parquet": PARQUET, ".arrow": _ARROW_STREAM}.get(path.suffix.lower())
    if kind in TABLES:
        yield from _rows(path, table_batches(path, kind, columns, stretch))
    elif kind in (None, "compressed by gzip", "compressed by zstd"):
        with unpacked(path) as stream:
            for line, value in _values(path, stream, stretch):
                yield f"line {line}", value
    else:
        raise DataError(
            f"{path} is {kind}: {source} reads Parquet, Arrow and JSON Lines, and JSON Lines also "
            "packed by gzip or zstd"
        )


# -- JSON ------------------------------------------------------------------------------------------


def _values(path: Path, stream: BinaryIO, stretch: FileStretch) -> Iterator[tuple[str, Any]]:
    """The line and the value of each record, of which a line may hold several. Lines of a stretch
    are counted from its first one.
    """
    behind = ""
    if stretch.start:
        behind = f" after byte {stretch.start:,}"
        stream.seek(stretch.start - 1)
        _pass_line(stream)
    place = stream.tell() if stretch.end is not None else 0
    number = 0
    last = 0
    begun = stretch.start > 0
    while (stretch.end is None or place < stretch.end) and (data := stream.readline(LONGEST + 1)):
        place += len(data)
        number += 1
        line = f"{number}{behind}"
        mark = codecs.BOM_UTF8 if number == 1 and not stretch.start else b""
        text = _decoded(path, line, data, mark)
        text = text.rstrip()
        if not begun and text.lstrip().startswith("["):
            raise DataError(f"{path}, line {line}: it begins a list, {_as_lines(path, '.[]')}")
        if not begun and text.lstrip() == "{":
            raise OtherFile(
                f"{path}, line {line}: it begins a value over several lines, {_as_lines(path, '.')}"
            )
        begun = begun or bool(text)
        last = number if text else last
        if number - last > MOST_EMPTY:
            raise DataError(
                f"{path}, line {line}: {MOST_EMPTY:,} lines before it are empty. Take them out"
            )
        at = _after_space(text, 0)
        while at < len(text):
            with _json_errors(path, line):
                value, end = _DECODER.raw_decode(text, at)
            yield line, value
            at = _after_space(text, end)


def _pass_line(stream: BinaryIO) -> None:
    """Read on to the beginning of the next line."""
    while (data := stream.readline(1 << 20)) and not data.endswith(b"\n"):
        pass


def _as_lines(path: Path, values: str) -> str:
    """What makes JSON Lines of a file whose values jq selects so."""
    name = plain_name(path)
    lines = Path(name).with_suffix(".jsonl")
    return f"and one record a line is read: jq -c '{values}' {name} > {lines}"


class Repeated(tuple[Any, ...]):
    """The values of a name that an object in JSON has several times: nobody says which is meant."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for name in values:
            under = [value for other, value in pairs if other == name]
            if any(value != under[0] for value in under):
                values[name] = Repeated(under)
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_SPACE = " \t\r\n"


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _decoded(path: Path, line: str, data: bytes, mark: bytes) -> str:
    """The text of a line, within bounds."""
    try:
        text = data.removeprefix(mark).decode()
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text ({error.reason}). Convert the file (iconv -t utf-8)"
        if is_binary(data[:HEAD]):
            why = "it is binary data. What is read is JSON, Parquet and Arrow"
        raise DataError(f"{path}, line {line}: {why}") from error
    if len(data) > LONGEST:
        raise _too_long(path, line)
    if len(text) > LARGE and text.count(",") > MOST_PARTS:
        raise DataError(f"{path}, line {line}: it holds more than {MOST_PARTS:,} values. Divide it")
    return text


def _too_long(path: Path, line: str) -> DataError:
    return DataError(
        f"{path}, line {line}: it is longer than {LONGEST >> 20} MB, and a record is read as "
        "one. Divide it, or give "
        "its text in a file of its own to data=text"
    )


@contextmanager
def _json_errors(path: Path, line: str) -> Iterator[None]:
    """Errors of a value in `line`."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {line}: it is no JSON ({error.msg}, column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            why = "too deeply nested"
        else:  # an integer of thousands of digits: the one other error of a decoder
            why = f"{first_line(error)}. Write it as text, in quotes, or leave that value out"
        raise DataError(f"{path}, line {line}: it cannot be read as JSON: {why}") from error


def parsed(text: str) -> Any:
    """The value that a text in a record is in JSON.

    Raises:
        ValueError: it is no JSON, nested too deeply, or holds too many values.
    """
    if len(text) > LARGE and text.count(",") > MOST_PARTS:
        raise ValueError(f"it holds more than {MOST_PARTS:,} values")
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}, character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(first_line(error)) from error


def name_of(value: Any) -> str:
    """What a value in JSON is called."""
    names = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
        Repeated: "several values under one name",
    }
    if value is None:
        return "null"
    return names.get(type(value), type(value).__name__)


# -- tables ----------------------------------------------------------------------------------------


PARQUET = "a Parquet file"
_ARROW_STREAM = "an Arrow stream"
TABLES = (PARQUET, _ARROW_STREAM, "an Arrow file")
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


def _row_groups(path: Path, column: str, size: int) -> Iterator[tuple[int, FileStretch]]:
    """The row groups of Parquet in stretches of which `column` has about `size` bytes.

    Raises:
        DataError: the file is damaged.
    """
    with table_errors(path):
        import pyarrow.parquet

        metadata = pyarrow.parquet.read_metadata(path)
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

        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
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
            file = pyarrow.OSFile(str(path))
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


def _rows(path: Path, batches: Iterable[Batch]) -> Iterator[tuple[str, dict[str, Any]]]:
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
        raise _no_column(path, column, schema.names)
    if (columns := schema.names.count(column)) > 1:
        raise DataError(
            f"{path} has {columns} columns of the name data.column={column}: nobody says which is "
            "meant. Write it anew with one"
        )
    return int(schema.names.index(column))


def _text_column(path: Path, schema: Any, column: str) -> list[int]:
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
    except (DataError, MemoryError):
        raise
    except Exception as error:
        at = f", {place}" if place else ""
        raise DataError(f"{path}{at} cannot be read: {first_line(error).rstrip('.')}") from error
