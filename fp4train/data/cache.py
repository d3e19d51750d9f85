"""Tokenised data on disk: tokenise once, memory-map ever after.

An entry is two files named by the hash of its key (source, settings and tokenizer): HASH.bin, the packed ids, and
HASH.json, their count, type and, for each chunk of it, a digest, taken as the ids are written. All of it is read once,
when the entry is opened, and compared with the digests: what a run trains on is what was tokenised, to the bit. Reading
runs at 1 to 2 GB/s per core. Memory holds some pieces of text and their ids, whatever the size of the data.

Both files are written under another name and then renamed, the JSON last, so an entry is there whole or not at all, and
ranks that tokenise the same data at once do no harm. An entry that does not match its JSON is built anew.
"""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fp4train.data.digests import Digester, digests
from fp4train.data.files import expanded
from fp4train.data.tokens import Ids
from fp4train.errors import DataError

VERSION = 2
log = logging.getLogger(__name__)


def cached_tokens(
    cache_dir: str,
    key: Mapping[str, Any],
    chunks: Callable[[], Iterator[Ids]],
    *,
    dtype: np.dtype[Any],
    max_tokens: int | None = None,
) -> Ids:
    """The concatenation of `chunks()`, at most `max_tokens` long, from the cache where it is there already."""
    entry = json.dumps({"version": VERSION, "max_tokens": max_tokens, **key}, sort_keys=True)
    folder = expanded(cache_dir, "data.cache_dir")
    path = folder / f"{hashlib.sha256(entry.encode()).hexdigest()[:20]}.bin"
    try:
        ids = _read(path)
        if ids is None:
            folder.mkdir(parents=True, exist_ok=True)
            _write(path, chunks(), dtype, max_tokens)
            ids = _read(path)
    except OSError as error:
        raise DataError(
            f"tokenised data cannot be kept in {folder}: {error.strerror or error}. Choose another data.cache_dir."
        ) from error
    if ids is None:
        raise DataError(
            f"tokenised data in {path} cannot be read back as it was written. Choose another data.cache_dir."
        )
    return ids


def _read(path: Path) -> Ids | None:
    """The entry, or None if it is missing or damaged."""
    try:
        info = json.loads(path.with_suffix(".json").read_text())
        dtype, tokens, expected = np.dtype(str(info["dtype"])), int(info["tokens"]), info["digests"]
        if path.stat().st_size != tokens * dtype.itemsize:
            raise ValueError(f"{path.stat().st_size} bytes instead of {tokens * dtype.itemsize}")
        ids: Ids = np.memmap(path, dtype=dtype, mode="r") if tokens else np.empty(0, dtype=dtype)
        found = digests(ids)
        if found != expected:
            bad = sum(a != b for a, b in zip(found, expected, strict=True)) if len(found) == len(expected) else "some"
            raise ValueError(f"{bad} of {len(found)} chunks are not as they were written")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, SyntaxError) as error:  # SyntaxError: of a damaged name of a type
        log.warning("tokenised data in %s is damaged (%s): tokenising again", path, error)
        return None
    return ids


def _write(path: Path, chunks: Iterator[Ids], dtype: np.dtype[Any], max_tokens: int | None) -> None:
    new = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.new")
    tokens, digester = 0, Digester()
    try:
        with (
            new.open("wb") as file,
            tqdm(desc="tokenising", unit="tok", unit_scale=True, total=max_tokens, disable=None, leave=False) as bar,
        ):
            for chunk in chunks:
                kept = chunk if max_tokens is None else chunk[: max_tokens - tokens]
                data = kept.astype(dtype, copy=False).tobytes()
                file.write(data)
                digester.update(data)
                tokens += len(kept)
                bar.update(len(kept))
                if tokens == max_tokens:
                    break
            file.flush()
            os.fsync(file.fileno())
        info = {"dtype": dtype.str, "tokens": tokens, "digests": digester.digests()}
        os.replace(new, path)
        new.write_text(json.dumps(info))
        os.replace(new, path.with_suffix(".json"))
    finally:
        new.unlink(missing_ok=True)
