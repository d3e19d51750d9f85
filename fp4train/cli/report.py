"""fp4train report RUN RUN… [baseline=RUN] [out=report.html] [figures=pdf]

One HTML file about runs and the studies on them, for screens, phones and paper;
it needs no network (docs/report.md).

  baseline=RUN     the run that gaps are to; the default is the first one
  out=report.html  the file
  figures=svg,pdf  its figures as files beside it, too: report-curves.pdf, …;
                   .png, .svg and .pdf
  width=6.3        inches of these files
  labels=A,B       names of the runs, in the order of the command: one for each
                   RUN, or for those that differ in run.seed only
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fp4train.config.command_line import CommandLine, read_line
from fp4train.config.overrides import baseline_first
from fp4train.errors import UserError
from fp4train.lab.analysis import PICTURE, Width
from fp4train.lab.report import read_report

_log = logging.getLogger("fp4train")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(CommandLine):
    baseline: Path | None = None
    out: Path = Path("report.html")
    figures: tuple[Literal["png", "svg", "pdf"], ...] = ()
    width: Width = PICTURE
    labels: tuple[str, ...] = ()


def main(arguments: list[str]) -> int:
    """Write the file and print its path and size; returns the exit code."""
    line = read_line(arguments, ReportOptions, __doc__)
    out = line.out
    runs = max(line.runs, baseline_first(line.runs, line.baseline), key=len)
    if not runs:
        raise UserError(f"report needs run directories: {line.usage}")
    report = read_report(runs, out, line.labels, line.baseline)
    report.write(out)
    files = report.write_figures(out, line.figures, line.width)
    for problem in report.problems:
        _log.warning("%s", problem)
    print(f"{out}: {out.stat().st_size / 1000:,.0f} kB")
    for file in files:
        print(file)
    return 0
