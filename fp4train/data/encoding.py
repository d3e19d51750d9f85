"""Documents of any length → token ids, equal to those of the whole document, in bounded memory.

Tokenizers look at more than the text they are given: some put ▁ before it, merges and pre-tokens
reach over any border. So a long document is encoded in windows that overlap,

    window k:      |··········|====|
    window k + 1:              |====|··········|====|

and the ids of two windows are joined where both agree: a run of tokens with equal ids at equal
characters, `agree` characters long, far from the ends of both. In byte pairs one shared token
proves the join: a sequence of tokens is that of its text if every two neighbours are that of
theirs, and each pair of neighbours lies in one of the windows. Between pre-tokens, the expressions
that find them run from left to right: two that stand at the same place find the same. Other models
are joined between pre-tokens alone.

The characters of tokens cost two to three times the tokens themselves. So they are asked for at the
edges of windows alone: an edge is encoded once more with its characters, and its tokens are those
of the window as far as both have the same ones, counted from the end that both share. Where an edge
does not settle it, as in a long run of letters and digits, the characters of both windows are asked
for, in vain for no more characters than the document has.

Where windows do not agree (a pre-token is longer than the overlap), they are encoded as one, and so
on until the whole document is, up to `LONGEST` characters. What stays unseen is a pre-tokenizer
whose decision hangs on text further away than half an overlap, on both sides of which everything
else is equal.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from fp4train.data.tokens import Ids, Piece, Tokenizer, ids_dtype
from fp4train.errors import DataError

TEXTS_AT_ONCE = 64
"""Texts that the threads of a tokenizer share."""
CHARACTERS_AT_ONCE = 1 << 21
LONGEST = 1 << 22
"""Characters of the longest text that is encoded as one."""
VERSION = 2
"""Part of the key of cached ids: another number where the ids of equal text change."""

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """The ids of a text, the characters [starts, ends) that each stands for, and whether it begins
    a pre-token.
    """

    ids: Ids
    starts: Offsets
    ends: Offsets
    begins: npt.NDArray[np.bool_]

    def part(self, tokens: slice) -> "Encoded":
        """Some of the tokens, with the same characters."""
        return Encoded(
            self.ids[tokens], self.starts[tokens], self.ends[tokens], self.begins[tokens]
        )


@runtime_checkable
class SpanTokenizer(Protocol):
    """A tokenizer whose ids depend on text around them."""

    splits_words: bool
    """Whether two windows may be joined within a pre-token."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...
    def encode_spans(self, texts: Sequence[str]) -> list[Encoded]: ...


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How long documents are divided; all in characters."""

    length: int = 1 << 18
    overlap: int = 1 << 11
    agree: int = 256

    def of(self, document: Iterable[str]) -> Iterator["Window"]:
        """The windows of the texts that make one document."""
        text = ""
        at = shared = 0
        for part in document:
            text = text[at:] + part
            at = 0
            while len(text) - at > self.length + self.overlap:
                yield Window(text[at : at + self.length], shared, last=False)
                following = self._start(text, at + self.length)
                shared = at + self.length - following
                at = following
        yield Window(text[at:], shared, last=True)

    def _start(self, text: str, end: int) -> int:
        """Where the window after the one that ends at `end` begins: where a space follows other
        text, if possible.
        """
        start = end - self.overlap
        for place in range(start, end - self.overlap // 2):
            if text[place].isspace() and not text[place - 1].isspace():
                return place
        return start


class Window(NamedTuple):
    """A part of a document; its first `shared` characters are the last ones of the part before."""

    text: str
    shared: int
    last: bool

    @property
    def is_document(self) -> bool:
        """Whether the document has no other part."""
        return self.last and not self.shared


def encode_documents(
    pieces: Iterable[Piece], tokenizer: Tokenizer, windows: Windows | None = None
) -> Iterator[tuple[Ids, bool]]:
    """The ids of documents in order, some at a time, and whether a document ends with them.

    Raises:
        DataError: a text cannot be encoded, or not in parts and is too long for one.
    """
    if getattr(tokenizer, "concatenates", False):
        units = pieces
    elif isinstance(tokenizer, SpanTokenizer):
        windows = windows or Windows()
        join = _Join(tokenizer, windows)
        parts = chain.from_iterable(map(windows.of, _documents(pieces)))
        for batch in _batches(parts):
            yield from join.add(batch)
        return
    else:
        units = (Piece("".join(document)) for document in _documents(pieces))
    for batch_of_units in _batches(units):
        encoded = tokenizer.encode_batch([unit.text for unit in batch_of_units])
        for unit, ids in zip(batch_of_units, encoded, strict=True):
            yield ids, unit.ends_document


def encoding_key(tokenizer: Tokenizer) -> dict[str, Any]:
    """What the ids of cached text are known by, beside the text: they change where the way of
    encoding does.
    """
    key: dict[str, Any] = {"tokenizer": tokenizer.identity}
    if getattr(tokenizer, "concatenates", False):
        return key
    return {**key, "encoding": VERSION}


def encode_document(
    texts: Iterable[Piece], tokenizer: Tokenizer, windows: Windows | None = None
) -> Ids:
    """The ids of the pieces of one document."""
    parts = [ids for ids, _ in encode_documents(texts, tokenizer, windows)]
    if parts:
        return np.concatenate(parts)
    return np.empty(0, ids_dtype(tokenizer.vocab_size))


def _documents(pieces: Iterable[Piece]) -> Iterator[Iterator[str]]:
    """The texts of each document; those of one must be taken before the next is asked for."""
    stream = iter(pieces)

    def texts(first: Piece) -> Iterator[str]:
        piece = first
        yield piece.text
        while not piece.ends_document and (following := next(stream, None)) is not None:
            piece = following
            yield piece.text

    for piece in stream:
        yield texts(piece)


TextUnit = TypeVar("TextUnit", Piece, Window)


def _batches(texts: Iterable[TextUnit]) -> Iterator[list[TextUnit]]:
    batch: list[TextUnit] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.text)
        if len(batch) == TEXTS_AT_ONCE or size >= CHARACTERS_AT_ONCE:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


class _Seam(NamedTuple):
    """Where two windows are joined: tokens before it in the left one, and in the right one."""

    left: int
    right: int


class _Part(NamedTuple):
    """A window, its ids, and its edges with their characters."""

    window: Window
    ids: Ids
    head: Encoded
    """Its first characters: those that it shares, and `agree` more."""
    tail: Encoded
    """Its last characters, as many as a window may share, and `agree` more."""
    tail_text: str


class _Join:
    """Joins the ids of windows as they come."""

    def __init__(self, tokenizer: SpanTokenizer, windows: Windows) -> None:
        self.tokenizer = tokenizer
        self.windows = windows
        self.text = ""
        self.ids: Ids | None = None
        """The ids of `text`, the windows that are not all given out; None: a document begins."""
        self.given_out = 0
        """Tokens of `ids` that are."""
        self.end: _Part
        """The window that `text` ends with."""
        self.growing: list[_Part] = []
        """Windows after `text` that are to be encoded with it."""
        self.seen = 0
        """Characters of the document so far."""
        self.in_vain = 0
        """Those that were encoded with their characters, and whose windows did not agree."""

    def add(self, batch: Sequence[Window]) -> Iterator[tuple[Ids, bool]]:
        """The ids that more windows settle."""
        encoded = self.tokenizer.encode_batch([window.text for window in batch])
        parts = self._with_edges(batch, encoded)
        for window, ids in zip(batch, encoded, strict=True):
            if window.is_document:
                yield ids, True
            else:
                yield from self._add(next(parts))

    def _with_edges(self, batch: Sequence[Window], encoded: Sequence[Ids]) -> Iterator[_Part]:
        windows = self.windows
        parts = [pair for pair in zip(batch, encoded, strict=True) if not pair[0].is_document]
        heads = [window.text[: window.shared + windows.agree] for window, _ in parts]
        tails = [window.text[-windows.overlap - windows.agree :] for window, _ in parts]
        edges = iter(self.tokenizer.encode_spans([*heads, *tails]))
        first_edges = [next(edges) for _ in heads]
        for (window, ids), head, tail, text in zip(parts, first_edges, edges, tails, strict=True):
            yield _Part(window, ids, head, tail, text)

    def _add(self, part: _Part) -> Iterator[tuple[Ids, bool]]:
        window = part.window
        self.seen += len(window.text) - window.shared
        if self.ids is None:
            self._begin(part, 0)
        elif not self.growing and (seam := self._seam(self.ids, part)) is not None:
            yield self.ids[self.given_out : seam.left], False
            self._begin(part, seam.right)
        else:
            self.growing.append(part)
            more = sum(len(waiting.window.text) - waiting.window.shared for waiting in self.growing)
            if more >= len(self.text) or window.last:  # twice as much each time
                self._grow(self.ids)
        if window.last:
            assert self.ids is not None
            yield self.ids[self.given_out :], True
            self.ids = None
            self.seen = self.in_vain = 0

    def _begin(self, part: _Part, given_out: int) -> None:
        self.text = part.window.text
        self.ids = part.ids
        self.given_out = given_out
        self.end = part

    def _grow(self, ids: Ids) -> None:
        """Encode the windows that wait as one with those before them, whose ids are `ids`."""
        text = self.text + "".join(part.window.text[part.window.shared :] for part in self.growing)
        if len(text) > LONGEST:
            raise DataError(
                f"a document holds {len(text):,} characters that the tokenizer joins, "
                "beginning with "
                f"{text[:40]!r}: more than {LONGEST:,} are not encoded as one. Divide the document"
            )
        self.ids = self.tokenizer.encode_batch([text])[0]
        if not np.array_equal(ids[: self.given_out], self.ids[: self.given_out]):
            raise DataError(
                f"a document that begins with {text[:40]!r} is encoded otherwise when it goes "
                "on, further back than "
                f"{self.windows.overlap:,} characters: this tokenizer cannot encode it in "
                "parts. Divide the document"
            )
        self.text = text
        self.end = self.growing[-1]
        self.growing = []

    def _seam(self, ids: Ids, part: _Part) -> _Seam | None:
        """Where `part` is joined to the text before it, which has `ids`; None: they do not agree,
        or it would cost too much to see.
        """
        edges = self.end.tail_text, self.end.tail, part.head
        if (seam := self._seam_of(ids, part, *edges)) is not None:
            return seam
        tail = self.text[-self.windows.length :]
        window = part.window.text
        if self.in_vain + len(tail) + len(window) > self.seen:
            return None
        seam = self._seam_of(ids, part, tail, *self.tokenizer.encode_spans([tail, window]))
        if seam is None:
            self.in_vain += len(tail) + len(window)
        return seam

    def _seam_of(
        self, ids: Ids, part: _Part, text: str, left: Encoded, right: Encoded
    ) -> _Seam | None:
        """As `_seam`, by those tokens of the end of the text before and of the beginning of `part`
        that are tokens of the whole of both, too.

        Args:
            text: end of the text before.
            left: its tokens.
            right: tokens of a beginning of `part`.
        """
        unequal = len(left.ids) - _equal_at_start(left.ids[::-1], ids[::-1])
        left = left.part(slice(unequal, None))
        right = right.part(slice(_equal_at_start(right.ids, part.ids)))
        seam = self._place(left, right, len(text) - part.window.shared, part.window.shared)
        if seam is None:
            return None
        # a run of letters and digits may be cut by counting from a beginning that `text` does not
        # hold
        counted = text[int(left.starts[0]) : int(left.starts[seam.left])]
        if counted.isalnum() and len(text) < len(self.text):
            return None
        return _Seam(len(ids) - len(left.ids) + seam.left, seam.right)

    def _place(self, left: Encoded, right: Encoded, first: int, shared: int) -> _Seam | None:
        """Where the tokens of two texts are joined; the right one begins at character `first` of
        the left one.
        """
        for part in (4, 3, 5, 2, 6):
            anchor = int(np.searchsorted(left.starts, first + shared * part // 8))
            if anchor == len(left.starts):
                continue
            other = int(np.searchsorted(right.starts, left.starts[anchor] - first))
            if (run := _equal_run(left, right, anchor, other, first)) is None:
                continue
            low, high = run
            if left.ends[high - 1] - left.starts[low] < self.windows.agree:
                continue
            if (cut := self._cut(left, low, high)) is not None:
                return _Seam(cut, cut + other - anchor)
        return None

    def _cut(self, left: Encoded, low: int, high: int) -> int | None:
        """The place in the run [low, high) of equal tokens, nearest to its middle, at which no
        character is divided.
        """
        places = np.arange(low + 1, high)
        clean = left.starts[places] >= left.ends[places - 1]
        if not self.tokenizer.splits_words:
            clean &= left.begins[places]
        places = places[clean]
        if len(places):
            return int(places[np.abs(places - (low + high) // 2).argmin()])
        return None


def _equal_at_start(some: Ids, others: Ids) -> int:
    """How many ids two rows have in common from their beginnings on."""
    count = min(len(some), len(others))
    unlike = np.flatnonzero(some[:count] != others[:count])
    return int(unlike[0]) if len(unlike) else count


def _equal_run(
    left: Encoded, right: Encoded, anchor: int, other: int, first: int
) -> tuple[int, int] | None:
    """The tokens [low, high) of the left window around `anchor` that equal those of the right one
    around `other`.

    Args:
        first: the character of the left window at which the right one begins.
    """
    behind = min(anchor, other)
    ahead = min(len(left.ids) - anchor, len(right.ids) - other)
    ours, theirs = (slice(place - behind, place + ahead) for place in (anchor, other))
    equal: npt.NDArray[Any] = left.ids[ours] == right.ids[theirs]
    equal &= left.starts[ours] == right.starts[theirs] + first
    equal &= left.ends[ours] == right.ends[theirs] + first
    equal &= left.begins[ours] == right.begins[theirs]
    if not ahead or not equal[behind]:
        return None
    unlike = np.flatnonzero(~equal)
    place = int(np.searchsorted(unlike, behind))
    low = int(unlike[place - 1]) + 1 if place else 0
    if place < len(unlike):
        high = int(unlike[place])
    else:
        high = len(equal)
    return anchor - behind + low, anchor - behind + high
