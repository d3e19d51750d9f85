"""Reading one checkpoint: every file is verified first, then tensors are read when they are asked
for, whole or a box. Of a file that a rank verifies a copy stays in main memory, where there is room,
until the run has read its state: it is read once.

Whichever files and parts the tensors were written in, any box of them is put together from the
parts that overlap it; so a checkpoint of one number of ranks is read on another, and no rank reads
or holds more than it wants.
"""

import json
import math
import os
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4train.checkpoint import layout
from fp4train.checkpoint.layout import STATE, VERSION, CheckpointGroup
from fp4train.checkpoint.tensors import Box, checksum, read_box, read_header
from fp4train.checkpoint.tree import JSON, from_strict
from fp4train.errors import OlderForm, UserError, in_words
from fp4train.files import Folder, parent
from fp4train.sealed import checksum as checksum_of
from fp4train.shards import RowOrder, like, shard_of

_OPEN_FILES = 64


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of tensors, as it was when it was verified.

    Args:
        status: device, inode, size and time of change.
        boxes: boxes that it holds of each tensor, by the tensor's name.
    """

    status: tuple[int, ...]
    boxes: Mapping[str, tuple[Box, ...]]


def status_of(descriptor: int) -> tuple[int, ...]:
    """Device, inode, size and times of change: they differ once the file was replaced or written
    to.
    """
    status = os.fstat(descriptor)
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return status.st_dev, status.st_ino, status.st_size, *times


class StoredTensors(Mapping[str, Tensor]):
    """Name to CPU tensor; each access reads a tensor anew, with memory of its own.

    Args:
        folder: the checkpoint's directory.
        files: files of tensors, by name.
        aliases: names of tensors that are stored under another name.
        copies: descriptors of files in memory that are read in the place of those of their names.

    Raises:
        ValueError: the parts do not make whole tensors, or an alias stands for nothing.
    """

    def __init__(
        self,
        folder: Folder,
        files: Mapping[str, File],
        aliases: Mapping[str, str],
        copies: Mapping[str, int] | None = None,
    ) -> None:
        self.path = folder.path
        self._files = files
        self._boxes: dict[str, list[tuple[str, Box]]] = {}
        for file, stored in files.items():
            for name, boxes in stored.boxes.items():
                self._boxes.setdefault(name, []).extend((file, box) for box in boxes)
        for name, places in self._boxes.items():
            _check_whole(name, [box for _, box in places])
        if lost := next(
            (name for name, target in aliases.items() if target not in self._boxes), None
        ):
            raise ValueError(f"{lost} stands for {aliases[lost]}, which is not there")
        self._boxes |= {name: self._boxes[target] for name, target in aliases.items()}
        self._open = OrderedDict(copies or {})
        weakref.finalize(self, _close, self._open)

    def close(self) -> None:
        """Free the copies in memory; what is read after that is read from the files."""
        _close(self._open)

    def stack(self, name: str, parts: Sequence[Sequence[str]]) -> None:
        """Let `name` be a tensor [E, N, K]: for each e the matrices [·, K] of the names in `parts`,
        row after row.

        Raises:
            ValueError: they are no matrices that make a tensor, or were stored in parts.
        """
        columns = self.shape(parts[0][0])[1:]
        rows = sum(self.shape(part)[0] for part in parts[0])
        shape = (len(parts), rows, *columns)
        placed = []
        for index, names in enumerate(parts):
            above = 0
            for part in names:
                ((file, box), *more) = self._boxes[part]
                if (
                    more
                    or len(box.shape) != 2
                    or above + box.shape[0] > rows
                    or box.shape[1:] != columns
                ):
                    raise ValueError(
                        f"{part} of shape {list(box.shape)} is no part of a tensor {list(shape)}"
                    )
                placed.append(
                    (
                        file,
                        replace(box, shape=shape, offsets=(index, above, 0), sizes=(1, *box.shape)),
                    )
                )
                above += box.shape[0]
        _check_whole(name, [box for _, box in placed])
        self._boxes[name] = placed

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read(name, (0,) * len(shape), shape)

    @property
    def files(self) -> Collection[str]:
        """The names of the files that hold them."""
        return self._files.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._boxes)

    def __len__(self) -> int:
        return len(self._boxes)

    def __contains__(self, name: object) -> bool:
        return name in self._boxes

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor. Raises KeyError where there is none of this name."""
        return self._boxes[name][0][1].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the tensor. Raises KeyError where there is none of this name."""
        return self._boxes[name][0][1].dtype

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """The box of the tensor at `offsets`.

        Raises:
            OSError: a file is not there any more, or is another one than was verified.
            ValueError: the box is not covered by the parts.
        """
        into = torch.empty(sizes, dtype=self.dtype(name))
        count = math.prod(sizes)
        done = 0
        for file, box in self._boxes[name]:
            if done < count and box.overlap(offsets, sizes) is not None:
                done += read_box(self._descriptor(file), box, into, offsets)
        if done != count:
            raise ValueError(f"{name}: {done} of {count} elements are in {self.path.name}")
        return into

    def read_like(self, name: str, tensor: Tensor, order: RowOrder | None = None) -> Tensor:
        """This rank's part of a tensor that lies as `tensor` does, which has the same shape and
        order of rows.
        """
        boxes = shard_of(tensor, order).boxes()
        parts = [self.read(name, box.offsets, tuple(box.tensor.shape)) for box in boxes]
        if len(parts) == 1:
            return like(tensor, parts[0])
        return like(tensor, torch.cat(parts))

    def _descriptor(self, file: str) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        with parent(self.path) as (above, name), above.folder(name) as folder:
            descriptor = folder.descriptor_of(file)
        self._open[file] = descriptor
        if status_of(descriptor) != self._files[file].status:
            raise OSError(f"{self.path / file} was changed after it was verified")
        while len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor


class Unusable(Exception):
    """This checkpoint cannot be used; the message is the reason."""


def _body(folder: Folder, step: int) -> dict[str, Any]:
    """What the file of the state says, of this format, whole and of `step`."""
    body = json.loads(folder.read(STATE, layout.STATE_LIMIT))
    if not isinstance(body, dict) or body.get("format") != layout.FORMAT:
        raise Unusable(f"{STATE} is not one of fp4train's")
    # first: a damaged version is damage, not a newer fp4train
    if body.pop("sha256", None) != checksum_of(body):
        raise Unusable(f"{STATE} is damaged (checksum differs)")
    version = body.get("version")
    if isinstance(version, int) and version > VERSION:
        raise UserError(
            f"{folder.path} has checkpoint format version {version}; this fp4train reads "
            f"up to {VERSION}. "
            "Update fp4train to resume from it."
        )
    if version in range(1, VERSION):
        raise OlderForm(folder.path, f"has checkpoint format version {version}")
    if version != VERSION:
        raise Unusable(f"{STATE} has no format version")
    if body["step"] != step:
        raise Unusable(f"{STATE} is of step {body['step']}, not {step}")
    return body


def read(
    folder: Folder,
    step: int,
    ranks: CheckpointGroup | None,
    *,
    kind: str | None = None,
    room: int = 0,
) -> tuple[StoredTensors, dict[str, JSON]]:
    """The checkpoint in `folder`, of whose files this rank verifies a part, and without ranks the
    state alone; nothing here waits for another rank. `kind`: tensors in files of another kind are
    left out. `room`: bytes of main memory for copies of verified files.
    """
    copies: dict[str, int] = {}
    try:
        body = _body(folder, step)
        state = from_strict(body["state"])
        described = body["tensors"]
        if not isinstance(state, dict) or not isinstance(described["aliases"], dict):
            raise Unusable(f"{STATE} holds no state")
        aliases = described["aliases"]
        files = described["files"]
        if kind is not None:
            kinds = sorted({layout.kind_of(name) for name in files} - {layout.TENSORS})
            if kind not in kinds:
                raise UserError(
                    f"{folder.path} holds no {kind}: it has {', '.join(kinds) or 'none'}"
                )
            files = {name: file for name, file in files.items() if layout.kind_of(name) == kind}
            key = layout.key_of(kind)
            aliases = {name: aliases[name] for name in aliases if name.startswith(f"{key}/")}
        # by name: as many ranks as wrote it verify the files that they read
        verified = sorted(files)[ranks.rank :: ranks.size] if ranks is not None else []
        if hasattr(os, "memfd_create") and sum(files[name]["bytes"] for name in verified) <= room:
            copies = {name: os.memfd_create(name) for name in verified}
        read = {
            name: _file(folder, name, files[name], copies.get(name), verify=name in verified)
            for name in files
        }
        tensors = StoredTensors(folder, read, aliases, copies)
        copies = {}
        return tensors, state
    except FileNotFoundError as error:
        raise Unusable(f"{Path(str(error.filename)).name} is missing") from error
    except OSError as error:
        raise Unusable(in_words(error)) from error
    except (LookupError, TypeError, ValueError, RecursionError, AttributeError) as error:
        raise Unusable(f"{STATE} is damaged ({type(error).__name__}: {error})") from error
    finally:
        _close(OrderedDict(copies))


def _file(
    folder: Folder, name: str, described: Mapping[str, Any], copy: int | None, *, verify: bool
) -> File:
    """A file of tensors of the right size, and with `verify` of the right checksum; written to the
    descriptor `copy`, if there is one.
    """
    descriptor = folder.descriptor_of(name)
    try:
        status = status_of(descriptor)
        if (size := os.fstat(descriptor).st_size) != described["bytes"]:
            raise Unusable(f"{name} has {size} bytes instead of {described['bytes']}")
        try:
            if verify and checksum(descriptor, size, copy) != described["sha256"]:
                raise Unusable(f"{name} is damaged (checksum differs)")
            return File(status=status, boxes=read_header(copy or descriptor, size))
        except ValueError as error:
            raise Unusable(f"{name} is damaged ({error})") from error
    finally:
        os.close(descriptor)


def _check_whole(name: str, boxes: list[Box]) -> None:
    """Raises ValueError where the boxes of a tensor are not as many elements as it has."""
    shape = boxes[0].shape
    dtype = boxes[0].dtype
    if any((box.shape, box.dtype) != (shape, dtype) for box in boxes):
        raise ValueError(f"the parts of {name} differ in shape or dtype")
    if (stored := sum(math.prod(box.sizes) for box in boxes)) != math.prod(shape):
        raise ValueError(f"the parts of {name} have {stored} elements of {math.prod(shape)}")


def _close(descriptors: OrderedDict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()
