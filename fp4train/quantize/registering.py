"""How a plugin adds a number format or a rounding: by the function `register`, when it is imported.

    from fp4train.formats import ElementFormat, ScaleFormat
    from fp4train.quantize import register

    register(ElementFormat(name="e3m0", exponent_bits=3, mantissa_bits=0, bias=3))
    register(ScaleFormat.unsigned(name="ue4m4", exponent_bits=4, mantissa_bits=4, bias=7, ...))

A YAML file names it: `element: e3m0`. The readable reference runs it, and kernels where they are
general. A transform needs no name: it is a frozen dataclass on `Transform`, which YAML names by
`_target_`; a spec asks it for its matrix, which must be orthogonal.
"""

from typing import Any, TypeAlias

from fp4train.formats import (
    ELEMENT_FORMATS,
    SCALE_FORMATS,
    WIDE_FORMATS,
    ElementFormat,
    ScaleFormat,
)
from fp4train.formats.element import check_element
from fp4train.formats.registry import Registry
from fp4train.formats.scale import check_scale
from fp4train.quantize.contract import check_rounding
from fp4train.quantize.rounding import ROUNDINGS, Rounding

Registered: TypeAlias = ElementFormat | ScaleFormat | Rounding


def register(*entries: Registered) -> None:
    """Make formats and roundings known by their names. Registering the same definition again
    changes nothing.

    Args:
        entries: an element format of 2 to 8 bits whose values are exact in BF16; a scale format
            whose scales are bytes (`ScaleFormat.unsigned`) or float32; a rounding.

    Raises:
        TypeError: an entry is something else.
        ValueError: its name is taken or no name, its values cannot be multiplied in BF16, or it is
            a rounding that breaks its contract; none of the entries is added then that follow.
    """
    for entry in entries:
        if isinstance(entry, ElementFormat):
            _check_name(entry.name, ELEMENT_FORMATS, SCALE_FORMATS)
            check_element(entry)
            ELEMENT_FORMATS.add(entry)
        elif isinstance(entry, ScaleFormat):
            _check_name(entry.name, SCALE_FORMATS, ELEMENT_FORMATS)
            check_scale(entry)
            SCALE_FORMATS.add(entry)
        elif isinstance(entry, Rounding):
            check_rounding(entry)
            ROUNDINGS.add(entry)
        else:
            raise TypeError(
                f"register({entry!r}): an ElementFormat, a ScaleFormat or a Rounding is needed; a "
                "transform is named by its class, _target_"
            )


def _check_name(name: object, registry: Registry[Any], other: Registry[Any]) -> None:
    """Refuse a name by which something else than a format of this kind is known.

    Raises:
        ValueError: it is that of a format of high precision, or of the other kind.
    """
    if not isinstance(name, str) or registry.is_own(name):
        return  # what the registry itself judges
    for kind, names in (
        ("a format of high precision", [fmt.name for fmt in WIDE_FORMATS]),
        (f"the {other.kind} of that name", other.names),
    ):
        if name.lower() in names:
            raise ValueError(
                f"{registry.kind} name={name!r} is taken by {kind}: give the new one another"
            )
