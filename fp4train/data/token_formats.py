r"""What token files say of themselves.

| format | layout |
|---|---|
| NumPy | `\x93NUMPY`, version, a header with type, order and shape, then the ids (NEP 1) |
| llm.c | 256 int32 (magic 20240520: uint16, 20240801: uint32; version 1; number of tokens; unused), then raw ids |
| Megatron | PREFIX.bin: raw ids; PREFIX.idx: `MMIDIDX`, 2 zero bytes, uint64 version = 1, uint8 code of the type, \
uint64 number of sequences n, uint64 number of documents m, int32 lengths [n], int64 offsets [n],
int64 documents [m] |
| datatrove | FILE.ds: raw ids; FILE.ds.metadata: TOKENIZER`|`bytes of an id, in the next line the number of ids |
| nanoGPT, OLMo, dolma | raw ids, whatever the file is called |

Raw ids of which nothing says the type are uint16 where the vocabulary fits into it, else uint32; they
are refused where every second one is far smaller than the others, as halves of a wider type are.

All but NumPy's, which says it itself, are little-endian. Megatron's sequences lie one after another
in the .bin file, so that the stream is the file itself. A header is believed where the file has the
size that follows from it, and refused otherwise. What is a container of another kind, or text, is
refused by what it is.
"""

import math
import os
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp4train.data.containers import HEAD, TAIL, container, is_text
from fp4train.data.stored import IdFile, StoreFile, WatchedFile
from fp4train.errors import DataError, data_errors, reason
from fp4train.stores import StorePath
from fp4train.text import first_line

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
NUMPY_MAGIC = b"\x93NUMPY"
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_CODES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
LLMC_HEADER_BYTES = 256 * 4
LLMC_MAGICS = {20240520: "uint16", 20240801: "uint32"}
LENGTHS_AT_ONCE = 1 << 20
_FAR = 16
"""How many times larger the low half of an id is than its high half, at the largest of many ids."""
_MANY = 1024
"""So many ids; of fewer the largest two of each half may differ by chance, and zeros alone tell."""
_WRITE_RAW = "Write its ids as a raw array: numpy.asarray(ids, dtype='uint32').tofile('train.bin')"


@dataclass(frozen=True)
class IdLayout:
    """Where the ids of a file are, and of which type; None: it does not say."""

    dtype: np.dtype[Any] | None
    offset: int
    count: int | None = None


def open_tokens(path: Path, dtype: str | None, vocab_size: int, key: str) -> IdFile:
    """The ids of a token file of any of the formats.

    Args:
        dtype: type of the ids of a file that does not say it; None: that of the vocabulary.

    Raises:
        DataError: it is no token file, or not as its header says.
    """
    file: WatchedFile | StoreFile
    with data_errors(OSError, before=f"{key}={path} cannot be read: ", message=reason):
        if isinstance(path, StorePath):
            file = StoreFile(path)
        else:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            file = WatchedFile(descriptor, path, np.dtype(np.uint8), 0)
    size = file.stamp[0]
    if not size:
        raise DataError(f"{key}={path} is empty")
    file.count = size
    head = file.raw(0, min(HEAD, size))
    layout = _layout(path, head, size)
    if layout is None:
        tail = file.raw(size - min(TAIL, size), min(TAIL, size))
        _refuse_others(path, head, tail, size, dtype)
        layout = IdLayout(None, 0)
    if (
        layout.dtype is not None
        and dtype is not None
        and np.dtype(dtype).itemsize != layout.dtype.itemsize
    ):
        raise DataError(
            f"data.dtype={dtype}, but {path} says that it holds {layout.dtype.name}. Leave "
            "data.dtype out."
        )
    file.untyped = layout.dtype is None
    unsaid = dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")
    file.dtype = layout.dtype or np.dtype(unsaid).newbyteorder("<")
    if file.untyped and dtype is None:
        _check_width(file, vocab_size)
    file.offset = layout.offset
    ids, remainder = divmod(size - layout.offset, file.dtype.itemsize)
    file.count = ids if layout.count is None else layout.count
    if not file.count:
        raise DataError(f"{key}={path} is empty: it holds no ids")
    if remainder:
        raise DataError(
            f"{key}={path} has {size:,} bytes, which is no whole number of {file.dtype.name} "
            f"tokens: it is cut off, or another data.dtype is right ({', '.join(DTYPES)})"
        )
    return file


def _layout(path: Path, head: bytes, size: int) -> IdLayout | None:
    """What the header of a file, or its index, says; None: it has neither."""
    if head.startswith(NUMPY_MAGIC):
        return _numpy_layout(path, size)
    if (index := path.with_suffix(".idx")).is_file():
        return IdLayout(np.dtype(_megatron_dtype(index, size)).newbyteorder("<"), 0)
    metadata = path.with_name(f"{path.name}.metadata")
    if path.suffix == ".ds" and metadata.is_file():
        return IdLayout(np.dtype(f"<u{_datatrove_width(metadata, size)}"), 0)
    if len(head) < 12:
        return None
    magic, version, tokens = struct.unpack("<iii", head[:12])
    if magic not in LLMC_MAGICS or size < LLMC_HEADER_BYTES:
        return None
    if version != 1:
        raise DataError(
            f"{path} is a token file of llm.c of version {version}; supported is version 1"
        )
    dtype = np.dtype(LLMC_MAGICS[magic]).newbyteorder("<")
    expected = LLMC_HEADER_BYTES + tokens * dtype.itemsize
    if expected != size:
        raise DataError(
            f"{path} has {size:,} bytes, but its header counts {tokens:,} tokens "
            f"({expected:,} bytes)"
        )
    return IdLayout(dtype, LLMC_HEADER_BYTES)


def _numpy_layout(path: Path, size: int) -> IdLayout:
    """The layout of an array that numpy.save wrote; of several dimensions in the order in which it
    lies there.
    """
    refused = f"{path} is a NumPy array that cannot be read: "
    with (
        warnings.catch_warnings(),
        data_errors(Exception, before=refused, message=first_line),
        path.open("rb") as file,
    ):
        warnings.simplefilter("ignore")  # about headers of Python 2, which are read
        version = np.lib.format.read_magic(file)
        old = version == (1, 0)
        read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(file)
        offset = file.tell()
    if dtype.kind not in "iu":
        raise DataError(
            f"{path} is a NumPy array of {dtype}, not of token ids, which are whole numbers"
        )
    if not shape or by_columns:
        raise DataError(
            f"{path} is a NumPy array of shape {shape} whose rows do not lie one after another. Write "
            "it with numpy.save('train.npy', numpy.ascontiguousarray(ids))"
        )
    count = math.prod(shape)
    expected = offset + count * dtype.itemsize
    if expected != size:
        raise DataError(
            f"{path} has {size:,} bytes, but its header says {expected:,}: {dtype} of shape {shape}"
        )
    return IdLayout(dtype, offset, count)


def _megatron_dtype(index: Path, size: int) -> str:
    """The type that a Megatron index gives, checked against the size of the token file."""
    with (
        data_errors(OSError, before=f"{index} cannot be read: ", message=reason),
        index.open("rb") as file,
    ):
        head = file.read(MEGATRON_HEADER.size)
        if len(head) < MEGATRON_HEADER.size or not head.startswith(MEGATRON_MAGIC):
            raise DataError(
                f"{index} is no Megatron index (it does not start with MMIDIDX). Remove it, "
                "or write it anew."
            )
        _, version, code, sequences, _ = MEGATRON_HEADER.unpack(head)
        if version != 1 or code not in MEGATRON_CODES:
            raise DataError(
                f"{index} has version {version} and type code {code}; supported are version 1 "
                "and the codes "
                + ", ".join(f"{number} ({name})" for number, name in MEGATRON_CODES.items())
            )
        tokens = 0
        left = sequences
        while left and len(
            lengths := np.frombuffer(file.read(4 * min(LENGTHS_AT_ONCE, left)), "<i4")
        ):
            tokens += int(lengths.sum(dtype=np.int64))
            left -= len(lengths)
    expected = tokens * np.dtype(MEGATRON_CODES[code]).itemsize
    if expected != size:
        raise DataError(
            f"{index} counts {expected:,} bytes of tokens in {sequences:,} sequences, but its "
            f".bin file has {size:,}: one of the two is cut off or belongs to another"
        )
    return MEGATRON_CODES[code]


def _datatrove_width(metadata: Path, size: int) -> int:
    """The bytes of an id, checked against the size of the token file."""
    with data_errors(OSError, ValueError, before=f"{metadata} cannot be read: "):
        first, count, *_ = metadata.read_bytes().decode().split("\n")
        width = size // max(int(count), 1)
    said = first.rpartition("|")[2]
    if width not in (2, 4) or width * int(count) != size or said not in (first, str(width)):
        raise DataError(
            f"{metadata} counts {count} ids ({first}), but the file beside it has {size:,} bytes: "
            "one of the two is cut off or belongs to another"
        )
    return width


def _refuse_others(path: Path, head: bytes, tail: bytes, size: int, dtype: str | None) -> None:
    """Refuse what is no raw array of ids.

    Args:
        dtype: type that the user gives: text is an array of uint8, and every second uint16 of
            uint32 ids may be 0.
    """
    if (kind := container(head, tail)) is not None:
        advice = _WRITE_RAW
        if kind.startswith("compressed"):
            advice = "Unpack it first: its places are read in any order"
        raise DataError(f"{path} is {kind}, no array of token ids. {advice}")
    if dtype == "uint8":
        return
    if is_text(head, size):
        raise DataError(
            f"{path} is text, no array of token ids. data=text data.path={path} reads text, data=hf "
            "JSON, and data.dtype=uint8 takes each byte as an id. Ids in it: read them "
            "(numpy.loadtxt, json.load). " + _WRITE_RAW
        )


def _check_width(file: IdFile, vocab_size: int) -> None:
    """Refuse ids that are halves of wider ones: in all of a small file, and in 64 pieces of a larger
    one, every second one is far smaller than the others. Those outside of the vocabulary, which are
    refused as such, tell nothing.
    """
    size = file.count
    starts = range(0, size, max(HEAD, size // 64 // 8 * 8))
    head = b"".join(file.raw(start, min(HEAD, size - start) // 8 * 8) for start in starts)
    ids = np.frombuffer(head, file.dtype)
    if len(ids) < 3 * 64:
        return
    name = file.dtype.name
    wider = "uint32 or " if file.dtype.itemsize == 2 else ""
    halves = [half[half < vocab_size] for half in (ids[0::2], ids[1::2])]
    if not all(map(len, halves)):
        return
    for share in (1.0, 0.9):  # of which the second leaves out marks, as -100 is one
        least, most = sorted(int(np.quantile(half, share, method="lower")) for half in halves)
        if most == 0 or least > (most // _FAR if len(ids) >= _MANY else 0):
            continue
        raise DataError(
            f"{file.path}: every second {name} is at most {least}, as halves of wider ids are: give "
            f"their type, data.dtype={wider}int64, or data.dtype={name} if that is right"
        )
    if file.dtype.itemsize == 2 and _are_bytes(head):
        raise DataError(
            f"{file.path}: both bytes of its ids are alike, as in an array of uint8: give "
            "data.dtype=uint8, or data.dtype=uint16 if that is right"
        )


def _are_bytes(head: bytes) -> bool:
    """Whether pairs of bytes seem to be two ids each. Tokenizers number frequent tokens first, so
    that the high bytes of ids hold fewer bits than the low ones.
    """
    pairs = np.frombuffer(head, np.uint8).reshape(-1, 2)
    shares = [np.bincount(pairs[:, place], minlength=256) / len(pairs) for place in (0, 1)]
    bits = float(-(shares[0] * np.log2(shares[0].clip(1e-9))).sum())
    by_chance = np.sqrt(np.count_nonzero(shares[0] + shares[1]) / len(pairs))
    alike = np.abs(shares[0] - shares[1]).sum() < 0.1 + 2 * by_chance
    return bool(alike and 0 < bits < 7.5 and by_chance < 0.25)
