"""A corpus in parts that are read apart, each cut into shards: by that several processes share the
work, and one that was killed loses the shard that it was making alone.

The parts, and where each is cut, follow from the files and not from who reads them:

- a part is consecutive files, a stretch of one (lines, row groups), or the whole corpus where
  nobody can begin in its middle;
- a shard is consecutive documents of a part until their text passes `SHARD`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from fp4train.data.stored import Ids

SHARD = 1 << 28
"""Characters of the documents of a shard, and bytes of the files of a part."""


class Item(Protocol):
    """A document, or a piece of one."""

    @property
    def size(self) -> int: ...
    @property
    def ends_document(self) -> bool: ...


@dataclass(frozen=True)
class IdItem:
    """Ids that are there already, in the place of documents."""

    ids: Ids
    ends_document: bool = True

    @property
    def size(self) -> int:
        return self.ids.nbytes


def id_items(read: Callable[[], Iterator[Ids]]) -> Iterator[Item]:
    """The ids that `read` gives, some in each item."""
    return map(IdItem, read())


@dataclass(frozen=True)
class CorpusPart:
    """Documents that can be read without those before them.

    Args:
        size: about as many bytes, for the progress that is shown.
        readers: functions that read them, one after another.
    """

    size: int
    readers: tuple[Callable[[], Iterator[Item]], ...]

    def items(self) -> Iterator[Item]:
        return chain.from_iterable(read() for read in self.readers)


def joined_parts(small: Iterable[CorpusPart]) -> list[CorpusPart]:
    """The same documents in parts of at least `SHARD` bytes, as far as there are so many."""
    parts = [CorpusPart(0, ())]
    for part in small:
        if parts[-1].size >= SHARD:
            parts.append(CorpusPart(0, ()))
        parts[-1] = CorpusPart(parts[-1].size + part.size, parts[-1].readers + part.readers)
    return parts


def after(items: Iterator[Item], documents: int) -> Iterator[Item]:
    """What follows the first so many documents."""
    while documents and (item := next(items, None)) is not None:
        documents -= item.ends_document
    return items


def shard_items(items: Iterator[Item]) -> Iterator[Item]:
    """The documents of the next shard; `items` stands behind them then."""
    size = 0
    for item in items:
        size += item.size
        yield item
        if item.ends_document and size >= SHARD:
            return
