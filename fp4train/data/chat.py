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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fp4train.data.answers import VERSION, AnswerFinder, Conversation
from fp4train.data.cache import CacheEntry
from fp4train.data.chat_keys import ChatKeys
from fp4train.data.encoding import LONGEST, Encoded, encoding_key
from fp4train.data.files import shown, stamp
from fp4train.data.frames import ANSWERS
from fp4train.data.huggingface import record_files
from fp4train.data.packing import Learned, pack
from fp4train.data.records import parsed, read_objects
from fp4train.data.source import TextSource
from fp4train.data.stored import ShardedIds, TokenIds
from fp4train.data.template import MARKERS, ChatTemplate, find_template, kept_template
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
        ignore: keys, of records and of messages, that are passed over.
        template: a file with a Jinja2 template; None: that of the tokenizer's folder, or ChatML.
        val: the last conversations, held out for validation: a share below 1.
    """

    path: DataPaths
    column: str = "messages"
    ignore: tuple[str, ...] = ()
    template: PathText | None = None
    answers_only: ClassVar[bool] = True
    cache_dir: CacheFolder = "~/.cache/fp4train"

    def __post_init__(self) -> None:
        if not 0 < self.val < 1:
            raise ValueError(
                f"data.val={self.val}: conversations are held out by their share, between 0 and 1"
            )
        if needed := {self.column, "role", "content"}.intersection(self.ignore):
            raise ValueError(
                f"data.ignore={list(self.ignore)} holds {min(needed)}, which conversations are "
                "made of: leave it out"
            )
        super().__post_init__()

    def corpus(self, run_dir: Path) -> "_Conversations":
        paths = record_files(self.path)
        folder = None
        if isinstance(self.tokenizer, Pretrained):
            folder = self.tokenizer.name
            if is_hub_name(folder):
                folder = None if kept_template(run_dir) else str(self.tokenizer.folder)
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
        self.keys = ChatKeys(
            column=settings.column,
            template=frozenset(template.names),
            ignored=frozenset(settings.ignore),
        )
        self.count = sum(1 for _ in _talks(paths, self.keys))
        if self.count < 2:
            raise DataError(
                f"data.path={shown(settings.path)} holds {self.count} conversations: at least 2 "
                "are needed, one held out"
            )

    @property
    def documents(self) -> Documents:
        return self._texts

    def entries(self, tokenizer: Tokenizer, seq_len: int) -> Sequence[CacheEntry]:
        held_out = min(max(1, round(self.count * self.settings.val)), self.count - 1)
        cut = self.count - held_out
        return [
            self._entry(numbers, tokenizer, seq_len)
            for numbers in (range(cut), range(cut, self.count))
        ]

    def tokens(self, tokenizer: Tokenizer, seq_len: int) -> TokenData:
        of_train, of_val = self.entries(tokenizer, seq_len)
        train, answers = _part("train", of_train.ids(), tokenizer)
        val, held_answers = _part("val", of_val.ids(), tokenizer)
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

    def _entry(self, numbers: range, tokenizer: Tokenizer, seq_len: int) -> CacheEntry:
        """The tokens of some conversations, and what is said of each, in the cache."""
        dtype = ids_dtype(tokenizer.vocab_size)
        key = {
            "source": "chat",
            "part": [numbers.start, numbers.stop],
            "files": stamp(self.paths),
            "column": self.settings.column,
            "ignore": sorted(self.settings.ignore),
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

        return CacheEntry.of_ids(self.settings.cache_dir, key, [packed], dtype)

    def _talks(self, numbers: range, special: Sequence[str]) -> Iterator[tuple[str, _Talk]]:
        """The place and the messages of the conversations of these `numbers`."""
        for number, (at, record) in enumerate(_talks(self.paths, self.keys)):
            if number in numbers:
                with data_errors(ValueError, RecursionError, before=f"{at}: "):
                    talk = _talk(record, self.keys, special)
                yield at, talk


def _part(name: str, cached: ShardedIds, tokenizer: Tokenizer) -> tuple[TokenArray, TokenIds]:
    """The tokens of an entry, and of each whether it is learned."""
    length = len(cached) // PARTS
    ids, scored, inner = (
        cached[length * number : length * (number + 1)] for number in range(PARTS)
    )
    array = TokenArray(ids, tokenizer.vocab_size, name, scored=scored, inner_ends=inner)
    return array, scored


def _talks(paths: Sequence[Path], keys: ChatKeys) -> Iterator[tuple[str, Any]]:
    """The place and the value of each record of the files."""
    for path in paths:
        for place, value in read_objects(path, keys.columns, "data=chat"):
            yield f"{path}, {place}", value


def _talk(record: Any, keys: ChatKeys, special: Sequence[str]) -> _Talk:
    """The messages of a record.

    Raises:
        ValueError: it holds none, a key that may not be passed over, or a content that spells what
            separates messages.
    """
    keys.check(record)
    messages = record[keys.column]
    if isinstance(messages, str):
        refused = f'"{keys.column}" holds text that is no list of messages in JSON: '
        with data_errors(ValueError, before=refused):
            messages = parsed(messages)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"{keys.column}" holds no list of messages')
    contents = []
    unlearned = set()
    for number, message in enumerate(messages):
        place = f"message {number + 1}"
        content, learned = keys.read(place, message)
        _check_text(place, content, special)
        contents.append(content)
        if not learned:
            unlearned.add(number)
    return contents, unlearned


def _check_text(place: str, message: Mapping[str, Any], special: Sequence[str]) -> None:
    """Refuse a message that spells what separates messages.

    Args:
        place: its number, for messages.
    """
    text = message["role"] + message["content"]
    separating = [
        token for token in special if message["role"] != ANSWERS or not _encloses(token, special)
    ]
    if spelt := [token for token in separating if token in text]:
        raise ValueError(f"{place} spells {spelt[0]}, which separates messages")
    if lone := _HALF.search(text):
        raise ValueError(f"{place} holds half of a UTF-16 pair, {lone[0]!a}, which is no character")


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
