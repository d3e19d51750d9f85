"""fp4train report RUN RUN… [out=report.html] [gpu=B200]

One HTML file about runs and the studies on them, for screens, phones and paper; it needs no network (docs/report.md).

  out=report.html  the file
  gpu=B200         with the predicted time of the linear layers on that GPU
"""

from __future__ import annotations

import logging
from pathlib import Path

from fp4train.cli.output import usage
from fp4train.config import overrides
from fp4train.errors import UserError
from fp4train.hardware import find_gpu

_log = logging.getLogger("fp4train")

USAGE = usage(__doc__)
OPTIONS = ("out", "gpu")


def main(arguments: list[str]) -> int:
    """Write the file and print its path and size; returns the exit code."""
    from fp4train.lab.report.page import write_report

    if flags := [a for a in arguments if a.startswith("-")]:
        raise UserError(f"report knows no flag {flags[0]}: {USAGE}")
    given: dict[str, str] = {}
    runs = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in OPTIONS:
            runs.append(argument)
        elif key in given:
            raise UserError(f"{key}= is given twice")
        else:
            given[key] = value
    if not runs:
        raise UserError(f"report needs run directories: {USAGE}")
    if wrong := [a for a in runs if not overrides.names_folder(a)]:
        raise UserError(f"report takes run directories, out= and gpu=, not {wrong[0]}: {USAGE}")
    out = Path(given.get("out", "report.html"))
    try:
        gpu = find_gpu(given["gpu"]) if "gpu" in given else None
    except ValueError as error:
        raise UserError(str(error)) from error
    for problem in write_report([Path(run) for run in runs], out, gpu):
        _log.warning("%s", problem)
    print(f"{out}: {out.stat().st_size / 1000:,.0f} kB")
    return 0
