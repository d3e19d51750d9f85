"""The names and marks of a checkpoint's files, shared by what writes and what reads them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp4train import files
from fp4train.files import Folder

FORMAT = "fp4train.checkpoint"
VERSION, SHARDED = 1, 2
"""Of a checkpoint that one rank wrote, and of one that several wrote."""
TENSORS = "tensors.safetensors"
STATE = "state.json"
STATE_LIMIT = 1 << 26
"""Bytes of a state that are read; the largest of fp4train's own have some hundred thousand."""

NAME = re.compile(r"step_(\d{8,18})", re.ASCII)
LEFTOVER = ".tmp_"  # being written, or being deleted: worthless after a kill
REPLACED = ".old_"  # a whole checkpoint on its way out while one of the same step takes its place


@contextmanager
def opened_folder(folder: Path | Folder, *, create: bool = False) -> Iterator[Folder]:
    """`folder`, opened if it is a path."""
    if isinstance(folder, Folder):
        yield folder
    else:
        with files.parent(folder, create=create) as (above, name), above.folder(name, create=create) as opened:
            yield opened


def directory_name(step: int) -> str:
    return f"step_{step:08d}"
