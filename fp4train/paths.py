"""Texts of a configuration that name files, or places elsewhere: fields of type `Path`, or of one
of the types here.

    path: PathText                    # a file or folder
    name: PathOrHubName               # or the name of a data set or model on the Hugging Face hub
    entity: DestinationText           # an account or project of a service that gets what the run measures
    path: DataPaths                   # files or folders of data, which may move or lie on a store
    cache_dir: CacheFolder            # a folder of what can be made again

They are text to everything else. A configuration that somebody else wrote may by itself name no
path outside of its run, nor where its numbers are sent (`fp4train.run.record.trust`), and it is the
type that says what a text is, in the classes of plugins, too.
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fp4train.keys import CHANGES_NOTHING, MOVABLE


@dataclass(frozen=True)
class NamesPath:
    """Marks a text that names a file or folder; with `hub` it may be a name on the Hugging Face hub
    as well, with `stores` a path on an object store.
    """

    hub: bool = False
    stores: bool = False


@dataclass(frozen=True)
class NamesDestination:
    """Marks a text that says where data of the run are sent, or which programs get them."""


RUNS = Path("runs")
"""The folder of the runs that `run.name=` names."""
INIT_KEYS = ("init", "init_step")
"""Keys of a configuration that name the weights that a run begins with."""
_OF_WEIGHTS = re.compile(r"(.+?)(?:@(\d{1,18}))?(?::([a-z]\w*))?", re.ASCII | re.DOTALL)

PathText = Annotated[str, NamesPath()]
PathOrHubName = Annotated[str, NamesPath(hub=True)]
DestinationText = Annotated[str, NamesDestination()]
ON_STORE = NamesPath(stores=True)
StoreText = Annotated[str, ON_STORE]
DataPaths = Annotated[StoreText | Sequence[StoreText], MOVABLE]
CacheFolder = Annotated[PathText, CHANGES_NOTHING]


def is_hub_name(text: str) -> bool:
    """Whether a text is the name of something on the hub, and no path: nothing here has this
    name.
    """
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith(".json"):
        return False
    return not os.path.exists(os.path.expanduser(text))


def split_weights(text: str) -> tuple[str, int | None, str | None]:
    """(Path, step, kind) of a text that names weights, PATH@STEP:KIND; None for what it does not
    name. A text that is the name of a file or folder is a path.
    """
    match = _OF_WEIGHTS.fullmatch(text)
    if match is None or os.path.lexists(text):
        return text, None, None
    path, step, kind = match.groups()
    return path, None if step is None else int(step), kind


def lies_in(text: str, folder: Path) -> bool:
    """Whether the path that `text` names, as itself or of weights, is `folder` or lies in it,
    wherever links lead; a pattern leads anywhere.
    """
    if (path := split_weights(text)[0]) != text and not lies_in(path, folder):
        return False
    try:
        if glob.has_magic(text) and not os.path.lexists(os.path.expanduser(text)):
            return False
        return Path(os.path.realpath(os.path.expanduser(text))).is_relative_to(
            os.path.realpath(folder)
        )
    except ValueError:  # a zero byte
        return False
