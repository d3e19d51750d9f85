"""A tiny run of every family, as words of a command line: a new family gets its words here, and the
tests of all families take it (tests/models/test_families.py asks for it).
"""

from command_line import TINY

from fp4train.config import to_config
from fp4train.config.composition import compose
from fp4train.models import Architecture

TINY_RUNS: dict[str, tuple[str, ...]] = {
    "hybrid": (
        "model=hybrid_tiny",
        "model.width=32",
        "model.pattern=M-*",
        "model.hidden=64",
        "model.scan.heads=4",
        "model.scan.head_dim=16",
        "model.scan.state=16",
        "model.scan.chunk=16",
    ),
    "hyena": (
        "model=hyena_tiny",
        "model.width=32",
        "model.pattern=SDH*",
        "model.hidden=64",
        "model.filters.groups=8",
        "model.filters.poles=4",
        "model.vocab_size=320",
    ),
    "llama": tuple(word for word in TINY if word.startswith("model.")),
    "moe": (
        "model=moe_tiny",
        "model.width=32",
        "model.layers=2",
        "model.dense=1",
        "model.hidden=64",
        "model.experts.count=4",
        "model.experts.hidden=32",
        "model.balance.loss=0.01",
        "model.balance.speed=0.01",
    ),
    "olmo2": (
        "model=olmo2_tiny",
        "model.width=32",
        "model.layers=2",
        "model.kv_heads=2",
        "model.hidden=64",
    ),
}
"""By the family's name; every kind of its blocks is in the model."""
BEYOND_LLAMA = tuple(name for name in TINY_RUNS if name != "llama")
"""Families that have other blocks than a llama, which the other tests train."""


def tiny_run(family: str, *words: str) -> tuple[str, ...]:
    """The words of a family's run, with others in the place of those of the same keys."""
    keys = {word.partition("=")[0] for word in words}
    kept = (word for word in TINY_RUNS[family] if word.partition("=")[0] not in keys)
    return (*kept, *words)


def tiny_shape(family: str, *words: str) -> Architecture:
    """The `model=…` of a family's run."""
    shape: Architecture = to_config(compose([*tiny_run(family, *words), "run.name=a"])).model
    return shape
