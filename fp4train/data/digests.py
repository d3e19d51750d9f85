"""Digests of the token files of somebody else, by which a run knows that its data are what they were.

A file, which may be read-only, is read once per run: its digest is kept in the run's directory with
the stamp of the file (`stored.py`), and read anew where that differs. Reading runs at the speed of
the disk, or of SHA-256, 0.3 to 2 GB/s per core.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from fp4train import files
from fp4train.data.stored import IdFile, WatchedFile

CHUNK = 1 << 22
"""Bytes of each digest."""
READERS = 4
KEPT = "token_digests.json"
"""The file of token files' digests in the run's directory."""
LIMIT = 1 << 24
"""Bytes that are read of that file."""
LARGE = 1 << 30
"""Bytes from which on progress is shown."""

_log = logging.getLogger(__name__)


def _digest(chunk: bytes) -> str:
    return hashlib.sha256(chunk).hexdigest()[:16]


def digests(file: IdFile) -> list[str]:
    """SHA-256 of each chunk of a file's ids, shortened to 64 bits: against faults, not against
    people.
    """
    quiet = None if file.size >= LARGE else True
    bar = tqdm(
        desc="checking", total=file.size, unit="B", unit_scale=True, disable=quiet, leave=False
    )

    def of(start: int) -> str:
        return _digest(file.raw(start, min(CHUNK, file.size - start)))

    chunk_digests = []
    with ThreadPoolExecutor(READERS) as pool, bar:
        for digest in pool.map(of, range(0, file.size, CHUNK)):
            bar.update(CHUNK)
            chunk_digests.append(digest)
    return chunk_digests


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
