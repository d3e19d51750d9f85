"""Text → token ids: what a tokenizer is, and what every source ends as, two arrays of ids that
share no token.

`hold_out` takes the last part of the stream for validation. Where a document ends inside the first
half of that part, the cut moves to that end, so that validation starts with a document that
training has not seen the beginning of.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fp4train.data.loader import Loader
from fp4train.data.stored import Ids as Ids, TokenIds
from fp4train.data.token_array import TokenArray
from fp4train.errors import DataError
from fp4train.text import counted

CHECKED = 1 << 24
"""Ids of each part that are checked before a run begins."""
AT_ONCE = 1 << 20
"""Ids that are read at once."""
VALIDATION_SEED = 0
"""The seed of validation sequences, the same for all runs, so that the losses of seeds compare."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some whole lines of one document, and whether the document ends with them.

    Documents come in pieces so that neither a huge file nor a huge folder need fit into memory.
    """

    text: str
    ends_document: bool = True

    @property
    def size(self) -> int:
        return len(self.text)


Documents = Callable[[], Iterator[Piece]]


class Tokenizer(Protocol):
    """Text ↔ ids. `identity` differs for tokenizers that differ: a part of the key of tokenised
    data.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...
    @property
    def identity(self) -> str: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def begin_of_document(tokenizer: object) -> int | None:
    """The id that a tokenizer puts before each document; None: there is none."""
    begin: int | None = getattr(tokenizer, "begin_of_document", None)
    return begin


class TokenizerConfig(Protocol):
    """The protocol of `data.tokenizer`."""

    def build(self, documents: Documents, run_dir: Path) -> Tokenizer:
        """The tokenizer; what must be kept for a resume is kept in `run_dir`."""


def token_bytes(tokenizer: Tokenizer | None, vocab_size: int) -> Ids | None:
    """Bytes of text that each id stands for, int64 [vocab_size]: 0 for the end of a document and
    for special tokens.

    None: there is no tokenizer. One that says it itself has a method `token_bytes`; of another an
    id has what its text adds to that of the id before it.
    """
    if tokenizer is None:
        return None
    if (method := getattr(tokenizer, "token_bytes", None)) is not None:
        sizes: Ids = method()
        return sizes

    def length(ids: list[int]) -> int:
        return len(tokenizer.decode(ids).encode())

    anchor = tokenizer.encode("a")
    return np.array(
        [length([*anchor, token_id]) - length(anchor) for token_id in range(vocab_size)],
        dtype=np.int64,
    )


def check_tokenizer(tokenizer: object) -> None:
    """Refuse what is no tokenizer's configuration, such as the name that `data.tokenizer=NAME`
    leaves here.
    """
    if not hasattr(tokenizer, "build"):
        raise ValueError(
            f"data.tokenizer={tokenizer!r}: a kind of tokenizer is chosen with a slash, "
            "data/tokenizer=bytes, data/tokenizer=bpe, or data/tokenizer=pretrained "
            "data.tokenizer.name=FILE_OR_HUB_NAME"
        )


def ids_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id below `vocab_size`."""
    if vocab_size <= 1 << 8:
        return np.dtype(np.uint8)
    if vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


def fingerprint(ids: TokenIds) -> str:
    """A short sum over the length and up to 1024 places: tells other data apart without reading all
    of it.
    """
    places = np.unique(np.linspace(0, max(len(ids) - 64, 0), 1024).astype(np.int64))
    read = ids.take(places[:, None] + np.arange(min(64, len(ids))))
    return f"{zlib.crc32(read.astype('<i8').tobytes(), zlib.crc32(str(len(ids)).encode())):08x}"


@dataclass(frozen=True, kw_only=True)
class Borders:
    """The ids that divide documents: the one that ends each, the one that begins each; None: there
    is no such id.
    """

    end: int | None = None
    begin: int | None = None

    def __bool__(self) -> bool:
        return self.end is not None or self.begin is not None

    def next(self, ids: TokenIds, first: int, end: int) -> int:
        """The first place in ids[first:end] where a document begins, or `first`; reads no more than
        it needs.
        """
        for start in range(first, end, AT_ONCE):
            part = np.asarray(ids[start : min(start + AT_ONCE, end)])
            begins = part == self.begin
            if self.end is not None:
                begins = np.concatenate(([False], part == self.end))
            if begins.any():
                return start + int(begins.argmax())
        return first


NO_BORDERS = Borders()


def borders_of(source: object, tokenizer: Tokenizer | None) -> Borders:
    """The ids that divide documents in what a source gives: those of its keys, or that of its
    tokenizer.
    """
    keys = Borders(end=getattr(source, "end_id", None), begin=getattr(source, "begin_id", None))
    return keys or Borders(end=None if tokenizer is None else tokenizer.end_of_document)


@dataclass(frozen=True)
class TokenData:
    """Training and validation tokens of a run.

    `tokenizer` is None for token files that came without one; `digest` is of all tokens of files
    that are not in the cache, which checks its own; `borders` are those of the tokenizer unless
    they are given.
    """

    vocab_size: int
    train: TokenArray
    val: TokenArray
    tokenizer: Tokenizer | None = field(repr=False)
    description: str
    digest: str | None = None
    borders: Borders = NO_BORDERS

    def __post_init__(self) -> None:
        object.__setattr__(self, "borders", self.borders or borders_of(None, self.tokenizer))

    @property
    def fingerprint(self) -> str:
        """Differs when the data differs: a run that resumes can tell that its data is no longer the
        same.
        """
        sampled = f"{fingerprint(self.train.ids)}-{fingerprint(self.val.ids)}"
        if self.digest is None:
            return sampled
        return f"{sampled}-{self.digest}"

    def training(self, *, batch_size: int, seq_len: int, seed: int) -> Loader:
        """Batches of the training tokens, in the order of the run's `seed`."""
        return Loader(self.train, batch_size=batch_size, seq_len=seq_len, seed=seed)

    def validation(self, *, batch_size: int, seq_len: int) -> Loader:
        """Batches of the validation tokens, in the order that all runs share."""
        return Loader(self.val, batch_size=batch_size, seq_len=seq_len, seed=VALIDATION_SEED)


def check_val(val: float) -> None:
    """`val` is a share below 1, or a whole number of tokens."""
    if not (0 < val < 1 or (val >= 1 and float(val).is_integer())):
        raise ValueError(
            f"data.val={val}: allowed are a share between 0 and 1, or a whole number of tokens"
        )


def hold_out(
    ids: TokenIds,
    *,
    val: float,
    vocab_size: int,
    seq_len: int,
    tokenizer: Tokenizer | None,
    description: str,
    borders: Borders = NO_BORDERS,
) -> TokenData:
    """Cut `ids` into a training part and, at its end, a validation part of `val` (a share, or
    tokens).
    """
    held_out = int(len(ids) * val) if val < 1 else int(val)
    cut = max(len(ids) - held_out, 0)
    borders = borders or borders_of(None, tokenizer)
    if borders:
        movable = max(min((len(ids) - cut) // 2, len(ids) - cut - (seq_len + 1)), 0)
        cut = borders.next(ids, cut, cut + movable)
    return token_data(
        ids[:cut],
        ids[cut:],
        vocab_size=vocab_size,
        seq_len=seq_len,
        tokenizer=tokenizer,
        description=description,
        whole=f"of the {len(ids):,} tokens in all, data.val={val:g} holds out the last "
        f"{len(ids) - cut:,}",
        borders=borders,
    )


def token_data(
    train: TokenIds,
    val: TokenIds,
    *,
    vocab_size: int,
    seq_len: int,
    tokenizer: Tokenizer | None,
    description: str,
    whole: str,
    borders: Borders = NO_BORDERS,
) -> TokenData:
    """Both parts, checked for the length of a sequence and, up to `CHECKED` tokens, for their
    ids.
    """
    for name, part in (("training", train), ("validation", val)):
        if len(part) < seq_len + 1:
            raise DataError(
                f"the {name} text is {counted(len(part), 'token')} long, but a sequence needs "
                f"train.seq_len+1 = {seq_len + 1:,} ({description}; {whole}). Use more text or a "
                "smaller train.seq_len, or hold out another part."
            )
    parts = TokenArray(train, vocab_size, "train"), TokenArray(val, vocab_size, "val")
    for tokens in parts:
        for start in range(0, min(len(tokens.ids), CHECKED), AT_ONCE):
            tokens.check(
                np.asarray(tokens.ids[start : start + AT_ONCE]),
                f"{tokens.name} tokens ({description})",
            )
    summary = (
        f"{description}: {len(train):,} training and {len(val):,} validation tokens, vocabulary "
        f"{vocab_size:,}"
    )
    return TokenData(vocab_size, parts[0], parts[1], tokenizer, summary, borders=borders)
