"""fp4train report RUN RUN… [out=report.html] [gpu=B200]

One HTML file about runs and the studies on them, for screens, phones and paper; it needs no network (docs/report.md).

  out=report.html  the file
  gpu=B200         with the predicted time of the linear layers on that GPU
"""

import logging
from pathlib import Path

from fp4train.cli.output import usage
from fp4train.config.overrides import Option, read_options
from fp4train.errors import UserError, user_errors
from fp4train.hardware import find_gpu
from fp4train.lab.report.page import write_report

_log = logging.getLogger("fp4train")

USAGE = usage(__doc__)
OPTIONS = {"out": Option(Path, default=Path("report.html")), "gpu": Option()}


def main(arguments: list[str]) -> int:
    """Write the file and print its path and size; returns the exit code."""

    line = read_options(arguments, OPTIONS)
    out, gpu_name = line.options["out"], line.options["gpu"]
    if line.flags:
        raise UserError(f"report knows no flag {line.flags[0]}: {USAGE}")
    if line.overrides:
        raise UserError(f"report takes run directories, out= and gpu=, not {line.overrides[0]}: {USAGE}")
    if not line.runs:
        raise UserError(f"report needs run directories: {USAGE}")
    with user_errors(ValueError):
        gpu = find_gpu(gpu_name) if gpu_name is not None else None
    for problem in write_report([Path(run) for run in line.runs], out, gpu):
        _log.warning("%s", problem)
    print(f"{out}: {out.stat().st_size / 1000:,.0f} kB")
    return 0
