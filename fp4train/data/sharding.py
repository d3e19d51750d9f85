"""Makes the shards of an entry of the cache, with any number of processes on any machines.

A process takes the parts one after another, each under a lock in the file `locks`, which the system
lifts when the process ends, however it ends. After each shard it writes down, in the part's JSON,
what is there; who takes up a part that another process left goes on behind that. Whoever sees that
all parts are finished writes the index, in every bit the same. A process whose own work is done
looks every `PAUSE` seconds for parts that others left, until all are finished.

On a file system without locks processes make the same shards, and each puts them whole in place.
"""

import fcntl
import json
import logging
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from tqdm import tqdm

from fp4train import files
from fp4train.data.parts import CorpusPart, Item, after, shard_items
from fp4train.data.stored import BLOCK, Ids, checksums

INDEX = "index.json"
LOCKS = "locks"
LIMIT = 1 << 24
"""Bytes that are read of what is written down of a part."""
PAUSE = 0.5
TOLD_SECONDS = 60.0
"""Between two lines about the progress, where no bar is shown."""
_WRITTEN_AT_ONCE = 1 << 22
_LITTER = re.compile(r"\.(\d+).*\.tmp")

_log = logging.getLogger(__name__)

ShardNumber = tuple[int, int]
"""CorpusPart, and shard in it."""


def shard_name(part: int, number: int) -> str:
    """The name of a shard without suffix; most parts have one."""
    return f"{part:05d}" + (f"-{number}" if number else "")


@dataclass(kw_only=True)
class PartRecord:
    """What is there of a part: ids and documents of each shard, and whether these are all."""

    shards: list[tuple[int, int]] = field(default_factory=list)
    finished: bool = False

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.shards)

    @property
    def documents(self) -> int:
        return sum(documents for _, documents in self.shards)


@dataclass(kw_only=True)
class Sharding:
    """The work on one entry.

    Args:
        place: folder of the entry.
        encode: function from documents to their packed ids.
        max_tokens: most ids that are needed.
        workers: processes of this machine that share the work.
    """

    place: files.Folder
    parts: Sequence[CorpusPart]
    encode: Callable[[Iterator[Item]], Iterator[Ids]]
    dtype: np.dtype[Any]
    max_tokens: int | None
    workers: int

    def __post_init__(self) -> None:
        self.records: dict[int, PartRecord] = {}
        self.locks = True
        self.parent = os.getpid()

    def make(self, first: int = 0, step: int = 1) -> None:
        """Make every `step`-th part from `first` on; the index, if all parts are there then.

        Raises:
            DataError: a document cannot be read or encoded.
        """
        mine = range(first, len(self.parts), step)
        progress = _Progress(sum(self.parts[part].size for part in mine))
        with self._others(mine), progress.bar:
            self._work(mine, progress)
        if self._whole(range(len(self.parts))):
            self._write_index()

    @contextmanager
    def _others(self, mine: range) -> Iterator[None]:
        """A context beside which the other workers work. An error of theirs is met again by this
        process, which takes up the part that they left.
        """
        if self.workers == 1:
            yield
            return
        before = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        fork = multiprocessing.get_context("fork")
        count = min(self.workers, len(mine)) - 1
        processes = [fork.Process(target=self._beside, args=(mine,)) for _ in range(count)]
        try:
            for process in processes:
                process.start()
            yield
        finally:
            for process in processes:
                process.terminate()
                process.join()
            if before is None:
                del os.environ["TOKENIZERS_PARALLELISM"]
            else:
                os.environ["TOKENIZERS_PARALLELISM"] = before

    def _beside(self, mine: range) -> None:
        """What another worker does; it ends at once, whatever the process that it was copied from
        would do.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with suppress(BaseException):
            self._work(mine, None)
        os._exit(0)

    # -- parts -------------------------------------------------------------------------------------

    def _work(self, mine: range, progress: "_Progress | None") -> None:
        """Make what nobody else makes, until all of `mine` is there."""
        flags = os.O_RDWR | os.O_CREAT
        with os.fdopen(self.place.descriptor_of(LOCKS, flags), "r+b") as locks:
            while not self._whole(mine):
                if not self._pass(mine, progress, locks.fileno()):
                    time.sleep(PAUSE)

    def _pass(self, mine: range, progress: "_Progress | None", locks: int) -> bool:
        """Make those parts of `mine` that nobody else makes; whether there were any."""
        litter = self._litter()
        before = 0
        made_some = False
        for part in mine:
            if progress is not None:
                progress.at(before)
            before += self.parts[part].size
            if self._is_finished(part) or not self._lock(locks, part):
                continue
            try:
                if not self._is_finished(part):  # by the process that had the lock
                    made_some = True
                    for name in litter.get(part, ()) if self.locks else ():
                        self.place.remove(name)
                    self._make_part(part, progress)
            finally:
                self._unlock(locks, part)
            if self._enough():
                break
        return made_some

    def _whole(self, numbers: range) -> bool:
        """Whether all of these parts are finished, or as many as are needed."""
        return all(map(self._is_finished, numbers)) or self._enough()

    def _enough(self) -> bool:
        """Whether the finished parts at the beginning hold all ids that are needed."""
        tokens = 0
        for part in range(len(self.parts)):
            if self.max_tokens is None or not self._is_finished(part):
                return False
            tokens += self.records[part].tokens
            if tokens >= self.max_tokens:
                return True
        return False

    def _is_finished(self, part: int) -> bool:
        if part not in self.records or not self.records[part].finished:
            self.records[part] = self._record(part)
        return self.records[part].finished

    def _record(self, part: int) -> PartRecord:
        """What is there of a part: the shards that are written down and are of their length."""
        name = f"{part:05d}.json"
        try:
            data = json.loads(self.place.read(name, LIMIT))
            if data["entry"] != self.place.path.name:
                text = "%s is of another text or tokenizer, and is not used: its part is made anew"
                _log.warning(text, self.place.path / name)
                self.place.remove(name)
                return PartRecord()
            shards = [(int(tokens), int(documents)) for tokens, documents in data["shards"]]
            there = 0
            while there < len(shards) and self._is_there(part, there, shards[there][0]):
                there += 1
            finished = data["finished"] is True and there == len(shards)
            return PartRecord(shards=shards[:there], finished=finished)
        except FileNotFoundError:
            return PartRecord()
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            _log.warning("%s is damaged (%s): its part is made anew", name, error)
            self.place.remove_all(name)
            return PartRecord()

    def _is_there(self, part: int, number: int, tokens: int) -> bool:
        """Whether a shard and its checksums have their lengths."""
        name = shard_name(part, number)
        size = tokens * self.dtype.itemsize
        sums = -(-size // BLOCK) * 4
        for suffix, length in ((".bin", size), (".crc", sums)):
            status = self.place.status(name + suffix)
            if status is None or status.st_size != length or not self.place.has_file(name + suffix):
                return False
        return True

    def _make_part(self, part: int, progress: "_Progress | None") -> None:
        """Make the shards of a part that are not there; the lock on it is held."""
        record = self.records[part]
        items = after(self.parts[part].items(), record.documents)
        while not record.finished:
            following = next(items, None)
            if following is not None:
                items = chain([following], items)
                left = None if self.max_tokens is None else self.max_tokens - record.tokens
                counted = _Counted(shard_items(items), progress)
                tokens = self._write(shard_name(part, len(record.shards)), counted, left)
                record.shards.append((tokens, counted.documents))
            enough = self.max_tokens is not None and record.tokens >= self.max_tokens
            record.finished = following is None or enough
            written = {
                "entry": self.place.path.name,
                "shards": record.shards,
                "finished": record.finished,
            }
            self.place.write(f"{part:05d}.json", json.dumps(written).encode())

    def _write(self, name: str, documents: Iterator[Item], left: int | None) -> int:
        """Write a shard, of at most `left` ids; returns how many it has."""
        sums: list[Any] = []
        size = 0

        def data() -> Iterator[bytes]:
            nonlocal size
            for part in _divided(self._bytes(documents, left)):
                if os.getppid() != self.parent and os.getpid() != self.parent:
                    os._exit(1)  # the process that began the work is gone
                sums.append(checksums(part))
                size += len(part)
                yield part

        self.place.write(f"{name}.bin", data())
        self.place.write(f"{name}.crc", np.concatenate([np.empty(0, np.uint32), *sums]).tobytes())
        return size // self.dtype.itemsize

    def _bytes(self, documents: Iterator[Item], left: int | None) -> Iterator[bytes]:
        for ids in self.encode(documents):
            kept = ids if left is None else ids[:left]
            yield kept.astype(self.dtype, copy=False).tobytes()
            if left is not None:
                left -= len(kept)
                if not left:
                    return

    def _write_index(self) -> None:
        """Write the index of the parts that are needed, and take away what others hold."""
        counts: list[list[int]] = []
        tokens = 0
        for part in range(len(self.parts)):
            if self.max_tokens is not None and tokens >= self.max_tokens:
                break
            counts.append([shard_tokens for shard_tokens, _ in self.records[part].shards])
            tokens += self.records[part].tokens
        index = {
            "entry": self.place.path.name,
            "dtype": self.dtype.str,
            "tokens": tokens if self.max_tokens is None else min(tokens, self.max_tokens),
            "parts": counts,
        }
        self.place.write(INDEX, json.dumps(index).encode())
        if len(counts) < len(self.parts):
            for name in self.place.names():
                match = re.match(r"\.?(\d{5,})[-.]", name)
                if match and int(match[1]) >= len(counts):
                    self.place.remove_all(name)

    # -- locks -------------------------------------------------------------------------------------

    def _lock(self, descriptor: int, part: int) -> bool:
        """Take the lock of a part; False: another process has it."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, part)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            self.locks = False
        return True

    def _unlock(self, descriptor: int, part: int) -> None:
        if self.locks:
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, part)

    def _litter(self) -> dict[int, list[str]]:
        """What killed processes, or others that work, have not finished, by part."""
        litter: dict[int, list[str]] = {}
        for name in self.place.names():
            if match := _LITTER.fullmatch(name):
                litter.setdefault(int(match[1]), []).append(name)
        return litter


class _Counted(Iterator[Item]):
    """Documents as they are taken, counted."""

    def __init__(self, items: Iterator[Item], progress: "_Progress | None") -> None:
        self.items = items
        self.progress = progress
        self.documents = 0

    def __next__(self) -> Item:
        item = next(self.items)
        self.documents += item.ends_document
        if self.progress is not None:
            self.progress.add(item.size)
        return item


class _Progress:
    """Shows how much is done, how fast, and how long the rest takes: by a bar on a terminal, by
    lines elsewhere.

    Args:
        total: bytes of all parts.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.began = self.told = time.monotonic()
        self.done = self.at_first = 0
        self.bar: tqdm[Any] = tqdm(
            desc="tokenising", total=total, unit="B", unit_scale=True, disable=None, leave=False
        )

    def at(self, done: int) -> None:
        """All parts of so many bytes are there, or in work."""
        if self.done == self.at_first:  # they were there before
            self.at_first = self.bar.initial = done
        self._tell(done)

    def add(self, size: int) -> None:
        """So many bytes more are done."""
        self._tell(min(self.done + size, self.total))

    def _tell(self, done: int) -> None:
        self.bar.update(done - self.done)
        self.done = done
        now = time.monotonic()
        if self.bar.disable and now - self.told > TOLD_SECONDS:
            self.told = now
            line = tqdm.format_meter(
                done,
                self.total,
                now - self.began,
                unit="B",
                unit_scale=True,
                initial=self.at_first,
            )
            _log.info("tokenising: %s", line)


def _divided(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in portions of whole blocks."""
    gathered = bytearray()
    for part in parts:
        gathered += part
        while len(gathered) >= _WRITTEN_AT_ONCE:
            yield bytes(gathered[:_WRITTEN_AT_ONCE])
            del gathered[:_WRITTEN_AT_ONCE]
    if gathered:
        yield bytes(gathered)
