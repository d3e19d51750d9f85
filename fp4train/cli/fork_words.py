"""What verbs with forks of checkpoints share: the words on runs, candidates and forks, the work
itself, which may be interrupted, and the results in the folder of each checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from fp4train.cli.trained import named_paths
from fp4train.config import overrides, plugins
from fp4train.config.binding import bind
from fp4train.config.overrides import read_options
from fp4train.errors import UserError
from fp4train.lab.studies.base import Base, ForkRequest
from fp4train.lab.studies.candidates import SECTIONS
from fp4train.run.host import keep_freed_memory
from fp4train.run.record import directory as run_directory
from fp4train.sealed import sealed

_log = logging.getLogger("fp4train")

STEP = "step"
_HINTS = get_type_hints(ForkRequest)
FORK_OPTIONS: Mapping[str, Any] = {
    STEP: int | None,
    **{key: _HINTS[key] for key in ("steps", "schedule", "lr", "batches", "processes")},
    "out": str | None,
}
"""Key → type of the options that all of these verbs have."""


@dataclass(frozen=True, kw_only=True)
class ForkWords:
    """A command line taken apart.

    Args:
        sections: words on recipe, policy, phases and their keys.
        settings: fields of `ForkRequest`, as far as they were given.
        options: the verb's own options that were given.
    """

    sections: Sequence[str]
    settings: Mapping[str, Any]
    options: Mapping[str, Any]


def fork_words(refusal: str, usage: str, arguments: list[str], own: Mapping[str, Any]) -> ForkWords:
    """Take the command line of a verb apart, of which all are in Hydra's grammar: step= may be
    swept over.

    Args:
        refusal: message about a key with several values, which has a place for the key.
        own: key → type of the verb's own options.

    Raises:
        UserError: no run, an unknown key or flag, or a value of another type.
    """
    arguments = overrides.with_files(arguments)
    line = read_options(arguments, {})
    line.check_flags(usage)
    if not line.runs:
        raise UserError(f"{usage.split()[1]} takes the directories of runs: {usage}")
    known = {**FORK_OPTIONS, **own}
    values: dict[str, Any] = {}
    path_words = []
    sections = list[str]()
    for override in overrides.parse(line.overrides):
        key = override.key_or_group
        if key.partition(".")[0] in SECTIONS:
            sections.append(str(override.input_line))
        elif key in known:
            if key in values:
                raise UserError(f"{key}= is given twice")
            swept = override.is_sweep_override()
            if swept and key != STEP:
                raise UserError(f"{override.input_line}: {refusal.format(key)}")
            points: list[Any] = [override.value()]
            if swept:
                points = list(override.sweep_iterator())
            values[key] = [bind(value, known[key], key) for value in points]
        else:
            path_words.append(override)
    steps_at = values.pop(STEP, [None])
    single = {key: value for key, (value,) in values.items()}
    settings = {key: value for key, value in single.items() if key in FORK_OPTIONS}
    if settings.get("out") is not None:
        settings["out"] = Path(settings["out"])
    return ForkWords(
        sections=sections,
        settings={
            "runs": [Path(run) for run in line.runs],
            "steps_at": steps_at,
            "packages": overrides.plugins(line.overrides),
            "folders": overrides.own_folders(line.flags),
            "paths": named_paths(path_words, (*SECTIONS, *known)),
            **settings,
        },
        options={key: value for key, value in single.items() if key in own},
    )


@contextmanager
def making_forks(request: ForkRequest) -> Iterator[None]:
    """Where forks are made: with the classes of plugins, and a word on what an interrupt leaves."""
    keep_freed_memory()
    with plugins.using(request.packages, request.folders):
        try:
            yield
        except KeyboardInterrupt:
            _log.warning(
                "interrupted: the forks that were made are recorded, the same command goes on"
            )
            raise


def write_results(
    name: str, contents: Mapping[str, Any], folders: Sequence[Path], bases: Iterable[Base]
) -> list[Path]:
    """Write results into the folder of each checkpoint, with the identity of its run; the files."""
    for folder, base in zip(folders, bases, strict=False):
        body = {**contents, "identity": {"run": run_directory.identity(base.source)}}
        run_directory.write_text(folder / name, sealed(body, indent=1).decode())
    return [folder / name for folder in folders]
