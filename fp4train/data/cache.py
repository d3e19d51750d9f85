"""Token ids on disk: the cache of tokenised data, and the digests by which a run knows that data is
what it was.

An entry of the cache is two files named by the hash of its key (source, settings and tokenizer):
HASH.bin, the packed ids, and HASH.json, their count, type and, for each chunk of it, a digest,
taken as the ids are written. All of it is read once, when the entry is opened, and compared with
the digests; from then on each block that a batch reads is compared with what it was then
(`stored.py`): what a run trains on is what was tokenised, to the bit. Memory holds some pieces of
text and their ids, whatever the size of the data.

Both files are written under another name and then renamed, the JSON last, so an entry is there
whole or not at all, and ranks that tokenise the same data at once do no harm. An entry that does
not match its JSON is built anew. One that belongs to another user is not read, whatever it says: a
user's own is made beside it, as HASH-UID.

A token file that somebody else keeps, and that may be read-only, is read once per run: its digest
is kept in the run's directory with the stamp of the file (`stored.py`), and read anew where that
differs. Reading runs at the speed of the disk, or of SHA-256, 0.3 to 2 GB/s per core.
"""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from fp4train import files
from fp4train.data.files import expanded
from fp4train.data.stored import CheckedFile, IdFile, Ids, StoredIds, WatchedFile, checksums
from fp4train.errors import DataError, data_errors, reason
from fp4train.text import shortened

VERSION = 2
CHUNK = 1 << 22
"""Bytes of each digest."""
READERS = 4
KEPT = "token_digests.json"
"""The file of token files' digests in the run's directory."""
LIMIT = 1 << 24
"""Bytes that are read of a file of digests: those of 3 TB of ids."""
SUFFIXES = (".json", ".bin")
QUOTED = 300
"""Characters of a reason that are shown: it quotes what stands in the file."""
LARGE = 1 << 30
"""Bytes from which on progress is shown."""

_log = logging.getLogger(__name__)

Summed = TypeVar("Summed")


def cached_tokens(
    cache_dir: str,
    key: Mapping[str, Any],
    chunks: Callable[[], Iterator[Ids]],
    *,
    dtype: np.dtype[Any],
    max_tokens: int | None = None,
) -> StoredIds[CheckedFile]:
    """The concatenation of `chunks()`, at most `max_tokens` long, from the cache where it is there
    already.
    """
    entry = json.dumps({"version": VERSION, "max_tokens": max_tokens, **key}, sort_keys=True)
    name = hashlib.sha256(entry.encode()).hexdigest()[:20]
    place = expanded(cache_dir, "data.cache_dir")
    refused = f"tokenised data cannot be kept in {place}: "
    remedy = ". Choose another data.cache_dir."
    kept = data_errors(OSError, before=refused, message=reason, after=remedy)
    with kept, files.Folder.open(place, create=True) as folder:
        name = _own_name(folder, name)
        ids = stored_tokens(folder, name)
        if ids is None:
            _write(folder, name, chunks(), dtype, max_tokens)
            ids = stored_tokens(folder, name)
    if ids is None:
        raise DataError(
            f"tokenised data in {place / name}.bin cannot be read back as it was written{remedy}"
        )
    return ids


def _own_name(folder: files.Folder, name: str) -> str:
    """The name of an entry that belongs to this user: `name`, or where somebody else has that, one
    with the user's number.
    """
    user = os.geteuid()
    if (owner := _other_owner(folder, name)) is None:
        return name
    beside = f"{name}-{user}"
    text = (
        "tokenised data in %s belongs to user %d, not to you (%d): it is not read; yours is "
        "kept beside it as %s"
    )
    _log.warning(text, folder.path / name, owner, user, beside)
    return beside


def _other_owner(folder: files.Folder, name: str) -> int | None:
    """The number of another user to whom one of the two files of an entry belongs; None: there is
    none.
    """
    owners = [
        status.st_uid for suffix in SUFFIXES if (status := folder.status(name + suffix)) is not None
    ]
    return next((owner for owner in owners if owner != os.geteuid()), None)


def stored_tokens(folder: files.Folder, name: str) -> StoredIds[CheckedFile] | None:
    """The entry, or None if it is missing or damaged."""
    path = folder.path / f"{name}.bin"
    try:
        info = json.loads(folder.read(f"{name}.json", LIMIT))
        dtype = np.dtype(str(info["dtype"]))
        tokens = int(info["tokens"])
        expected = info["digests"]
        descriptor = folder.descriptor_of(path.name)
        file = CheckedFile(descriptor, path, dtype, tokens)
        size = os.fstat(descriptor).st_size
        if dtype.kind != "u" or size != file.size:
            raise ValueError(f"{size} bytes instead of {tokens} ids of type {dtype}")
        if len(expected) != -(-size // CHUNK):
            raise ValueError(f"{len(expected)} digests of {-(-size // CHUNK)} chunks")
        actual, file.checksums = _checked(file)
        if actual != expected:
            bad = sum(digest != right for digest, right in zip(actual, expected, strict=True))
            raise ValueError(f"{bad} of {len(actual)} chunks are not as they were written")
    except FileNotFoundError:
        return None
    except (OSError, *_DAMAGE) as error:
        strange = isinstance(error, files.NotPlain)
        if isinstance(error, OSError) and not strange and error.errno != errno.EFBIG:
            raise
        _log.warning(
            "tokenised data in %s is damaged (%s): tokenising again",
            path,
            shortened(reason(error), QUOTED),
        )
        return None
    return StoredIds([file])


_DAMAGE = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, OverflowError)
"""What a damaged entry raises; SyntaxError: the name of its type is."""


def _write(
    folder: files.Folder,
    name: str,
    chunks: Iterator[Ids],
    dtype: np.dtype[Any],
    max_tokens: int | None,
) -> None:
    digests: list[str] = []
    tokens = 0
    bar = tqdm(
        desc="tokenising", unit="tok", unit_scale=True, total=max_tokens, disable=None, leave=False
    )

    def parts() -> Iterator[bytes]:
        nonlocal tokens
        for chunk in chunks:
            if max_tokens is None:
                kept = chunk
            else:
                kept = chunk[: max_tokens - tokens]
            tokens += len(kept)
            bar.update(len(kept))
            yield kept.astype(dtype, copy=False).tobytes()
            if tokens == max_tokens:
                break

    def data() -> Iterator[bytes]:
        for part in _divided(parts()):
            digests.append(_digest(part))
            yield part

    with bar:
        folder.write(f"{name}.bin", data())
    info = {"dtype": dtype.str, "tokens": tokens, "digests": digests}
    folder.write(f"{name}.json", json.dumps(info).encode())


def _divided(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in portions of `CHUNK`."""
    gathered = bytearray()
    for part in parts:
        gathered += part
        while len(gathered) >= CHUNK:
            yield bytes(gathered[:CHUNK])
            del gathered[:CHUNK]
    if gathered:
        yield bytes(gathered)


def _digest(chunk: Any) -> str:
    return hashlib.sha256(chunk).hexdigest()[:16]


def digests(file: IdFile) -> list[str]:
    """SHA-256 of each chunk of a file's ids, shortened to 64 bits: against faults, not against
    people.
    """
    return [digest for digest, _ in _chunks(file, lambda data: (_digest(data), None))]


def _checked(file: IdFile) -> tuple[list[str], npt.NDArray[np.uint32]]:
    """The digests of an entry, and the checksums of its blocks, from the same bytes."""
    both = list(_chunks(file, _sums))
    sums = [np.empty(0, np.uint32), *(sums for _, sums in both)]
    return [digest for digest, _ in both], np.concatenate(sums)


def _sums(data: bytes) -> tuple[str, npt.NDArray[np.uint32]]:
    return _digest(data), checksums(data)


def _chunks(file: IdFile, sums: Callable[[bytes], Summed]) -> Iterator[Summed]:
    """What `sums` gives of each chunk of a file's ids, in order."""
    quiet = None if file.size >= LARGE else True
    bar = tqdm(
        desc="checking", total=file.size, unit="B", unit_scale=True, disable=quiet, leave=False
    )

    def of(start: int) -> Summed:
        return sums(file.raw(start, min(CHUNK, file.size - start)))

    with ThreadPoolExecutor(READERS) as pool, bar:
        for summed in pool.map(of, range(0, file.size, CHUNK)):
            bar.update(CHUNK)
            yield summed


def file_digests(token_files: Sequence[WatchedFile], run_dir: Path) -> list[str]:
    """The digest of all ids of each token file; from `run_dir` where a file was read for this run
    before.
    """
    try:
        kept = json.loads(files.read(run_dir / KEPT, LIMIT))
        kept = kept if isinstance(kept, dict) else {}
    except (OSError, ValueError, RecursionError):
        kept = {}
    on_disk = dict(kept)
    for file in token_files:
        name = str(file.path.resolve())
        stamp = dict(zip(("bytes", "written", "inode", "changed"), file.stamp, strict=True))
        entry = kept.get(name)
        if isinstance(entry, dict) and stamp.items() <= entry.items() and "sha256" in entry:
            file.digest = str(entry["sha256"])
        else:
            file.digest = _file_digest(file)
        file.anew = _file_digest
        kept[name] = stamp | {"sha256": file.digest}
    try:
        if kept != on_disk:
            files.write(run_dir / KEPT, json.dumps(kept).encode(), create=True)
    except OSError as error:
        _log.debug("%s: %s", run_dir / KEPT, error)  # they are read again then
    return [str(file.digest) for file in token_files]


def _file_digest(file: IdFile) -> str:
    return _digest("".join(digests(file)).encode())
