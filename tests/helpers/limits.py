"""Limits of the package that a test sets so that little data, or a short wait, reaches them.

A test names the limit; only this file knows where the package keeps it.
"""

from importlib import import_module
from typing import Any

import pytest

LIMITS = {
    "logits of a chunk": ["fp4train.models.common.loss._LOGITS_IN_A_CHUNK"],
    "elements drawn at a time": ["fp4train.models.common.initialise._CHUNK"],
    "bytes read or written at a time": ["fp4train.checkpoint.tensors._CHUNK"],
    "bytes read once for both forms": ["fp4train.quantize.cpu.PAIR_BYTES"],
    "bytes of a digest": ["fp4train.data.digests.CHUNK"],
    "characters of a shard": ["fp4train.data.parts.SHARD", "fp4train.data.huggingface.SHARD"],
    "characters encoded as one": ["fp4train.data.encoding.LONGEST"],
    "calls in a tracker's queue": ["fp4train.track.tracker.CAPACITY"],
    "seconds to import wandb": ["fp4train.track.config.IMPORT_SECONDS"],
    "seconds for an answer of wandb's server": ["fp4train.track.wandb.PROBE_SECONDS"],
    "seconds for a line of metrics": ["fp4train.track.metrics.WAIT_SECONDS"],
    "seconds until an idle thread ends": ["fp4train.worker.IDLE_SECONDS"],
    "seconds for the last metrics": ["fp4train.track.metrics.END_SECONDS"],
    "seconds for a checkpoint": ["fp4train.run.supervise.saving.WAIT_SECONDS"],
    "pauses before the last checkpoint is tried again": [
        "fp4train.run.supervise.saving.PAUSES",
        "fp4train.run.supervise.rescue.PAUSES",
    ],
    "least ratio of gradient to noise": ["fp4train.run.observe.THRESHOLD"],
    "seconds for an answer of the run": ["fp4train.exchange.evaluation.WAIT"],
    "seconds to explain a difference": ["fp4train.audits.fault.SECONDS"],
}
"""Each limit, and the dotted names of its constant in the modules that read it."""


def set_limit(monkeypatch: pytest.MonkeyPatch, limit: str, value: Any) -> None:
    """Set a limit until the test ends."""
    for place in LIMITS[limit]:
        module, _, constant = place.rpartition(".")
        monkeypatch.setattr(import_module(module), constant, value)
