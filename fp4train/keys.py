"""Marks of the fields of configuration classes: when the value of a key may differ, and where a
section's messages write its keys.

    cache_dir: Annotated[PathText, CHANGES_NOTHING]
    steps: Annotated[int, CHANGES_COURSE]
    source: Annotated[TextSource, WrittenUnder("data")]

A mark on a section holds for every key in it. A key without a mark belongs to the run: another
value makes another run, and another subject of studies.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Flag, auto
from typing import Any


class MayDiffer(Flag):
    """The uses of a saved configuration for which a key may have another value."""

    REPEATED = auto()
    """The same command is given again."""
    RESUMED = auto()
    """`resume=` goes on with the run."""
    STUDIED = auto()
    """A study goes on with its measurements of a checkpoint."""


CHANGES_NOTHING = MayDiffer.REPEATED | MayDiffer.RESUMED | MayDiffer.STUDIED
"""What is computed does not depend on the key."""
CHANGES_COURSE = MayDiffer.RESUMED | MayDiffer.STUDIED
"""Training goes on in another way; model, batches and gradients at a checkpoint stay. A study has
what it varies (recipes, policies, rates) in the identity of its record itself.
"""
MOVABLE = MayDiffer.RESUMED | MayDiffer.STUDIED
"""The path of data, which are known by their fingerprint and not by their place."""
CHANGES_DIGITS = MayDiffer.RESUMED
"""The same is computed in another way, on other machines, or beside another model."""
CHANGES_START = MayDiffer.STUDIED
"""The weights that a run begins with; a study knows those of its checkpoint by their checksum."""


@dataclass(frozen=True)
class WrittenUnder:
    """Marks a section whose messages write its keys as if it stood at `root`."""

    root: str

    def placed(self, message: str, kind: type[Any], path: str) -> str:
        """A message of an object of the dataclass `kind`, with its keys under `path`, where the
        object stands.
        """
        names = "|".join(field.name for field in fields(kind))
        key = rf"(?<![\w./]){self.root}\.(?=(?:{names})\b)"
        return re.sub(key, lambda _: f"{path}.", message)


def in_sections(key: str, sections: Iterable[str]) -> bool:
    """Whether a full key is one of `sections`, or a key in one of them."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)
