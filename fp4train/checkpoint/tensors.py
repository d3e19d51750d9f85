"""Named parts of tensors as a safetensors file, on an open descriptor: written with its checksum,
read by boxes.

The format (github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the
header with dtype, shape and place of each tensor, then the bytes of the tensors without gaps,
largest dtype first so that each is aligned. It is written here because the library takes a path,
which could lead over a link, and so that the checksum is taken of what is written. Where a file
holds parts, `__metadata__` says of which tensors: the shape of the whole, the offsets, and the runs
of rows where they do not follow each other.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fp4train import foreign_json
from fp4train.files import write_all
from fp4train.shards import Runs, TensorShard, check_lies_in

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 24
HEADER_LIMIT = 1 << 25
"""Bytes of a header that are read at most: those of 200,000 tensors."""
_PARTS = "parts"

Spans: TypeAlias = tuple[range, ...]
"""Indices in each dimension of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a tensor as it lies in a file.

    Args:
        dtype: dtype of its elements.
        shape: shape of the whole tensor.
        offsets: first index of the part in each dimension.
        sizes: size of the part in each dimension.
        start: place of its first byte in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    def overlap(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Spans | None:
        """The indices, in each dimension of the tensor, that it has of the box at `offsets`; None:
        it has nothing of it.
        """
        bounds = zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        spans = tuple(range(max(a, b), min(a + m, b + n)) for a, m, b, n in bounds)
        return spans if all(spans) else None


@dataclass(frozen=True, kw_only=True)
class StreamedTensor:
    """A tensor to write, whose values are made when they are written.

    Args:
        pieces: function that gives its elements in row-major order, as tensors of `dtype` and any
            shape; a piece is made when the one before is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def described(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def write_parts(descriptor: int, parts: Mapping[str, TensorShard]) -> tuple[int, str]:
    """Write `parts`, of any device and strides; returns the number of bytes and their SHA-256.

    Raises:
        OSError: the disk takes no more.
        TypeError: a dtype that the format does not know.
    """
    places = {name: _place(part) for name, part in parts.items() if not part.whole}
    digest = hashlib.sha256()

    def put(data: bytes | memoryview) -> None:
        digest.update(data)
        write_all(descriptor, data)

    def streamed(name: str) -> StreamedTensor:
        tensor = parts[name].tensor.detach()
        return StreamedTensor(
            name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=lambda: [tensor]
        )

    metadata = {}
    if places:
        metadata[_PARTS] = _compact(places)
    size = write_tensors(put, map(streamed, sorted(parts)), metadata)
    return size, digest.hexdigest()


def write_tensors(
    put: Callable[[bytes | memoryview], None],
    tensors: Iterable[StreamedTensor],
    metadata: Mapping[str, str],
) -> int:
    """Give `put` the bytes of a file of `tensors`, one tensor after the other; returns how many
    bytes.

    Tensors of larger dtypes come first, those of one size in the order given.

    Args:
        metadata: entries of the header's `__metadata__`.

    Raises:
        TypeError: a dtype that the format does not know.
        ValueError: pieces that do not make their tensor.
    """
    order = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    end = 0
    for tensor in order:
        if tensor.dtype not in _NAMES:
            raise TypeError(
                f"{tensor.name}: a tensor of {tensor.dtype} cannot be in a file of safetensors"
            )
        begin = end
        end = end + tensor.size
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = _compact(header).encode()
    text += b" " * (-len(text) % 8)
    put(len(text).to_bytes(8, "little") + text)
    for tensor in order:
        left = tensor.size
        for piece in tensor.pieces():
            on_cpu = piece.cpu().contiguous()
            left = left - piece.nbytes
            if on_cpu.dtype != tensor.dtype or left < 0:
                raise ValueError(
                    f"{tensor.name}: a piece of {on_cpu.dtype} {list(on_cpu.shape)} is none of "
                    f"{tensor.described}"
                )
            if on_cpu.numel():
                data = _bytes(on_cpu.reshape(-1).view(torch.uint8))
                for start in range(0, len(data), _CHUNK):
                    put(data[start : start + _CHUNK])
        if left:
            raise ValueError(f"{tensor.name}: {left} bytes of {tensor.described} are missing")
    return 8 + len(text) + end


def checksum(descriptor: int, size: int, copy: int | None = None) -> str:
    """The SHA-256 of a file of `size` bytes, which are written to the descriptor `copy` as well.

    Raises:
        ValueError: it is shorter.
    """
    digest = hashlib.sha256()
    done = 0
    view = memoryview(bytearray(min(size, _CHUNK)))
    while done < size:
        count = os.preadv(descriptor, [view[: size - done]], done)
        if not count:
            raise ValueError(f"it ends after {done} of {size} bytes")
        digest.update(view[:count])
        if copy is not None:
            write_all(copy, view[:count])
        done += count
    return digest.hexdigest()


def read_header(descriptor: int, size: int) -> dict[str, tuple[Box, ...]]:
    """The boxes of tensors in a file of `size` bytes, by the name of the tensor.

    The bytes of tensors follow one another without gaps up to the end of the file, as the format's
    own library demands: a byte that two tensors have, or none, is read by one program and not by
    another.

    Raises:
        ValueError: it is no such file; the message says why.
    """
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > size - 8:
        raise ValueError("its header does not fit into it")
    if length > HEADER_LIMIT:
        raise ValueError(
            f"its header has {length:,} bytes; more than {HEADER_LIMIT:,} are not read"
        )
    text = os.pread(descriptor, length, 8)
    try:
        header = foreign_json.parse(text)
        places = {}
        if isinstance(header, dict):
            places = foreign_json.parse(
                (header.pop("__metadata__", None) or {}).get(_PARTS, "{}").encode()
            )
    except (TypeError, AttributeError) as error:
        raise ValueError("its header is no JSON") from error
    except ValueError as error:
        raise ValueError(f"its header is no JSON that is read: {error}") from error
    if not isinstance(header, dict) or not isinstance(places, dict) or not text.startswith(b"{"):
        raise ValueError("its header is no table")
    boxes = {
        name: tuple(_boxes(name, entry, places.get(name), 8 + length, size))
        for name, entry in header.items()
    }
    _check_contiguous(header, size - 8 - length)
    return boxes


def read_box(descriptor: int, box: Box, into: Tensor, offsets: tuple[int, ...]) -> int:
    """Read what `box` has of the part `into` at `offsets` of the same tensor; returns the number of
    elements read.

    Rows of the first dimension are read whole, some at a time, and what is not wanted of them is
    dropped.

    Raises:
        ValueError: the file is too short.
    """
    spans = box.overlap(offsets, tuple(into.shape))
    if spans is None:
        return 0
    if not spans:
        into.copy_(_read(descriptor, box, box.start, ()))
        return 1
    row_bytes = math.prod(box.sizes[1:]) * box.dtype.itemsize
    step = max(1, _CHUNK // row_bytes)
    for begin in range(spans[0].start, spans[0].stop, step):
        rows = range(begin, min(begin + step, spans[0].stop))
        start = box.start + (begin - box.offsets[0]) * row_bytes
        stored = _read(descriptor, box, start, (len(rows), *box.sizes[1:]))
        box_spans = (rows, *spans[1:])
        into[_within(box_spans, offsets)] = stored[_within(box_spans, (begin, *box.offsets[1:]))]
    return math.prod(map(len, spans))


def _within(spans: Spans, offsets: tuple[int, ...]) -> tuple[slice, ...]:
    """Indices of a tensor as those of a box of it at `offsets`."""
    pairs = zip(spans, offsets, strict=True)
    return tuple(slice(span.start - o, span.stop - o) for span, o in pairs)


def _read(descriptor: int, box: Box, start: int, sizes: tuple[int, ...]) -> Tensor:
    data = torch.empty(math.prod(sizes) * box.dtype.itemsize, dtype=torch.uint8)
    view = _bytes(data)
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if not count:
            raise ValueError(f"it ends after {start + done} bytes")
        done += count
    return data.view(box.dtype).reshape(sizes)


def _bytes(tensor_u8: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU."""
    array: Any = tensor_u8.numpy()
    return memoryview(array)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _place(part: TensorShard) -> dict[str, object]:
    """Entry of a part in `__metadata__`: the whole shape, the offsets, and runs of rows if there
    are several.
    """
    place: dict[str, object] = {"shape": list(part.shape), "offsets": list(part.offsets)}
    if part.runs:
        return {**place, "runs": [list(run) for run in part.runs]}
    return place


def _boxes(name: str, entry: object, place: object, begin: int, size: int) -> Iterator[Box]:
    """The boxes of a tensor in a file: one, or one for each run of rows."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} is not described by dtype, shape and data_offsets")
    dtype = DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
    sizes = _sizes(name, entry["shape"])
    bounds = _sizes(name, entry["data_offsets"])
    if len(bounds) != 2 or not bounds[0] <= bounds[1] <= size - begin:
        raise ValueError(f"{name} lies outside of the file")
    start, end = bounds
    if end - start != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{name}: {end - start} bytes do not make {dtype} of {list(sizes)}")
    if place is None:
        place = {"shape": list(sizes), "offsets": [0] * len(sizes)}
    if not isinstance(place, dict) or place.keys() - {"runs"} != {"shape", "offsets"}:
        raise ValueError(f"{name}: its part is not described by shape and offsets")
    shape = _sizes(name, place["shape"])
    offsets = _sizes(name, place["offsets"])
    rows = [(offsets[:1], sizes[:1])]
    if "runs" in place:
        rows = [((first_row,), (count,)) for first_row, count in _runs(name, place["runs"], sizes)]
    for first_rows, counts in rows:
        box = Box(
            dtype=dtype,
            shape=shape,
            offsets=(*first_rows, *offsets[1:]),
            sizes=(*counts, *sizes[1:]),
            start=begin + start,
        )
        check_lies_in(f"{name}: a part of", box.sizes, box.offsets, box.shape)
        yield box
        start += math.prod(box.sizes) * dtype.itemsize


def _runs(name: str, runs: object, sizes: tuple[int, ...]) -> Runs:
    """The runs of rows of a part of `sizes`."""
    pairs = [_sizes(name, run) for run in runs] if isinstance(runs, list) else []
    if any(len(pair) != 2 for pair in pairs) or (sum(n for _, n in pairs),) != sizes[:1]:
        raise ValueError(f"{name}: {runs!r} are not the rows of a part of {list(sizes)}")
    return tuple((first_row, count) for first_row, count in pairs)


def _check_contiguous(header: Mapping[str, dict[str, list[int]]], size: int) -> None:
    """Raises ValueError where the tensors of a header do not fill the `size` bytes after it, one
    after another.
    """
    bounds = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    begins = [begin for begin, _ in bounds]
    if [*begins, size] != [0, *(end for _, end in bounds)]:
        raise ValueError("its tensors do not lie one after another, up to its end")


def _sizes(name: str, numbers: object) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{name}: {numbers!r} are no sizes")
    return tuple(numbers)
