"""Digests of token ids: all of them are read once, so that a run can tell that its data is what it was, to the bit.

Reading runs at the speed of the disk, or of SHA-256, 1 to 2 GB/s per core. A token file that somebody else keeps, and
that may be read-only, is read once per run: its digest is kept in the run's directory with the size, the time of the
last change and the inode of the file, and read anew where one of them differs.
"""

import hashlib
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from fp4train import files

CHUNK = 1 << 22
"""Bytes of each digest."""
READERS = 4
KEPT = "token_digests.json"
"""In the run's directory."""
LIMIT = 1 << 20
LARGE = 1 << 30
"""Bytes from which on progress is shown."""

_log = logging.getLogger(__name__)


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


def digests(ids: npt.NDArray[np.integer[Any]]) -> list[str]:
    """SHA-256 of each chunk, shortened to 64 bits: against faults, not against people."""
    data: Any = np.ascontiguousarray(ids).view(np.uint8).reshape(-1) if len(ids) else np.empty(0, dtype=np.uint8)
    found: list[str] = []
    shown = tqdm(
        desc="checking",
        total=len(data),
        unit="B",
        unit_scale=True,
        disable=None if len(data) >= LARGE else True,
        leave=False,
    )
    with ThreadPoolExecutor(READERS) as pool, shown as bar:
        for each in pool.map(lambda start: _digest(data[start : start + CHUNK]), range(0, len(data), CHUNK)):
            found.append(each)
            bar.update(CHUNK)
    return found


def file_digest(file: Path, ids: npt.NDArray[np.integer[Any]], run_dir: Path) -> str:
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
