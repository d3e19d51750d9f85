"""The formats by name. A new format is a file and an entry here."""

from typing import Final

from fp4train.formats.element import E2M1, E2M3, E3M2, E4M3, E5M2, ElementFormat
from fp4train.formats.scale import E4M3_SCALE, E8M0_SCALE, FP32_SCALE, POW2_SCALE, ScaleFormat
from fp4train.formats.ue5m3 import UE5M3_SCALE
from fp4train.text import near_miss

ELEMENT_FORMATS: Final[tuple[ElementFormat, ...]] = (E2M1, E2M3, E3M2, E4M3, E5M2)
"""Formats that tensors are quantised to, narrowest first."""

SCALE_FORMATS: Final[tuple[ScaleFormat, ...]] = (E4M3_SCALE, E8M0_SCALE, UE5M3_SCALE, FP32_SCALE, POW2_SCALE)
"""Scale formats."""


def get_format(name: str) -> ElementFormat:
    """The element format called `name`. ValueError with a near miss otherwise."""
    for fmt in ELEMENT_FORMATS:
        if fmt.name == name:
            return fmt
    raise ValueError(_unknown("element", name, [fmt.name for fmt in ELEMENT_FORMATS]))


def get_scale_format(name: str) -> ScaleFormat:
    """The scale format called `name`. ValueError with a near miss otherwise."""
    for fmt in SCALE_FORMATS:
        if fmt.name == name:
            return fmt
    raise ValueError(_unknown("scale", name, [fmt.name for fmt in SCALE_FORMATS]))


def _unknown(kind: str, name: object, known: list[str]) -> str:
    return f"{kind} format {name!r} is unknown{near_miss(str(name), known)} (known: {', '.join(known)})"
