"""Files of records: the value that each has in one column, with the place that it comes from.

| kind, by the first bytes | what is read at a time | place |
|---|---|---|
| Parquet | some rows of a row group, of the column's pages alone | row group and row, from 0 |
| Arrow, stream or file, as `save_to_disk` writes it | the column of one batch | batch and row, from 0 |
| JSON: values one after another, most often one a line, or a list of them; plain, gzip or zstd | a value | line |

Other columns may hold anything, and differ from file to file.
"""

import codecs
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fp4train.data.compressed import unpacked
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
BATCH_ROWS = 256
"""Rows of Parquet that are decoded at once, fewer where they may be large."""
UNPACKED = 1 << 28
TIMES = 100
"""A column of this many bytes, and this many times those that it takes in the file, is no text: it
is refused.
"""
LOOKED_AT = 1000
"""Records after which a file whose records all lack the column has none."""


ReadColumns = Callable[[Path, Any], Sequence[int]]
"""The places of the columns to read in the schema of a table, or a DataError where the table has
none that fit.
"""
RowReader = Callable[[Path, ReadColumns], Iterator[tuple[str, dict[str, Any]]]]
"""Gives the place of each row of a file, and what it has in the columns."""


class PlacedValue(NamedTuple):
    """The value of a record in the column, None where it has none.

    Args:
        place: place of the record within its file.
        value: its value in the column.
        columns: columns that the record has instead; empty: it has this one.
    """

    place: str
    value: Any
    columns: tuple[str, ...] = ()


def read_records(path: Path, column: str) -> Iterator[PlacedValue]:
    """The value in `column` of each record of a file, in order.

    Raises:
        DataError: the file holds no records, is damaged, or lacks the column; it says where.
    """
    other_columns: dict[str, None] = {}
    rows = _json(path, column)
    if (table := _table(path, "data=hf")) is not None:
        records = table(path, lambda path, schema: [_check_column(path, schema, column)])
        rows = (PlacedValue(place, record[column]) for place, record in records)
    head: list[PlacedValue] = []
    for row in rows:
        head.append(row)
        other_columns.update(dict.fromkeys(row.columns))
        if not row.columns or len(head) == LOOKED_AT:
            break
    if head and head[-1].columns:
        listing = ", ".join(list(other_columns)[:50])
        raise DataError(f"data.column={column} is not in {path}. Its columns: {listing or 'none'}.")
    yield from chain(head, rows)


def read_objects(path: Path, columns: ReadColumns) -> Iterator[tuple[str, Any]]:
    """The place and the value of each record of a file.

    Args:
        columns: columns of a table that an object has; in JSON it is whole.

    Raises:
        DataError: the file holds no records, or is damaged; it says where.
    """
    if (table := _table(path, "data=chat")) is not None:
        yield from table(path, columns)
        return
    with unpacked(path) as stream:
        for line, value in _values(path, stream):
            yield f"line {line}", value


def _table(path: Path, source: str) -> RowReader | None:
    """What reads a file that is a table, by its first bytes; None: it is JSON.

    Args:
        source: option that asks, for the message of a refusal.
    """
    kind = container_of(path)
    if kind is None and (
        table := {".parquet": _parquet, ".arrow": _arrow}.get(path.suffix.lower())
    ):
        return table  # a damaged one, which says what is wrong with it
    if kind is None or kind in ("compressed by gzip", "compressed by zstd"):
        return None
    if kind == "a Parquet file":
        return _parquet
    if kind in ("an Arrow stream", "an Arrow file"):
        return _arrow
    raise DataError(
        f"{path} is {kind}: {source} reads Parquet, Arrow and JSON Lines, and JSON Lines also "
        "packed by gzip or zstd"
    )


# -- JSON ------------------------------------------------------------------------------------------


def _json(path: Path, column: str) -> Iterator[PlacedValue]:
    with unpacked(path) as stream:
        for line, value in _values(path, stream):
            if not isinstance(value, dict):
                raise DataError(f"{path}, line {line}: it is no JSON object but {name_of(value)}")
            if column in repeated_keys(value):
                raise DataError(
                    f"{path}, line {line}: it has data.column={column} twice: nobody says which is "
                    "meant. Write it with one"
                )
            lacks = () if column in value else tuple(value) or ("none",)
            yield PlacedValue(f"line {line}", value.get(column), lacks)


def _values(path: Path, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
    """The line and the value of each record. A file that begins with a list, or with a brace alone,
    may spread values over lines.
    """
    line = 0
    begun = False
    while data := stream.readline(LONGEST + 1):
        line += 1
        text = _decoded(path, line, data, codecs.BOM_UTF8 if line == 1 else b"")
        if not begun and (text.lstrip().startswith("[") or text.strip() == "{"):
            yield from _spread(path, stream, line, text)
            return
        text = text.rstrip()
        begun = begun or bool(text)
        at = _after_space(text, 0)
        while at < len(text):
            with _json_errors(path, line, text):
                value, end = _DECODER.raw_decode(text, at)
            yield line, value
            at = _after_space(text, end)


def _spread(path: Path, stream: BinaryIO, line: int, text: str) -> Iterator[tuple[int, Any]]:
    """Values that lines do not divide, in a list or not.

    Args:
        line: number of the line `text`, the first that is not blank.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    listed = text.lstrip().startswith("[")
    at = text.index("[") + 1 if listed else 0
    more = True
    while True:
        previous = at
        at = _after_space(text, at, more=", " if listed else "")
        line += text.count("\n", previous, at)
        if listed and text.startswith("]", at):
            return
        try:
            with _json_errors(path, line, text[:0]):
                value, end = _DECODER.raw_decode(text, at)
        except DataError:
            if not more:
                if at == len(text) and not listed:
                    return
                with _json_errors(path, line, text[at:]):
                    _DECODER.raw_decode(text[at:])
            text = text[at:]
            at = 0
            data = stream.read(max(1 << 16, len(text)))
            more = bool(data)
            text += _decoded(path, line, data, decoder=decoder)
            if len(text) > LONGEST:
                raise _too_long(path, line) from None
        else:
            yield line, value
            line += text.count("\n", at, end)
            at = end


class _RepeatingObject(dict[str, Any]):
    """An object in JSON that has keys twice; of each the last value."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs)
        self.repeated = frozenset(key for key, count in counts.items() if count > 1)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        return _RepeatingObject(pairs)
    return table


def repeated_keys(value: dict[str, Any]) -> frozenset[str]:
    """Keys that an object has twice where it stands in JSON."""
    return getattr(value, "repeated", frozenset())


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_SPACE = " \t\r\n"


def _after_space(text: str, at: int, more: str = "") -> int:
    while at < len(text) and text[at] in _SPACE + more:
        at += 1
    return at


def _decoded(path: Path, line: int, data: bytes, mark: bytes = b"", decoder: Any = None) -> str:
    """The text of some bytes, within bounds."""
    try:
        if decoder is None:
            text = data.removeprefix(mark).decode()
        else:
            text = decoder.decode(data, not data)
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


def _too_long(path: Path, line: int) -> DataError:
    return DataError(
        f"{path}, line {line}: it is longer than {LONGEST >> 20} MB, and a record is read as "
        "one. Divide it, or give "
        "its text in a file of its own to data=text"
    )


@contextmanager
def _json_errors(path: Path, line: int, text: str) -> Iterator[None]:
    """Errors of a value whose text begins in `line`."""
    try:
        yield
    except json.JSONDecodeError as error:
        if error.lineno > 1:
            where = line + text.count("\n", 0, error.pos)
        else:
            where = line
        raise DataError(
            f"{path}, line {where}: it is no JSON ({error.msg}, column {error.colno})"
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
    }
    if value is None:
        return "null"
    return names.get(type(value), type(value).__name__)


# -- tables ----------------------------------------------------------------------------------------


def _parquet(path: Path, columns: ReadColumns) -> Iterator[tuple[str, dict[str, Any]]]:
    with table_errors(path):
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    with file:
        if not file.metadata.num_rows:
            return
        schema = file.schema_arrow
        names = [schema.names[number] for number in columns(path, schema)]
        for group in range(file.metadata.num_row_groups):
            place = f"row group {group}"
            count = min(
                rows_at_once(path, file.metadata.row_group(group), name, place) for name in names
            )
            batches = file.iter_batches(count, row_groups=[group], columns=names, use_threads=False)
            yield from _rows(path, batches, place)


def rows_at_once(path: Path, group: Any, column: str, place: str) -> int:
    """How many rows of a row group are decoded at once. A dictionary may hold one value for all
    rows; lists and objects have a chunk for each of their parts.
    """
    every_chunk = [group.column(number) for number in range(group.num_columns)]
    chunks = [chunk for chunk in every_chunk if chunk.path_in_schema.split(".")[0] == column]
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


def _arrow(path: Path, columns: ReadColumns) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, batch in enumerate(arrow_batches(path, lambda schema: columns(path, schema))):
        yield from _rows(path, iter([batch]), f"batch {index}")


def arrow_batches(path: Path, numbers_in: Callable[[Any], Sequence[int]]) -> Iterator[Any]:
    """The batches of an Arrow stream or file, of the columns alone whose numbers `numbers_in` gives
    of the schema.
    """
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

        numbers = numbers_in(opened().schema)
        reader = opened(included_fields=list(numbers))
    if hasattr(reader, "num_record_batches"):
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        batches = iter(reader)
    for index in range(1 << 62):
        with table_errors(path, f"batch {index}"):
            if (batch := next(batches, None)) is None:
                return
            batch.validate(full=True)
        yield batch


def _rows(path: Path, batches: Iterator[Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the values of each row of batches."""
    number = 0
    while True:
        if number:
            where = f"{place}, after row {number - 1}"
        else:
            where = place
        with table_errors(path, where):
            if (batch := next(batches, None)) is None:
                return
        for index in range(len(batch)):
            with table_errors(path, f"{place}, row {number}"):
                values = [column[index].as_py() for column in batch.columns]
            yield f"{place}, row {number}", dict(zip(batch.schema.names, values, strict=True))
            number += 1


def column_place(path: Path, schema: Any, column: str) -> int:
    """The place of a column in a table's schema.

    Raises:
        DataError: there is none of this name.
    """
    if column not in schema.names:
        listing = ", ".join(schema.names[:50])
        raise DataError(f"data.column={column} is not in {path}. Its columns: {listing or 'none'}.")
    if (count := schema.names.count(column)) > 1:
        raise DataError(
            f"{path} has {count} columns of the name data.column={column}: nobody says which is "
            "meant. Write it anew with one"
        )
    return int(schema.names.index(column))


def _check_column(path: Path, schema: Any, column: str) -> int:
    """The place of a column of text.

    Raises:
        DataError: there is none of this name, or it holds something else.
    """
    number = column_place(path, schema, column)
    kind = schema.field(number).type
    if not holds_text(kind):
        raise DataError(f"data.column={column} of {path} holds {kind}, not text")
    return number


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
