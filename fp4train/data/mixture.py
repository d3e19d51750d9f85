"""`data=mixture data.parts=…`: several sources, each in the share of its weight, with one tokenizer.

Each source holds out its own part for validation, which is mixed in the shares of the parts'
weights. Weights are shares of sequences, not of what the sources hold: a source whose share is
longer than its text is read again from the start, in another order. Stages give training other
weights from some step on.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from fp4train.data.cache import CacheEntry
from fp4train.data.source import Corpus, Source, Texts, Workers, check_workers
from fp4train.data.stored import TokenIds, joined
from fp4train.data.token_array import TokenArray, TokenPart
from fp4train.data.tokenizers import Bytes
from fp4train.data.tokens import (
    NO_BORDERS,
    Piece,
    TokenData,
    Tokenizer,
    TokenizerConfig,
    borders_of,
    check_tokenizer,
)
from fp4train.errors import DataError, data_errors
from fp4train.keys import CHANGES_COURSE, WrittenUnder

CYCLE = 4096
"""Sequences of a cycle, in which every part has its share: the precision of weights."""
MISSED = 0.011
"""The most that shares which are meant to sum to 1 miss it by: three of .33 do."""
HEAVIEST = 1e300
"""The most that a weight is: the sum of all is finite."""


SOURCE: Final = WrittenUnder("data")
"""Where the messages of sources write their keys."""


def _check_weight(key: str, weight: float) -> None:
    if not 0 <= weight <= HEAVIEST:
        raise ValueError(f"{key}={weight}: allowed are numbers from 0 to {HEAVIEST:g}")


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """A source and its weight among those of all parts.

    Args:
        weight: its share of validation, and of training until the first stage; 0: it is evaluated
            alone.
        epochs: most times that each training sequence is shown; None: any number.
    """

    source: Annotated[Source, SOURCE]
    weight: float = 1.0
    epochs: Annotated[float | None, CHANGES_COURSE] = None

    def __post_init__(self) -> None:
        _check_weight("weight", self.weight)
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs={self.epochs}: allowed are numbers above 0, or null")


@dataclass(frozen=True, kw_only=True)
class MixtureStage:
    """Other weights for training, from a step on, until the next stage.

    Args:
        start: a step (integer), or a share of the run (float in [0, 1]).
        weights: weights by the names of parts; the others have none. Where all are below 1 they are
            shares and sum to 1.
    """

    start: int | float
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        if not 0 <= self.start <= (1 if isinstance(self.start, float) else math.inf):
            raise ValueError(
                f"start={self.start}: allowed are a step from 0 on, or a share of the run between "
                "0.0 and 1.0"
            )
        for name, weight in self.weights.items():
            _check_weight(f"weights.{name}", weight)
        total = sum(self.weights.values())
        if max(self.weights.values(), default=0) < 1 and abs(total - 1) > MISSED:
            raise ValueError(
                f"weights sum to {total:g}: shares below 1 sum to 1; weights of any sum are "
                "written as numbers from 1 on, 3 and 1 for 75 % and 25 %"
            )


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources by name.

    Args:
        parts: the sources and their weights; a weight of 3 beside one of 1 is 75 % of the
            sequences.
        stages: later weights for training, in the order of their steps.
        tokenizer: that of all parts, which have none of their own; None: no part has text.
        workers: processes that tokenise each part.
    """

    parts: Mapping[str, Weighted]
    stages: Annotated[tuple[MixtureStage, ...], CHANGES_COURSE] = ()
    tokenizer: TokenizerConfig | None = field(default_factory=Bytes)
    workers: Workers = 1

    def __post_init__(self) -> None:
        check_workers(self.workers)
        # by name, whatever order they are written in: the order of the sequences depends on it
        object.__setattr__(self, "parts", dict(sorted(self.parts.items())))
        if not self.parts:
            raise ValueError("data.parts={}: a mixture needs at least one source")
        sources = {name: part.source for name, part in self.parts.items()}
        if self.tokenizer == Bytes() and not any(hasattr(s, "corpus") for s in sources.values()):
            object.__setattr__(self, "tokenizer", None)
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer)
        for name, source in sources.items():
            if isinstance(source, Mixture):
                raise ValueError(f"data.parts.{name}.source is a mixture: name its parts here")
            if getattr(source, "tokenizer", None) not in (None, Bytes(), self.tokenizer):
                raise ValueError(
                    f"data.parts.{name}.source.tokenizer: the parts of a mixture share one "
                    "tokenizer, data.tokenizer; leave it out"
                )
        if sum(map(_learns_answers, sources.values())) > 1:
            raise ValueError(
                "data.parts: two parts are data=chat, and a run has one chat template; name the "
                "files of both in one part, data.path=[a,b]"
            )
        _ = self.shares, self.planned  # refused now

    @property
    def shares(self) -> dict[str, int]:
        """The sequences of each part in `CYCLE`, of validation, and of training until a stage."""
        return self._rounded({name: part.weight for name, part in self.parts.items()}, "data.parts")

    @property
    def planned(self) -> tuple[tuple[int | float, tuple[int, ...]], ...]:
        """When each stage begins, and the sequences of each part in `CYCLE`."""
        return tuple(
            (
                stage.start,
                (*self._rounded(stage.weights, f"data.stages[{number}].weights").values(),),
            )
            for number, stage in enumerate(self.stages)
        )

    def _rounded(self, weights: Mapping[str, float], key: str) -> dict[str, int]:
        """The sequences of each part in `CYCLE`: weights, rounded so that they add up."""
        if strange := [name for name in weights if name not in self.parts]:
            raise ValueError(
                f"{key}.{strange[0]}: there is no such part; data.parts has {', '.join(self.parts)}"
            )
        total = sum(weights.values())
        if not total:
            raise ValueError(f"{key}: all weights are 0, and one part has to be read")
        exact = {name: CYCLE * weights.get(name, 0.0) / total for name in self.parts}
        shares = {name: int(share) for name, share in exact.items()}
        for name, share in shares.items():
            if exact[name] and not share:
                raise ValueError(
                    f"{key}.{name}: its weight {weights[name]:g} is less than 1/{CYCLE} of the sum "
                    f"of all weights, {total:g}: leave the part out, or give it more"
                )
        fullest = sorted(exact, key=lambda name: shares[name] - exact[name])
        for name in fullest[: CYCLE - sum(shares.values())]:
            shares[name] += 1
        return shares

    @property
    def answers_only(self) -> bool:
        """Whether a part has conversations, of which the answers alone are learned."""
        return any(_learns_answers(part.source) for part in self.parts.values())

    @property
    def vocab_size(self) -> int | None:
        """The size of the vocabulary, where a part says it."""
        return self._said("vocab_size")

    @property
    def end_id(self) -> int | None:
        """The id that ends documents, where a part says it."""
        return self._said("end_id")

    @property
    def begin_id(self) -> int | None:
        """The id that begins documents, where a part says it."""
        return self._said("begin_id")

    def _said(self, key: str) -> int | None:
        values = (getattr(part.source, key, None) for part in self.parts.values())
        said: int | None = next((value for value in values if value is not None), None)
        return said

    def entries(self, run_dir: Path, seq_len: int) -> Sequence[CacheEntry]:
        """What the cache keeps of all parts."""
        corpora, tokenizer = self._opened(run_dir)
        entries = list[CacheEntry]()
        for name, corpus in corpora.items():
            with self._errors_of(name):
                entries += corpus.entries(tokenizer, seq_len)
        return entries

    def _opened(self, run_dir: Path, seed: int = 0) -> tuple[dict[str, Corpus], Any]:
        """The documents of all parts, and their tokenizer; None: they are ids already."""
        corpora = dict[str, Corpus]()
        for name, part in self.parts.items():
            with self._errors_of(name):
                if not hasattr(part.source, "corpus"):
                    corpora[name] = _Ready(part.source, run_dir, seed)
                    continue
                corpora[name] = part.source.corpus(run_dir)
                if isinstance(corpus := corpora[name], Texts) and self.workers > 1:
                    corpora[name] = replace(corpus, workers=self.workers)
        if self.tokenizer is None:
            return corpora, None
        return corpora, self.tokenizer.build(lambda: self._documents(corpora), run_dir)

    def build(self, run_dir: Path, seq_len: int, seed: int) -> TokenData:
        corpora, tokenizer = self._opened(run_dir, seed)
        parts = dict[str, TokenData]()
        for name, corpus in corpora.items():
            with self._errors_of(name):
                parts[name] = corpus.tokens(tokenizer, seq_len)
        of_parts = (data.tokenizer for data in parts.values())
        tokenizer = next((other for other in of_parts if other is not None), tokenizer)
        borders = borders_of(self, tokenizer)
        (first, vocab_size), *_ = ((name, data.vocab_size) for name, data in parts.items())
        for name, data in parts.items():
            if data.vocab_size != vocab_size:
                raise DataError(
                    f"data.parts.{name} has {data.vocab_size} token ids, and data.parts.{first} "
                    f"has {vocab_size}: all have those of one tokenizer; choose that which wrote "
                    "the token files, data/tokenizer=…, and give its size as their vocab_size"
                )
            if data.borders not in (NO_BORDERS, borders):
                raise DataError(
                    f"data.parts.{name}: end_id={data.borders.end} and begin_id="
                    f"{data.borders.begin} divide its documents, {borders.end} and {borders.begin} "
                    "those of the mixture: give all token files the ids of the tokenizer, or none"
                )
        listed = "; ".join(
            f"{name} {self.shares[name] / CYCLE:.2%} of {data.description}"
            for name, data in parts.items()
        )
        digests = [data.digest for data in parts.values() if data.digest is not None]
        train = self._mixed("train", {name: data.train for name, data in parts.items()})
        return TokenData(
            vocab_size,
            replace(train, stages=self.planned),
            self._mixed("val", {name: data.val for name, data in parts.items()}),
            tokenizer,
            f"a mixture: {listed}",
            digest="+".join(digests) or None,
            borders=borders,
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

        def fulfilled(name: str) -> float:
            weight = self.parts[name].weight
            return characters[name] / weight if weight else math.inf

        while streams:
            name = min(streams, key=fulfilled)
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
                name=part,
                first=end - len(array),
                end=end,
                share=self.shares[part],
                epochs=self.parts[part].epochs if name == "train" else None,
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


@dataclass(frozen=True)
class _Ready:
    """The corpus of a source that has token ids already, or makes them itself."""

    source: Source
    run_dir: Path
    seed: int

    def documents(self) -> Iterator[Piece]:
        return iter(())

    def entries(self, tokenizer: Tokenizer, seq_len: int) -> Sequence[CacheEntry]:
        entries_of = getattr(self.source, "entries", None)
        return () if entries_of is None else entries_of(self.run_dir, seq_len)

    def tokens(self, tokenizer: Tokenizer, seq_len: int) -> TokenData:
        data = self.source.build(self.run_dir, seq_len, self.seed)
        if not isinstance(data, TokenData):
            raise DataError(
                f"{type(self.source).__name__} gives a {type(data).__name__}, whose rows are read "
                "in order; a part of a mixture is a TokenData (fp4train.data.tokens)"
            )
        return data


def _learns_answers(source: Source) -> bool:
    return bool(getattr(source, "answers_only", False))


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
