"""A folder of weights as Hugging Face's software reads it, written one tensor at a time, whole or
not at all.

The files are safetensors: `model.safetensors`, or `model-00001-of-00003.safetensors` … with the
index `model.safetensors.index.json`, which says in which file each tensor lies. The header of a
file comes first and is known from names, shapes and dtypes alone; then each tensor is made, written
and dropped. So an export takes the memory of a piece of one tensor.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from fp4train import files
from fp4train.checkpoint.model_folder import INDEX, WEIGHTS
from fp4train.checkpoint.tensors import StreamedTensor, write_tensors
from fp4train.errors import UserError, in_words
from fp4train.files import Folder, write_all

SHARD_BYTES = 5_000_000_000
"""Largest file of weights, unless one tensor is larger: the default of the Hugging Face hub."""

Tell = Callable[[int, int | None, str], None]
"""Hears how many tensors are written, of how many (None: it is not known yet), and what comes
next.
"""


def silent(done: int, total: int | None, what: str) -> None:
    """A progress report that nobody reads."""


@contextmanager
def new_export(out: Path) -> Iterator[Folder]:
    """The folder `out`, open to be filled; it gets its name when the block has ended
    (`files.new_folder`).

    Raises:
        UserError: something of that name is there already, or the disk does not take it: then
            nothing is there.
    """
    try:
        with files.new_folder(out) as folder:
            yield folder
    except FileExistsError as error:
        raise UserError(
            f"out={out} is there already, and nothing is written over: name a new folder"
        ) from error
    except OSError as error:
        raise UserError(
            f"out={out} is not written: {in_words(error)}. There is no folder of that name"
        ) from error


def write_json(folder: Folder, name: str, value: object) -> None:
    """Put `value` into the file `name`, as readable JSON."""
    folder.write(name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_weights(
    folder: Folder,
    tensors: Iterable[StreamedTensor],
    *,
    shard: int = SHARD_BYTES,
    tell: Tell = silent,
) -> int:
    """Write the weights, and where they are several files their index; returns the bytes of all
    tensors.

    Tensors keep their order from file to file; in one file larger dtypes come first, as the format
    wants them aligned.

    Args:
        shard: bytes of tensors in one file, at most; a tensor that is larger has a file of its own.

    Raises:
        OSError: the disk takes no more.
        TypeError, ValueError: a tensor is not what its description says.
    """
    shards = list(_shards(tensors, shard))
    total = sum(tensor.size for group in shards for tensor in group)
    count = sum(map(len, shards))
    done = itertools.count()

    def with_progress(tensor: StreamedTensor) -> StreamedTensor:
        def pieces() -> Iterator[Tensor]:
            tell(next(done), count, tensor.name)
            yield from tensor.pieces()

        return replace(tensor, pieces=pieces)

    places: dict[str, str] = {}
    for number, group in enumerate(shards, start=1):
        name = WEIGHTS
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder, name, map(with_progress, group))
        places |= {tensor.name: name for tensor in group}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_json(folder, INDEX, index)
    return total


def _shards(tensors: Iterable[StreamedTensor], most: int) -> Iterator[list[StreamedTensor]]:
    group: list[StreamedTensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.size > most:
            yield group
            group = []
            size = 0
        group.append(tensor)
        size += tensor.size
    yield group


def _write(folder: Folder, name: str, tensors: Iterable[StreamedTensor]) -> None:
    descriptor = folder.descriptor_of(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_tensors(lambda data: write_all(descriptor, data), tensors, {"format": "pt"})
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
