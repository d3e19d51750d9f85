"""The keys of a conversation and of its messages: what is read, passed over, and refused.

Read are the messages, and of a message its role, its content, and the keys that say whether it is
learned. Notes such as an id are passed over. What a template would write, or what may choose what is
learned, is refused until the user names it in `data.ignore`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from fp4train.data.frames import ANSWERS
from fp4train.data.records import Repeated, name_of, parsed
from fp4train.data.tables import column_place, holds_text
from fp4train.errors import DataError

_RENDERED = ("tools", "documents", "functions", "system", "chat_template_kwargs")
"""Keys of a record, beside the messages, that templates write, or that say what the first message
should.
"""
_LOSS_KEYS = ("weight", "loss", "train", "training", "trainable", "loss_mask")
"""Keys of a message that say whether it is learned: 1 or true, 0 or false."""
_LEARNING = re.compile(
    "(no|un)?(train|learn|los|mask|weigh|supervis|skip|ignor|exclu|inclu|select|target|keep|kept|omit|"
    "drop|discard).*|sft|grad|only"
)
"""Words of keys that may say what is learned."""
_OUT = re.compile(
    "(no|not|un|dont)[_-]?(train|learn|los|supervis).*|(mask|skip|ignor|exclu|omit|drop|discard)[a-z]*",
    re.IGNORECASE,
)
"""Values of notes that say that something is not learned."""
_NOTES = (
    "at author channel conversation cost count country created date end finish hash hashed header id "
    "identifier idx index ip lang language latency length message meta metadata model name "
    "nickname num number openai origin parent provider quality rank rating reason recipient redacted "
    "review score seed sender source speaker state status stop synthetic time timestamp token toxic ts "
    "turn type uid updated url usage user username uuid version"
)
"""Words, without a plural s, of keys that say what a record or a message is, not what is learned of
it.
"""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_a-zA-Z]+")
NUMBERS = (int, float, Decimal)
"""Numbers and truth values of JSON and of tables."""
_EMPTY: tuple[Any, ...] = (None, "", [], {}, "[]", "{}", "null")


@dataclass(frozen=True, kw_only=True)
class ChatKeys:
    """The keys of a file of conversations.

    Args:
        column: the key of a record that holds the messages.
        template: names that the chat template reads.
        ignored: keys, of records and of messages, that the user says to pass over.
    """

    column: str
    template: frozenset[str]
    ignored: frozenset[str]

    @property
    def rendered(self) -> frozenset[str]:
        """Keys beside the messages that would change the text."""
        return self.template.union(_RENDERED) - {self.column, "messages"}

    def columns(self, path: Path, schema: Any) -> list[int]:
        """The places of the column of messages in a table, and of those that `check` looks at.

        Raises:
            DataError: there is no column of messages of this name.
        """
        if self.column not in schema.names:
            listing = ", ".join(schema.names[:50])
            likely = _likely(part.name for part in schema if _holds_messages(part.type))
            raise DataError(
                f"data.column={self.column} is not in {path}. Its columns: {listing or 'none'} "
                f"({likely})"
            )
        number = column_place(path, schema, self.column)
        kind = schema.field(number).type
        if not _holds_messages(kind) and not holds_text(kind):
            raise DataError(
                f"data.column={self.column} of {path} holds {kind}, neither lists of messages nor "
                "text that is such a list in JSON"
            )
        beside = [
            place
            for place, part in enumerate(schema)
            if place != number and self._is_checked(part.name, part.type)
        ]
        return [number, *beside]

    def _is_checked(self, name: str, kind: Any) -> bool:
        import pyarrow.types as types

        if name in self.ignored:
            return False
        return name in self.rendered or _is_of_learning(name) or types.is_nested(kind)

    def check(self, record: Any) -> None:
        """Refuse a record without messages, or with a key beside them that may change what is
        learned.

        Raises:
            ValueError: it says which key, and what to do.
        """
        if not isinstance(record, dict):
            raise ValueError(f"it is no JSON object but {name_of(record)}")
        if self.column not in record:
            likely = _likely(
                key
                for key, value in record.items()
                if isinstance(value, list) and value and isinstance(value[0], dict)
            )
            raise ValueError(
                f'it has no "{self.column}"; its keys: {", ".join(record) or "none"} ({likely})'
            )
        for key, value in record.items():
            all_is_learned = key in _LOSS_KEYS and value == 1
            if key in (self.column, *self.ignored) or value in _EMPTY or all_is_learned:
                continue
            if key in self.rendered:
                raise ValueError(
                    f'it has "{key}" beside "{self.column}", and only messages are read: write it '
                    f"into a message, or set data.ignore=[{key}] to leave it out"
                )
            if _may_select(key, value):
                raise ValueError(
                    f'"{key}" beside "{self.column}" may say which messages are learned, and is not '
                    'read: give each message a "weight" of 0 or 1, or set '
                    f"data.ignore=[{key}] if it says something else"
                )

    def read(self, place: str, message: Any) -> tuple[dict[str, Any], bool]:
        """A message without keys that say nothing, and whether it may be learned.

        Args:
            place: its number, for messages.

        Raises:
            ValueError: it is no message, has a key that is not read, or one that cannot be obeyed.
        """
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f"{place} is no object with a role and a content, both of them text; "
                f"{_parts_of(message)}"
            )
        content = {
            key: value
            for key, value in message.items()
            if key in ("role", "content")
            or (key not in self.ignored and not _is_absent(key, value))
        }
        for key, value in content.items():
            if key in ("role", "content", *_LOSS_KEYS):
                continue
            if not _is_note(key) or _may_select(key, value):
                raise ValueError(
                    f"{place} has {key!r}, which is not supported: only role, content, and a weight "
                    f"of 0 or 1 are. To leave it out, set data.ignore=[{key}]"
                )
        return content, _is_learned(place, content)


def _is_absent(key: str, value: Any) -> bool:
    """Whether a key of a message says nothing; a key of the loss that is not null says something."""
    return value is None if key in _LOSS_KEYS else value in _EMPTY


def _words(key: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(key)}


def _is_of_learning(key: str) -> bool:
    """Whether a word of a key may speak of learning; of one that is not in English nobody knows."""
    return any(_LEARNING.fullmatch(word) or not word.isascii() for word in _words(key))


def _is_note(key: str) -> bool:
    notes = _NOTES.split()
    words = _words(key)
    return bool(words) and all(word in notes or word.removesuffix("s") in notes for word in words)


def _may_select(key: str, value: Any, *, noted: bool = False) -> bool:
    """Whether what stands under a key, or within it, may say what is learned: anything under a name
    of learning, a word such as "masked", and numbers in a list that is no note.
    """
    if value in _EMPTY:
        return False
    if _is_of_learning(key):
        return True
    noted = noted or _is_note(key)
    if isinstance(value, str):
        if value.lstrip()[:1] not in ("{", "["):
            return _OUT.fullmatch(value) is not None
        try:
            return _may_select(key, parsed(value), noted=noted)
        except ValueError:
            return False
    if isinstance(value, dict):
        return any(_may_select(inner, part, noted=noted) for inner, part in value.items())
    if isinstance(value, Repeated):
        return any(_may_select(key, part, noted=noted) for part in value)
    if isinstance(value, tuple):  # an entry of a map in a table
        return _may_select(str(value[0]), value[1], noted=noted)
    if isinstance(value, bytes):
        return not noted
    if not isinstance(value, list):
        return False
    numbers = any(isinstance(part, NUMBERS) for part in value)
    return (numbers and not noted) or any(_may_select(key, part, noted=noted) for part in value)


def _holds_messages(kind: Any) -> bool:
    """Whether a column of this type of Arrow holds lists of objects."""
    import pyarrow.types as types

    checks = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    is_list = any(check(kind) for check in checks)
    return is_list and bool(types.is_struct(kind.value_type))


def _likely(columns: Iterable[str]) -> str:
    """Where messages may be: the first column that holds lists of objects."""
    for column in columns:
        return f"data.column={column}"
    return "none holds messages"


def _is_learned(place: str, message: Mapping[str, Any]) -> bool:
    """Whether no key of a message takes it out of the loss.

    Raises:
        ValueError: a key says something else, two disagree, or it is no answer that is to be
            learned.
    """
    flags = {key: message[key] for key in _LOSS_KEYS if message.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, NUMBERS) or value not in (0, 1):
            if isinstance(value, Repeated):
                raise ValueError(f'{place} has "{key}" several times: {value!r}. Write it once')
            raise ValueError(
                f'{place} has "{key}": {value!r}, and a message is learned (1 or true) or not (0 or '
                "false)"
            )
    if len(set(flags.values())) > 1:
        listing = ", ".join(f'"{key}": {value!r}' for key, value in flags.items())
        raise ValueError(f"{place} has {listing}: nobody says which is meant. Write it with one")
    if 1 in flags.values() and message["role"] != ANSWERS:
        raise ValueError(
            f'{place}, of the role "{message["role"]}", has "{next(iter(flags))}", as if it were to '
            f'be learned, and only messages of the role "{ANSWERS}" are: leave it out'
        )
    return 0 not in flags.values()


def _parts_of(message: Any) -> str:
    """What stands where a message should, and how ShareGPT's keys become those of one."""
    if not isinstance(message, dict):
        return f"it is {name_of(message)}"
    parts = [
        key if isinstance(value, str) else f"{key} ({name_of(value)})"
        for key, value in message.items()
    ]
    there = f"it has: {', '.join(parts)[:100] or 'nothing'}"
    if {"from", "value"} <= set(message):
        there += ". Write from as role, human and gpt as user and assistant, and value as content"
    return there
