"""RUN/statistics.bin: what quantisation does to every operand of every layer, one block for each measured step.

A block is complete in itself::

    4 bytes   b"f4s1"
    3 × u32   lengths of the header and of the two tables, little-endian
    1 × u32   CRC-32 of all that follows
    header    JSON: step, recipe, the layers' names, the operands' names, the columns (NumPy's descr) of both tables,
              and "after", the CRC-32 of the block before, the first one's of the run's identity; older ones have none
    table 1   a row for each quantised operand: `OPERAND`
    table 2   a row for each layer with one: `GRADIENT`

The file is only appended to; a kill loses at most the block being written. Checkpoints remember how long it was and its
checksum (`fp4train.sealed`). A resumed run drops the blocks of later steps and damaged ones. `read_statistics` gives
columns; it needs nothing but this file, also while the run goes on.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp4train import files
from fp4train.errors import UserError
from fp4train.sealed import Rolling, identity

_log = logging.getLogger(__name__)

STATISTICS: Final = "statistics.bin"
LIMIT: Final = 1 << 31
"""Bytes of a file that are read, and written."""
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
_FREE: Final = 1 << 24
"""After damage the next block is looked for until so many bytes, and four times those of the file, are checked."""
_TRY: Final = 1 << 12
"""Bytes that a try counts beside those that it checks."""


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

    def to_bytes(self, after: int) -> bytes:
        """The block; `after`: checksum of the one before."""
        columns = [[list(column) for column in dtype.descr] for dtype in (OPERAND, GRADIENT)]
        head = {"step": self.step, "recipe": self.recipe, "layers": self.layers, "names": self.names}
        parts = (
            json.dumps({**head, "columns": columns, "after": f"{after:08x}"}).encode(),
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
        self._failing = False
        try:
            with files.parent(self.path, create=True) as (folder, name):
                self._last = zlib.crc32((identity(folder) or "").encode())
                status = folder.status(name)
                data = b"" if status is None else folder.read(name, LIMIT)
                kept = []
                for block in _blocks(data, self.path, None, _log.warning):
                    if resume_step is None or block.parsed.step <= resume_step:
                        kept.append(block.raw if block.after is None else block.parsed.to_bytes(self._last))
                        self._last = _checksum(kept[-1])
                self._all = Rolling(kept)
                if status is not None and (status.st_nlink > 1 or self._all.mark() != Rolling((data,)).mark()):
                    folder.write(name, kept)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error}; move it away to go on without what was measured"
            ) from error
        self.mark = self._all.mark()
        """Of what is written, for the next checkpoint."""

    def log(self, statistics: Statistics) -> None:
        """Append a block. A disk that does not take it is reported once, and the block is left out."""
        data = statistics.to_bytes(self._last)
        try:
            if self._all.size + len(data) > LIMIT:
                raise OSError(errno.EFBIG, f"it has {LIMIT:,} bytes")
            if self._descriptor is None:
                with files.parent(self.path) as (folder, name):
                    self._descriptor = folder.descriptor_of(name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
                    folder.sync()
            try:
                files.write_all(self._descriptor, data)
            except BaseException:
                os.ftruncate(self._descriptor, self._all.size)
                raise
            self._all.add(data)
            self._last, self.mark = _checksum(data), self._all.mark()
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


def read_statistics(run: Path, say: Callable[[str], object] = _log.warning) -> Columns:
    """All whole blocks of RUN/statistics.bin, also of a run that is running or was killed.

    Args:
        say: takes a sentence for what is damaged or missing.

    Raises:
        UserError: the run has none, or the file cannot be read.
    """
    path = Path(run) / STATISTICS
    try:
        with files.parent(path) as (folder, name):
            data, own = folder.read(name, LIMIT), identity(folder)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: a run writes it with eval.errors_every=STEPS") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    first = None if own is None else zlib.crc32(own.encode())
    blocks = [each.parsed for each in _blocks(data, path, first, say)]
    rows = sum(len(each.operands) + len(each.gradients) for each in blocks)
    longest = max((len(name) for each in blocks for name in (each.recipe, *each.layers, *each.names)), default=0)
    if 4 * rows * longest > LIMIT:
        raise UserError(f"{path} cannot be read: {rows:,} rows with names of up to {longest:,} letters")
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


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A whole block as it is in the file; `after`: what it says of the block before."""

    raw: bytes
    parsed: Statistics
    after: int | None


def _blocks(data: bytes, path: Path, first: int | None, say: Callable[[str], object]) -> Iterator[_Block]:
    """The whole blocks. What is damaged is skipped up to the next block; a torn end is left out. Linear in the file.

    Args:
        first: what the first block comes after; None: not compared.
        say: takes a sentence for what is damaged or missing.
    """
    at, before, left = 0, first, _FREE + 4 * len(data)
    while 0 <= at < len(data):
        if (found := _block(data, at)) is not None:
            if found.after is not None and before is not None and found.after != before:
                say(f"{path}: measured steps before step {found.parsed.step} are missing, or it is of another run")
            before = _checksum(found.raw)
            yield found
            at += len(found.raw)
            continue
        following = data.find(_MAGIC, at + 1)
        while following >= 0 and left > 0 and _block(data, following) is None:
            left -= _claimed(data, following) + _TRY
            following = data.find(_MAGIC, following + 1)
        if following >= 0:
            end = following if left > 0 else len(data)
            say(f"{path}: {end - at} bytes at {at} are damaged and left out")
            following = end
        at, before = following, None


def _checksum(block: bytes) -> int:
    return int(_HEAD.unpack_from(block)[-1])


def _claimed(data: bytes, at: int) -> int:
    """The bytes of the block that begins at `at`; 0: none does."""
    if len(data) - at < _HEAD.size:
        return 0
    magic, *lengths, _ = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + sum(lengths)
    return end - at if magic == _MAGIC and end <= len(data) else 0


def _block(data: bytes, at: int) -> _Block | None:
    raw = data[at : at + _claimed(data, at)]
    if not raw or zlib.crc32(memoryview(raw)[_HEAD.size :]) != _checksum(raw):
        return None
    _, first, second, *_ = _HEAD.unpack_from(raw)
    begin, middle = _HEAD.size + first, _HEAD.size + first + second
    try:
        head = json.loads(raw[_HEAD.size : begin])
        dtypes = [np.dtype([(name, kind) for name, kind in columns]) for columns in head["columns"]]
        for dtype, known in zip(dtypes, (OPERAND, GRADIENT), strict=True):
            if any(dtype[name].kind != known[name].kind for name in known.names or ()):
                return None
        operands, gradients = np.frombuffer(raw[begin:middle], dtypes[0]), np.frombuffer(raw[middle:], dtypes[1])
        names = {key: tuple(map(str, head[key])) for key in ("layers", "names")}
        parsed = Statistics(
            step=np.int64(head["step"]).item(),
            recipe=str(head["recipe"]),
            operands=operands,
            gradients=gradients,
            **names,
        )
        for rows in (operands, gradients):
            if len(rows) and int(rows["layer"].max()) >= len(parsed.layers):
                return None
        if len(operands) and int(operands["operand"].max()) >= len(parsed.names):
            return None
        after = None if head.get("after") is None else int(str(head["after"]), 16)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
    return _Block(raw=raw, parsed=parsed, after=after)
