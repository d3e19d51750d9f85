"""Checkpoints: verified folders of safetensors and JSON, written atomically, free of pickle."""

from fp4train.checkpoint.folder import Checkpoint, CheckpointError, load, prune, save, steps
from fp4train.checkpoint.tree import JSON, escaped, flatten, unflatten

__all__ = ["JSON", "Checkpoint", "CheckpointError", "escaped", "flatten", "load", "prune", "save", "steps", "unflatten"]
