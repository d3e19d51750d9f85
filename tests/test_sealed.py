"""Checked records that are appended to: whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from fp4train.files import Folder
from fp4train.sealed import LogWriter


def test_a_full_disk_leaves_what_was_appended_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Folder.open(tmp_path) as folder:
        with LogWriter(folder, "a", 0) as file:
            file.write(b"one\n", sync=True)
        write = os.write
        monkeypatch.setattr(
            os, "write", lambda d, data: write(d, data[:2]) if len(data) > 2 else full()
        )
        with pytest.raises(OSError, match="No space"), LogWriter(folder, "a", 4) as file:
            file.write(b"two\n", sync=True)
        monkeypatch.undo()
        assert (tmp_path / "a").read_bytes() == b"one\n"
        os.link(tmp_path / "a", tmp_path / "b")
        with LogWriter(folder, "a", 4) as file:
            file.write(b"three\n", sync=True)
        assert (tmp_path / "a").read_bytes() == b"one\nthree\n" and (
            tmp_path / "b"
        ).read_bytes() == b"one\n"


def full() -> int:
    raise OSError(errno.ENOSPC, "No space left on device")
