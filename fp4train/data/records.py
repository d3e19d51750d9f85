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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fp4train.data.compressed import plain_name, unpacked
from fp4train.data.containers import HEAD, is_binary
from fp4train.data.files import container_of
from fp4train.data.tables import (
    ALL,
    ARROW_STREAM,
    PARQUET,
    TABLES,
    FileStretch,
    OtherFile,
    ReadColumns,
    no_column,
    row_groups,
    table_batches,
    table_rows,
    text_column,
)
from fp4train.errors import DataError
from fp4train.text import first_line

LONGEST = 1 << 26
"""Bytes of the longest value in JSON."""
LARGE = 1 << 24
MOST_PARTS = 1 << 21
"""Parts of a value in JSON of more than `LARGE` bytes: one takes three bytes of a file, and up to
160 of memory.
"""
MOST_EMPTY = 1_000_000
"""Empty lines in a row, of which a small packed file may hold billions."""
LOOKED_AT = 1000
"""Records after which a file whose records all lack the column has none."""


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
        yield from row_groups(path, column, size)
    else:
        yield total, ALL


def read_records(path: Path, column: str, stretch: FileStretch = ALL) -> Iterator[tuple[str, Any]]:
    """The place of each record of a file, or of a stretch of it, in order, and its value in
    `column`; None: it has none.

    Raises:
        DataError: the file holds no records, is damaged, or lacks the column; it says where.
    """
    records = read_objects(path, partial(text_column, column=column), "data=hf", stretch)
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
        raise no_column(path, column, list(other_columns))
    yield from head
    for place, record in records:
        yield place, _value(path, place, record, column)


def _value(path: Path, place: str, record: Any, column: str) -> Any:
    """The value of a record in a column; None: it has none."""
    if not isinstance(record, dict):
        raise DataError(f"{path}, {place}: it is no JSON object but {name_of(record)}")
    return record.get(column)


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
        kind = {".parquet": PARQUET, ".arrow": ARROW_STREAM}.get(path.suffix.lower())
    if kind in TABLES:
        yield from table_rows(path, table_batches(path, kind, columns, stretch))
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
