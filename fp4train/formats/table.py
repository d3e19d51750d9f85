"""The rows that `fp4train formats` prints: what each format can hold."""

import math
from dataclasses import dataclass

from fp4train.formats.element import ELEMENT_FORMATS, WIDE_FORMATS


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
    """All formats, narrowest first: the elements, the E8M0 scale, and FP16, BF16, FP32 for reference."""
    rows = [
        FormatRow(
            name=fmt.name,
            bits=fmt.bits,
            largest=fmt.max,
            smallest_normal=fmt.smallest_normal,
            smallest=fmt.smallest_subnormal,
            binades=fmt.binades,
            specials="inf, NaN" if fmt.has_inf else "NaN" if fmt.has_nan else "none",
        )
        for fmt in (*ELEMENT_FORMATS, *WIDE_FORMATS)
    ]
    smallest = math.ldexp(1.0, -127)
    e8m0 = FormatRow(
        name="e8m0",
        bits=8,
        largest=math.ldexp(1.0, 127),
        smallest_normal=smallest,
        smallest=smallest,
        binades=254.0,
        specials="NaN; no sign, no zero",
    )
    rows.insert(len(ELEMENT_FORMATS), e8m0)
    return rows
