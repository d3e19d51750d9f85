"""Reading one checkpoint: every file is verified before any tensor of it is read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4train.checkpoint.layout import FORMAT, SHARDED, STATE, STATE_LIMIT, TENSORS
from fp4train.checkpoint.ranks import CheckpointGroup
from fp4train.checkpoint.stored import File, StoredTensors, status_of
from fp4train.checkpoint.tensors import checksum, read_header
from fp4train.checkpoint.tree import JSON, from_strict
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.sealed import checksum as checksum_of


class Unusable(Exception):
    """This checkpoint cannot be used; the message is the reason."""


def read(folder: Folder, step: int, ranks: CheckpointGroup | None) -> tuple[StoredTensors, dict[str, JSON]]:
    """The checkpoint in `folder`, of whose files this rank verifies a part, and without ranks the state alone; nothing
    here waits for another rank."""
    try:
        body = json.loads(folder.read(STATE, STATE_LIMIT))
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise Unusable(f"{STATE} is not one of fp4train's")
        if body.pop("sha256", None) != checksum_of(body):  # first: a damaged version is damage, not a newer fp4train
            raise Unusable(f"{STATE} is damaged (checksum differs)")
        version = body.get("version")
        if isinstance(version, int) and version > SHARDED:
            raise UserError(
                f"{folder.path} has checkpoint format version {version}; this fp4train reads up to {SHARDED}. "
                "Update fp4train to resume from it."
            )
        if body["step"] != step:
            raise Unusable(f"{STATE} is of step {body['step']}, not {step}")
        state, described = from_strict(body["state"]), body["tensors"]
        if not isinstance(state, dict) or not isinstance(described["aliases"], dict):
            raise Unusable(f"{STATE} holds no state")
        files = described["files"] if version == SHARDED else {TENSORS: described}
        largest_first = sorted(files, key=lambda name: (-files[name]["bytes"], name))
        verified = set() if ranks is None else set(largest_first[ranks.rank :: ranks.size])
        read = {name: _file(folder, name, files[name], verify=name in verified) for name in files}
        return StoredTensors(folder, read, described["aliases"]), state
    except FileNotFoundError as error:
        raise Unusable(f"{Path(str(error.filename)).name} is missing") from error
    except UnicodeDecodeError as error:
        raise Unusable(f"{STATE} is damaged (not text)") from error
    except json.JSONDecodeError as error:
        raise Unusable(f"{STATE} is damaged (not JSON: {error})") from error
    except (OSError, LookupError, TypeError, ValueError, RecursionError, AttributeError) as error:
        raise Unusable(f"unreadable ({type(error).__name__}: {error})") from error


def _file(folder: Folder, name: str, described: Mapping[str, Any], *, verify: bool) -> File:
    """A file of tensors of the right size, and with `verify` of the right checksum."""
    descriptor = folder.descriptor_of(name)
    try:
        status = status_of(descriptor)
        if (size := os.fstat(descriptor).st_size) != described["bytes"]:
            raise Unusable(f"{name} has {size} bytes instead of {described['bytes']}")
        try:
            if verify and checksum(descriptor, size) != described["sha256"]:
                raise Unusable(f"{name} is damaged (checksum differs)")
            return File(status=status, boxes=read_header(descriptor, size))
        except ValueError as error:
            raise Unusable(f"{name} is damaged ({error})") from error
    finally:
        os.close(descriptor)
