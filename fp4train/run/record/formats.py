"""Element formats in the journal: what their codes stand for, so that no other format takes the
place of a name.

A recipe names its formats. The record of a start, and of a swap, says beside the plan what each
name meant then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fp4train.errors import UserError
from fp4train.formats import ElementFormat
from fp4train.precision.plan import Plan

FIELDS = ("exponent_bits", "mantissa_bits", "bias", "has_inf", "has_nan")
"""The fields of a format that the values of its codes follow from."""


def described(fmt: ElementFormat) -> dict[str, int]:
    """What the values of a format's codes follow from, as plain JSON."""
    return {name: int(getattr(fmt, name)) for name in FIELDS}


def described_formats(plan: Plan) -> dict[str, dict[str, int]]:
    """Name of each element format that a plan quantises to → what it is (`described`)."""
    formats = set[ElementFormat]()
    for stretch in plan.stretches:
        for layer in stretch.layers.values():
            for spec in layer.specs:
                formats.add(spec.format)
                if spec.requantises is not None:
                    formats.add(spec.requantises.format)
    return {fmt.name: described(fmt) for fmt in sorted(formats, key=lambda fmt: fmt.name)}


def check_formats(plan: Plan, tables: Iterable[Mapping[str, object]], run: Path) -> None:
    """Refuse to go on where a name of a format means another one now.

    Args:
        plan: the plan of the steps that come.
        tables: the `described_formats` of the records of the run that it goes on from.
        run: the folder of that run.

    Raises:
        UserError: a format that the plan quantises to is not the one that the run used by that
            name.
    """
    planned = described_formats(plan)
    for table in tables:
        for name, recorded in table.items():
            if name in planned and planned[name] != recorded:
                raise UserError(
                    f"{run} was trained with another element format {name} "
                    f"({_shown(recorded)}; now: "
                    f"{_shown(planned[name])}): give the new one another name, or go on with "
                    "a recipe that does not "
                    f"quantise to {name} (recipe=…)"
                )


def _shown(fields: object) -> str:
    """The fields of a format, of a record that somebody else may have prepared."""
    values = fields if isinstance(fields, dict) else {}
    return ", ".join(f"{name}={values[name]}" for name in FIELDS if name in values)
