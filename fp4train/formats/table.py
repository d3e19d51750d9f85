"""The rows that `fp4train formats` prints: range and special values of each format."""

import math
from dataclasses import dataclass

from fp4train.formats.element import WIDE_FORMATS, ElementFormat
from fp4train.formats.registry import ELEMENT_FORMATS, SCALE_FORMATS
from fp4train.formats.scale import ScaleFormat


@dataclass(frozen=True, kw_only=True)
class FormatRow:
    """One format: width, largest finite value, smallest normal and smallest positive value, log2 of the range,
    specials.
    """

    name: str
    bits: int
    largest: float
    smallest_normal: float
    smallest: float
    binades: float
    specials: str


def formats_table() -> list[FormatRow]:
    """All formats: elements, narrowest first; the other scale formats; FP16, BF16, FP32 for reference."""
    names = {fmt.name for fmt in (*ELEMENT_FORMATS, *WIDE_FORMATS)}
    return [
        *map(_of_element, ELEMENT_FORMATS),
        *(_of_scale(fmt) for fmt in SCALE_FORMATS if fmt.is_byte and fmt.name not in names),
        *map(_of_element, WIDE_FORMATS),
    ]


def _of_element(fmt: ElementFormat) -> FormatRow:
    return FormatRow(
        name=fmt.name,
        bits=fmt.bits,
        largest=fmt.max,
        smallest_normal=fmt.smallest_normal,
        smallest=fmt.smallest_subnormal,
        binades=fmt.binades,
        specials="inf, NaN" if fmt.has_inf else "NaN" if fmt.has_nan else "none",
    )


def _of_scale(fmt: ScaleFormat) -> FormatRow:
    return FormatRow(
        name=fmt.name,
        bits=8,
        largest=fmt.max,
        smallest_normal=fmt.smallest_normal,
        smallest=fmt.smallest,
        binades=math.log2(fmt.max) - math.log2(fmt.smallest),
        specials="NaN; no sign" if fmt.mantissa_bits else "NaN; no sign, no zero",
    )
