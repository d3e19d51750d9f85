"""fp4train report RUN RUN… [baseline=RUN] [out=report.html] [figures=pdf] [gpu=B200]

One HTML file about runs and the studies on them, for screens, phones and paper; it needs no network (docs/report.md).

  baseline=RUN     the run that gaps are to; the default is the first one
  out=report.html  the file
  figures=svg,pdf  its figures as files beside it, too: report-curves.pdf, …; .png, .svg and .pdf
  width=6.3        inches of these files
  gpu=B200         with the predicted time of the linear layers on that GPU
"""

import logging
from pathlib import Path

from fp4train.cli.output import usage
from fp4train.config.overrides import Option, baseline_first, read_options
from fp4train.errors import UserError, user_errors
from fp4train.hardware import find_gpu
from fp4train.lab.analysis.figure import PICTURE, endings_of, width_of
from fp4train.lab.report.page import read_report

_log = logging.getLogger("fp4train")

USAGE = usage(__doc__)
OPTIONS = {
    "baseline": Option(Path),
    "out": Option(Path, default=Path("report.html")),
    "figures": Option(
        endings_of, "figures={}: one or several of png, svg and pdf, with commas", ()
    ),
    "width": Option(width_of, "width={} must be a number of inches, from 3 to 30", PICTURE),
    "gpu": Option(),
}


def main(arguments: list[str]) -> int:
    """Write the file and print its path and size; returns the exit code."""

    line = read_options(arguments, OPTIONS)
    baseline, out, endings, width, gpu_name = (line.options[key] for key in OPTIONS)
    line.check_runs_alone(USAGE)
    runs = baseline_first(list(map(Path, line.runs)), baseline)
    if not runs:
        raise UserError(f"report needs run directories: {USAGE}")
    with user_errors(ValueError):
        gpu = find_gpu(gpu_name) if gpu_name is not None else None
    report = read_report(runs, out, gpu)
    report.write(out)
    files = report.write_figures(out, endings, width)
    for problem in report.problems:
        _log.warning("%s", problem)
    print(f"{out}: {out.stat().st_size / 1000:,.0f} kB")
    for file in files:
        print(file)
    return 0
