"""The cache of token ids: what the ids of a corpus are known by, and how they are opened.

    CACHE/HASH/00000.bin     the packed ids of the first shard (`parts.py`)
               00000.crc     the CRC-32 of each block of it
               00000.json    the shards of the first part, as far as they are there
               index.json    all of them, written last

HASH is that of source, settings and tokenizer. A start reads the index alone; each block that a
batch reads is compared with its checksum (`stored.py`), so that a run trains on what was
tokenised, to the bit. A shard that a run found damaged has a mark beside it: the next start reads
it whole, and has it made anew (`sharding.py`). Files are written under another name and then
renamed. Users who name one folder share what is in it.
"""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from fp4train import files
from fp4train.data.files import expanded
from fp4train.data.parts import CorpusPart, IdItem, Item, id_items
from fp4train.data.sharding import INDEX, Sharding, ShardNumber, shard_name
from fp4train.data.stored import BLOCK, OPEN, SUSPECT, CheckedFile, IdFile, Ids, ShardedIds
from fp4train.errors import DataError, data_errors, reason
from fp4train.paths import PathText
from fp4train.text import counted, shortened

VERSION = 3
LIMIT = 1 << 26
"""Bytes that are read of an index: those of a quarter of a million shards have 4 MB."""
QUOTED = 300
"""Characters of a reason that are shown: it quotes what stands in the file."""
AT_ONCE = 1 << 22
"""Bytes that are compared at once where a shard is read whole."""

_log = logging.getLogger(__name__)
_DAMAGE = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, OverflowError)
"""What a damaged index raises; SyntaxError: the name of its type is."""


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """The ids of a corpus in the cache.

    Args:
        key: mapping that names them in the cache.
        parts: function that gives the corpus in parts.
        encode: function from documents to their packed ids.
        max_tokens: most ids that are taken.
        workers: processes that make them.
    """

    cache_dir: PathText
    key: Mapping[str, Any]
    parts: Callable[[], Sequence[CorpusPart]]
    encode: Callable[[Iterator[Item]], Iterator[Ids]]
    dtype: np.dtype[Any]
    max_tokens: int | None = None
    workers: int = 1

    @classmethod
    def of_ids(
        cls,
        cache_dir: str,
        key: Mapping[str, Any],
        readers: Sequence[Callable[[], Iterator[Ids]]],
        dtype: np.dtype[Any],
    ) -> "CacheEntry":
        """The ids that `readers` give one after another."""
        return cls(
            cache_dir=cache_dir,
            key=key,
            parts=lambda: [CorpusPart(0, (partial(id_items, read),)) for read in readers],
            encode=lambda items: (item.ids for item in items if isinstance(item, IdItem)),
            dtype=dtype,
        )

    def ids(self) -> ShardedIds:
        """The ids, made where they are not there already."""
        with self._kept():
            folder = self._folder()
            if (ids := opened(folder)) is None:
                self._sharding(folder).make()
                ids = opened(folder)
        if ids is None:
            raise DataError(
                f"tokenised data in {folder.path} cannot be read back as it was written. "
                "Choose another data.cache_dir."
            )
        return ids

    def prepare(self, first: int, step: int, *, verify: bool) -> str:
        """Make every `step`-th part from `first` on; returns what is there then, in words.

        Args:
            verify: whether shards that are there are read whole.
        """
        with self._kept():
            folder = self._folder()
            if opened(folder, verify=verify) is None:
                self._sharding(folder).make(first, step)
            ids = opened(folder)
            if ids is None:
                return f"{folder.path}: its share is there, other parts are not"
        cut = ", cut off at data.max_tokens" if len(ids) == self.max_tokens else ""
        return f"{folder.path}: {len(ids):,} ids in {counted(len(ids.counts), 'shard')}{cut}"

    def _sharding(self, folder: files.Folder) -> Sharding:
        return Sharding(
            place=folder,
            parts=self.parts(),
            encode=self.encode,
            dtype=self.dtype,
            max_tokens=self.max_tokens,
            workers=self.workers,
        )

    @cached_property
    def _place(self) -> Path:
        return expanded(self.cache_dir, "data.cache_dir")

    def _kept(self) -> AbstractContextManager[None]:
        """A context whose errors of the file system say that ids cannot be kept."""
        refused = f"tokenised data cannot be kept in {self._place}: "
        remedy = ". Choose another data.cache_dir; what is finished is kept."
        return data_errors(OSError, before=refused, message=reason, after=remedy)

    def _folder(self) -> files.Folder:
        """The folder of this entry."""
        entry = {"version": VERSION, "max_tokens": self.max_tokens, **self.key}
        name = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:20]
        with files.Folder.open(self._place, create=True) as cache:
            cache.remove_litter()
            if cache.status(name) is not None and not cache.has_folder(name):
                cache.remove(name)
            return cache.folder(name, create=True)


def opened(folder: files.Folder, *, verify: bool = False) -> ShardedIds | None:
    """The ids of a finished entry; None: it is not finished, or damaged, which is said, and what is
    damaged is taken away.

    Args:
        verify: whether all shards are read.
    """
    path = folder.path
    try:
        index = json.loads(folder.read(INDEX, LIMIT))
        dtype = np.dtype(str(index["dtype"]))
        tokens = int(index["tokens"])
        of_parts = [[int(count) for count in counts] for counts in index["parts"]]
        shards = [(part, k) for part, counts in enumerate(of_parts) for k in range(len(counts))]
        counts = [count for counts in of_parts for count in counts]
        if dtype.kind != "u" or not 0 <= tokens <= sum(counts) or min(counts, default=0) < 0:
            raise ValueError(f"{tokens} ids of type {dtype} in {len(counts)} shards")
        if index["entry"] != path.name:
            raise ValueError("it is of another text or tokenizer")
    except FileNotFoundError:
        return None
    except (OSError, *_DAMAGE) as error:
        strange = isinstance(error, files.NotPlain)
        if isinstance(error, OSError) and not strange and error.errno != errno.EFBIG:
            raise
        text = "tokenised data in %s is damaged (%s: %s): tokenising again what is not there"
        _log.warning(text, path, INDEX, shortened(reason(error), QUOTED))
        folder.remove_all(INDEX)
        return None
    open_shard = partial(_open_shard, folder, dtype, shards, counts)
    ids = ShardedIds(path, dtype, counts, open_shard, tokens)
    if not (damaged := list(_damaged(folder, ids, shards, verify=verify))):
        return ids
    for shard, why in damaged:
        text = "tokenised data in %s is damaged (%s): tokenising again this part"
        _log.warning(text, path / f"{shard_name(*shard)}.bin", shortened(why, QUOTED))
        for name in (INDEX, *(shard_name(*shard) + suffix for suffix in (".bin", ".crc", SUSPECT))):
            folder.remove_all(name)
    return None


def _damaged(
    folder: files.Folder, ids: ShardedIds, shards: Sequence[ShardNumber], *, verify: bool
) -> Iterator[tuple[ShardNumber, str]]:
    """The shards that are damaged, and why. The names of all are looked at, the sizes of few, and
    what they hold if it is asked for, or a run has found it damaged.
    """
    names = set(folder.names())
    for number, shard in enumerate(shards):
        name = shard_name(*shard)
        suspect = name + SUSPECT in names
        try:
            if not {f"{name}.bin", f"{name}.crc"} <= names:
                raise DataError("it is missing")
            if len(shards) <= OPEN or suspect or verify:
                file = ids.file(number)
                if suspect or verify:
                    for start in range(0, file.size, AT_ONCE):
                        file.checked(start, min(AT_ONCE, file.size - start))
                if suspect:
                    folder.remove(name + SUSPECT)
        except (DataError, OSError) as error:
            yield shard, reason(error)


def _open_shard(
    folder: files.Folder,
    dtype: np.dtype[Any],
    shards: Sequence[ShardNumber],
    counts: Sequence[int],
    number: int,
) -> CheckedFile:
    """Shard `number` of an entry.

    Raises:
        DataError: it is not there, or not of its length.
    """
    name = shard_name(*shards[number])
    path = folder.path / f"{name}.bin"
    size = counts[number] * dtype.itemsize
    blocks = -(-size // BLOCK)
    again = ". Start the command again: this part is tokenised anew"
    with data_errors(OSError, before=f"{path} cannot be read: ", message=reason, after=again):
        sums_path = path.with_suffix(".crc")
        sums = IdFile(folder.descriptor_of(sums_path.name), sums_path, np.dtype(np.uint32), blocks)
        file = CheckedFile(folder.descriptor_of(path.name), path, dtype, counts[number], sums=sums)
        for opened in (file, sums):
            actual = os.fstat(opened.descriptor).st_size
            if actual != opened.size:
                raise DataError(
                    f"{opened.path} holds {actual:,} bytes instead of {opened.size:,}{again}"
                )
    return file
