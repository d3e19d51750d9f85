"""RUN/statistics.bin: what quantisation does to every operand of every layer, one block for each
measured step.

A block is complete in itself::

    4 bytes   b"f4s1"
    3 × u32   lengths of the header and of the two tables, little-endian
    1 × u32   CRC-32 of all that follows
    header    JSON: step, recipe, the layers' names, the operands' names, the columns (NumPy's descr) of both tables
    table 1   a row for each quantised operand: `OPERAND`
    table 2   a row for each layer with one: `GRADIENT`

The file is only appended to; a kill loses at most the block being written. Checkpoints remember how
long it was and its checksum (`fp4train.sealed`). A resumed run drops the blocks of later steps and
damaged ones. `read_statistics` gives columns; it needs nothing but this file, also while the run
goes on.
"""

import errno
import json
import logging
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4train import files
from fp4train.errors import UserError, user_errors
from fp4train.sealed import LogWriter, ScannedPart, cut

_log = logging.getLogger(__name__)

STATISTICS = "statistics.bin"
LIMIT = 1 << 31
"""Bytes of a file that are read, and written."""
OPERAND = np.dtype(
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
"""A quantised operand. layer, operand: indices of names. amax of the tensor. sqnr_db: 10
log10(|x|²/|y-x|²). underflow: share of nonzero elements that became zero. saturation: share of
elements beyond the range of their block. kurtosis: 3 for a normal distribution. Block scales: share
of the 256 codes in use (0 for float32 scales), and log2 of the smallest above zero and of the
largest.
"""
GRADIENT = np.dtype([("layer", "<u2"), ("gradient", "<f4"), ("noise", "<f4")])
"""A layer's weight gradient: its norm, and that of the error its own quantised product adds (0: not
quantised).
"""

_MAGIC = b"f4s1"
_HEAD = struct.Struct("<4sIIII")


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """One measured step.

    Args:
        step: optimizer steps done with it.
        recipe: name of the recipe that held.
        layers, names: names of the layers and operands ("fprop.x") that the tables' indices stand
            for.
        operands: rows of `OPERAND`.
        gradients: rows of `GRADIENT`.
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
        head = {
            "step": self.step,
            "recipe": self.recipe,
            "layers": self.layers,
            "names": self.names,
        }
        parts = (
            json.dumps({**head, "columns": columns}).encode(),
            self.operands.astype(OPERAND).tobytes(),
            self.gradients.astype(GRADIENT).tobytes(),
        )
        body = b"".join(parts)
        return _HEAD.pack(_MAGIC, *map(len, parts), zlib.crc32(body)) + body


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The statistics of a run, a row for each measured step and operand or layer, in the order of
    steps.

    Args:
        operands: arrays of equal length: step (int64), recipe, layer, operand (str), and the
            columns of `OPERAND` from amax on (float32).
        gradients: step, recipe, layer, gradient, noise.
    """

    operands: Mapping[str, NDArray[Any]]
    gradients: Mapping[str, NDArray[Any]]


class StatisticsLog:
    """Appends blocks to a file, which the first one creates.

    Args:
        path: the file.
        resume_step: the steps done at the checkpoint that the run goes on from; later blocks are
            dropped.

    Raises:
        UserError: the file is there and cannot be read or written.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self._file: LogWriter | None = None
        self._failing = False

        def keep(block: Statistics) -> bool:
            return resume_step is None or block.step <= resume_step

        remedy = "; move it away to go on without what was measured"
        refused = user_errors(OSError, before=f"{self.path} cannot be written: ", after=remedy)
        with refused, files.parent(self.path, create=True) as (folder, name):
            if folder.status(name) is None:
                data = b""
            else:
                data = folder.read(name, LIMIT)
            self._all, wrong = cut(folder, name, _blocks(data), keep)
        for damage in wrong:
            _log.warning("%s: %s", self.path, damage.why)
        self.mark = self._all.mark()
        """Mark of what is written, for the next checkpoint."""

    def log(self, statistics: Statistics) -> None:
        """Append a block. A disk that does not take it is reported once, and the block is left
        out.
        """
        data = statistics.to_bytes()
        try:
            if self._all.size + len(data) > LIMIT:
                raise OSError(errno.EFBIG, f"it has {LIMIT:,} bytes")
            if self._file is None:
                with files.parent(self.path) as (folder, name):
                    self._file = LogWriter(folder, name, self._all.size)
            self._file.write(data)
            self._all.add(data)
            self.mark = self._all.mark()
            self._failing = False
        except OSError as error:
            if not self._failing:
                _log.error(
                    "%s cannot be written (%s); steps are left out until it can", self.path, error
                )
            self._failing = True

    def sync(self) -> None:
        """Make what is written durable."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """A second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_statistics(run: Path) -> Columns:
    """All whole blocks of RUN/statistics.bin, also of a run that is running or was killed.

    Raises:
        UserError: the run has none, or the file cannot be read.
    """
    path = Path(run) / STATISTICS
    try:
        with files.parent(path) as (folder, name):
            data = folder.read(name, LIMIT)
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing: a run writes it with eval.errors_every=STEPS"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    blocks: list[Statistics] = []
    for scanned in _blocks(data):
        if scanned.why:
            _log.warning("%s: %s", path, scanned.why)
        if scanned.value is not None:
            blocks.append(scanned.value)
    return Columns(
        operands=_columns([(block, block.operands) for block in blocks], OPERAND),
        gradients=_columns([(block, block.gradients) for block in blocks], GRADIENT),
    )


def _columns(
    tables: list[tuple[Statistics, NDArray[Any]]], dtype: np.dtype[Any]
) -> dict[str, NDArray[Any]]:
    """The columns of all tables, each row with its step and recipe, and names for numbers."""

    def columns(block: Statistics, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        named = {"layer": block.layers, "operand": block.names}
        shared = {
            "step": np.full(len(rows), block.step, np.int64),
            "recipe": np.full(len(rows), block.recipe),
        }
        measured = {
            name: np.array(named[name], np.str_)[rows[name]] if name in named else rows[name]
            for name in dtype.names or ()
        }
        return {**shared, **measured}

    nothing = np.empty(0, dtype)
    empty = Statistics(step=0, recipe="", layers=(), names=(), operands=nothing, gradients=nothing)
    parts = [columns(empty, nothing), *(columns(*table) for table in tables)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _blocks(data: bytes) -> Iterator[ScannedPart]:
    """The blocks of a file. What is damaged is skipped up to the next one; a torn end is left out."""
    at = 0
    while 0 <= at < len(data):
        raw = data[at : at + _claimed(data, at)]
        if (block := _block(raw)) is not None:
            yield ScannedPart(0, raw, block, "")
            at += len(raw)
            continue
        following = data.find(_MAGIC, at + 1)
        while (
            following >= 0
            and _block(data[following : following + _claimed(data, following)]) is None
        ):
            following = data.find(_MAGIC, following + 1)
        if following >= 0:
            yield ScannedPart(
                0, b"", None, f"{following - at} bytes at {at} are damaged and left out"
            )
        at = following


def _checksum(block: bytes) -> int:
    return int(_HEAD.unpack_from(block)[-1])


def _claimed(data: bytes, at: int) -> int:
    """The bytes of the block that begins at `at`; 0: none does."""
    if len(data) - at < _HEAD.size:
        return 0
    magic, *lengths, _ = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + sum(lengths)
    return end - at if magic == _MAGIC and end <= len(data) else 0


def _block(raw: bytes) -> Statistics | None:
    """Statistics that a block holds; None: it is damaged, or no block."""
    if not raw or zlib.crc32(memoryview(raw)[_HEAD.size :]) != _checksum(raw):
        return None
    _, head_size, operands_size, *_ = _HEAD.unpack_from(raw)
    begin = _HEAD.size + head_size
    middle = _HEAD.size + head_size + operands_size
    try:
        head = json.loads(raw[_HEAD.size : begin])
        dtypes = [np.dtype([(name, kind) for name, kind in columns]) for columns in head["columns"]]
        operands = np.frombuffer(raw[begin:middle], dtypes[0])
        gradients = np.frombuffer(raw[middle:], dtypes[1])
        return Statistics(
            step=np.int64(head["step"]).item(),
            recipe=str(head["recipe"]),
            operands=operands,
            gradients=gradients,
            layers=tuple(map(str, head["layers"])),
            names=tuple(map(str, head["names"])),
        )
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
