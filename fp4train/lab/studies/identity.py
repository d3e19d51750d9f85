"""What a record of measurements is of, in a form that a later version of fp4train reads alike.

A dataclass is described by its class and the fields that differ from their defaults. A field that a later version adds
is then absent from the description until somebody sets it: an object older than an option has that option's default.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any


def described(value: Any) -> Any:
    """A configuration value, or an object made of dataclasses, as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        changed = {
            field.name: described(getattr(value, field.name))
            for field in dataclasses.fields(kind)
            if field.init and getattr(value, field.name) != _default(field)
        }
        return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **changed}
    if isinstance(value, Mapping):
        return {str(key): described(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def digest(value: Any) -> str:
    """Checksum of a description, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(described(value), sort_keys=True).encode()).hexdigest()


def _default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; where it has none, a value that equals nothing."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING
