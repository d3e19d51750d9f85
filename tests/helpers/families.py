"""A tiny run of every family of the registry, as words of a command line. A new family has one
without an entry here, where its `model=NAME_tiny` builds at the width and number of blocks of others.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from configured import config_of

from fp4train.models import Architecture
from fp4train.models.families import Family, families, family_of

SIZES = {"width": 32, "layers": 2, "hidden": 64}
WORDS: dict[str, tuple[str, ...]] = {
    "hybrid": (
        "model.pattern=M-*",
        "model.scan.heads=4",
        "model.scan.head_dim=16",
        "model.scan.state=16",
        "model.scan.chunk=16",
    ),
    "hyena": (
        "model.pattern=SDH*",
        "model.filters.groups=8",
        "model.filters.poles=4",
        "model.vocab_size=320",
    ),
    "moe": (
        "model.dense=1",
        "model.experts.count=4",
        "model.experts.hidden=32",
        "model.balance.loss=0.01",
        "model.balance.speed=0.01",
    ),
    "olmo2": ("model.kv_heads=2",),
}
"""What families have besides `SIZES`, so that every kind of their blocks is in the model."""


def _tiny(family: Family) -> tuple[str, ...]:
    keys = {field.name for field in fields(family.shape)}
    sizes = (f"model.{key}={size}" for key, size in SIZES.items() if key in keys)
    return (f"model={family.name}_tiny", *sizes, *WORDS.get(family.name, ()))


TINY_RUNS = {family.name: _tiny(family) for family in families()}
"""By the family's name."""
SMALL_SHAPES = {family.name: family.small for family in families()}
"""Small shapes of every family (`Family.small`), by its name."""
MODEL_TYPES = sorted(kind for family in families() for kind in family.model_types)
"""All `model_type` of folders that a family reads."""
BEYOND_LLAMA = tuple(name for name in TINY_RUNS if name != "llama")
"""Families that have other blocks than a llama, which the other tests train."""


def tiny_run(family: str, *words: str) -> tuple[str, ...]:
    """The words of a family's run, with others in the place of those of the same keys."""
    keys = {word.partition("=")[0] for word in words}
    kept = (word for word in TINY_RUNS[family] if word.partition("=")[0] not in keys)
    return (*kept, *words)


def tiny_shape(family: str, *words: str) -> Architecture:
    """The `model=…` of a family's run."""
    return config_of(*tiny_run(family, *words)).model


def folder_names(shape: Architecture) -> Mapping[str, Any]:
    """Name in a model's state dict → that in a Hugging Face folder (`Family.names_of`)."""
    return family_of(shape).names_of(shape)
