"""Nested state as named tensors plus plain JSON, and back.

A tensor becomes ``{"$tensor": "path/to/it"}``, a tuple ``{"$tuple": [...]}``, a dict with keys that
are not plain strings ``{"$items": [[key, value], ...]}`` (which two ranks cannot share), a
NaN or infinity ``{"$float": "nan"}``. Only data can be written this way, so reading it back
executes nothing.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from fp4train.shards import is_sharded

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """Split nested dicts, lists and tuples into the `tensors` and the `state` that `save` takes.

    Raises:
        TypeError: a leaf is neither a tensor nor a JSON value; its path is named.
    """
    tensors: dict[str, Tensor] = {}
    state = {key: _encode(value, escaped(key), tensors) for key, value in tree.items()}
    return tensors, state


def unflatten(tensors: Mapping[str, Tensor], state: Mapping[str, JSON]) -> dict[str, Any]:
    """The tree that `flatten` was given."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "$tensor": tensors.__getitem__,
        "$tuple": tuple,
        "$items": dict,
    }
    return {key: _replaced(value, kinds) for key, value in state.items()}


def merged(first: JSON, other: JSON, path: str = "state") -> JSON:
    """The union of what two ranks say of one state: each key's value is that of either, or the same
    of both.

    Raises:
        ValueError: they differ; the place is named.
    """
    if isinstance(first, dict) and isinstance(other, dict):
        both = {
            key: merged(first[key], other[key], f"{path}/{key}") for key in first if key in other
        }
        return {**first, **other, **both}
    if to_strict(first) != to_strict(other):
        raise ValueError(f"{path} is {first!r} on one rank and {other!r} on another")
    return first


def to_strict(value: Any) -> Any:
    """Non-finite floats as ``{"$float": ...}``: JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    if isinstance(value, dict):
        return {key: to_strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict(item) for item in value]
    return value


def from_strict(value: Any) -> Any:
    """The floats that `to_strict` replaced, put back."""
    return _replaced(value, {"$float": float})


def escaped(key: object) -> str:
    """A key as it is in the paths of tensors."""
    # as in a JSON pointer (RFC 6901): paths stay unambiguous
    return str(key).replace("~", "~0").replace("/", "~1")


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> JSON:
    inner = hasattr(value, "__tensor_flatten__")  # it consists of others, as torchao's moments
    if isinstance(value, Tensor) and (not inner or is_sharded(value)):
        if path in tensors:
            raise TypeError(f"{path}: two entries have this path (keys that differ only in type)")
        tensors[path] = value
        return {"$tensor": path}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        entries = [_encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return entries if isinstance(value, list) else {"$tuple": entries}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {
                key: _encode(item, f"{path}/{escaped(key)}", tensors) for key, item in value.items()
            }
        items: list[JSON] = []
        for key, item in value.items():
            if not isinstance(key, bool | int | float | str):
                raise TypeError(
                    f"{path}: key {key!r} of type {type(key).__name__}; allowed are strings "
                    "and numbers"
                )
            items.append([key, _encode(item, f"{path}/{escaped(key)}", tensors)])
        return {"$items": items}
    raise TypeError(
        f"{path}: {type(value).__name__} cannot be in a checkpoint; allowed are tensors "
        "of values, None, bool, int, float, str, lists, tuples and dicts of these"
    )


def _replaced(value: Any, kinds: Mapping[str, Callable[[Any], Any]]) -> Any:
    """`value` with each {mark: content}, of a mark in `kinds`, made into what it stands for."""
    if isinstance(value, list):
        return [_replaced(item, kinds) for item in value]
    if not isinstance(value, dict):
        return value
    content = {key: _replaced(item, kinds) for key, item in value.items()}
    mark = next(iter(content)) if len(content) == 1 else ""
    if mark in kinds:
        return kinds[mark](content[mark])
    return content
