"""Checks at the start that all ranks run the same thing, in the same directory."""

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fp4train
from fp4train import files
from fp4train.errors import UserError
from fp4train.parallel.world import AgreedError, World

NONCE = ".ranks"
"""A file by which ranks see that they share the run's directory."""
_SEEN_SECONDS = 20.0
"""A network file system may show a new file late."""


def check_same(world: World, what: Mapping[str, Any]) -> None:
    """Compare plain values by name over several ranks.

    Raises:
        AgreedError: on every rank; it names the first that differs, and whose it is.
    """
    own = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
    found = world.gathered(own)
    if len(set(found)) == 1:
        return
    odd = next(rank for rank, each in enumerate(found) if each != found[0])
    all_values = world.gathered({key: str(value) for key, value in what.items()})
    first, other = all_values[0], all_values[odd]
    key = next((k for k in {**first, **other} if first.get(k) != other.get(k)), "something")
    raise AgreedError(
        f"the ranks do not run the same thing: {key} is {first.get(key)} on rank 0 and {other.get(key)} on rank {odd}. "
        "Give every rank the same command, the same code and the same data"
    )


@cache
def code_version() -> str:
    """fp4train's and torch's versions, and a checksum of fp4train's source: two check-outs may have one version."""
    digest, root = hashlib.sha256(), Path(fp4train.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"fp4train {fp4train.__version__} ({digest.hexdigest()[:12]}) with torch {torch.__version__}"


def check_shared(world: World, directory: Path) -> None:
    """Check that each of several ranks sees the lead's run directory; the lead has made it.

    Raises:
        UserError: on every rank: a rank sees another directory under that path, or none.
    """
    nonce = world.of_lead(secrets.token_hex(16))
    try:
        with world.together():
            if world.lead:
                files.write(directory / NONCE, nonce.encode(), sync=False)
        with world.together():
            if not world.lead and not _sees(directory / NONCE, nonce):
                raise UserError(
                    f"{directory} is not the directory that rank 0 trains in: it must lie on a file system that all "
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
