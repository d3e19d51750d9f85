"""Checks at the start that all ranks run the same thing, in the same directory."""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import fp4train
from fp4train import files
from fp4train.errors import UserError
from fp4train.parallel.world import AgreedError, World

NONCE = ".ranks"
"""A file by which ranks see that they share the run's directory."""
_SEEN_SECONDS = 20.0
"""A network file system may show a new file late."""
_ABSENT = "not there"
_LARGE = 2**26
"""Bytes; larger files are compared by their sizes."""
_KERNEL_CHOICES = (
    "NVTE_",
    "NVIDIA_TF32_OVERRIDE",
    "ATEN_CPU_CAPABILITY",
    "DNNL_",
    "ONEDNN_",
    "MKL_",
    "TRITON_F32_",
)
"""Beginnings of environment variables that change what a rank computes in the same code."""


def check_same(world: World, what: Mapping[str, Any]) -> None:
    """Compare plain values by name over several ranks.

    Raises:
        AgreedError: on every rank; it names the first that differs, and whose it is.
    """
    digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
    digests = world.gathered(digest)
    if len(set(digests)) == 1:
        return
    odd = next(rank for rank, other in enumerate(digests) if other != digests[0])
    all_values = world.gathered({key: str(value) for key, value in what.items()})
    lead_value = all_values[0]
    other = all_values[odd]
    key = next(
        (k for k in {**lead_value, **other} if lead_value.get(k) != other.get(k)), "something"
    )
    raise AgreedError(
        f"the ranks do not run the same thing: {key} is {lead_value.get(key, _ABSENT)} on "
        "rank 0 and "
        f"{other.get(key, _ABSENT)} on rank {odd}. "
        "Give every rank the same command, the same code and libraries, and the same data"
    )


def source_values(files_by_name: Mapping[str, Path]) -> dict[str, str]:
    """Each file's checksum by its name, for `check_same`: a file that another rank lacks differs,
    too.
    """
    return {f"the source {name}": _checksum(path) for name, path in files_by_name.items()}


def own_files() -> dict[str, Path]:
    """The files of fp4train that decide what it computes: its Python sources and its compiled
    extension. Two check-outs may have one version, and an extension may be older than the sources
    beside it.
    """
    root = Path(fp4train.__file__).parent
    endings = (".py", *EXTENSION_SUFFIXES)
    paths = [path for path in root.rglob("*") if path.name.endswith(endings)]
    return {f"fp4train/{path.relative_to(root).as_posix()}": path for path in sorted(paths)}


def outside_settings() -> dict[str, str]:
    """The environment variables by which libraries choose other kernels, for `check_same`."""
    return {
        f"the variable {name}": value
        for name, value in os.environ.items()
        if name.startswith(_KERNEL_CHOICES)
    }


def _checksum(path: Path) -> str:
    """The first digits of the file's SHA-256; of a large one, which is data, its size; "unreadable"
    else.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _LARGE:
                return f"{size} bytes"
            return f"SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def check_shared(world: World, directory: Path) -> None:
    """Check that each of several ranks sees the lead's run directory; the lead has made it.

    Raises:
        UserError: on every rank: a rank sees another directory under that path, or none.
    """
    nonce = world.broadcast(secrets.token_hex(16))
    try:
        with world.same_outcome():
            if world.lead:
                files.write(directory / NONCE, nonce.encode(), sync=False)
        with world.same_outcome():
            if not world.lead and not _sees(directory / NONCE, nonce):
                raise UserError(
                    f"{directory} is not the directory that rank 0 trains in: it must lie on "
                    "a file system that all "
                    "machines share; choose another run.dir"
                )
    finally:
        if world.lead:
            with files.Folder.open(directory) as folder:
                folder.remove(NONCE)


def _sees(path: Path, nonce: str) -> bool:
    deadline = time.monotonic() + _SEEN_SECONDS
    while True:
        try:
            if files.read(path, 64).decode() == nonce:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
