"""Small checkpoints, and what damages them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp4train.checkpoint import save
from fp4train.sealed import checksum

ONE = {"w": torch.arange(6.0)}


def save_steps(folder: Path, *numbers: int, keep: int = 10) -> None:
    for step in numbers:
        save(folder, step, {"w": torch.full((1000,), float(step))}, {"step": step}, keep=keep)


def reseal(file: Path, change: Callable[[Any], None]) -> None:
    """Change a state as an attacker would: with a checksum that fits."""
    body = json.loads(file.read_text())
    change(body)
    body.pop("sha256")
    file.write_text(json.dumps({**body, "sha256": checksum(body)}))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)
