"""Formats and roundings in the journal: what they were, so that no other one takes the place of a
name.

A recipe names its formats. The record of a start, and of a swap, says beside the plan what the name
of each element format meant then, and those of the scale formats and roundings of plugins.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fp4train.errors import UserError
from fp4train.formats import SCALE_FORMATS, ElementFormat, ScaleFormat
from fp4train.precision.plan import Plan
from fp4train.quantize import ROUNDINGS, Rounding
from fp4train.text import shortened

LONGEST = 300
"""Characters of what a message shows of a record."""
FIELDS = ("exponent_bits", "mantissa_bits", "bias", "has_inf", "has_nan")
"""The fields of a format that the values of its codes follow from."""


def described(fmt: ElementFormat) -> dict[str, int]:
    """What the values of a format's codes follow from, as plain JSON."""
    return {name: int(getattr(fmt, name)) for name in FIELDS}


def described_formats(plan: Plan) -> dict[str, dict[str, Any]]:
    """Name of each element format that a plan quantises to → what it is (`described`); so of each
    scale format and rounding of a plugin, whose names have the kind before them.
    """
    specs = [
        part
        for stretch in plan.stretches
        for layer in stretch.layers.values()
        for spec in layer.specs
        for part in (spec, spec.requantises)
        if part is not None
    ]
    formats = {spec.format for spec in specs}
    named: dict[str, dict[str, Any]] = {fmt.name: described(fmt) for fmt in formats}
    for spec in specs:
        if not SCALE_FORMATS.is_own(spec.scale):
            named[f"scale {spec.scale}"] = _fields(spec.scale_format)
        if not ROUNDINGS.is_own(spec.rounding):
            named[f"rounding {spec.rounding}"] = _fields(spec.rounder)
    return dict(sorted(named.items()))


def _fields(entry: ScaleFormat | Rounding) -> dict[str, Any]:
    """The class of an entry, and its numbers and texts, as plain JSON."""
    kind = type(entry)
    values = {field.name: getattr(entry, field.name) for field in fields(entry)}
    plain = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
    return {"class": f"{kind.__module__}.{kind.__qualname__}", **plain}


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
                    f"{run} was trained with another {_kind(name)} "
                    f"({_shown(recorded)}; now: "
                    f"{_shown(planned[name])}): give the new one another name, or go on with "
                    "a recipe that does not "
                    f"use {name.rpartition(' ')[2]} (recipe=…)"
                )


def _kind(name: str) -> str:
    return name if " " in name else f"element format {name}"


def _shown(recorded: object) -> str:
    """The fields of a format, of a record that somebody else may have prepared."""
    values = recorded if isinstance(recorded, dict) else {}
    return shortened(", ".join(f"{name}={value}" for name, value in values.items()), LONGEST)
