"""Who wrote a configuration: a signature that only this user can make, on what it names outside of its run.

The signature is HMAC-SHA256 over the run's identity and the configuration, with 32 random bytes that are kept in
$XDG_STATE_HOME/fp4train/key (~/.local/state/fp4train/key), readable by the user alone, and made when they are first
needed. A run directory that was made by somebody else, on a machine with another home, or by hand cannot carry it. It
says that this user named these paths for this run; it says nothing about the rest of the directory.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp4train.config.binding import path_values
from fp4train.config.schema import Config
from fp4train.files import Folder, write_all
from fp4train.paths import lies_in

KEY = "key"
_BYTES = 32
_OF_THE_COMMAND = ("run.dir", "resume")
"""Paths that are never taken from a saved configuration: a command says where it trains, and what it goes on with."""


def outside_paths(values: Mapping[str, Any], run: Path) -> dict[str, str]:
    """Full key → path, of the paths in a plain configuration that lie outside of the run directory `run`."""
    found = dict(path_values(values, Config))
    return {key: each for key, each in found.items() if key not in _OF_THE_COMMAND and not lies_in(each, run)}


def signature(identity: str, body: bytes, *, create: bool = False) -> str:
    """The user's signature of a configuration; `create` makes the key where there is none.

    Raises:
        OSError: there is no key, it cannot be read or made, or others can read it.
    """
    return hmac.new(_key(create=create), f"fp4train run {identity}\n".encode() + body, "sha256").hexdigest()


def _key(*, create: bool) -> bytes:
    state = os.environ.get("XDG_STATE_HOME", "")
    place = Path(state if os.path.isabs(state) else os.path.expanduser("~/.local/state")) / "fp4train"
    if not place.is_absolute():
        raise OSError(errno.ENOENT, "this user has no home directory", str(place))
    if create:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Folder.open(place) as folder:
        if create and folder.status(KEY) is None:
            _make(folder)
        key, status = folder.read(KEY, _BYTES), folder.status(KEY)
    if status is None or status.st_mode & 0o077 or len(key) != _BYTES:
        raise OSError(errno.EPERM, "it is damaged, or others can read it: remove it", str(place / KEY))
    return key


def _make(folder: Folder) -> None:
    """A new key, whole or not at all; of several processes that make one the first wins."""
    temporary = f".{KEY}.{secrets.token_hex(8)}.tmp"
    descriptor = folder.descriptor_of(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        write_all(descriptor, secrets.token_bytes(_BYTES))
        os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(temporary, KEY, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
    finally:
        os.close(descriptor)
        folder.remove(temporary)
