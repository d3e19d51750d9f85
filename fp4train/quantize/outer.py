"""Scales above block scales, by the rows and columns that share one (`QuantSpec.global_scale`).

    tensor            the tensor
    row               a row
    block             128 columns of a row (TetraJet-v2, arXiv 2510.27527)
    (rows, columns)   a tile, such as (128, 128); (rows, None): these rows from end to end, as
                      CTA-local NVFP4 has it (arXiv 2610.00053)
    macro             128 columns of a row, or 128x128 under square blocks: not a float32 number but
                      a mantissa of 8 bits over E8M0 block scales (ALTO, arXiv 2603.08713)

Scales of the tensor, of rows and of whole rows stay the same along the contracted axis and are
applied to the product. Others multiply the elements, so emulation multiplies in float32.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from fp4train.text import check_choice

GlobalScale: TypeAlias = str | tuple[int, int | None] | None
Extent: TypeAlias = tuple[int, int | None]
"""Rows and columns that share a scale; None: all columns."""

GLOBAL_SCALES = (None, "tensor", "row", "block", "macro")
OUTER_COLUMNS = 128
"""Columns that share a scale with "block" and "macro"; of the latter, rows under square blocks,
too.
"""
_NAMED: dict[Extent, str] = {(1, None): "row", (1, OUTER_COLUMNS): "block"}


def read_global_scale(value: Any) -> GlobalScale:
    """A global scale as `QuantSpec` holds it: a pair, from YAML a list, as a tuple.

    Raises:
        ValueError: it is neither a name nor a pair of rows and columns, or a pair that has a name.
    """
    if value is None or isinstance(value, str):
        check_choice("global_scale", value, GLOBAL_SCALES)
        return value
    pair = tuple(value) if isinstance(value, Sequence) else ()
    if len(pair) != 2 or not _is_extent(pair[0]) or not (pair[1] is None or _is_extent(pair[1])):
        names = ", ".join(map(str, GLOBAL_SCALES))
        raise ValueError(
            f"global_scale={value!r}: allowed are {names}, or (rows, columns) of a tile, integers "
            ">= 1; (rows, None) for whole rows"
        )
    if pair in _NAMED:
        raise ValueError(f"global_scale={value!r}: use its name, {_NAMED[pair]!r}")
    return pair[0], pair[1]


def _is_extent(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def extent_of(global_scale: GlobalScale, block: tuple[int | None, int | None]) -> Extent | None:
    """The extent of a scale above block scales; None: it is that of the tensor, or there is
    none.
    """
    if isinstance(global_scale, tuple):
        return global_scale
    if global_scale == "macro":
        return (1 if block[0] == 1 else OUTER_COLUMNS, OUTER_COLUMNS)
    return next((extent for extent, name in _NAMED.items() if name == global_scale), None)


def check_extent(global_scale: GlobalScale, block: tuple[int | None, int | None]) -> None:
    """Refuse blocks that are not whole within what shares a scale above theirs.

    Raises:
        ValueError: names both extents, and what to use instead.
    """
    extent = extent_of(global_scale, block)
    if extent is None:
        return
    rows, columns = extent
    tall, wide = block
    if columns is None and tall != 1:
        raise ValueError(
            f"global_scale={global_scale!r}: block={block!r} spans rows of different scale where "
            "the other axis is contracted; use block=(1, ...), or 'tensor' for square blocks"
        )
    if rows == 1 and tall != 1:
        raise ValueError(
            f"global_scale={global_scale!r}: block={block!r} spans rows of different scale; "
            "use block=(1, ...)"
        )
    if tall is None or rows % tall:
        raise ValueError(
            f"global_scale={global_scale!r}: block={block!r} does not divide {rows} rows"
        )
    if columns is not None and (wide is None or columns % wide):
        raise ValueError(
            f"global_scale={global_scale!r}: block={block!r} does not divide an outer block "
            f"of {columns} columns"
        )


def describe_global(global_scale: GlobalScale) -> str:
    """Its words in tables: "FP32 tensor", "FP32 128×128", "E0M8 1×128"; "" without one."""
    if global_scale is None:
        return ""
    if global_scale == "macro":
        return "E0M8 macro"
    if global_scale == "block":
        return f"FP32 1×{OUTER_COLUMNS}"
    if isinstance(global_scale, tuple):
        rows, columns = global_scale
        return f"FP32 {rows} rows" if columns is None else f"FP32 {rows}×{columns}"
    return f"FP32 {global_scale}"
