"""`data=chat data.path=FILE.jsonl`: conversations, of which a model learns the answers (supervised
fine-tuning).

A record, in JSON, Parquet or Arrow, has a `column` with messages, each with a role and a content:

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}

A chat template makes text of them (`template.py`), which is encoded as one; the loss is that of the
answers alone, with what ends each (`answers.py`), without those that a key of their message takes
out, such as "weight": 0. Each conversation lies whole in a sequence of
train.seq_len tokens (`packing.py`), and attends to itself alone (`train.document_mask`).
"""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fp4train.data.answers import VERSION, AnswerFinder, Conversation
from fp4train.data.cache import cached_tokens
from fp4train.data.encoding import LONGEST, Encoded, encoding_key
from fp4train.data.files import shown, stamp
from fp4train.data.frames import ANSWERS
from fp4train.data.huggingface import record_files
from fp4train.data.packing import Learned, pack
from fp4train.data.records import column_place, holds_text, name_of, parsed, read_objects
from fp4train.data.source import TextSource
from fp4train.data.stored import TokenIds
from fp4train.data.template import MARKERS, ChatTemplate, find_template
from fp4train.data.token_array import TokenArray
from fp4train.data.tokenizers import Pretrained
from fp4train.data.tokens import (
    Documents,
    Ids,
    Piece,
    TokenData,
    Tokenizer,
    fingerprint,
    ids_dtype,
)
from fp4train.errors import DataError, data_errors
from fp4train.paths import CacheFolder, DataPaths, PathText, is_hub_name

_RENDERED = ("tools", "documents", "functions", "system", "chat_template_kwargs")
"""Keys of a record, beside the messages, that templates write, or that say what the first message
should.
"""
_LEARNING = (
    "weight los loss train training trained untrained trainable mask masked learn learned learnable "
    "supervised"
)
"""Words, without a last s, of keys that say what is learned."""
_TURNS = "on turn message role assistant"
"""Words, without a last s, of keys that say of which messages."""
_LOSS_KEYS = ("weight", "loss", "train", "training", "trainable", "loss_mask")
"""Keys of a message that say whether it is learned: 1 or true, 0 or false."""
_NOTES = (
    "at author conversation cost count country created date deleted finish hash hashed header id "
    "identifier idx index ip lang language latency length message meta metadata model name "
    "nickname num number openai origin parent provider quality rank rating reason redacted review score seed "
    "sender source speaker state status stop synthetic time timestamp token tokens toxic ts turn uid updated "
    "url usage user username uuid version"
)
"""Words of the keys that a message may have beside: they say what it is, not what is learned."""
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+")
_OFF = re.compile("0|false|[01]{2,}")
_SWITCHES = (None, "0", "1", "true", "false")
_EMPTY: tuple[Any, ...] = (None, "", [], {}, "[]", "{}", "null")
_HALF = re.compile("[\ud800-\udfff]")

_Talk = tuple[list[dict[str, Any]], set[int]]
"""The messages of a record, and the numbers of those that a key takes out of the loss."""

PARTS = 3
"""Arrays of a cached entry: ids, which are scored, and which end a document within a
conversation.
"""


@dataclass(frozen=True, kw_only=True)
class Chat(TextSource):
    """Conversations of a file of records, or of those below a folder.

    Args:
        path: the file or folder.
        column: the key of a record that holds the messages.
        template: a file with a Jinja2 template; None: that of the tokenizer's folder, or ChatML.
        val: the last conversations, held out for validation: a share below 1.
    """

    path: DataPaths
    column: str = "messages"
    template: PathText | None = None
    answers_only: ClassVar[bool] = True
    cache_dir: CacheFolder = "~/.cache/fp4train"

    def __post_init__(self) -> None:
        if not 0 < self.val < 1:
            raise ValueError(
                f"data.val={self.val}: conversations are held out by their share, between 0 and 1"
            )
        super().__post_init__()

    def corpus(self, run_dir: Path) -> "_Conversations":
        paths = record_files(self.path)
        folder = None
        if isinstance(self.tokenizer, Pretrained) and not is_hub_name(self.tokenizer.name):
            folder = self.tokenizer.name
        template = find_template(self.template, folder, run_dir)
        return _Conversations(self, paths, template)


class _Conversations:
    """The conversations of all files, in the text that a template makes of them.

    Raises:
        DataError: there are too few.
    """

    def __init__(self, settings: Chat, paths: Sequence[Path], template: ChatTemplate) -> None:
        self.settings = settings
        self.paths = paths
        self.template = template
        self.rendered = {*_RENDERED, *_LOSS_KEYS, *template.names} - {settings.column, "messages"}
        self.count = sum(1 for _ in _talks(paths, settings.column, self.rendered))
        if self.count < 2:
            raise DataError(
                f"data.path={shown(settings.path)} holds {self.count} conversations: at least 2 "
                "are needed, one held out"
            )

    @property
    def documents(self) -> Documents:
        return self._texts

    def tokens(self, tokenizer: Tokenizer, seq_len: int) -> TokenData:
        held_out = min(max(1, round(self.count * self.settings.val)), self.count - 1)
        cut = self.count - held_out
        train, answers = self._part("train", range(cut), tokenizer, seq_len)
        val, held_answers = self._part("val", range(cut, self.count), tokenizer, seq_len)
        size = (
            f"{len(train):,} training and {len(val):,} validation tokens, vocabulary "
            f"{tokenizer.vocab_size:,}"
        )
        share = int(np.count_nonzero(np.asarray(answers))) / len(train)
        return TokenData(
            tokenizer.vocab_size,
            train,
            val,
            tokenizer,
            f"{shown(self.settings.path)}, {self.count:,} conversations: {size}; {share:.0%} of "
            "the training tokens are answers",
            digest=fingerprint(answers) + fingerprint(held_answers),
        )

    def _texts(self) -> Iterator[Piece]:
        finder = self.template.finder()
        for at, talk in self._talks(range(self.count), ()):
            yield Piece(_conversation(finder, talk, at).text)

    def _part(
        self, name: str, numbers: range, tokenizer: Tokenizer, seq_len: int
    ) -> tuple[TokenArray, TokenIds]:
        """The tokens of some conversations, and of each whether it is learned."""
        dtype = ids_dtype(tokenizer.vocab_size)
        key = {
            "source": "chat",
            "part": [numbers.start, numbers.stop],
            "files": stamp(self.paths),
            "column": self.settings.column,
            "seq_len": seq_len,
            "template": self.template.key,
            "parts": PARTS,
            "answers": VERSION,
            **encoding_key(tokenizer),
        }

        def packed() -> Iterator[Ids]:
            markers = MARKERS if MARKERS[0] in self.template.source else ()
            special = (*getattr(tokenizer, "special_tokens", ()), *markers)
            finder = self.template.finder(special)
            learned = (
                _learned(tokenizer, _conversation(finder, talk, at), at)
                for at, talk in self._talks(numbers, special)
            )
            yield from pack(learned, tokenizer.end_of_document, seq_len, dtype)

        cached = cached_tokens(self.settings.cache_dir, key, packed, dtype=dtype)
        length = len(cached) // PARTS
        ids, scored, inner = (
            cached[length * number : length * (number + 1)] for number in range(PARTS)
        )
        array = TokenArray(ids, tokenizer.vocab_size, name, scored=scored, inner_ends=inner)
        return array, scored

    def _talks(self, numbers: range, special: Sequence[str]) -> Iterator[tuple[str, _Talk]]:
        """The place and the messages of the conversations of these `numbers`."""
        column = self.settings.column
        for number, (at, record) in enumerate(_talks(self.paths, column, self.rendered)):
            if number in numbers:
                with data_errors(ValueError, RecursionError, before=f"{at}: "):
                    talk = _talk(record, column, self.rendered, special)
                yield at, talk


def _talks(
    paths: Sequence[Path], column: str, rendered: Container[str]
) -> Iterator[tuple[str, Any]]:
    """The place and the value of each record of the files."""
    for path in paths:
        columns = partial(_talk_columns, column=column, rendered=rendered)
        for place, value in read_objects(path, columns, "data=chat"):
            yield f"{path}, {place}", value


def _talk_columns(path: Path, schema: Any, column: str, rendered: Container[str]) -> list[int]:
    """The places of the column of messages in a table, and of those beside it that a template would
    render, or that may say what is learned.

    Raises:
        DataError: there is no column of messages of this name.
    """
    import pyarrow.types as types

    def holds_messages(kind: Any) -> bool:
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        return bool(is_list and types.is_struct(kind.value_type))

    if column not in schema.names:
        listing = ", ".join(schema.names[:50])
        likely = _likely([part.name for part in schema if holds_messages(part.type)])
        raise DataError(
            f"data.column={column} is not in {path}. Its columns: {listing or 'none'} ({likely})"
        )
    number = column_place(path, schema, column)
    kind = schema.field(number).type
    if not holds_messages(kind) and not holds_text(kind):
        raise DataError(
            f"data.column={column} of {path} holds {kind}, neither lists of messages nor text that "
            "is such a list in JSON"
        )

    def may_select(name: str, kind: Any) -> bool:
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        ids = is_list and (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type))
        return name in rendered or ids or _has_word(name, _LEARNING)

    beside = [
        place
        for place, part in enumerate(schema)
        if place != number and may_select(part.name, part.type)
    ]
    return [number, *beside]


def _likely(columns: Sequence[str]) -> str:
    """Where messages may be: the first column that holds lists of objects."""
    if columns:
        return f"data.column={columns[0]}"
    return "none holds messages"


def _talk(record: Any, column: str, rendered: Container[str], special: Sequence[str]) -> _Talk:
    """The messages of a record.

    Raises:
        ValueError: it holds none, or a content spells what separates messages.
    """
    if not isinstance(record, dict):
        raise ValueError(f"it is no JSON object but {name_of(record)}")
    if column not in record:
        lists = {key: value for key, value in record.items() if isinstance(value, list)}
        likely = _likely(
            [key for key, value in lists.items() if value and isinstance(value[0], dict)]
        )
        raise ValueError(
            f'it has no "{column}"; its keys: {", ".join(record) or "none"} ({likely})'
        )
    unread = [
        key
        for key, value in record.items()
        if key in rendered and value not in _EMPTY and not (key in _LOSS_KEYS and value == 1)
    ]
    if unread:
        raise ValueError(
            f'it has "{unread[0]}" beside "{column}", which is not supported: only messages '
            "are read. Leave it out, or write it into a message"
        )
    messages = record[column]
    if isinstance(messages, str):
        refused = f'"{column}" holds text that is no list of messages in JSON: '
        with data_errors(ValueError, before=refused):
            messages = parsed(messages)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"{column}" holds no list of messages')
    for key, value in record.items():
        if _seems_to_select(key, value, len(messages)):
            raise ValueError(
                f'"{key}" beside "{column}" seems to say which messages are learned, and is not '
                f'read: give each message a "weight" of 0 or 1, and leave "{key}" out'
            )
    unlearned = set()
    for number, message in enumerate(messages):
        place = f"message {number + 1}"
        _check_message(place, message, special)
        if not _is_learned(place, message):
            unlearned.add(number)
    return [_without_empty(message) for message in messages], unlearned


def _seems_to_select(key: str, value: Any, messages: int) -> bool:
    """Whether what stands beside so many messages says which of them are learned: ids that no loss
    is taken of; a 0 or 1 for each; under a name like "train_mask" values that are not all 1; under
    one like "train_on_turn" any.
    """
    if value in _EMPTY or (key in _LOSS_KEYS and value == 1):
        return False
    of_learning = _has_word(key, _LEARNING)
    if of_learning and _has_word(key, _TURNS):
        return True
    if not isinstance(value, list | dict):
        is_off = value == 0 or (isinstance(value, str) and _OFF.fullmatch(value.lower()))
        return of_learning and bool(is_off)
    leaves = _leaves(value)
    if any(type(leaf) is int and leaf == -100 for leaf in leaves):
        return True
    uneven = any(leaf not in (1, "1", "true") for leaf in leaves)
    if of_learning:
        return uneven and all(isinstance(leaf, int | float) or leaf in _SWITCHES for leaf in leaves)
    is_mask = isinstance(value, list) and len(value) == messages and set(leaves) <= {0, 1}
    return is_mask and uneven and not _words(key) <= {*_NOTES.split()}


def _leaves(value: Any) -> list[Any]:
    """What nested lists and objects hold."""
    leaves = []
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            waiting += node.values()
        else:
            leaves.append(node)
    return leaves


def _words(key: str) -> set[str]:
    return {word.lower().removesuffix("s") for word in _WORD.findall(key)}


def _has_word(key: str, words: str) -> bool:
    return not _words(key).isdisjoint(words.split())


def _without_empty(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without keys that say nothing."""
    return {
        key: value
        for key, value in message.items()
        if key in ("role", "content") or value not in _EMPTY
    }


def _check_message(place: str, message: Any, special: Sequence[str]) -> None:
    """Refuse what is no message, spells what separates messages, or has keys that are not read.

    Args:
        place: its number, for messages.
    """
    if not isinstance(message, dict) or not all(
        isinstance(message.get(key), str) for key in ("role", "content")
    ):
        raise ValueError(
            f"{place} is no object with a role and a content, both of them text; "
            f"{_parts_of(message)}"
        )
    text = message["role"] + message["content"]
    separating = [
        token for token in special if message["role"] != ANSWERS or not _encloses(token, special)
    ]
    if spelt := [token for token in separating if token in text]:
        raise ValueError(f"{place} spells {spelt[0]}, which separates messages")
    if lone := _HALF.search(text):
        raise ValueError(f"{place} holds half of a UTF-16 pair, {lone[0]!a}, which is no character")
    for key in _without_empty(message):
        words = {word.lower() for word in _WORD.findall(key)}
        known = key in ("role", "content", *_LOSS_KEYS) or (words and words <= {*_NOTES.split()})
        if not known:
            raise ValueError(
                f"{place} has {key!r}, which is not supported: only role, content, and a weight of "
                "0 or 1 are"
            )


def _is_learned(place: str, message: Mapping[str, Any]) -> bool:
    """Whether no key of a message takes it out of the loss.

    Raises:
        ValueError: a key says something else, two disagree, or it is no answer that is to be
            learned.
    """
    flags = {key: message[key] for key in _LOSS_KEYS if message.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
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


def _encloses(token: str, special: Sequence[str]) -> bool:
    """Whether a special token is one of a pair that answers write themselves, as `<think>` and
    `</think>`.
    """
    name = token.strip("</>")
    return (
        len(name) > 1
        and token in (f"<{name}>", f"</{name}>")
        and {f"<{name}>", f"</{name}>"} <= set(special)
    )


def _conversation(finder: AnswerFinder, talk: _Talk, at: str) -> Conversation:
    messages, unlearned = talk
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    with data_errors(ValueError, before=f"{at}: "):
        conversation = finder.find(plain)
        if messages == plain:
            return conversation
        return finder.without(conversation, messages, unlearned)


def _learned(tokenizer: Tokenizer, conversation: Conversation, at: str) -> Learned:
    """The ids of a conversation and which of them are learned: those with a character of an
    answer.
    """
    encoded = _encoded(tokenizer, conversation, at)
    learned = np.zeros(len(conversation.text) + 1, dtype=np.int64)
    for start, end in conversation.answers:
        learned[start + 1 : end + 1] = 1
    answered = learned.cumsum()  # characters of answers before each character
    ends = np.minimum(np.maximum(encoded.ends, encoded.starts + 1), len(conversation.text))
    return Learned(encoded.ids, answered[ends] > answered[encoded.starts])


def _encoded(tokenizer: Tokenizer, conversation: Conversation, at: str) -> Encoded:
    """The ids of the whole text, with the characters that each stands for."""
    text = conversation.text
    if len(text) > LONGEST and not getattr(tokenizer, "concatenates", False):
        raise DataError(
            f"{at}: the conversation has {len(text):,} characters; up to {LONGEST:,} are encoded"
        )
    if (markup := getattr(tokenizer, "encode_markup", None)) is not None:
        encoded: Encoded = markup(text)
        return encoded
    # A tokenizer of somebody else: its ids are told apart only if those of parts are those of the
    # whole.
    borders = sorted({0, len(text), *(border for span in conversation.answers for border in span)})
    parts = [tokenizer.encode(text[start:end]) for start, end in pairwise(borders)]
    ids = np.array([token for part in parts for token in part], dtype=np.uint32)
    if not np.array_equal(ids, tokenizer.encode(text)):
        raise DataError(
            f"{at}: {type(tokenizer).__name__} encodes answers differently within the "
            "conversation: it needs a method `encode_markup` "
            "(fp4train.data.tokenizers.json_file)"
        )
    starts, ends = (
        np.repeat(
            [span[place] for span in pairwise(borders)], [len(part) for part in parts]
        ).astype(np.int64)
        for place in (0, 1)
    )
    return Encoded(ids, starts, ends, np.ones(len(ids), dtype=np.bool_))
