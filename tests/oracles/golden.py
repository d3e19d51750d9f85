"""Where the golden vectors are, and how to read one file of them."""

import json
import os
from pathlib import Path

import pytest
from safetensors import safe_open
from torch import Tensor

FOLDER = Path(os.environ.get("FP4TRAIN_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden"))


def load_golden(name: str) -> tuple[dict[str, Tensor], list[dict]]:
    """(tensors, cases) of a golden file; skips the test where the folder is absent."""
    path = FOLDER / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"no golden vectors at {path.parent}; set FP4TRAIN_GOLDEN", allow_module_level=True)
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["cases"])
