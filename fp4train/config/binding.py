"""Plain configuration values → the objects that they describe.

A mapping with `_target_` names a dataclass; one without is bound to the dataclass that the field's
type names. Field names and types are checked here for all classes, so that every error message has
the same parts: the full key, the value, what is allowed, and a suggestion. The class itself checks
whether the values make sense.

Which classes `_target_` may name is checked in `targets`.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fp4train.config.folders import own_options
from fp4train.config.plugins import below, own_class
from fp4train.config.unknown import unknown_key
from fp4train.errors import UserError, check_local, user_errors
from fp4train.keys import MayDiffer, WrittenUnder
from fp4train.paths import ON_STORE, NamesDestination, NamesPath, is_hub_name

M = TypeVar("M")

MISSING = "???"
"""The value of a key that the user must set."""
MISSING_KEY = " is missing"
"""The end of the message about a key that is not there."""

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "null",
}


def bind(node: Any, hint: Any, path: str) -> Any:
    """The value or object of type `hint` that `node` describes.

    Args:
        node: values, as YAML gives them.
        hint: the type that is needed: a dataclass, protocol, scalar, tuple, list, mapping, Literal,
            or a union of them.
        path: the full key of `node`, for error messages.

    Raises:
        UserError: a key is unknown or missing, a value has another type or is refused by its class,
            or a `_target_` is not a configuration class (see `own_class`).
    """
    options = types_of(hint)
    if isinstance(node, str) and node == MISSING:
        raise UserError(f"{path} must be given: {path}=…")
    if isinstance(node, str) and ":/" in node and takes_path(hint):
        check_local(node, path, stores=mark_of(hint, NamesPath) == ON_STORE)
    if isinstance(node, Mapping):
        return _bind_mapping(node, options, path, mark_of(hint, WrittenUnder))
    for option in options:
        if not is_sequence(option) or type(node) in options:
            continue
        if isinstance(node, (list, tuple)):
            return _bind_sequence(node, option, path)
        if isinstance(node, str) and not _holds_numbers(option):
            return _bind_sequence((node,), option, path)
    return _bind_scalar(node, options, path)


def complete(node: Any, hint: Any) -> Any:
    """`node` with its classes' defaults filled in, and each class by its full name.

    Keys that no class has are kept, and missing values are not reported.
    """
    if not isinstance(node, Mapping):
        return node
    kind, hints = _described(node, hint)
    completed = {str(key): complete(value, hints(str(key))) for key, value in node.items()}
    if kind is not None:
        completed["_target_"] = _full_name(kind)
        for name, field in _fields(kind).items():
            if name not in completed and (default := default_of(field)) is not dataclasses.MISSING:
                completed[name] = as_node(default)
    return completed


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyField:
    """A key of a configuration, as its class has it.

    Args:
        path: the full key; `name` is its last part.
        owner: the class of the section that the key is in; None: a section without one.
        hint: the type that the value needs.
        value: the value, as plain values.
    """

    path: str
    owner: type | None
    hint: Any
    value: Any

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def may_differ(self) -> MayDiffer:
        """The uses for which the key, or every key of the section, may differ."""
        return mark_of(self.hint, MayDiffer) or MayDiffer(0)

    @property
    def allowed(self) -> str:
        """What the key takes, in words; empty for a section."""
        if isinstance(self.value, Mapping):
            return ""
        return _allowed(types_of(self.hint))


def key_fields(node: Any, hint: Any, path: str = "") -> Iterator[KeyField]:
    """The keys below `node`, sections and values, without `_target_`."""
    if not isinstance(node, Mapping):
        return
    kind, hints = _described(node, hint)
    for key, value in node.items():
        if key == "_target_":
            continue
        where = below(path, key)
        needed = hints(str(key))
        yield KeyField(path=where, owner=kind, hint=needed, value=value)
        yield from key_fields(value, needed, where)


def differing_keys(node: Any, hint: Any, use: MayDiffer) -> tuple[str, ...]:
    """The full keys and sections of `node` that may differ for `use`, as their fields are
    marked.
    """
    return tuple(key.path for key in key_fields(complete(node, hint), hint) if use & key.may_differ)


def flattened(node: Any, prefix: str = "") -> dict[str, Any]:
    """Plain values by their full keys: {"train": {"steps": 3}} → {"train.steps": 3}."""
    if isinstance(node, Mapping) and node:
        return {
            k: v
            for key, value in node.items()
            for k, v in flattened(value, f"{prefix}{key}.").items()
        }
    return {prefix.rstrip("."): list(node) if isinstance(node, tuple) else node}


def unknown_keys(node: Any, hint: Any) -> Iterator[str]:
    """The full keys that the classes of a configuration do not have."""
    return (
        key.path
        for key in key_fields(node, hint)
        if key.owner is not None and key.name not in _fields(key.owner)
    )


def known_part(node: Any, hint: Any) -> Any:
    """`node` without the keys that its classes do not have."""
    if isinstance(node, list):
        kinds = [get_args(option)[0] for option in types_of(hint) if is_sequence(option)]
        return [known_part(item, kinds[0]) for item in node] if kinds else node
    if not isinstance(node, Mapping):
        return node
    kind, hints = _described(node, hint)
    keys = node if kind is None else _fields(kind)
    return {key: known_part(node[key], hints(str(key))) for key in node if key in keys}


def path_values(node: Any, hint: Any) -> Iterator[tuple[str, str]]:
    """(full key, value) of every text below `node` that names a file or folder, by the type of its
    field: `Path`, or one of `fp4train.paths`. A field's default is left out: its class names that.
    """
    for key, text, marks in _texts(node, hint):
        names = (mark for mark in marks if isinstance(mark, NamesPath))
        if any(not (mark.hub and is_hub_name(text)) for mark in names):
            yield key, text


def hub_names(node: Any, hint: Any) -> Iterator[tuple[str, str]]:
    """As `path_values`, of texts that name something on the Hugging Face hub."""
    for key, text, marks in _texts(node, hint):
        if any(isinstance(mark, NamesPath) and mark.hub for mark in marks) and is_hub_name(text):
            yield key, text


def destinations(node: Any, hint: Any) -> Iterator[tuple[str, str]]:
    """As `path_values`, of texts that say where data of the run are sent."""
    for key, text, marks in _texts(node, hint):
        if any(isinstance(mark, NamesDestination) for mark in marks):
            yield key, text


def names_destinations(target: object) -> bool:
    """Whether the configuration class `target` has fields that say where data are sent."""
    hints = _hints(own_class(target, "_target_")).values()
    return any(mark_of(hint, NamesDestination) is not None for hint in hints)


def _texts(node: Any, hint: Any, path: str = "") -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """(full key, value, marks) of every text below `node`, for each type that its field may
    have.
    """
    if isinstance(node, Mapping):
        kind, hints = _described(node, hint)
        if kind is None:
            defaults = {}
        else:
            defaults = {name: field.default for name, field in _fields(kind).items()}
        for key, value in node.items():
            if str(key) not in defaults or defaults[str(key)] != value:
                yield from _texts(value, hints(str(key)), below(path, key))
        return
    for option, marks in _branches(hint):
        if is_sequence(option) and isinstance(node, (list, tuple, str)):
            for item, kind in product([node] if isinstance(node, str) else node, get_args(option)):
                yield from _texts(item, kind, path)
        elif isinstance(node, str):
            yield path, node, (NamesPath(),) if option is Path else marks


def _branches(hint: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each type that a value may have, and the marks of the types that lead to it, outer ones
    first.
    """
    base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(base) in (Union, UnionType):
        for option in get_args(base):
            for kind, inner in _branches(option):
                yield kind, (*marks, *inner)
    else:
        yield base, tuple(marks)


def types_of(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    return tuple(option for option, _ in _branches(hint))


def mark_of(hint: Any, kind: type[M]) -> M | None:
    """The first mark of a class that leads to a type that a value may have."""
    marks = (mark for _, marks in _branches(hint) for mark in marks)
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def hint_of(key: str, node: Any, hint: Any) -> Any:
    """The type that a full key below `node` needs."""
    for part in key.split("."):
        section = node if isinstance(node, Mapping) else {}
        _, hints = _described(section, hint)
        hint = hints(part)
        node = section.get(part)
    return hint


def sections_of(node: Mapping[Any, Any], hint: Any) -> Iterator[tuple[str, Any, Any]]:
    """(Key, value, type that is needed) of what a section holds."""
    _, hints = _described(node, hint)
    return ((str(key), value, hints(str(key))) for key, value in node.items())


def takes_path(hint: Any) -> bool:
    """Whether a text of this type names a file or folder."""
    return Path in types_of(hint) or mark_of(hint, NamesPath) is not None


def _described(node: Mapping[Any, Any], hint: Any) -> tuple[type | None, Callable[[str], Any]]:
    """The dataclass, if any, that `node` describes where a `hint` is needed, and the types that its
    keys need; none of a class that a configuration may not name, which `bind` refuses.
    """
    options = types_of(hint)
    kind = next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)
    if "_target_" in node:
        try:
            kind = own_class(node["_target_"], "_target_")
        except UserError:
            return None, lambda key: Any
    if kind is not None:
        hints = _hints(kind)
        return kind, lambda key: hints.get(key, Any)
    item = next((get_args(o)[1] for o in options if _is_mapping(o)), Any)
    return None, lambda key: item


def is_sequence(hint: Any) -> bool:
    return get_origin(hint) in (tuple, list, Sequence)


def _holds_numbers(sequence: Any) -> bool:
    """Whether the items of a sequence are numbers, so that no text is one of them."""
    return set(types_of(get_args(sequence)[0])) <= {int, float, bool}


def _is_mapping(hint: Any) -> bool:
    return get_origin(hint) in (dict, Mapping)


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields."""
    with user_errors(
        NameError,
        before=f"{_full_name(kind)}: the type of a field cannot be resolved at run time: ",
    ):
        return get_type_hints(kind, include_extras=True)


def _fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields that a dataclass's constructor takes, by name."""
    return {f.name: f for f in dataclasses.fields(kind) if f.init}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; `dataclasses.MISSING`, which equals nothing, where it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def as_node(value: Any) -> Any:
    """An object, or a value, as a configuration would give it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {name: as_node(getattr(value, name)) for name in _fields(type(value))}
        return {"_target_": _full_name(type(value)), **values}
    if isinstance(value, tuple):
        return [as_node(item) for item in value]
    return value


def _bind_mapping(
    node: Mapping[Any, Any], options: tuple[Any, ...], path: str, mark: WrittenUnder | None
) -> Any:
    if "_target_" in node:
        kind = own_class(node["_target_"], below(path, "_target_"))
        reasons = [_why_not(kind, option) for option in options]
        if all(reasons):
            because = f": {reasons[0]}" if len(reasons) == 1 else ""
            raise UserError(
                f"{path}: {kind.__name__} cannot stand here; {_allowed(options)} is needed{because}"
            )
        return _construct(kind, {k: v for k, v in node.items() if k != "_target_"}, path, mark)
    for option in options:
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return _construct(option, node, path, mark)
        if _is_mapping(option):
            return {
                str(key): bind(value, get_args(option)[1], f"{path}.{key}")
                for key, value in node.items()
            }
        if option in (dict, Mapping, Any):
            return {str(key): bind(value, Any, f"{path}.{key}") for key, value in node.items()}
    raise UserError(f"{path}={dict(node)!r} must be {_allowed(options)}")


def _why_not(kind: type, option: Any) -> str | None:
    """Why an object of class `kind` cannot stand where `option` is needed; None: it can."""
    if not getattr(option, "_is_protocol", False):
        if option is Any or (isinstance(option, type) and issubclass(kind, option)):
            return None
        return f"it does not inherit from {getattr(option, '__name__', option)}"
    for name, member in vars(option).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            if name not in _fields(kind) and not hasattr(kind, name):
                return f"it has no {name}"
        elif not _takes(getattr(kind, name, None), member):
            parameters = list(inspect.signature(member).parameters)[1:]
            return f"it has no method {name}({', '.join(parameters)})"
    return None


def _takes(method: Any, protocol_method: Callable[..., Any]) -> bool:
    """Whether `method` takes the parameters of `protocol_method`, and needs no others."""
    if not callable(method):
        return False
    needed = inspect.signature(protocol_method).parameters
    accepted = inspect.signature(method).parameters
    additional = [parameter for name, parameter in accepted.items() if name not in needed]
    return set(needed) <= set(accepted) and all(
        p.default is not p.empty or p.kind == p.VAR_KEYWORD for p in additional
    )


def _construct(kind: type, node: Mapping[Any, Any], path: str, mark: WrittenUnder | None) -> Any:
    fields = _fields(kind)
    prefix = f"{path}." if path else ""
    for key in node:
        if key not in fields:
            raise unknown_key(f"{prefix}{key}", [prefix + name for name in fields])
    for name, field in fields.items():
        if name not in node and default_of(field) is dataclasses.MISSING:
            raise UserError(f"{prefix}{name}{MISSING_KEY}")
    hints = _hints(kind)
    values = {
        str(key): bind(value, hints[str(key)], prefix + str(key)) for key, value in node.items()
    }
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        message = str(error)
        if mark is not None:
            message = mark.placed(message, kind, path)
        if not message.startswith(prefix):
            message = f"{path or 'configuration'}: {message}"
        raise UserError(message) from error


def _bind_sequence(node: Sequence[Any], option: Any, path: str) -> tuple[Any, ...] | list[Any]:
    kinds = get_args(option)
    if get_origin(option) is tuple and kinds[-1] is not Ellipsis:
        if len(node) != len(kinds):
            raise UserError(f"{path}={list(node)!r} must hold {len(kinds)} values")
    else:
        kinds = (kinds[0],) * len(node)
    values = [
        bind(item, kind, f"{path}[{i}]")
        for i, (item, kind) in enumerate(zip(node, kinds, strict=True))
    ]
    if get_origin(option) is list:
        return values
    return tuple(values)


def _bind_scalar(node: Any, options: tuple[Any, ...], path: str) -> Any:
    if isinstance(node, float) and not math.isfinite(node):
        raise UserError(f"{path}={node} must be finite")
    if (
        isinstance(node, (int, float))
        and abs(node) >= 2**63
        and (isinstance(node, int) or float not in options)
    ):
        raise UserError(f"{path} is too large: it must lie within ±(2**63 - 1)")
    if Any in options or type(node) in options:
        return node
    if any(get_origin(option) is Literal and node in get_args(option) for option in options):
        return node
    # The command line's grammar reads 1 as an integer where 1.0 or "1" is meant.
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        if float in options:
            return float(node)
        if int in options and node == int(node):
            return int(node)
        if str in options:
            return str(node)
    if isinstance(node, str) and Path in options:
        if not node.strip():  # as an unset variable of a shell leaves it
            none = f", or {path}=null" if NoneType in options else ""
            raise UserError(f"{path} is empty: give a path{none}; . is the working directory")
        return Path(node)
    shown = repr(node)
    if node is None:
        shown = "null"
    elif isinstance(node, bool):
        shown = str(node).lower()
    group = path.replace(".", "/")
    if group != path and group in own_options():
        names = ", ".join(own_options()[group])
        raise UserError(
            f"{path}={shown}: an option of a group in a group is chosen with a slash, "
            f"{group}=NAME ({names})"
        )
    hint = ""
    if node is None and any(map(is_sequence, options)):
        hint = f": {path}=[] is an empty one"
    raise UserError(f"{path}={shown} must be {_allowed(options)}{hint}")


def _allowed(options: tuple[Any, ...]) -> str:
    """The types that are allowed, in words."""
    words = []
    for option in options:
        if option in _WORDS:
            words.append(_WORDS[option])
        elif is_sequence(option):
            words.append("a list")
        elif get_origin(option) is Literal:
            words.append("one of " + ", ".join(map(str, get_args(option))))
        else:
            name = str(getattr(option, "__name__", option))
            words.append(f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
    return " or ".join(dict.fromkeys(words))
