"""Checkpoints: verified folders of safetensors and JSON, written atomically by one rank or many, free of pickle."""

from fp4train.checkpoint.folder import Checkpoint, CheckpointError, load, newest_state, prune, save, steps
from fp4train.checkpoint.layout import ALONE, CheckpointGroup
from fp4train.checkpoint.reading import StoredTensors
from fp4train.checkpoint.tree import escaped, flatten, unflatten

__all__ = [
    "ALONE",
    "Checkpoint",
    "CheckpointError",
    "CheckpointGroup",
    "StoredTensors",
    "escaped",
    "flatten",
    "load",
    "newest_state",
    "prune",
    "save",
    "steps",
    "unflatten",
]
