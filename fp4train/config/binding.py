"""Plain configuration values → the objects that they describe.

A mapping with `_target_` names a dataclass of this package; one without is bound to the dataclass its place asks for.
Field names and kinds are checked here, once for all classes, so that every slip gets the same kind of answer: the full
key, the value, what is allowed, and the near miss. What a value means is checked by the class itself.

Only dataclasses of this package can be named. Building one stores values and does nothing else, so a configuration
found in a run directory is data and never runs foreign code. (Looking at the name alone would not do: there is
"fp4train.checkpoint.folder.os.system".)
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fp4train.errors import UserError
from fp4train.text import near_miss

MISSING = "???"
"""How a configuration says that a value must be given."""

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "null",
}


def bind(node: Any, hint: Any, path: str) -> Any:
    """The value or object that `node`, which stands at key `path`, describes where a value of type `hint` is asked for.

    Raises:
        UserError: a key is unknown or missing, a value is of another kind or refused by its class, or a `_target_` is
            not one of this package's dataclasses.
    """
    options = _options(hint)
    if isinstance(node, str) and node == MISSING:
        raise UserError(f"{path} must be given: {path}=…")
    if isinstance(node, Mapping):
        return _bind_mapping(node, options, path)
    for option in options:
        if get_origin(option) in (tuple, Sequence) and (
            isinstance(node, (list, tuple, str)) and type(node) not in options
        ):
            return _bind_sequence((node,) if isinstance(node, str) else node, option, path)
    return _bind_scalar(node, options, path)


def complete(node: Any, hint: Any) -> Any:
    """`node` with what it leaves to its classes' defaults written out, and each class by its full name.

    Nothing is checked: keys that no class knows stay, and those that must be given stay missing.
    """
    if not isinstance(node, Mapping):
        return node
    kind, hints = _described(node, hint)
    found = {str(key): complete(value, hints(str(key))) for key, value in node.items()}
    if kind is not None:
        found["_target_"] = _full_name(kind)
        for name, field in _fields(kind).items():
            if name not in found and not _needed(field):
                factory = field.default_factory
                found[name] = _as_node(field.default if factory is dataclasses.MISSING else factory())
    return found


def unknown_keys(node: Any, hint: Any, path: str = "") -> Iterator[str]:
    """The full keys below `node`, which stands at key `path`, that its classes do not have."""
    if not isinstance(node, Mapping):
        return
    kind, hints = _described(node, hint)
    for key, value in node.items():
        where = f"{path}.{key}" if path else str(key)
        if kind is not None and key != "_target_" and key not in _fields(kind):
            yield where
        else:
            yield from unknown_keys(value, hints(str(key)), where)


def check_targets(node: Any, path: str = "") -> None:
    """Raise UserError where a configuration names anything but a dataclass of this package."""
    for where, target in _targets(node, path):
        own_class(target, where)


def own_class(target: object, where: str) -> type:
    """The dataclass of this package that `target` names.

    Raises:
        UserError: it names something else.
    """
    module, _, name = str(target).rpartition(".")
    found = None
    if module.split(".")[0] == "fp4train":
        try:
            found = getattr(importlib.import_module(module), name, None)
        except (ImportError, ValueError):
            found = None
    own = isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__.split(".")[0] == "fp4train"
    if not own:
        raise UserError(
            f"{where}={target!r} is no configuration class of fp4train; a configuration may name only those"
        )
    assert isinstance(found, type)
    return found


def _targets(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            where = f"{path}.{key}" if path else str(key)
            if key == "_target_":
                yield where, value
            else:
                yield from _targets(value, where)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _targets(value, f"{path}[{index}]")


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _described(node: Mapping[Any, Any], hint: Any) -> tuple[type | None, Callable[[str], Any]]:
    """The dataclass, if any, that `node` describes where a `hint` is asked for, and what is asked for at its keys."""
    options = _options(hint)
    kind = next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)
    if "_target_" in node:
        kind = own_class(node["_target_"], "_target_")
    if kind is not None:
        hints = get_type_hints(kind)
        return kind, lambda key: hints.get(key, Any)
    item = next((get_args(o)[1] for o in options if get_origin(o) is Mapping), Any)
    return None, lambda key: item


def _fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """What a dataclass is made from, by name."""
    return {f.name: f for f in dataclasses.fields(kind) if f.init}


def _needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _as_node(value: Any) -> Any:
    """A field's default as a configuration would give it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {name: _as_node(getattr(value, name)) for name in _fields(type(value))}
        return {"_target_": _full_name(type(value)), **values}
    return [_as_node(item) for item in value] if isinstance(value, tuple) else value


def _bind_mapping(node: Mapping[Any, Any], options: tuple[Any, ...], path: str) -> Any:
    if "_target_" in node:
        found = own_class(node["_target_"], f"{path}._target_" if path else "_target_")
        if not any(_serves(found, option) for option in options):
            raise UserError(f"{path}: {found.__name__} cannot stand here; {_allowed(options)} is needed")
        return _construct(found, {k: v for k, v in node.items() if k != "_target_"}, path)
    for option in options:
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return _construct(option, node, path)
        if get_origin(option) is Mapping:
            return {str(key): bind(value, get_args(option)[1], f"{path}.{key}") for key, value in node.items()}
    raise UserError(f"{path}={dict(node)!r} must be {_allowed(options)}")


def _serves(found: type, option: Any) -> bool:
    """Whether an object of class `found` can stand where `option` is asked for."""
    if getattr(option, "_is_protocol", False):
        methods = [name for name in vars(option) if not name.startswith("_")]
        return all(hasattr(found, m) and _parameters(found, m) == _parameters(option, m) for m in methods)
    return option is Any or (isinstance(option, type) and issubclass(found, option))


def _parameters(kind: type, method: str) -> set[str]:
    return set(inspect.signature(getattr(kind, method)).parameters)


def _construct(kind: type, node: Mapping[Any, Any], path: str) -> Any:
    fields = _fields(kind)
    prefix = f"{path}." if path else ""
    for key in node:
        if key not in fields:
            raise UserError(
                f"unknown key {prefix + str(key)!r}{near_miss(prefix + str(key), [prefix + n for n in fields])} "
                f"(known: {', '.join(fields)})"
            )
    for name, field in fields.items():
        if _needed(field) and name not in node:
            raise UserError(f"{prefix}{name} is missing")
    hints = get_type_hints(kind)
    values = {str(key): bind(value, hints[str(key)], prefix + str(key)) for key, value in node.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise UserError(
            str(error) if str(error).startswith(prefix) else f"{path or 'configuration'}: {error}"
        ) from error


def _bind_sequence(node: Sequence[Any], option: Any, path: str) -> tuple[Any, ...]:
    kinds = get_args(option)
    if get_origin(option) is tuple and kinds[-1] is not Ellipsis:
        if len(node) != len(kinds):
            raise UserError(f"{path}={list(node)!r} must hold {len(kinds)} values")
    else:
        kinds = (kinds[0],) * len(node)
    return tuple(bind(item, kind, f"{path}[{i}]") for i, (item, kind) in enumerate(zip(node, kinds, strict=True)))


def _bind_scalar(node: Any, options: tuple[Any, ...], path: str) -> Any:
    if isinstance(node, float) and not math.isfinite(node):
        raise UserError(f"{path}={node} must be finite")
    if Any in options or type(node) in options:
        return node
    # What the command line's grammar reads as another kind but can only mean one thing here.
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        if float in options:
            return float(node)
        if int in options and node == int(node):
            return int(node)
        if str in options:
            return str(node)
    if isinstance(node, str) and Path in options:
        return Path(node)
    shown = "null" if node is None else str(node).lower() if isinstance(node, bool) else repr(node)
    raise UserError(f"{path}={shown} must be {_allowed(options)}")


def _allowed(options: tuple[Any, ...]) -> str:
    """The kinds that are allowed, in words."""
    words = []
    for option in options:
        if option in _WORDS:
            words.append(_WORDS[option])
        elif get_origin(option) in (tuple, Sequence):
            words.append("a list")
        else:
            name = str(getattr(option, "__name__", option))
            words.append(f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
    return " or ".join(dict.fromkeys(words))
