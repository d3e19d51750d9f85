"""`data=tokens data.path=train.bin`: token files that are there already (`token_formats.py`), read
as they are.

Several files, as llm.c and others cut a large text, are one stream in the order in which they are
named; those of a folder or a pattern in the order of their names. Documents are divided by the id
that ends each, as nanoGPT and Megatron write it, or by the one that begins each, as llm.c and Llama
do.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp4train.data.cache import CacheEntry
from fp4train.data.digests import file_digests
from fp4train.data.files import expanded, input_files, shown
from fp4train.data.huggingface import saved_files
from fp4train.data.stored import RemoteIds, StoredIds, StoreFile, TokenIds, WatchedFile
from fp4train.data.token_formats import DTYPES, open_tokens
from fp4train.data.token_tables import SUFFIXES as TABLES, hold_tables, table_entry
from fp4train.data.tokens import (
    Borders,
    TokenData,
    TokenizerConfig,
    check_tokenizer,
    check_val,
    hold_out,
    token_data,
)
from fp4train.errors import DataError
from fp4train.paths import CacheFolder, DataPaths

SUFFIXES = (".bin", ".npy", ".ds")
"""Of the files of a folder that are read."""
OPEN = 16
"""Most token files of one path that stay open."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Files of token ids below `vocab_size`, and optionally others for validation.

    Args:
        end_id: the id that ends a document.
        begin_id: the id that begins a document.
        column: column of Parquet and Arrow files that holds the ids.
        tokenizer: that which wrote the ids, for text from the model; None: it is not known.
        cache_dir: folder in which the ids of such files are kept.
    """

    path: DataPaths
    vocab_size: int
    val_path: DataPaths | None = None
    dtype: str | None = None
    end_id: int | None = None
    begin_id: int | None = None
    column: str = "input_ids"
    tokenizer: TokenizerConfig | None = None
    val: float = 0.01
    cache_dir: CacheFolder = "~/.cache/fp4train"

    def __post_init__(self) -> None:
        check_val(self.val)
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer)
        if self.vocab_size < 1:
            raise ValueError(f"data.vocab_size={self.vocab_size}: allowed are whole numbers from 1")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(
                f"data.dtype={self.dtype}: allowed are {', '.join(DTYPES)}, or null for the "
                "format's own"
            )
        for key, number in (("end_id", self.end_id), ("begin_id", self.begin_id)):
            if number is not None and not 0 <= number < self.vocab_size:
                raise ValueError(
                    f"data.{key}={number}: allowed are ids of the vocabulary, 0 … "
                    f"{self.vocab_size - 1}, or null"
                )

    def build(self, run_dir: Path, seq_len: int, seed: int) -> TokenData:
        data = self.opened(seq_len)
        parts = [data.train.ids] if self.val_path is None else [data.train.ids, data.val.ids]
        digests = filter(None, (_digest(part, run_dir) for part in parts))
        return replace(data, digest="+".join(digests) or None)

    def opened(self, seq_len: int) -> TokenData:
        """The data, of which not all is read."""
        ids = self._open(self.path, "data.path")
        borders = Borders(end=self.end_id, begin=self.begin_id)
        description = _described(self.path, ids)
        if self.val_path is None:
            return hold_out(
                ids,
                val=self.val,
                vocab_size=self.vocab_size,
                seq_len=seq_len,
                tokenizer=None,
                description=description,
                borders=borders,
            )
        val = self._open(self.val_path, "data.val_path")
        return token_data(
            ids,
            val,
            vocab_size=self.vocab_size,
            seq_len=seq_len,
            tokenizer=None,
            description=f"{description}, validation {_described(self.val_path, val)}",
            whole="a file each",
            borders=borders,
        )

    def entries(self, run_dir: Path, seq_len: int) -> Sequence[CacheEntry]:
        """What the cache keeps of the data: the ids of tables."""
        named = {"data.path": self.path, "data.val_path": self.val_path}
        entries = (self._table(paths, key)[1] for key, paths in named.items() if paths is not None)
        return [entry for entry in entries if entry is not None]

    def _table(
        self, paths: str | Sequence[str], key: str
    ) -> tuple[Sequence[Path], CacheEntry | None]:
        """The files that paths mean; where they are tables, their ids in the cache, too."""
        named = [
            file
            for path in ((paths,) if isinstance(paths, str) else paths)
            for file in saved_files(expanded(path, key)) or [_file(path, key)]
        ]
        files = _token_files(named, key)
        if not hold_tables(files, key):
            return files, None
        if self.dtype is not None:
            raise DataError(
                f"data.dtype={self.dtype} is of raw ids, and {files[0]} is a table: leave it out"
            )
        return files, table_entry(files, self.column, self.vocab_size, self.cache_dir)

    def _open(self, paths: str | Sequence[str], key: str) -> StoredIds[Any]:
        files, entry = self._table(paths, key)
        if entry is not None:
            return entry.ids()
        parts = []
        for file in files:
            parts.append(open_tokens(file, self.dtype, self.vocab_size, key))
            if len(files) > OPEN:
                parts[-1].let_go()
        if all(isinstance(part, StoreFile) for part in parts):
            return RemoteIds(parts)  # type: ignore[arg-type]
        return StoredIds(parts)


def _token_files(named: Sequence[str], key: str) -> list[Path]:
    """The files that hold ids; of a folder without raw ones, the tables."""
    try:
        return input_files(named, SUFFIXES, key)
    except DataError as error:
        try:
            return input_files(named, (*SUFFIXES, *TABLES), key)
        except DataError:
            raise error from None


def _file(path: str, key: str) -> str:
    """The file that holds the ids: Megatron's pair may be named by either file, or by its
    prefix.
    """
    prefix = expanded(path, key)
    if prefix.suffix == ".idx":
        return str(prefix.with_suffix(".bin"))
    if not prefix.exists() and prefix.with_name(f"{prefix.name}.bin").exists():
        return f"{prefix}.bin"
    return path


def _described(paths: str | Sequence[str], ids: StoredIds[Any]) -> str:
    if len(ids.files) == 1:
        return shown(paths)
    return f"{shown(paths)}, {len(ids.files)} files"


def _digest(ids: TokenIds, run_dir: Path) -> str | None:
    """One digest of the user's own files; None: they lie in the cache, which checks them."""
    assert isinstance(ids, StoredIds)
    watched = [file for file in ids.files if isinstance(file, WatchedFile)]
    digests = file_digests(watched, run_dir)
    digests += [f"{file.stamp[2]:08x}" for file in ids.files if isinstance(file, StoreFile)]
    if len(digests) > 1:
        return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
    return next(iter(digests), None)
