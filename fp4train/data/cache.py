"""Token ids on disk: the cache of tokenised data, and the digests by which a run knows that data is what it was.

An entry of the cache is two files named by the hash of its key (source, settings and tokenizer): HASH.bin, the packed
ids, and HASH.json, their count, type and, for each chunk of it, a digest, taken as the ids are written. All of it is
read once, when the entry is opened, and compared with the digests: what a run trains on is what was tokenised, to the
bit. Memory holds some pieces of text and their ids, whatever the size of the data.

Both files are written under another name and then renamed, the JSON last, so an entry is there whole or not at all, and
ranks that tokenise the same data at once do no harm. An entry that does not match its JSON is built anew.

A token file that somebody else keeps, and that may be read-only, is read once per run: its digest is kept in the run's
directory with the size, the time of the last change and the inode of the file, and read anew where one of them differs.
Reading runs at the speed of the disk, or of SHA-256, 1 to 2 GB/s per core.
"""

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fp4train import files
from fp4train.data.files import expanded
from fp4train.data.tokens import Ids
from fp4train.errors import DataError, data_errors, reason

VERSION = 2
CHUNK = 1 << 22
"""Bytes of each digest."""
READERS = 4
KEPT = "token_digests.json"
"""The file of token files' digests in the run's directory."""
LIMIT = 1 << 20
LARGE = 1 << 30
"""Bytes from which on progress is shown."""

_log = logging.getLogger(__name__)


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
    refused, remedy = f"tokenised data cannot be kept in {folder}: ", ". Choose another data.cache_dir."
    with data_errors(OSError, before=refused, message=reason, after=remedy):
        ids = _read(path)
        if ids is None:
            folder.mkdir(parents=True, exist_ok=True)
            _write(path, chunks(), dtype, max_tokens)
            ids = _read(path)
    if ids is None:
        raise DataError(f"tokenised data in {path} cannot be read back as it was written{remedy}")
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
        _log.warning("tokenised data in %s is damaged (%s): tokenising again", path, error)
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


class Digester:
    """`digests` of bytes that come in any portions."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._rest = bytearray()

    def update(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= CHUNK:
            self._done.append(_digest(self._rest[:CHUNK]))
            del self._rest[:CHUNK]

    def digests(self) -> list[str]:
        return [*self._done, _digest(self._rest)] if self._rest else self._done


def _digest(chunk: Any) -> str:
    return hashlib.sha256(chunk).hexdigest()[:16]


def digests(ids: Ids) -> list[str]:
    """SHA-256 of each chunk, shortened to 64 bits: against faults, not against people."""
    data: Any = np.ascontiguousarray(ids).view(np.uint8).reshape(-1) if len(ids) else np.empty(0, dtype=np.uint8)
    found: list[str] = []
    quiet = None if len(data) >= LARGE else True
    shown = tqdm(desc="checking", total=len(data), unit="B", unit_scale=True, disable=quiet, leave=False)
    with ThreadPoolExecutor(READERS) as pool, shown as bar:
        for each in pool.map(lambda start: _digest(data[start : start + CHUNK]), range(0, len(data), CHUNK)):
            found.append(each)
            bar.update(CHUNK)
    return found


def file_digest(file: Path, ids: Ids, run_dir: Path) -> str:
    """The digest of all `ids` of the token file `file`; from `run_dir` where the file was read for this run before."""
    status = file.stat()
    now = {"bytes": status.st_size, "changed": status.st_mtime_ns, "inode": status.st_ino}
    name = str(file.resolve())
    try:
        kept = json.loads(files.read(run_dir / KEPT, LIMIT))
        known = kept[name]
        if {key: known[key] for key in now} == now and isinstance(known["sha256"], str):
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        kept = {}
    began = time.perf_counter()
    found = _digest("".join(digests(ids)).encode())
    seconds = time.perf_counter() - began
    if status.st_size >= LARGE:
        speed = status.st_size / seconds / 1e9
        _log.info("%s: %.1f GB read and checked in %.0f s (%.1f GB/s)", file, status.st_size / 1e9, seconds, speed)
    kept = (kept if isinstance(kept, dict) else {}) | {name: now | {"sha256": found}}
    try:
        files.write(run_dir / KEPT, json.dumps(kept).encode(), create=True)
    except OSError as error:
        _log.debug("%s: %s", run_dir / KEPT, error)  # it is read again then
    return found
