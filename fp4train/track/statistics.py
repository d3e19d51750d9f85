"""RUN/statistics.bin: what quantisation does to every operand of every layer, one block for each measured step.

A block is complete in itself::

    4 bytes   b"f4s1"
    3 × u32   lengths of the header and of the two tables, little-endian
    1 × u32   CRC-32 of all that follows
    header    JSON: step, recipe, the layers' names, the operands' names, the columns (NumPy's descr) of both tables
    table 1   a row for each quantised operand: `OPERAND`
    table 2   a row for each layer with one: `GRADIENT`

The file is only appended to; a kill loses at most the block being written. A resumed run drops the blocks of later
steps and damaged ones. `read_statistics` gives columns; it needs nothing but this file, also while the run goes on.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp4train import files
from fp4train.errors import UserError

_log = logging.getLogger(__name__)

STATISTICS: Final = "statistics.bin"
LIMIT: Final = 1 << 34
"""Bytes of a file that are read."""
OPERAND: Final = np.dtype(
    [
        ("layer", "<u2"),
        ("operand", "u1"),
        ("amax", "<f4"),
        ("sqnr_db", "<f4"),
        ("underflow", "<f4"),
        ("saturation", "<f4"),
        ("kurtosis", "<f4"),
        ("scale_codes", "<f4"),
        ("scale_min", "<f4"),
        ("scale_max", "<f4"),
    ]
)
"""A quantised operand. layer, operand: indices of names. amax of the tensor. sqnr_db: 10 log10(|x|²/|y-x|²). underflow:
share of nonzero elements that became zero. saturation: share of elements beyond the range of their block. kurtosis: 3
for a normal distribution. Block scales: share of the 256 codes in use (0 for float32 scales), and log2 of the smallest
above zero and of the largest."""
GRADIENT: Final = np.dtype([("layer", "<u2"), ("gradient", "<f4"), ("noise", "<f4")])
"""A layer's weight gradient: its norm, and that of the error its own quantised product adds (0: not quantised)."""

_MAGIC: Final = b"f4s1"
_HEAD: Final = struct.Struct("<4sIIII")


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """One measured step.

    Args:
        step: optimizer steps done with it.
        recipe: name of the recipe that held.
        layers, names: what the tables' indices stand for: layers, operands ("fprop.x").
        operands: rows of `OPERAND`. gradients: rows of `GRADIENT`.
    """

    step: int
    recipe: str
    layers: tuple[str, ...]
    names: tuple[str, ...]
    operands: NDArray[Any]
    gradients: NDArray[Any]

    def to_bytes(self) -> bytes:
        """The block."""
        columns = [[list(column) for column in dtype.descr] for dtype in (OPERAND, GRADIENT)]
        head = {"step": self.step, "recipe": self.recipe, "layers": self.layers, "names": self.names}
        parts = (
            json.dumps({**head, "columns": columns}).encode(),
            self.operands.astype(OPERAND).tobytes(),
            self.gradients.astype(GRADIENT).tobytes(),
        )
        body = b"".join(parts)
        return _HEAD.pack(_MAGIC, *map(len, parts), zlib.crc32(body)) + body


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The statistics of a run, a row for each measured step and operand or layer, in the order of steps.

    Args:
        operands: arrays of equal length: step (int64), recipe, layer, operand (str), and the columns of `OPERAND` from
            amax on (float32).
        gradients: step, recipe, layer, gradient, noise.
    """

    operands: Mapping[str, NDArray[Any]]
    gradients: Mapping[str, NDArray[Any]]


class StatisticsLog:
    """Appends blocks to a file, which the first one creates.

    Args:
        path: the file.
        resume_step: the steps done at the checkpoint that the run goes on from; later blocks are dropped.

    Raises:
        UserError: the file is there and cannot be read or written.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        self._size, self._failing = 0, False
        try:
            with files.parent(self.path, create=True) as (folder, name):
                status = folder.status(name)
                if status is None:
                    return
                data = folder.read(name, LIMIT)
                blocks = [(raw, each.step) for raw, each in _blocks(data, self.path)]
                kept = b"".join(raw for raw, step in blocks if resume_step is None or step <= resume_step)
                if kept != data or status.st_nlink > 1:
                    folder.write(name, kept)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error}") from error

    def log(self, statistics: Statistics) -> None:
        """Append a block. A disk that does not take it is reported once, and the block is left out."""
        data = statistics.to_bytes()
        try:
            if self._descriptor is None:
                with files.parent(self.path) as (folder, name):
                    self._descriptor = folder.descriptor_of(name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
                    folder.sync()
                self._size = os.fstat(self._descriptor).st_size
            try:
                files.write_all(self._descriptor, data)
            except BaseException:
                os.ftruncate(self._descriptor, self._size)
                raise
            self._size += len(data)
            self._failing = False
        except OSError as error:
            if not self._failing:
                _log.error("%s cannot be written (%s); steps are left out until it can", self.path, error)
            self._failing = True

    def sync(self) -> None:
        """Make what is written durable."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """A second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_statistics(run: Path) -> Columns:
    """All whole blocks of RUN/statistics.bin, also of a run that is running or was killed; damaged ones are reported.

    Raises:
        UserError: the run has none, or the file cannot be read.
    """
    path = Path(run) / STATISTICS
    try:
        data = files.read(path, LIMIT)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: a run writes it with eval.errors_every=STEPS") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    blocks = [each for _, each in _blocks(data, path)]
    return Columns(
        operands=_columns([(each, each.operands) for each in blocks], OPERAND),
        gradients=_columns([(each, each.gradients) for each in blocks], GRADIENT),
    )


def _columns(tables: list[tuple[Statistics, NDArray[Any]]], dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
    def join(parts: list[NDArray[Any]], kind: Any) -> NDArray[Any]:
        return np.concatenate(parts) if parts else np.empty(0, kind)

    found = {
        "step": join([np.full(len(rows), each.step, np.int64) for each, rows in tables], np.int64),
        "recipe": join([np.full(len(rows), each.recipe) for each, rows in tables], np.str_),
        "layer": join([np.array(each.layers, np.str_)[rows["layer"]] for each, rows in tables], np.str_),
    }
    for name in dtype.names or ():
        if name == "operand":
            found[name] = join([np.array(each.names, np.str_)[rows[name]] for each, rows in tables], np.str_)
        elif name != "layer":
            found[name] = join([rows[name] for _, rows in tables], np.float32)
    return found


def _blocks(data: bytes, path: Path) -> Iterator[tuple[bytes, Statistics]]:
    """(raw, parsed) of each whole block. What is damaged is skipped up to the next block; a torn end is left out."""
    at = 0
    while 0 <= at < len(data):
        found = _block(data, at)
        if found is not None:
            yield found
            at += len(found[0])
            continue
        following = data.find(_MAGIC, at + 1)
        while following >= 0 and _block(data, following) is None:
            following = data.find(_MAGIC, following + 1)
        if following >= 0:
            _log.warning("%s: %d bytes at %d are damaged and left out", path, following - at, at)
        at = following


def _block(data: bytes, at: int) -> tuple[bytes, Statistics] | None:
    if len(data) - at < _HEAD.size:
        return None
    magic, *lengths, checksum = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + sum(lengths)
    body = data[at + _HEAD.size : end]
    if magic != _MAGIC or len(body) < sum(lengths) or zlib.crc32(body) != checksum:
        return None
    middle = lengths[0] + lengths[1]
    try:
        head = json.loads(body[: lengths[0]])
        first, second = (np.dtype([(name, kind) for name, kind in columns]) for columns in head["columns"])
        tables = np.frombuffer(body[lengths[0] : middle], first), np.frombuffer(body[middle:], second)
        names = {key: tuple(map(str, head[key])) for key in ("layers", "names")}
        parsed = Statistics(
            step=int(head["step"]), recipe=str(head["recipe"]), operands=tables[0], gradients=tables[1], **names
        )
        for rows in tables:
            if len(rows) and int(rows["layer"].max()) >= len(parsed.layers):
                return None
        if len(tables[0]) and int(tables[0]["operand"].max()) >= len(parsed.names):
            return None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return data[at:end], parsed
