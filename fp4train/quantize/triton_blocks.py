"""Blocks of a spec as the Triton kernel that quantises takes them, a class per kind."""

from dataclasses import dataclass
from typing import ClassVar

from fp4train.formats import AdaptiveScale, LevelledScale
from fp4train.quantize.random import LANES
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.triton_variant import parts

COLUMN_BLOCKS = (16, 32)
TILE = 4096  # elements per program: 32 per thread


@dataclass(frozen=True)
class Blocks:
    """Blocks of 1xN along contiguous columns; other kinds differ in what they override.

    Attributes:
        name: function of the kernel that quantises them (`Variant.blocks`).
        strided: whether x is read wherever its columns lie; else it is copied first.
        word_bytes: bytes of codes that are stored at a time.
    """

    spec: QuantSpec
    name: ClassVar[str] = "rows"
    strided: ClassVar[bool] = False

    @property
    def n(self) -> int:
        """Columns of a block; of one scale for a row or tensor, those of a draw of random bits."""
        return self.spec.block[1] or LANES

    @property
    def height(self) -> int:
        """Rows of a block, where the kernel asks for them (`Variant.height`)."""
        return 1

    @property
    def span(self) -> int:
        """Columns of the blocks that a program takes together."""
        return self.n * parts(self.spec)

    @property
    def word_bytes(self) -> int:
        return 4 if self.spec.format.packed else 1

    def groups(self, columns: int) -> int:
        """Blocks of a row, filled up to whole groups of the transform."""
        return cdiv(columns, self.span) * parts(self.spec)

    def tile(self, groups: int) -> tuple[int, int]:
        """(rows, blocks per row) of a program."""
        return tile(groups, TILE // self.n)

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 4

    def scales(self, rows: int, groups: int) -> tuple[int, ...]:
        """The shape of the stored scales."""
        return (cdiv(rows, self.spec.block[0] or 1), groups)

    def row_bytes(self, columns: int, groups: int) -> int:
        """Bytes of the codes of a row of x."""
        return groups * self.n // (1 + self.spec.format.packed)


class PackedRows(Blocks):
    """Blocks of 1x16 whose codes are two in a byte: a thread stores one word of a block."""

    name = "rows16"

    @property
    def word_bytes(self) -> int:
        return 8


class WholeRows(Blocks):
    """One scale for a row, or for the tensor."""

    name = "whole"

    def scales(self, rows: int, groups: int) -> tuple[int, ...]:
        return (rows if self.spec.block[0] == 1 else 1, 1)

    def row_bytes(self, columns: int, groups: int) -> int:
        return columns


class Squares(Blocks):
    """Blocks of NxN, which serve a tensor and its transpose."""

    name = "squares"

    def tile(self, groups: int) -> tuple[int, int]:
        return (self.n, max(1, TILE // (self.n * self.n)))

    @property
    def warps(self) -> int:
        return 4 if self.n <= 64 else 8


class ByColumns(Blocks):
    """Blocks of which a thread holds a row, wherever its elements lie."""

    name = "columns"
    strided = True

    @property
    def height(self) -> int:
        return self.spec.block[0] or 1

    @property
    def word_bytes(self) -> int:
        return 8

    def tile(self, groups: int) -> tuple[int, int]:
        return column_tile(self.n, self.spec)


def blocks_of(spec: QuantSpec, *, strided: bool, codes: bool) -> Blocks:
    """The blocks of a spec.

    Args:
        strided: whether the elements of a row of x do not follow each other.
        codes: whether codes are made, else values.
    """
    height, n = spec.block
    if needs_rows_in_threads(spec) or (strided and height == 1 and n in COLUMN_BLOCKS):
        return ByColumns(spec)
    if n is None:
        return WholeRows(spec)
    if height != 1:
        return Squares(spec)
    return rows_of(spec, codes=codes)


def rows_of(spec: QuantSpec, *, codes: bool) -> Blocks:
    """The blocks of 1xN along contiguous columns."""
    if codes and spec.format.packed and spec.block[1] == 16:
        return PackedRows(spec)
    return Blocks(spec)


def tile(groups: int, blocks: int) -> tuple[int, int]:
    """(rows, blocks per row) of a program of `blocks` blocks (a power of two), with few places
    beyond a row's end.
    """
    divisor = groups & -groups
    across = max(divisor, min(8, 1 << (groups - 1).bit_length()))
    across = min(across, blocks)
    return blocks // across, across


def needs_rows_in_threads(spec: QuantSpec) -> bool:
    """Whether a thread needs all elements of a row of a block, wherever they lie: to transform
    them, or to sum their errors in order.
    """
    fmt = spec.scale_format
    return spec.hadamard is not None or isinstance(fmt, AdaptiveScale | LevelledScale)


def column_tile(n: int, spec: QuantSpec) -> tuple[int, int]:
    """(rows, blocks per row) of a program of the columns kernels: 32 bytes of codes per row; four
    or two rows per thread, two where the random words need the registers. A row of 64 elements, of
    blocks that a transform spans, or one of which two grids are tried, per thread.
    """
    if n == 64 or parts(spec) > 1:
        return (128, 1)
    if isinstance(spec.scale_format, AdaptiveScale):
        return (64, 2)
    if n == 16 and not spec.random:
        return (128, 4)
    return (64, 4)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
