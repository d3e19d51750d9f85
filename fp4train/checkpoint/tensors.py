"""Named tensors as a safetensors file, written to and read from an open descriptor, with its checksum on the way.

The format (github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the header with dtype,
shape and place of each tensor, then the bytes of the tensors without gaps, largest dtype first so that each is aligned.
It is written here because the library takes a path, which could lead over a link, and so that the file is read once:
the checksum is taken of what is written, not of what was written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp4train.files import write_all

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
_HEADER_LIMIT = 100_000_000


def separate(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors without those that are another one (tied weights), and the names of these with what they stand for."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if names.setdefault(place, name) != name:
                aliases[name] = names[place]
                continue
        stored[name] = tensor
    return stored, aliases


def write_tensors(descriptor: int, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write `tensors`, of any device and strides; returns the number of bytes and their SHA-256.

    Raises:
        OSError: the disk takes no more.
        TypeError: a dtype that the format does not know.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: a tensor of {tensor.dtype} cannot be in a checkpoint")
        first, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()

    def put(data: bytes | memoryview) -> None:
        digest.update(data)
        write_all(descriptor, data)

    put(len(text).to_bytes(8, "little") + text)
    for name in order:
        whole = tensors[name].detach().cpu().contiguous()
        if whole.numel():
            data = _bytes(whole.reshape(-1).view(torch.uint8))
            for start in range(0, len(data), _CHUNK):
                put(data[start : start + _CHUNK])
    return 8 + len(text) + end, digest.hexdigest()


def read_tensors(descriptor: int, size: int) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file of `size` bytes, each with memory of its own, and the SHA-256 of the file.

    Raises:
        ValueError: it is no such file; the message says why.
    """
    data = torch.empty(size, dtype=torch.uint8)
    view, done, digest = _bytes(data), 0, hashlib.sha256()
    while done < size:
        count = os.readv(descriptor, [view[done : done + _CHUNK]])
        if not count:
            raise ValueError(f"it ends after {done} of {size} bytes")
        digest.update(view[done : done + count])
        done += count
    length = int.from_bytes(view[:8], "little")
    if size < 8 or length > min(size - 8, _HEADER_LIMIT):
        raise ValueError("its header does not fit into it")
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
    except (ValueError, RecursionError):
        raise ValueError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {name: _tensor(name, entry, body) for name, entry in header.items()}, digest.hexdigest()


def _bytes(tensor_u8: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU."""
    array: Any = tensor_u8.numpy()
    return memoryview(array)


def _tensor(name: str, entry: object, body: Tensor) -> Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = DTYPES.get(str(entry["dtype"])), entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"{name}: {numbers!r} are no sizes")
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= len(body):
        raise ValueError(f"{name} lies outside of the file")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {offsets[1] - offsets[0]} bytes do not make {dtype} of {shape}")
    return body[offsets[0] : offsets[1]].clone().view(dtype).reshape(shape)
