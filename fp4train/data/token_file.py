r"""`data=tokens data.path=train.bin`: token files that are there already, memory-mapped.

| format | layout, little-endian |
|---|---|
| nanoGPT | raw ids of `data.dtype` (uint16 unless said otherwise) |
| llm.c | 256 int32 (magic 20240520: uint16, 20240801: uint32; version; number of tokens; unused), then raw ids |
| Megatron | PREFIX.bin: raw ids; PREFIX.idx: `MMIDIDX`, 2 zero bytes, uint64 version = 1, uint8 code of the type, \
uint64 number of sequences, uint64 number of documents, int32 lengths of the sequences, … |

Megatron's sequences lie one after another in the .bin file, so that the stream is the file itself; documents are
separated by the end-of-document id that `preprocess_data.py --append-eod` wrote.
"""

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fp4train.data.cache import file_digest
from fp4train.data.files import existing_path, expanded
from fp4train.data.tokens import Ids, TokenData, check_val, hold_out, token_data
from fp4train.errors import DataError, data_errors, reason
from fp4train.paths import PathText

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_CODES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
LLMC_HEADER_BYTES = 256 * 4
LLMC_MAGICS = {20240520: "uint16", 20240801: "uint32"}


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A file of token ids below `vocab_size`, and optionally another one for validation."""

    path: PathText
    vocab_size: int
    val_path: PathText | None = None
    dtype: str | None = None
    val: float = 0.01

    def __post_init__(self) -> None:
        check_val(self.val)
        if self.vocab_size < 1:
            raise ValueError(f"data.vocab_size={self.vocab_size}: allowed are whole numbers from 1")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"data.dtype={self.dtype}: allowed are {', '.join(DTYPES)}, or null for the format's own")

    def build(self, run_dir: Path, seq_len: int, seed: int) -> TokenData:
        given = {"data.path": self.path} | ({} if self.val_path is None else {"data.val_path": self.val_path})
        files = [(_file(path, key), key) for key, path in given.items()]
        ids = [open_tokens(file, self.dtype, key) for file, key in files]
        vocab_size = self.vocab_size
        if self.val_path is None:
            data = hold_out(
                ids[0], val=self.val, vocab_size=vocab_size, seq_len=seq_len, tokenizer=None, description=self.path
            )
        else:
            what, whole = f"{self.path}, validation {self.val_path}", "a file each"
            data = token_data(
                *ids, vocab_size=vocab_size, seq_len=seq_len, tokenizer=None, description=what, whole=whole
            )
        digests = [file_digest(file, each, run_dir) for (file, _), each in zip(files, ids, strict=True)]
        return replace(data, digest="+".join(digests))


def _file(path: str, key: str) -> Path:
    """The file that holds the ids: Megatron's pair may be named by either file, or by its prefix."""
    prefix = expanded(path, key)
    if prefix.suffix == ".idx" or (not prefix.exists() and Path(f"{prefix}.bin").exists()):
        path = str(prefix.with_suffix(".bin") if prefix.suffix == ".idx" else f"{prefix}.bin")
    file = existing_path(path, key)
    if not file.is_file():
        raise DataError(f"{key}={file} is a folder; one token file is needed")
    return file


def open_tokens(file: Path, dtype: str | None, key: str) -> Ids:
    """The ids of a token file of any of the three formats, memory-mapped."""
    with data_errors(OSError, before=f"{key}={file} cannot be read: ", message=reason):
        size = file.stat().st_size
        stored, offset = _header(file, size)
        if stored is not None and dtype is not None and np.dtype(dtype).itemsize != np.dtype(stored).itemsize:
            raise DataError(f"data.dtype={dtype}, but {file} says that it holds {stored}. Leave data.dtype out.")
        chosen = np.dtype(stored or dtype or "uint16").newbyteorder("<")
        if size == offset:
            raise DataError(f"{key}={file} is empty")
        if (size - offset) % chosen.itemsize:
            raise DataError(
                f"{key}={file} has {size:,} bytes, which is no whole number of {chosen.name} tokens: it is cut off, or "
                f"another data.dtype is right ({', '.join(DTYPES)})"
            )
        return np.memmap(file, dtype=chosen, mode="r", offset=offset)


def _header(file: Path, size: int) -> tuple[str | None, int]:
    """The type of the ids, if the file or its index says it, and the bytes before them."""
    if (index := file.with_suffix(".idx")).is_file():
        return _megatron_dtype(index, size), 0
    with file.open("rb") as opened:
        head = opened.read(12)
    magic, _, tokens = struct.unpack("<iii", head) if len(head) == 12 else (0, 0, 0)
    dtype = LLMC_MAGICS.get(magic)
    if dtype is None or size < LLMC_HEADER_BYTES:
        return None, 0
    expected = LLMC_HEADER_BYTES + tokens * np.dtype(dtype).itemsize
    if expected != size:
        raise DataError(f"{file} has {size:,} bytes, but its header counts {tokens:,} tokens ({expected:,} bytes)")
    return dtype, LLMC_HEADER_BYTES


def _megatron_dtype(index: Path, size: int) -> str:
    """The type that a Megatron index gives, checked against the size of the token file."""
    with index.open("rb") as file:
        head = file.read(MEGATRON_HEADER.size)
        if len(head) < MEGATRON_HEADER.size or not head.startswith(MEGATRON_MAGIC):
            raise DataError(
                f"{index} is no Megatron index (it does not start with MMIDIDX). Remove it, or write it anew."
            )
        _, version, code, sequences, _ = MEGATRON_HEADER.unpack(head)
        if version != 1 or code not in MEGATRON_CODES:
            raise DataError(
                f"{index} has version {version} and type code {code}; supported are version 1 and the codes "
                + ", ".join(f"{known} ({name})" for known, name in MEGATRON_CODES.items())
            )
        lengths: np.ndarray[Any, np.dtype[np.int32]] = np.fromfile(file, dtype="<i4", count=sequences)
    expected = int(lengths.sum(dtype=np.int64)) * np.dtype(MEGATRON_CODES[code]).itemsize
    if len(lengths) != sequences or expected != size:
        raise DataError(
            f"{index} counts {expected:,} bytes of tokens in {sequences:,} sequences, but its .bin file has {size:,}: "
            "one of the two is cut off or belongs to another"
        )
    return MEGATRON_CODES[code]
