"""A folder of a model as Hugging Face's software writes it, opened for reading: `config.json` and
safetensors.

The weights are `model.safetensors`, or the files that `model.safetensors.index.json` names. They
are data: nothing in the folder is run, no link in it is followed, and no name in it leads outside.
A folder says nothing of checksums; files that change while they are read are refused, and so are
files that are shorter than their headers say.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fp4train import foreign_json
from fp4train.checkpoint.layout import STATE_LIMIT
from fp4train.checkpoint.reading import File, StoredTensors, status_of
from fp4train.checkpoint.tensors import read_header
from fp4train.errors import UserError, reason, user_errors
from fp4train.files import Folder, NotPlain
from fp4train.text import first_few

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Allowed dtypes of stored weights; float32 has all values of the others."""
_PICKLED = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
    "model.pth",
    "consolidated.00.pth",
)


def is_model_folder(path: Path) -> bool:
    """Whether `path` is a folder with a `config.json`."""
    return os.path.lexists(path / CONFIG)


def read_config(path: Path) -> dict[str, Any]:
    """The table in the folder's `config.json`.

    Raises:
        UserError: it cannot be read, or is no table.
    """
    return read_table(path, CONFIG)


def read_table(path: Path, name: str) -> dict[str, Any]:
    """The JSON table in the file `name` of the folder.

    Raises:
        UserError: it cannot be read, or is no table.
    """
    with _opened(path) as folder:
        return _table(folder, name)


def has_file(path: Path, name: str) -> bool:
    """Whether the folder has a file of that name.

    Raises:
        UserError: it has a link or a folder of that name.
    """
    with _opened(path) as folder:
        if folder.status(name) is None:
            return False
        os.close(folder.descriptor_of(name))
        return True


def open_weights(
    path: Path,
    names: Iterable[str] | None = None,
    *,
    spare: Callable[[str], bool] = lambda name: False,
) -> StoredTensors:
    """The tensors of the folder; each is read when it is asked for, whole or a part.

    Args:
        names: the tensors that must be there, and no others; None: the folder may hold any.
        spare: whether another tensor may be there all the same.

    Raises:
        UserError: a file is missing, damaged, pickled, a link, or outside of the folder; with
            `names` a tensor is missing, is none of them, or is of none of `DTYPES`.
    """
    path = Path(os.path.realpath(path))  # the user names the folder, perhaps by a link
    with user_errors(ValueError, before=f"{path}: "), _opened(path) as folder:
        stored = StoredTensors(folder, _files(folder), {})
        if names is not None:
            _check_names(path, stored, set(names), spare)
        return stored


def _files(folder: Folder) -> dict[str, File]:
    """The files of weights, by name."""
    if folder.status(WEIGHTS) is not None:
        return {WEIGHTS: _file(folder, WEIGHTS)}
    if folder.status(INDEX) is None:
        have = folder.names()
        if pickled := [name for name in _PICKLED if name in have]:
            raise UserError(
                f"{folder.path} has its weights in {pickled[0]}, a pickle, which can run code "
                "and is not opened. Convert it where you trust it: load it in transformers and "
                "save_pretrained(…), which writes safetensors"
            )
        raise UserError(f"{folder.path} has no weights: neither {WEIGHTS} nor {INDEX}")
    places = _table(folder, INDEX).get("weight_map")
    where = folder.path / INDEX
    if not isinstance(places, dict) or not places:
        raise UserError(f"{where} has no table weight_map of tensors and files")
    tensors: dict[str, list[str]] = {}
    for tensor, file in places.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise UserError(
                f"{where}: {tensor} lies in {file!r}, which is no safetensors file of this folder"
            )
        tensors.setdefault(file, []).append(tensor)
    if lost := sorted(name for name in tensors if folder.status(name) is None):
        raise UserError(
            f"{folder.path / lost[0]} is missing: {len(lost)} of {len(tensors)} files that "
            "the index names"
        )
    files: dict[str, File] = {}
    for name in sorted(tensors):
        files[name] = _file(folder, name)
        if strange := next(
            (tensor for tensor in tensors[name] if tensor not in files[name].boxes), None
        ):
            raise UserError(f"{where}: {strange} lies in {name}, which does not hold it")
    return files


def _file(folder: Folder, name: str) -> File:
    damaged = user_errors(ValueError, before=f"{folder.path / name} is no whole safetensors file: ")
    with damaged, os.fdopen(folder.descriptor_of(name), "rb") as file:
        status = status_of(file.fileno())
        return File(status=status, boxes=read_header(file.fileno(), status[2]))


def _check_names(
    path: Path, stored: StoredTensors, described: set[str], spare: Callable[[str], bool]
) -> None:
    if lost := sorted(described - set(stored)):
        raise UserError(f"{path} lacks {first_few(lost, 1)}")
    if strange := sorted(name for name in set(stored) - described if not spare(name)):
        raise UserError(
            f"{path} holds tensors that its {CONFIG} does not describe: {first_few(strange, 1)}"
        )
    for name in sorted(described):
        if stored.dtype(name) not in DTYPES:
            raise UserError(
                f"{path}: {name} is of {stored.dtype(name)}; weights are read in "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
            )


def _table(folder: Folder, name: str) -> dict[str, Any]:
    with user_errors(ValueError, before=f"{folder.path / name} is no JSON that is read: "):
        table = foreign_json.parse(folder.read(name, STATE_LIMIT))
    if not isinstance(table, dict):
        raise UserError(f"{folder.path / name} is no table")
    return table


@contextmanager
def _opened(path: Path) -> Iterator[Folder]:
    """The folder. Raises UserError: it, or something in it, cannot be read."""
    try:
        with Folder.open(path) as folder:
            yield folder
    except OSError as error:
        message = f"{error.filename or path}: {reason(error)}"
        if isinstance(error, NotPlain):
            message += f". If you trust where its links lead, copy the files: cp -rL {path} COPY"
        raise UserError(message) from error
