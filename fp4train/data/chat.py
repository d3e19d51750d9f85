"""`data=chat data.path=FILE.jsonl`: conversations, of which a model learns the answers (supervised fine-tuning).

A line is a JSON object whose `column` holds messages, each with a role and a content:

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}

A chat template makes text of them (`template.py`); the loss is that of the answers, with what ends each, alone.

Conversations are packed into sequences of train.seq_len tokens: each goes, in order, into the fullest of the last
`OPEN` sequences that has room, and none is divided. The rest of a sequence is filled with ends of documents. Tokens
attend within their own conversation (`train.document_mask`). One that is longer than a sequence loses its end.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fp4train.data.cache import cached_tokens
from fp4train.data.files import existing_path, files_of, stamp
from fp4train.data.template import MARKERS, ChatTemplate, find_template
from fp4train.data.tokenizers import Bytes, Pretrained
from fp4train.data.tokens import (
    Ids,
    Piece,
    TokenArray,
    TokenData,
    Tokenizer,
    TokenizerConfig,
    check_tokenizer,
    fingerprint,
    ids_dtype,
)
from fp4train.errors import DataError, data_errors
from fp4train.paths import PathText, is_hub_name

OPEN = 64
SUFFIXES = (".jsonl", ".json")
_HALF = re.compile("[\ud800-\udfff]")
_log = logging.getLogger(__name__)

Line = tuple[Path, int]
"""A file and the number of a line in it."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Conversations of a JSON Lines file, or of those below a folder.

    Args:
        path: the file or folder.
        column: the key of a line that holds the messages.
        template: a file with a Jinja2 template; None: that of the tokenizer's folder, or ChatML.
        val: the last conversations, held out for validation: a share below 1.
    """

    path: PathText
    column: str = "messages"
    template: PathText | None = None
    tokenizer: TokenizerConfig = field(default_factory=Bytes)
    val: float = 0.05
    answers_only: ClassVar[bool] = True
    cache_dir: PathText = "~/.cache/fp4train"

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer)
        if not 0 < self.val < 1:
            raise ValueError(f"data.val={self.val}: conversations are held out by their share, between 0 and 1")

    def build(self, run_dir: Path, seq_len: int, seed: int) -> TokenData:
        paths = files_of(existing_path(self.path, "data.path"), SUFFIXES, "data.path")
        own = self.tokenizer.name if isinstance(self.tokenizer, Pretrained) else None
        place = None if own is None or is_hub_name(own) else own
        template = find_template(self.template, place, run_dir)
        lines = sum(1 for _ in _lines(paths))
        if lines < 2:
            raise DataError(f"data.path={self.path} holds {lines} conversations: at least 2 are needed, one held out")
        held = min(max(1, round(lines * self.val)), lines - 1)

        def texts() -> Iterator[Piece]:
            for at, messages in self._conversations(paths, 0, lines, ()):
                yield Piece("".join(text for text, _ in _parts(template, messages, at)))

        tokenizer = self.tokenizer.build(texts, run_dir)
        dtype = ids_dtype(tokenizer.vocab_size)

        def part(name: str, first: int, last: int) -> tuple[TokenArray, Ids]:
            key = {
                "source": "chat",
                "part": [first, last],
                "files": stamp(paths),
                "column": self.column,
                "seq_len": seq_len,
                "template": [template.source, dict(template.variables)],
                "tokenizer": tokenizer.identity,
            }

            def packed() -> Iterator[Ids]:
                markers = MARKERS if MARKERS[0] in template.source else ()
                special = (*getattr(tokenizer, "special_tokens", ()), *markers)
                found = self._conversations(paths, first, last, special)
                encoded = (_encoded(tokenizer, template, each, at) for at, each in found)
                yield from _pack(encoded, tokenizer.end_of_document, seq_len, dtype)

            both = cached_tokens(self.cache_dir, key, packed, dtype=dtype)
            ids, scored = both[: len(both) // 2], both[len(both) // 2 :]
            return TokenArray(ids, tokenizer.vocab_size, name, scored=scored), scored

        (train, answers), (val, held_answers) = part("train", 0, lines - held), part("val", lines - held, lines)
        size = f"{len(train):,} training and {len(val):,} validation tokens, vocabulary {tokenizer.vocab_size:,}"
        share = int(np.count_nonzero(answers)) / len(train)
        return TokenData(
            tokenizer.vocab_size,
            train,
            val,
            tokenizer,
            f"{self.path}, {lines:,} conversations: {size}; {share:.0%} of the training tokens are answers",
            digest=fingerprint(answers) + fingerprint(held_answers),
        )

    def _conversations(
        self, paths: Sequence[Path], first: int, last: int, special: Sequence[str]
    ) -> Iterator[tuple[Line, list[dict[str, str]]]]:
        for number, (at, line) in enumerate(_lines(paths)):
            if first <= number < last:
                with data_errors(ValueError, RecursionError, before=f"{at[0]}, line {at[1]}: "):
                    messages = _messages(line, self.column, special)
                yield at, messages


def _lines(paths: Sequence[Path]) -> Iterator[tuple[Line, str]]:
    """The lines of the files that are not empty."""
    for path in paths:
        try:
            with path.open(encoding="utf-8-sig") as file:
                yield from (((path, number), line) for number, line in enumerate(file, start=1) if line.strip())
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text ({error.reason}): convert it (iconv -t utf-8)") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _messages(line: str, column: str, special: Sequence[str]) -> list[dict[str, str]]:
    """The messages of a line.

    Raises:
        ValueError: it holds none, or a content spells what separates messages.
    """
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"it is no JSON object ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"it is no JSON object but a {type(found).__name__}")
    if column not in found:
        raise ValueError(f'it has no "{column}"; its keys: {", ".join(map(str, found)) or "none"} (data.column=…)')
    messages = found[column]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"{column}" holds no list of messages')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"message {number} is no object with a role and a content, both of them text")
        if more := [key for key, value in message.items() if key not in ("role", "content") and value]:
            raise ValueError(f"message {number} has {more[0]!r}, which is not supported: only role and content are")
        if spelt := [token for token in special if token in message["role"] + message["content"]]:
            raise ValueError(f"message {number} spells {spelt[0]}, which separates messages")
        if lone := _HALF.search(message["role"] + message["content"]):
            raise ValueError(f"message {number} holds half of a UTF-16 pair, {lone[0]!a}, which is no character")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _parts(template: ChatTemplate, messages: Sequence[Mapping[str, str]], at: Line) -> list[tuple[str, bool]]:
    with data_errors(ValueError, before=f"{at[0]}, line {at[1]}: "):
        return list(template.parts(messages))


Conversation = tuple[list[int], list[bool]]
"""Token ids, and of each whether it is a token of an answer."""


def _encoded(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, str]], at: Line
) -> Conversation:
    markup = getattr(tokenizer, "encode_markup", None)
    ids: list[int] = []
    scored: list[bool] = []
    for text, answer in _parts(template, messages, at):
        new = tokenizer.encode(text) if markup is None else markup(text).ids.tolist()
        ids += new
        scored += [answer] * len(new)
    if tokenizer.end_of_document in ids[:-1]:
        raise DataError(
            f"{at[0]}, line {at[1]}: the template writes the end of a document between messages, which would then not "
            "attend to each other: choose another data.tokenizer.end_of_document"
        )
    if ids[-1:] != [tokenizer.end_of_document]:
        ids.append(tokenizer.end_of_document)
        scored.append(scored[-1])
    return ids, scored


def _pack(conversations: Iterable[Conversation], end: int, seq_len: int, dtype: np.dtype[Any]) -> Iterator[Ids]:
    """The packed ids of all sequences, one more as the last target, and then for each id whether it is of an answer."""
    sequences: list[list[Ids]] = []
    room: dict[int, int] = {}
    cut = dropped = 0
    for ids, scored in conversations:
        if len(ids) > seq_len:
            ids, scored, cut = ids[:seq_len], scored[:seq_len], cut + 1
            if not any(scored):
                dropped += 1
                continue
        fitting = [number for number, left in room.items() if left >= len(ids)]
        if fitting:
            number = min(fitting, key=lambda each: (room[each], each))
        else:
            number, room[len(sequences)] = len(sequences), seq_len
            sequences.append([])
            if len(room) > OPEN:
                del room[min(room, key=lambda each: (room[each], each))]
        sequences[number].append(np.array((ids, scored), dtype=dtype))
        if number in room:
            room[number] -= len(ids)
    if cut:
        text = (
            "%d conversations are longer than train.seq_len=%d and lose their ends; %d with no answer left are dropped"
        )
        _log.warning(text, cut, seq_len, dropped)
    if not sequences:
        raise DataError(f"no answer lies within train.seq_len={seq_len} tokens: choose a larger one")
    packed = np.full(len(sequences) * seq_len + 1, end, dtype=dtype)
    answers = np.zeros_like(packed)
    for number, each in enumerate(sequences):
        both = np.concatenate(each, axis=1)
        place = slice(number * seq_len, number * seq_len + both.shape[1])
        packed[place], answers[place] = both
    yield packed
    yield answers
