"""Checksums of what fp4train writes, and how they are checked where it is read: one rule for every
record of a run.

- An object in JSON (a request, a study's result) holds the checksum of the rest of it: `sealed`,
  `unsealed`.
- A line that is appended to a record holds its own checksum (`seal_line`)::

      {"step": 120, "train/loss": 2.31, "crc": "5f0e2d1a"}

  Metrics, the journal and studies' records are such lines; a block of the statistics has its
  checksum in its header.
- Lines do not show that one of them is gone. So each checkpoint holds the length and the checksum
  of every record (`FileDigest`), and `changed_since` compares them.

A record that is appended to is read as `ScannedPart` parts (lines, blocks), each whole or damaged;
`cut` leaves the whole ones that a run goes on from, and `LogWriter` adds to them.

Checksums find damage. They keep nobody from writing anew who means to: CRC-32 for lines, SHA-256
for the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fp4train import files
from fp4train.errors import UserError, user_errors
from fp4train.files import Folder
from fp4train.text import first_line

_CRC = b', "crc": "%08x"}'
_CRC_BYTES = len(_CRC % 0)
_SUM = re.compile(rb'"[0-9a-f]{8}"\}$')
"""The end of a line with a checksum, whose name may be damaged."""

CONFIG = "config.yaml"
CONFIG_LIMIT = 1 << 19
"""Bytes of a configuration that are read, and written: YAML is read at 0.1 MB/s."""
_HEADER = re.compile(
    rb"# fp4train run ([0-9a-f]{16}) sha256 ([0-9a-f]{64})(?: signed ([0-9a-f]{64}))?\n"
)
"""The first line of a configuration: the run's identity, the checksum of the rest, and its user's
signature.
"""


def checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 of an object in JSON, without its own "sha256".

    Raises:
        ValueError: a number in it is not finite.
    """
    content = {key: value for key, value in body.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(body: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """`body` in JSON with its checksum.

    Raises:
        ValueError: a number in it is not finite.
    """
    body = json.loads(json.dumps(body, allow_nan=False))  # as it will be read back
    return json.dumps({**body, "sha256": checksum(body)}, indent=indent).encode() + b"\n"


def unsealed(data: bytes) -> dict[str, Any]:
    """The body of a file that `sealed` wrote.

    Raises:
        ValueError, RecursionError: it is no object in JSON, or not as it was written.
    """
    body = json.loads(data)
    if not isinstance(body, dict):
        raise ValueError("it is no JSON object")
    if "sha256" not in body:
        raise ValueError("it has no checksum: it was made by an older fp4train, or by hand")
    if body["sha256"] != checksum(body):
        raise ValueError("it is damaged (its checksum differs)")
    del body["sha256"]
    return body


class NoChecksum(ValueError):
    """A line without a checksum."""


def seal_line(text: bytes) -> bytes:
    """`text`, an object in JSON that is not empty, as a line with its checksum."""
    body = text[:-1]
    return body + _CRC % zlib.crc32(body) + b"\n"


def checksum_of(raw: bytes) -> str:
    """The checksum at the end of a line, eight digits."""
    return raw.removesuffix(b"\n")[-10:-2].decode()


def open_line(raw: bytes) -> dict[str, Any]:
    """The object in a line, without its checksum.

    Raises:
        NoChecksum: it has none.
        ValueError, RecursionError: it is no line, or not as it was written.
    """
    raw = raw.removesuffix(b"\n")
    line = json.loads(raw)
    if not isinstance(line, dict):
        raise ValueError("it is no object")
    if "crc" not in line and not _SUM.search(raw):
        raise NoChecksum("it has no checksum")
    if raw[-_CRC_BYTES:] != _CRC % zlib.crc32(raw[:-_CRC_BYTES]):
        raise ValueError("its checksum differs")
    del line["crc"]
    line.pop("after", None)  # older lines name the checksum of the line before
    return line


Header = tuple[str, str, str | None]
"""Identity, checksum, and signature or None, as the first line of a configuration says them."""


def split_config(data: bytes) -> tuple[Header | None, bytes]:
    """The first line of a saved configuration, and the rest of it.

    Raises:
        ValueError: its first line is damaged.
    """
    header = _HEADER.match(data)
    if header is None and data.startswith(b"#"):  # a run writes no other comment
        raise ValueError("was changed after the run had written it (its first line is damaged)")
    if header is None:
        return None, data
    signed = None
    if header[3] is not None:
        signed = header[3].decode()
    return (header[1].decode(), header[2].decode(), signed), data[header.end() :]


def config_parts(path: Path) -> tuple[Header | None, bytes]:
    """`split_config` of the file `path`.

    Raises:
        UserError: it cannot be read, or its first line is damaged.
    """
    unreadable = user_errors(OSError, before=f"{path} cannot be read as a configuration: ")
    with unreadable, user_errors(ValueError, before=f"{path} "):
        return split_config(files.read(path, CONFIG_LIMIT))


def saved_config(path: Path) -> dict[str, Any]:
    """The plain values of a saved configuration that is as the run wrote it.

    Raises:
        UserError: it cannot be read, or was changed.
    """
    header, body = config_parts(path)
    if header is not None and hashlib.sha256(body).hexdigest() != header[1]:
        raise UserError(
            f"{path} was changed after the run had written it (its checksum differs): undo "
            "that, or remove its first line to take the file as it stands"
        )
    strange = (yaml.YAMLError, RecursionError, ValueError)
    refused = f"{path} cannot be read as a configuration: "
    with user_errors(*strange, before=refused, message=first_line):
        saved = _PlainLoader(body).get_single_data()
    if not isinstance(saved, dict) or not isinstance(saved.get("run"), dict):
        raise UserError(f"{path} cannot be read as a configuration: it has no section run")
    return saved


class _PlainLoader(yaml.SafeLoader):
    """YAML without anchors: a few of them make gigabytes, or a structure without an end."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(
                "it holds an anchor and an alias; a saved configuration has plain values only"
            )
        return super().compose_node(parent, index)


def identity(folder: Folder) -> str | None:
    """Identity of the run in `folder`, by the first line of its configuration; None: none that can
    be read.
    """
    with suppress(OSError, ValueError):
        if folder.has_file(CONFIG) and (
            header := split_config(folder.read(CONFIG, CONFIG_LIMIT))[0]
        ):
            return header[0]
    return None


class FileDigest:
    """Length and checksum of a file that is only appended to."""

    def __init__(self, pieces: Iterable[bytes] = ()) -> None:
        self.size = 0
        self._digest = hashlib.sha256()
        for piece in pieces:
            self.add(piece)

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self._digest.update(data)

    def mark(self) -> dict[str, Any]:
        """The mark that a checkpoint keeps: length and checksum."""
        return {"bytes": self.size, "sha256": self._digest.copy().hexdigest()}


class ScannedPart(NamedTuple):
    """A part of a record: a line, or a block.

    Args:
        number: number of the line, from 1; 0 of a block.
        raw: bytes of the part in the file.
        value: content of the part; None: it is damaged.
        why: sentence about the damage to it; empty: there is none.
    """

    number: int
    raw: bytes
    value: Any
    why: str


def cut(
    folder: Folder,
    name: str,
    scanned: Iterable[ScannedPart],
    keep: Callable[[Any], bool],
    damaged: str | None = None,
) -> tuple[FileDigest, list[ScannedPart]]:
    """Leave the whole parts of the file `name` that `keep` takes; atomically, and only if that
    differs.

    Args:
        scanned: parts of the file.
        keep: whether the content of a part stays.
        damaged: the name under which the file is kept as it was, if something was wrong with it.

    Returns:
        Length and checksum of what is left, and the parts with which something was wrong.
    """
    kept = []
    wrong = []
    if (status := folder.status(name)) is None:
        return FileDigest(), []
    for part in scanned:
        if part.why:
            wrong.append(part)
        if part.value is not None and keep(part.value):
            kept.append(part.raw)
    left = FileDigest(kept)
    if wrong and damaged is not None:
        folder.write(damaged, folder.pieces(name, status.st_size))
    if left.size != status.st_size:
        folder.write(name, kept)
    return left, wrong


class LogWriter:
    """The end of a file that is only appended to; a context manager that closes it.

    A file that has another name, too (a hard link), is left alone under that one.

    Args:
        size: number of bytes that stay; what is behind them is cut off.
    """

    def __init__(self, folder: Folder, name: str, size: int) -> None:
        status = folder.status(name)
        if status is not None and status.st_nlink > 1:
            folder.write(name, folder.pieces(name, status.st_size))
        self._descriptor = folder.descriptor_of(name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._size = size
        os.ftruncate(self._descriptor, size)
        if status is None:
            folder.sync()

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def write(self, data: bytes, *, sync: bool = False) -> None:
        """Add `data`, with `sync` durably, all of it or nothing: a nearly full disk takes a part,
        and then refuses.
        """
        try:
            files.write_all(self._descriptor, data)
            if sync:
                self.sync()
        except BaseException:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def sync(self) -> None:
        """Make what is written durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def changed_since(folder: Folder, name: str, mark: object, limit: int) -> str | None:
    """The difference, in words, of the file `name`, of up to `limit` bytes, from its beginning as
    `mark` remembers it; None: there is none, or nothing is remembered.
    """
    if not isinstance(mark, Mapping):
        return None
    size = mark.get("bytes")
    if type(size) is not int:
        return None
    beginning = FileDigest()
    if folder.status(name) is not None:
        for piece in folder.pieces(name, limit):
            beginning.add(piece[: size - beginning.size])
            if beginning.size == size:
                break
    if beginning.size < size:
        return f"is cut off ({beginning.size} bytes of {size})"
    if beginning.mark() == {"bytes": size, "sha256": mark.get("sha256")}:
        return None
    return "was changed"
