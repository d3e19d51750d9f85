"""Number formats: codes <-> values, packing, the formats by name, and the rows that `fp4train
formats` prints.

Independent of blocks and scaling. A new format is a constant of its own, in `element` or `scale`,
and an entry here; one of a plugin is added by `fp4train.quantize.register`. All else that depends
on a format asks the format. Kernels hold sets of the formats that they know; the reference takes
any.
"""

import math
from typing import NamedTuple

from fp4train.formats.element import (
    BF16,
    E1M2,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FP16,
    FP32,
    INT4,
    WIDE_FORMATS,
    ElementFormat,
    decode,
    encode,
    pack_fp4,
    unpack_fp4,
)
from fp4train.formats.levels import (
    HIF4_SCALE,
    IF4_SCALE,
    AdaptiveScale,
    LevelledScale,
    e6m2_decode,
    e6m2_encode,
)
from fp4train.formats.registry import Registry
from fp4train.formats.scale import (
    E4M3_SCALE,
    E8M0_SCALE,
    FP32_SCALE,
    POW2_SCALE,
    UE5M3_IEEE_SCALE,
    UE5M3_SCALE,
    ScaleFormat,
    e4m3_decode,
    e4m3_encode,
    e8m0_decode,
    e8m0_encode,
)

ELEMENT_FORMATS = Registry[ElementFormat](
    "element format", (E2M1, E1M2, INT4, E2M3, E3M2, E4M3, E5M2)
)
"""Formats that tensors are quantised to: the program's own, narrowest first, then those of
plugins.
"""

SCALE_FORMATS = Registry[ScaleFormat](
    "scale format",
    (
        E4M3_SCALE,
        E8M0_SCALE,
        UE5M3_SCALE,
        UE5M3_IEEE_SCALE,
        FP32_SCALE,
        POW2_SCALE,
        HIF4_SCALE,
        IF4_SCALE,
    ),
)
"""Scale formats, those of plugins last."""


def get_format(name: str) -> ElementFormat:
    """The element format called `name`. ValueError with a near miss otherwise."""
    return ELEMENT_FORMATS.get(name)


def get_scale_format(name: str) -> ScaleFormat:
    """The scale format called `name`. ValueError with a near miss otherwise."""
    return SCALE_FORMATS.get(name)


def formats_of(elements: str) -> tuple[ElementFormat, ...]:
    """The formats of the operands of a product: of "E2M1·E2M1", "E4M3·BF16", or "BF16" for both.

    Raises:
        ValueError: they are not one or two formats.
    """
    formats = {fmt.name.upper(): fmt for fmt in (*ELEMENT_FORMATS, *WIDE_FORMATS)}
    words = elements.upper().split("·")
    if len(words) > 2 or not all(word in formats for word in words):
        raise ValueError(
            f"elements={elements!r} must be one or two of {', '.join(formats)}, joined by '·'"
        )
    return tuple(formats[word] for word in words)


def product_rate(*operands: ElementFormat) -> str | None:
    """The rate of tensor cores that multiplies such operands: that of the widest, to which others
    are cast; None: no tensor core does.
    """
    return max(operands, key=lambda fmt: fmt.bits).rate


class FormatRow(NamedTuple):
    """One format: its width, its largest, smallest normal and smallest positive value, log2 of its
    range, and which special values it has.
    """

    name: str
    bits: int
    largest: float
    smallest_normal: float
    smallest: float
    binades: float
    specials: str


def formats_table() -> list[FormatRow]:
    """All formats: elements, narrowest first; the other scale formats; FP16, BF16, FP32 for
    reference.
    """
    names = {fmt.name for fmt in (*ELEMENT_FORMATS, *WIDE_FORMATS)}
    return [
        *map(_of_element, ELEMENT_FORMATS),
        *(_of_scale(fmt) for fmt in SCALE_FORMATS if fmt.is_byte and fmt.name not in names),
        *map(_of_element, WIDE_FORMATS),
    ]


def _of_element(fmt: ElementFormat) -> FormatRow:
    if fmt.has_inf:
        specials = "inf, NaN"
    elif fmt.has_nan:
        specials = "NaN"
    else:
        specials = "none"
    return FormatRow(
        fmt.name,
        fmt.bits,
        fmt.max,
        fmt.smallest_normal,
        fmt.smallest_subnormal,
        fmt.binades,
        specials,
    )


def _of_scale(fmt: ScaleFormat) -> FormatRow:
    if isinstance(fmt, LevelledScale):
        specials = "NaN; no zero; 3 levels"
    elif isinstance(fmt, AdaptiveScale):
        specials = "NaN; sign: the grid"
    elif fmt.mantissa_bits:
        specials = "NaN; no sign"
    else:
        specials = "NaN; no sign, no zero"
    binades = math.log2(fmt.max) - math.log2(fmt.smallest)
    return FormatRow(
        fmt.name, 8 * fmt.block_bytes, fmt.max, fmt.smallest_normal, fmt.smallest, binades, specials
    )
