"""fp4train rank RUN recipe=A,B,… [policy=…] [phases=…] [step=…] [steps=24] [forks=6]

Which recipe is better, and with what certainty: short forks of one checkpoint on the same batches, their differences
with intervals and tests (docs/ranking.md). RUN is a run directory.

  recipe=A,B  policy=A,B  phases=A,B    and their keys, recipe.KEY=A,B: every combination is a candidate, the first one
                   the reference; the default is recipe=bf16,mxfp8,nvfp4,mxfp4
  step=200         the checkpoint; the default is the newest
  forks=6          seeds of each candidate, at most
  steps=24         optimizer steps of a fork; the default with schedule=own is the rest of the run
  schedule=linear  the learning rate falls to zero over the steps; own: as the run's would
  lr=1e-3          that it falls from; the default is that of the checkpoint
  batches=8        validation batches; the default is the run's
  margin=0.0005    nats per token; smaller differences do not matter
  stop=true        stop when every pair is told apart or alike
  processes=1      forks at the same time, each with a copy of the model
  plugins=[NAME]   packages of the classes of your own that the run uses
  data.path=PATH   paths of the run's configuration, where it is another user's or machine's, or the data was moved
  out=FOLDER       for the record and the results; the default is a folder in RUN/studies

Writes rank.json and rank.png. Finished forks are recorded: the same command goes on, with more forks or candidates too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4train.cli.output import usage
from fp4train.config import overrides, plugins
from fp4train.config.binding import bind
from fp4train.config.folders import check_folder
from fp4train.config.schema import Config
from fp4train.errors import UserError
from fp4train.sealed import sealed
from fp4train.text import near_miss

if TYPE_CHECKING:
    from fp4train.studies.rank import Request

_log = logging.getLogger("fp4train")

USAGE = usage(__doc__)
DEFAULT = "recipe=bf16,mxfp8,nvfp4,mxfp4"
"""What is ranked where no candidate is named."""
RANKING, PICTURE = "rank.json", "rank.png"

OPTIONS: Mapping[str, Any] = {
    "step": int | None,
    "steps": int | None,
    "forks": int,
    "schedule": str,
    "lr": float | None,
    "batches": int | None,
    "margin": float,
    "stop": bool,
    "processes": int,
    "out": str | None,
}
_OF_A_RUN = {field.name for field in fields(Config)} - {"plugins"}
"""Sections and keys of a run's configuration, whose paths may be given."""
_SWEPT = ("recipe", "policy", "phases")


def main(arguments: list[str]) -> int:
    """Rank, print the table, and write rank.json and rank.png; returns the exit code."""
    from fp4train.analysis.curves import save_figure
    from fp4train.run import directory as run_directory
    from fp4train.run.host import keep_freed_memory
    from fp4train.studies.rank import rank
    from fp4train.studies.ranking_picture import picture

    request = _request(arguments)
    keep_freed_memory()
    with plugins.using(request.packages, request.folders):
        try:
            ranking, folder = rank(request)
        except KeyboardInterrupt:
            _log.warning("interrupted: the forks that were made are recorded, the same command goes on")
            raise
    print(ranking.render())
    body = {**ranking.plain(), "identity": {"run": run_directory.identity(request.run)}}
    run_directory.write_text(folder / RANKING, sealed(body, indent=1).decode())
    print(f"\n{folder / RANKING}; {save_figure(picture(ranking), folder / PICTURE)}")
    return 0


def _request(arguments: list[str]) -> Request:
    from fp4train.studies.rank import Request

    arguments = overrides.with_files(arguments)
    flags, words = overrides.flags_and_words(arguments)
    if other := overrides.other_flags(flags):
        raise UserError(f"rank knows no flag {other[0]}: {USAGE}")
    runs = [word for word in words if overrides.names_folder(word)]
    if len(runs) != 1:
        raise UserError(f"rank takes one run directory, not {len(runs)}: {USAGE}")
    folders = overrides.own_folders(arguments)
    for folder in folders:
        check_folder(folder)
    values: dict[str, Any] = {}
    paths: dict[str, str | None] = {}
    sweep: list[str] = []
    words = [word for word in words if word not in runs]
    for override in overrides.parse(words):
        key = override.key_or_group
        if key.partition(".")[0] in _SWEPT:
            sweep.append(str(override.input_line))
        elif key in OPTIONS:
            if key in values:
                raise UserError(f"{key}= is given twice")
            if override.is_sweep_override():
                raise UserError(f"{override.input_line}: a ranking has one {key}; it sweeps over {', '.join(_SWEPT)}")
            values[key] = bind(override.value(), OPTIONS[key], key)
        elif key.partition(".")[0] in _OF_A_RUN and isinstance(path := override.value(), str | None):
            paths[key] = path
        elif key != "plugins":
            known = (*_SWEPT, *OPTIONS, "plugins")
            raise UserError(f"unknown key {key!r}{near_miss(key, known)} (known: {', '.join(known)})")
    if values.get("out") is not None:
        values["out"] = Path(values["out"])
    try:
        return Request(
            run=Path(runs[0]),
            sweep=sweep or [DEFAULT],
            packages=overrides.plugins(words),
            folders=folders,
            paths=paths,
            **values,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
