"""Formats, and other parts of a `QuantSpec`, by the names that YAML uses.

A registry begins with the program's own entries; a plugin adds its own when it is imported
(`fp4train.quantize.register`). A name stands for one definition, so that a recipe means the same
wherever it is read.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence
from types import FunctionType
from typing import Any, Protocol, TypeVar

from fp4train.text import near_miss

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""What an entry may be called."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


EntryType = TypeVar("EntryType", bound=Named)


class Registry(Collection[EntryType]):
    """Entries by name, in the order in which they were added.

    Args:
        kind: the word for an entry in messages: "element format".
        own: the program's own entries.
    """

    def __init__(self, kind: str, own: Sequence[EntryType]) -> None:
        self.kind = kind
        self._own = frozenset(entry.name for entry in own)
        self._entries = {entry.name: entry for entry in own}

    def __iter__(self) -> Iterator[EntryType]:
        return iter(tuple(self._entries.values()))

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries.values()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self._entries)

    def is_own(self, name: str) -> bool:
        """Whether the name is that of one of the program's own entries."""
        return name in self._own

    def get(self, name: str) -> EntryType:
        """The entry called `name`.

        Raises:
            ValueError: there is none; the message has the near miss and all names.
        """
        if isinstance(name, str) and name in self._entries:
            return self._entries[name]
        raise ValueError(
            f"{self.kind} {name!r} is unknown{near_miss(str(name), self.names)} (known: "
            f"{', '.join(self.names)}; one of a plugin is known where plugins=[…] names it)"
        )

    def add(self, entry: EntryType) -> None:
        """Add an entry. A definition that is imported again takes the place of itself.

        Raises:
            ValueError: its name is no name, or that of another definition.
        """
        name = entry.name
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"{self.kind} name={name!r}: allowed are a letter, then letters, digits and _, all "
                "lower case, 32 characters at most"
            )
        present = self._entries.get(name)
        if present is not None and _definition(present) != _definition(entry):
            whose = "fp4train's own" if name in self._own else f"defined already: {present!r}"
            raise ValueError(
                f"{self.kind} name={name!r} is taken ({whose}): give the new one another name"
            )
        if name not in self._own:
            self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Take back an entry that was added; objects that hold it keep it.

        Raises:
            ValueError: there is none, or it is the program's own.
        """
        if name in self._own or name not in self._entries:
            raise ValueError(f"{self.kind} {name!r}: it was not added, so it cannot be removed")
        del self._entries[name]


def _definition(entry: Any) -> tuple[object, ...]:
    """What an entry is, the same after its module was imported again: its class with the code of
    its methods, and its fields.
    """
    kind = type(entry)
    values = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    functions = {name: value for name, value in values.items() if isinstance(value, FunctionType)}
    methods = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    code = [_code(function) for function in (*functions.values(), *methods)]
    return kind.__module__, kind.__qualname__, repr({**values, **dict.fromkeys(functions)}), code


def _code(function: FunctionType) -> tuple[object, ...]:
    code = function.__code__
    numbers = [value for value in code.co_consts if isinstance(value, int | float | str)]
    return function.__qualname__, code.co_code, code.co_names, numbers
