"""Find and read the golden vectors; tests/golden/README.md describes them."""

import json
import os
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1]
REDUCED = TESTS / "golden"
"""The set that every clone has."""


def _folder() -> Path:
    """The full set if present, else the reduced set."""
    if named := os.environ.get("FP4TRAIN_GOLDEN"):
        return Path(named)
    beside = TESTS.parents[1] / "shared" / "golden"
    return beside if beside.is_dir() else REDUCED


FOLDER = _folder()


def load_golden(
    name: str, folder: Path = FOLDER
) -> tuple[dict[str, Tensor], dict[str, list[dict]]]:
    """(tensors, the lists of the metadata: `cases`, and `gemms` where the file has them) of a
    golden file.
    """
    with safe_open(folder / f"{name}.safetensors", "pt") as file:
        names = list(file.keys())
        lists = {key: json.loads(value) for key, value in file.metadata().items()}
        return {name: file.get_tensor(name) for name in names}, lists
