"""The protocol of `data=…`, and how the documents of a source become its tokens.

A new source is one file with a class like `Source`, and one YAML in `configs/data`. The packed ids
are every document's tokens (`encoding.py`), one end-of-document id, the next document; before each
document the id that begins one, where the tokenizer has such an id.
"""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np

from fp4train.data import tokens
from fp4train.data.cache import CacheEntry
from fp4train.data.encoding import encode_documents, encoding_key
from fp4train.data.parts import CorpusPart
from fp4train.data.stored import TokenIds
from fp4train.data.stream import Stream
from fp4train.data.tokenizers import BytePairs, Bytes, Pretrained
from fp4train.data.tokenizers.json_file import keeps_tokenizer
from fp4train.data.tokens import (
    Documents,
    Ids,
    Piece,
    TokenData,
    Tokenizer,
    TokenizerConfig,
    ids_dtype,
)
from fp4train.errors import DataError
from fp4train.keys import CHANGES_NOTHING
from fp4train.paths import PathText, is_hub_name

CHUNK = 1 << 16
"""Ids that are given on at once."""


Workers = Annotated[int, CHANGES_NOTHING]
"""Processes that tokenise a source."""


def check_workers(workers: int) -> None:
    """`workers` is a whole number from 1."""
    if workers < 1:
        raise ValueError(f"data.workers={workers}: allowed are whole numbers from 1")


class RunData(Protocol):
    """The data of a run: `TokenData`, whose length is known, or `Streamed`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def borders(self) -> tokens.Borders: ...
    @property
    def description(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """What tells other data apart: a resume refuses another one."""

    def training(self, *, batch_size: int, seq_len: int, seed: int) -> Stream:
        """The rows of training, in the order of the run's `seed`."""

    def validation(self, *, batch_size: int, seq_len: int) -> Stream:
        """The rows of an evaluation, the same for all runs."""


class Source(Protocol):
    """The configuration of a source of data.

    `fp4train plan`, which reads little data, takes the size of the vocabulary from a field `vocab_size`
    or, where there is none, from the field `tokenizer`.
    """

    def build(self, run_dir: Path, seq_len: int, seed: int) -> RunData:
        """Rows for a run with sequences of `seq_len`, or a DataError that says what to do."""


class Corpus(Protocol):
    """The documents of a source, which become tokens once there is a tokenizer."""

    @property
    def documents(self) -> Documents:
        """The text of all documents, on which a tokenizer may be trained."""

    def entries(self, tokenizer: Tokenizer, seq_len: int) -> Sequence[CacheEntry]:
        """What the cache keeps of them."""

    def tokens(self, tokenizer: Tokenizer, seq_len: int) -> TokenData:
        """Their tokens, or a DataError that says what to do."""


@dataclass(frozen=True, kw_only=True)
class TextSource(ABC):
    """The settings that every source of text has.

    A source opens its documents (`corpus`), and these are tokenised afterwards, so that several
    sources can share a tokenizer.

    Args:
        val: the last part, held out for validation: a share below 1, or a number of tokens.
    """

    tokenizer: TokenizerConfig = field(default_factory=Bytes)
    val: float = 0.05

    def __post_init__(self) -> None:
        tokens.check_val(self.val)
        tokens.check_tokenizer(self.tokenizer)

    @abstractmethod
    def corpus(self, run_dir: Path) -> Corpus:
        """The documents that the settings name, or a DataError that says what to do.

        Args:
            run_dir: the run directory, for what the documents need and a resume must have again.
        """

    def entries(self, run_dir: Path, seq_len: int) -> Sequence[CacheEntry]:
        """What the cache keeps of the data; once it is asked for, what all ranks share is there."""
        corpus = self.corpus(run_dir)
        return corpus.entries(self.tokenizer.build(corpus.documents, run_dir), seq_len)

    def build(self, run_dir: Path, seq_len: int, seed: int) -> TokenData:
        corpus = self.corpus(run_dir)
        return corpus.tokens(self.tokenizer.build(corpus.documents, run_dir), seq_len)


def planned_vocab_size(source: Source, rows: int | None = None, run: Path | None = None) -> int:
    """Token ids of `source`; of a tokenizer that is still to be trained, the most it may have.

    Args:
        rows: rows of the embedding, where the model says; they stand for the ids of a tokenizer of
            the hub, which a plan does not download.
        run: the run directory whose tokenizer is taken over, if it keeps one.
    """
    size = getattr(source, "vocab_size", None)
    if isinstance(size, int):
        return size
    if (planned := planned_tokenizer(source, run, download=rows is None)) is not None:
        return planned.vocab_size
    tokenizer = getattr(source, "tokenizer", None)
    if tokenizer is None:
        raise DataError(
            f"{type(source).__name__} has neither vocab_size nor tokenizer: a source of "
            "data of one's own needs one of these fields, so that its vocabulary is known: its "
            "number of token ids, or a configuration of a tokenizer"
        )
    if isinstance(tokenizer, BytePairs):
        return tokenizer.vocab_size
    assert rows is not None  # a tokenizer of the hub is else downloaded
    return rows


def planned_tokenizer(
    source: Source, run: Path | None = None, *, download: bool = False
) -> Tokenizer | None:
    """The tokenizer of `source`; None: it has none, or one that is still to be trained or
    downloaded.

    Args:
        run: the run directory whose tokenizer is taken over, if it keeps one.
        download: whether a tokenizer of the hub is downloaded.
    """
    tokenizer: TokenizerConfig | None = getattr(source, "tokenizer", None)
    if tokenizer is None:
        return None
    if run is not None and keeps_tokenizer(run):
        return tokenizer.build(lambda: iter(()), run)
    on_hub = isinstance(tokenizer, Pretrained) and is_hub_name(tokenizer.name)
    if isinstance(tokenizer, BytePairs) or (on_hub and not download):
        return None
    with tempfile.TemporaryDirectory() as folder:
        return tokenizer.build(lambda: iter(()), Path(folder))


def ready_tokenizer(source: Source, run: Path | None = None) -> Tokenizer | None:
    """As `planned_tokenizer`, of fp4train's own classes: another one may need its documents."""
    if isinstance(getattr(source, "tokenizer", None), Bytes | BytePairs | Pretrained):
        return planned_tokenizer(source, run)
    return None


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A corpus of text, of which the last part is held out.

    Args:
        documents: the text of all documents.
        val: the held-out part, as `TextSource` has it.
        description: the name of the text in messages.
        cache_dir: folder of the tokens; None: they are made in memory, each time.
        key: with the tokenizer's identity, what the tokens are known by there.
        parts: function that gives the documents in parts; None: they are read from the first on.
        workers: processes that tokenise.
        max_tokens: most tokens that are taken.
        if_empty: message where there is no text.
    """

    documents: Documents
    val: float
    description: str
    cache_dir: PathText | None = None
    key: Mapping[str, Any] = field(default_factory=dict)
    parts: Callable[[], Sequence[CorpusPart]] | None = None
    workers: int = 1
    max_tokens: int | None = None
    if_empty: str = ""

    def entries(self, tokenizer: Tokenizer, seq_len: int) -> Sequence[CacheEntry]:
        if self.cache_dir is None:
            return ()
        entry = entry_of(self.documents, tokenizer, self.cache_dir, self.key)
        if self.parts is not None:
            entry = replace(entry, parts=self.parts)
        return (replace(entry, workers=self.workers, max_tokens=self.max_tokens),)

    def tokens(self, tokenizer: Tokenizer, seq_len: int) -> TokenData:
        ids: TokenIds
        if entries := self.entries(tokenizer, seq_len):
            ids = entries[0].ids()
        else:
            parts = token_chunks(self.documents(), tokenizer)
            ids = np.concatenate([np.empty(0, ids_dtype(tokenizer.vocab_size)), *parts])
        if self.if_empty and not len(ids):
            raise DataError(self.if_empty)
        description = self.description
        if len(ids) == self.max_tokens:
            description += f", cut off at data.max_tokens={self.max_tokens:,}"
        return tokens.hold_out(
            ids,
            val=self.val,
            vocab_size=tokenizer.vocab_size,
            seq_len=seq_len,
            tokenizer=tokenizer,
            description=description,
        )


def entry_of(
    documents: Documents, tokenizer: Tokenizer, cache_dir: str, key: Mapping[str, Any]
) -> CacheEntry:
    """The packed ids of `documents`, which are read from the first on, in the cache; see `Texts`."""
    return CacheEntry(
        cache_dir=cache_dir,
        key={**key, **encoding_key(tokenizer)},
        parts=lambda: [CorpusPart(0, (documents,))],
        encode=lambda items: token_chunks(
            (item for item in items if isinstance(item, Piece)), tokenizer
        ),
        dtype=ids_dtype(tokenizer.vocab_size),
    )


def token_chunks(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[Ids]:
    """The packed ids of `pieces` in order, some at a time, in the smallest type for the
    vocabulary.
    """
    dtype = ids_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype=dtype)
    begin_id = tokens.begin_of_document(tokenizer)
    begin = np.array([] if begin_id is None else [begin_id], dtype=dtype)
    parts: list[Ids] = []
    size = 0
    begins_document = True
    for ids, ends_document in encode_documents(pieces, tokenizer):
        if begins_document:
            parts.append(begin)
        parts.append(ids.astype(dtype))
        if ends_document:
            parts.append(end)
        begins_document = ends_document
        size += len(ids)
        if size >= CHUNK:
            yield np.concatenate(parts)
            parts = []
            size = 0
    if parts:
        yield np.concatenate(parts)
