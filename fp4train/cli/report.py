"""`fp4train report RUN RUN… [out=report.html]`: one HTML file about the runs, for screens, phones and paper."""

from __future__ import annotations

import logging
from pathlib import Path

from fp4train.config import overrides
from fp4train.errors import UserError

_log = logging.getLogger("fp4train")

USAGE = "fp4train report RUN RUN… [out=report.html]"


def main(arguments: list[str]) -> int:
    """Write the file and print its path and size; returns the exit code."""
    from fp4train.report.page import write_report

    if flags := [a for a in arguments if a.startswith("-")]:
        raise UserError(f"report knows no flag {flags[0]}: {USAGE}")
    given = [a.partition("=")[2] for a in arguments if a.startswith("out=")]
    if len(given) > 1:
        raise UserError("out= is given twice")
    runs = [a for a in arguments if not a.startswith("out=")]
    if not runs:
        raise UserError(f"report needs run directories: {USAGE}")
    if wrong := [a for a in runs if not overrides.names_folder(a)]:
        raise UserError(f"report takes run directories and out=, not {wrong[0]}: {USAGE}")
    out = Path(given[0] if given else "report.html")
    for problem in write_report([Path(run) for run in runs], out):
        _log.warning("%s", problem)
    print(f"{out}: {out.stat().st_size / 1000:,.0f} kB")
    return 0
