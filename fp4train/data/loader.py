"""Batches as a pure function of (seed, position): exact resume from the step number alone.

The tokens are packed: sequence k is tokens[k·T : k·T + T + 1], its first T tokens the input and its
last T the target, so that the sequences of an epoch predict every token once (but for a tail
shorter than T). The sequence shown at position i of a run is

    permutation(seed, epoch = i // n)[i % n],  n sequences an epoch

Where the tokens have parts, each has its own sequences and permutation, and `schedule.py` says
which part a position has, and which of the part's sequences.

Targets that do not count in the loss are `IGNORED`. An input that is the id that ends a document,
and yet ends none (`TokenArray.inner_ends`), is its complement, −1 − id: models that attend within
documents read it so.

Nothing is kept between calls. A rank or a microbatch fetches its own rows of a batch with
`rows(first, count)`.

The permutation needs no memory either: a balanced Feistel network permutes the even-bit numbers
below 4^h, the smallest such range that holds n,

    (l, r) → (r, l xor F(r, key_i)),  i = 0 … 5

and an image that falls outside 0 … n-1 is permuted again until it falls inside ("cycle walking",
Black and Rogaway 2002, section 3), which leaves a permutation of 0 … n-1. The range is less than 4
n: fewer than four walks are expected.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fp4train.data.schedule import MASK64, PartSchedule, first_steps, mix, splitmix64
from fp4train.data.stream import IGNORED, Rows, Stream, shown_passes
from fp4train.data.token_array import TokenArray, TokenPart
from fp4train.errors import DataError

ROUNDS = 6

_log = logging.getLogger(__name__)


def permute(
    index: npt.NDArray[np.int64], n: int, *, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """The images of `index` (any subset of 0 … n-1) under the permutation of `epoch`."""
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    state = splitmix64(splitmix64(seed & MASK64) ^ epoch)
    keys = [splitmix64(state + i) for i in range(ROUNDS)]
    image = index.astype(np.uint64)
    outside = np.ones(len(image), dtype=bool)
    while outside.any():
        left = image[outside] >> shift
        right = image[outside] & mask
        for key in keys:
            left, right = right, left ^ (mix(right, key) & mask)
        image[outside] = (left << shift) | right
        outside = image >= n
    return image.astype(np.int64)


class Loader(Stream):
    """Shuffled batches of packed sequences; no state, so every step can be asked for in any
    order.

    Args:
        stages: first positions and shares of all parts (`PartSchedule`); none: those that the parts
            have.
    """

    def __init__(
        self,
        tokens: TokenArray,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        stages: Sequence[tuple[int, tuple[int, ...]]] = (),
    ) -> None:
        if batch_size < 1 or seq_len < 1:
            raise ValueError(
                f"batch_size={batch_size}, seq_len={seq_len}: allowed are whole numbers from 1"
            )
        self.parts = tokens.parts or (TokenPart(name="", first=0, end=len(tokens), share=1),)
        for part in self.parts:
            if part.end - part.first < seq_len + 1:
                raise ValueError(
                    f"{part.end - part.first} {part.name or tokens.name} tokens: a sequence needs "
                    f"seq_len+1 = {seq_len + 1}"
                )
        super().__init__(
            name=tokens.name,
            vocab_size=tokens.vocab_size,
            batch_size=batch_size,
            seq_len=seq_len,
        )
        self.tokens = tokens
        self.all_scored = tokens.scored is None
        self.ahead = getattr(tokens.ids, "ahead", 1)
        self.seed = seed
        self.sequences = [(part.end - part.first - 1) // seq_len for part in self.parts]
        self.stages = stages or [(0, tuple(part.share for part in self.parts))]
        self.schedule = PartSchedule(self.stages, seed)

    def _again(self, **settings: Any) -> "Loader":
        """The same batches, but for some settings."""
        names = ("tokens", "batch_size", "seq_len", "seed", "stages")
        return Loader(**{**{name: getattr(self, name) for name in names}, **settings})

    def with_seed(self, seed: int) -> "Loader":
        """The same batches in another order."""
        return self._again(seed=seed)

    def by_part(self) -> dict[str, "Loader"]:
        """See `Stream.by_part`."""
        alone = {part.name: (replace(part, share=1),) for part in self.tokens.parts}
        return {
            name: self._again(tokens=replace(self.tokens, parts=parts), stages=())
            for name, parts in alone.items()
        }

    def lasting(self, steps: int, begun: int = 0) -> "Loader":
        """See `Stream.lasting`.

        Raises:
            DataError: stages are not in order, or a part is too small for them.
        """
        stages = [(0, tuple(part.share for part in self.parts))]
        first = first_steps((start for start, _ in self.tokens.stages), steps)
        for number, (step, (_, shares)) in enumerate(zip(first, self.tokens.stages, strict=True)):
            if step >= steps:
                _log.warning(
                    "data.stages[%d] never begins: its first step would be %d of a run of %d",
                    number,
                    step,
                    steps,
                )
            if step <= begun:
                stages = []
            stages.append((max(step - begun, 0) * self.batch_size, shares))
        loader = self._again(stages=stages)
        for number, (part, n) in enumerate(zip(self.tokens.parts, self.sequences, strict=False)):
            most = self.batch_size * max(shares[number] / sum(shares) for _, shares in stages)
            if n < most:
                raise DataError(
                    f"data.parts.{part.name} has {n:,} training sequences, and a batch takes "
                    f"{most:.4g} of it: give it more data or less weight, or choose a smaller "
                    "train.batch_size"
                )
            end = begun + loader.schedule.position(number, part.most(n)) // self.batch_size
            if end < steps:
                raise _exhausted(part, n, f"at step {end}")
        return loader

    @cached_property
    def fresh(self) -> int:
        """Sequences before any is shown again."""
        return min(self.schedule.position(part, n) for part, n in enumerate(self.sequences))

    def drawn(self, position: int) -> dict[str, list[float]]:
        """See `Stream.drawn`."""
        shares = self.schedule.stage(max(position - 1, 0)).shares
        passes = self.schedule.stage(position).taken(position) / self.sequences
        both = np.stack((shares / shares.sum(), passes), axis=1).tolist()
        return {part.name: pair for part, pair in zip(self.tokens.parts, both, strict=False)}

    def passes(self, batches: int) -> str:
        """See `Stream.passes`."""
        drawn = self.drawn(batches * self.batch_size)
        parts = [f"{shown_passes(passes)} of {name}" for name, (_, passes) in drawn.items()]
        return f"passes: {', '.join(parts)}" if parts else super().passes(batches)

    def starts(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """The places at which the sequences at positions first … first+count-1 of the run begin."""
        parts_at, numbers = self.schedule.at(first, count)
        starts = np.empty(count, dtype=np.int64)
        for number, (part, n) in enumerate(zip(self.parts, self.sequences, strict=True)):
            at = np.flatnonzero(parts_at == number)
            if (numbers[at] >= part.most(n)).any():
                raise _exhausted(part, n, "before the run ends, as batches were skipped")
            epochs, places = np.divmod(numbers[at], n)
            if number:
                seed = splitmix64(self.seed & MASK64) + number
            else:
                seed = self.seed
            for epoch in np.unique(epochs):
                now = epochs == epoch
                indices = permute(places[now], n, seed=seed, epoch=int(epoch))
                starts[at[now]] = part.first + indices * self.seq_len
        return starts

    def rows(self, first: int, count: int) -> Rows:
        """Inputs and targets, int64 [count, T] each, of positions first … first+count-1 of the
        run.

        Raises:
            DataError: a part is exhausted, or holds ids that the vocabulary lacks.
        """
        T = self.seq_len
        rows_BT1 = np.empty((count, T + 1), dtype=np.int64)  # first of all: too many rows end here
        places = np.add(self.starts(first, count)[:, None], np.arange(T + 1), out=rows_BT1)
        if self.tokens.scored is None:
            silent = None
        else:
            silent = self.tokens.scored.take(places[:, 1:]) == 0
        if self.tokens.inner_ends is None:
            inner = None
        else:
            inner = self.tokens.inner_ends.take(places[:, :-1]) != 0
        # `take` lets other threads run while it waits for a disk, however short a row is;
        # assignments do not.
        rows_BT1[...] = self.tokens.ids.take(rows_BT1)
        self.tokens.check(
            rows_BT1,
            f"{self.tokens.name} tokens at positions {first} … {first + count - 1} of the run",
        )
        rows = torch.from_numpy(rows_BT1)
        tokens = rows[:, :-1].contiguous()
        targets = rows[:, 1:].contiguous()
        if inner is not None and inner.any():
            tokens = torch.where(torch.from_numpy(inner), ~tokens, tokens)
        if silent is not None:
            targets = targets.masked_fill(torch.from_numpy(silent), IGNORED)
        return tokens, targets

    def scored(self, first: int, count: int) -> int:
        """The targets that count of the sequences at positions first … first+count-1."""
        if self.tokens.scored is None:
            return count * self.seq_len
        places = self.starts(first, count)[:, None] + np.arange(1, self.seq_len + 1)
        return int(np.count_nonzero(self.tokens.scored.take(places)))

    @property
    def place(self) -> str:
        """See `Stream.place`."""
        path = getattr(self.tokens.ids, "filename", None)
        return super().place + ("" if path is None else f" of {path}")


def _exhausted(part: TokenPart, sequences: int, when: str) -> DataError:
    return DataError(
        f"data.parts.{part.name} is exhausted {when}: it has {sequences:,} training sequences, and "
        f"data.parts.{part.name}.epochs={part.epochs:g} bounds how often each is shown. Raise "
        "epochs, lower its weight, train fewer steps, or let a stage without it begin by then "
        "(data.stages)"
    )


class _Share(NamedTuple):
    """Fetched rows, and the factor of the loss of the batch that they belong to."""

    rows: Rows
    loss_factor: float


class Feed:
    """The rows of a stream on `device`, fetched before they are asked for.

    Reading a batch can wait for a disk, and copying it to a GPU waits for the GPU where the memory
    is pageable. A thread fetches the next rows into page-locked memory while the current ones are
    trained on; the copy then runs beside the kernels.
    """

    def __init__(self, stream: Stream, device: torch.device) -> None:
        self.stream = stream
        self.device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: dict[tuple[int, int], Future[_Share]] = {}
        self._waits: tuple[float, int, int] | None = None
        self._waited = 0.0

    def rows(self, first: int, count: int, *, then: int | None = None) -> Rows:
        """Inputs and targets, int64 [count, T] each, of positions first … first+count-1 of the run.

        Args:
            then: position that is asked for next, with the same count, and further ones at this
                distance; None: nothing is fetched in advance.

        Raises:
            UserError: the rows hold ids that the vocabulary lacks.
        """
        ahead = self._ahead
        self._ahead = {}
        with self._waiting(first, count):
            if (first, count) in ahead:
                share = ahead[first, count].result()
            else:
                share = self._fetch(first, count)
        if then is not None:
            for start in range(then, then + self.stream.ahead * (then - first), then - first):
                rows = start, count
                self._ahead[rows] = ahead.get(rows) or self._thread.submit(self._fetch, *rows)
        inputs, targets = (rows.to(self.device, non_blocking=True) for rows in share.rows)
        return inputs, targets

    def problem(self, first: int, count: int) -> str | None:
        """What is wrong with rows that are asked for next; None: they are fetched, and can be had.

        Several ranks ask before they begin a step together, so that none of them is left alone in
        it.
        """
        if (first, count) not in self._ahead:
            self._ahead = {(first, count): self._thread.submit(self._fetch, first, count)}
        with self._waiting(first, count):
            error = self._ahead[first, count].exception()
        if error is not None and not isinstance(error, DataError):
            raise error
        return None if error is None else str(error)

    def loss_factor(self, batch: int) -> float:
        """`Stream.loss_factor` of a whole batch, which is fetched with its rows."""
        size = self.stream.batch_size
        for (start, count), share in self._ahead.items():
            if start // size == batch:
                with self._waiting(start, count):
                    return share.result().loss_factor
        return self.stream.loss_factor(batch * size, size)

    def waiting(self) -> tuple[float, str] | None:
        """The seconds that somebody has waited for rows by now, and for which rows; None: nobody
        waits.
        """
        if (waits := self._waits) is None:
            return None
        since, start, count = waits
        sequences = f"sequences {start}–{start + count - 1}" if count > 1 else f"sequence {start}"
        return time.monotonic() - since, f"{sequences} of the {self.stream.place}"

    def waited(self) -> float:
        """The seconds that rows were waited for since the last call."""
        seconds = self._waited
        self._waited = 0.0
        return seconds

    @contextmanager
    def _waiting(self, first: int, count: int) -> Iterator[None]:
        began = time.monotonic()
        self._waits = began, first, count
        yield
        self._waits = None
        self._waited += time.monotonic() - began

    def close(self) -> None:
        """End the thread; `rows` must not be called with `then` afterwards."""
        self._ahead = {}
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, first: int, count: int) -> _Share:
        rows = self.stream.rows(first, count)
        size = self.stream.batch_size
        factor = self.stream.loss_factor(first // size * size, size)
        if self.device.type == "cuda":
            rows = (rows[0].pin_memory(), rows[1].pin_memory())
        return _Share(rows, factor)


class RunRows:
    """The rows of a run on `device`: those that it learns, fetched before they are asked for, and
    those that it is evaluated on.

    Args:
        fingerprint: checksum of all data.
        begun: the first batch of these data, counted from the run's beginning.
    """

    def __init__(
        self,
        training: Stream,
        validation: Stream,
        fingerprint: str,
        device: torch.device,
        begun: int = 0,
    ) -> None:
        self.training = training
        self.validation = validation
        self.fingerprint = fingerprint
        self.begun = begun
        self.validation_parts = validation.by_part()
        self.feed = Feed(training, device)

    def with_seed(self, seed: int) -> "RunRows":
        """The same data, of which a run with another seed learns."""
        training = self.training.with_seed(seed)
        return RunRows(training, self.validation, self.fingerprint, self.feed.device, self.begun)
