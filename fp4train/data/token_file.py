"""`data=tokens data.path=train.bin`: token files that are there already (`token_formats.py`), read as they are.

Several files, as llm.c and others cut a large text, are one stream in the order in which they are named; those of a
folder or a pattern in the order of their names. Documents are divided by the id that ends each, as nanoGPT and Megatron
write it, or by the one that begins each, as llm.c and Llama do.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp4train.data.cache import file_digests
from fp4train.data.files import expanded, input_files, shown
from fp4train.data.stored import StoredIds, WatchedFile
from fp4train.data.token_formats import DTYPES, open_tokens
from fp4train.data.tokens import Borders, TokenData, check_val, hold_out, token_data
from fp4train.errors import DataError
from fp4train.paths import PathText

SUFFIXES = (".bin", ".npy")
"""Of the files of a folder that are read."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Files of token ids below `vocab_size`, and optionally others for validation.

    Args:
        end_id: the id that ends a document.
        begin_id: the id that begins a document.
    """

    path: PathText | Sequence[PathText]
    vocab_size: int
    val_path: PathText | Sequence[PathText] | None = None
    dtype: str | None = None
    end_id: int | None = None
    begin_id: int | None = None
    val: float = 0.01

    def __post_init__(self) -> None:
        check_val(self.val)
        if self.vocab_size < 1:
            raise ValueError(f"data.vocab_size={self.vocab_size}: allowed are whole numbers from 1")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"data.dtype={self.dtype}: allowed are {', '.join(DTYPES)}, or null for the format's own")
        for key, number in (("end_id", self.end_id), ("begin_id", self.begin_id)):
            if number is not None and not 0 <= number < self.vocab_size:
                raise ValueError(
                    f"data.{key}={number}: allowed are ids of the vocabulary, 0 … {self.vocab_size - 1}, or null"
                )

    def build(self, run_dir: Path, seq_len: int, seed: int) -> TokenData:
        ids = self._open(self.path, "data.path")
        borders = Borders(end=self.end_id, begin=self.begin_id)
        description = _described(self.path, ids)
        if self.val_path is None:
            digests = file_digests(ids.files, run_dir)
            data = hold_out(
                ids,
                val=self.val,
                vocab_size=self.vocab_size,
                seq_len=seq_len,
                tokenizer=None,
                description=description,
                borders=borders,
            )
            return replace(data, digest=_joined(digests))
        val = self._open(self.val_path, "data.val_path")
        data = token_data(
            ids,
            val,
            vocab_size=self.vocab_size,
            seq_len=seq_len,
            tokenizer=None,
            description=f"{description}, validation {_described(self.val_path, val)}",
            whole="a file each",
            borders=borders,
        )
        digests = file_digests([*ids.files, *val.files], run_dir)
        parts = digests[: len(ids.files)], digests[len(ids.files) :]
        return replace(data, digest="+".join(map(_joined, parts)))

    def _open(self, paths: str | Sequence[str], key: str) -> StoredIds[WatchedFile]:
        named = [_file(path, key) for path in ((paths,) if isinstance(paths, str) else paths)]
        files = input_files(named, SUFFIXES, key)
        if len(named) == 1 and Path(named[0]).is_dir():
            _refuse_both_parts(Path(named[0]), files, key)
        return StoredIds([open_tokens(file, self.dtype, key) for file in files])


def _file(path: str, key: str) -> str:
    """The file that holds the ids: Megatron's pair may be named by either file, or by its prefix."""
    prefix = expanded(path, key)
    if prefix.suffix == ".idx":
        return str(prefix.with_suffix(".bin"))
    if not prefix.exists() and Path(f"{prefix}.bin").exists():
        return f"{prefix}.bin"
    return path


def _refuse_both_parts(folder: Path, files: Sequence[Path], key: str) -> None:
    """Refuse a folder with files for training and for validation by their names, as llm.c, nanoGPT and others have."""
    parts = {part: [file for file in files if part in file.stem.lower()] for part in ("train", "val")}
    if parts["train"] and parts["val"]:
        raise DataError(
            f"{key}={folder} holds files for training and for validation ({parts['train'][0].name}, "
            f"{parts['val'][0].name}), which would be one text: data.path='{folder}/*train*' "
            f"data.val_path='{folder}/*val*'"
        )


def _described(paths: str | Sequence[str], ids: StoredIds[WatchedFile]) -> str:
    return shown(paths) if len(ids.files) == 1 else f"{shown(paths)}, {len(ids.files)} files"


def _joined(digests: Sequence[str]) -> str:
    """One digest of those of several files."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
