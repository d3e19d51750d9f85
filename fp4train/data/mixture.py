"""`data=mixture data.parts=…`: several sources of text, each in the share of its weight, with one
tokenizer.

Each source holds out its own part for validation, which is mixed in the same shares. Weights are
shares of sequences, not of what the sources hold: a source whose share is longer than its text is
read again from the start, in another order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Final

import numpy as np

from fp4train.data.cache import CacheEntry
from fp4train.data.source import Corpus, Texts, TextSource, Workers, check_workers
from fp4train.data.stored import TokenIds, joined
from fp4train.data.token_array import TokenArray, TokenPart
from fp4train.data.tokenizers import Bytes
from fp4train.data.tokens import Piece, TokenData, Tokenizer, TokenizerConfig, check_tokenizer
from fp4train.errors import DataError, data_errors
from fp4train.keys import WrittenUnder

CYCLE = 4096
"""Sequences of a cycle, in which every part has its share: the precision of weights."""


SOURCE: Final = WrittenUnder("data")
"""Where the messages of sources write their keys."""


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """A source and its weight among those of all parts."""

    source: Annotated[TextSource, SOURCE]
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources of text by name.

    Args:
        parts: the sources and their weights; a weight of 3 beside one of 1 is 75 % of the
            sequences.
        tokenizer: that of all parts, which have none of their own.
        workers: processes that tokenise each part.
    """

    parts: Mapping[str, Weighted]
    tokenizer: TokenizerConfig = field(default_factory=Bytes)
    workers: Workers = 1

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer)
        check_workers(self.workers)
        # by name, whatever order they are written in: the order of the sequences depends on it
        object.__setattr__(self, "parts", dict(sorted(self.parts.items())))
        if not self.parts:
            raise ValueError("data.parts={}: a mixture needs at least one source")
        for name, part in self.parts.items():
            if not 0 < part.weight < math.inf:
                raise ValueError(
                    f"data.parts.{name}.weight={part.weight}: allowed are finite numbers above 0"
                )
            if part.source.tokenizer not in (Bytes(), self.tokenizer):
                raise ValueError(
                    f"data.parts.{name}.source.tokenizer: the parts of a mixture share one "
                    "tokenizer, data.tokenizer; leave it out"
                )
        total = sum(part.weight for part in self.parts.values())
        for name, share in self.shares.items():
            if not share:
                raise ValueError(
                    f"data.parts.{name}.weight={self.parts[name].weight:g} is less than "
                    f"1/{CYCLE} of "
                    f"the sum of all weights, {total:g}: leave the part out, or give it more"
                )
        if sum(self._learns_answers(part) for part in self.parts.values()) > 1:
            raise ValueError(
                "data.parts: two parts are data=chat, and a run has one chat template; name the "
                "files of both in one part, data.path=[a,b]"
            )

    @property
    def shares(self) -> dict[str, int]:
        """The sequences of each part in `CYCLE`: weights, rounded so that they add up."""
        total = sum(part.weight for part in self.parts.values())
        exact = {name: CYCLE * part.weight / total for name, part in self.parts.items()}
        shares = {name: int(share) for name, share in exact.items()}
        fullest = sorted(exact, key=lambda name: shares[name] - exact[name])
        for name in fullest[: CYCLE - sum(shares.values())]:
            shares[name] += 1
        return {name: share if int(exact[name]) else 0 for name, share in shares.items()}

    @property
    def answers_only(self) -> bool:
        """Whether a part has conversations, of which the answers alone are learned."""
        return any(map(self._learns_answers, self.parts.values()))

    @staticmethod
    def _learns_answers(part: Weighted) -> bool:
        return bool(getattr(part.source, "answers_only", False))

    def entries(self, run_dir: Path, seq_len: int) -> Sequence[CacheEntry]:
        """What the cache keeps of all parts."""
        corpora, tokenizer = self._opened(run_dir)
        entries = list[CacheEntry]()
        for name, corpus in corpora.items():
            with self._errors_of(name):
                entries += corpus.entries(tokenizer, seq_len)
        return entries

    def _opened(self, run_dir: Path) -> tuple[dict[str, Corpus], Tokenizer]:
        corpora = dict[str, Corpus]()
        for name, part in self.parts.items():
            with self._errors_of(name):
                corpora[name] = part.source.corpus(run_dir)
                if isinstance(corpus := corpora[name], Texts) and self.workers > 1:
                    corpora[name] = replace(corpus, workers=self.workers)
        return corpora, self.tokenizer.build(lambda: self._documents(corpora), run_dir)

    def build(self, run_dir: Path, seq_len: int, seed: int) -> TokenData:
        corpora, tokenizer = self._opened(run_dir)
        parts = dict[str, TokenData]()
        for name, corpus in corpora.items():
            with self._errors_of(name):
                parts[name] = corpus.tokens(tokenizer, seq_len)
        listed = "; ".join(
            f"{name} {self.shares[name] / CYCLE:.2%} of {data.description}"
            for name, data in parts.items()
        )
        digests = [data.digest for data in parts.values() if data.digest is not None]
        return TokenData(
            tokenizer.vocab_size,
            self._mixed("train", {name: data.train for name, data in parts.items()}),
            self._mixed("val", {name: data.val for name, data in parts.items()}),
            tokenizer,
            f"a mixture: {listed}",
            digest="+".join(digests) or None,
        )

    def _errors_of(self, name: str) -> AbstractContextManager[None]:
        """A context whose data errors name a part and its keys."""
        place = f"data.parts.{name}"
        kind = type(self.parts[name].source)

        def message(error: DataError) -> str:
            placed = SOURCE.placed(str(error), kind, f"{place}.source")
            if placed.startswith(place):
                return placed
            return f"{place}: {placed}"

        return data_errors(DataError, message=message)

    def _documents(self, corpora: Mapping[str, Corpus]) -> Iterator[Piece]:
        """The documents of all parts in turn, so that each has given as many characters as its
        weight says, as long as it has any.
        """
        streams = {name: corpus.documents() for name, corpus in corpora.items()}
        characters = dict.fromkeys(streams, 0)
        while streams:
            name = min(streams, key=lambda name: characters[name] / self.parts[name].weight)
            piece = next(streams[name], None)
            while piece is not None:
                yield piece
                characters[name] += len(piece.text)
                if piece.ends_document:
                    break
                piece = next(streams[name], None)
            if piece is None:
                del streams[name]

    def _mixed(self, name: str, arrays: Mapping[str, TokenArray]) -> TokenArray:
        """The ids of all parts in one array, with where each part lies in it."""
        ends = list(accumulate(len(array) for array in arrays.values()))
        parts = tuple(
            TokenPart(
                name=f"{name} (data.parts.{part})",
                first=end - len(array),
                end=end,
                share=self.shares[part],
            )
            for (part, array), end in zip(arrays.items(), ends, strict=True)
        )
        ids = list(arrays.values())
        return TokenArray(
            joined([array.ids for array in ids]),
            ids[0].vocab_size,
            name,
            scored=_joined_marks([array.scored for array in ids], ids, 1),
            inner_ends=_joined_marks([array.inner_ends for array in ids], ids, 0),
            parts=parts,
        )


def _joined_marks(
    marks: list[TokenIds | None], arrays: list[TokenArray], default: int
) -> TokenIds | None:
    """What is marked of the ids of all arrays; `default` of those of which nothing is."""
    if all(mark is None for mark in marks):
        return None
    return joined(
        [
            np.broadcast_to(np.uint8(default), len(array)) if mark is None else mark
            for mark, array in zip(marks, arrays, strict=True)
        ]
    )
