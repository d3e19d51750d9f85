"""fp4train compare RUN RUN… [baseline=RUN] [out=FILE.png|.svg|.pdf|.csv|.json]

The loss gap between runs, as a table and a plot, and the keys in which their
configurations differ. Runs that differ in run.seed only are averaged.

  baseline=RUN     the run that gaps are to; the default is the first one
  out=FILE         a picture (.png, .svg, .pdf), the table (.csv) or everything
                   (.json); the default is compare.png in the first RUN; of one
                   RUN its curves
  width=6.3        inches of the picture
  labels=A,B       names in tables and picture, in the order of the command: one
                   for each RUN, or for those that differ in run.seed only
"""

import re
from dataclasses import dataclass
from pathlib import Path

from fp4train.cli.output import fitted, terminal_width
from fp4train.config.command_line import CommandLine, read_line
from fp4train.config.overrides import baseline_first
from fp4train.errors import UserError
from fp4train.lab.analysis import OUTPUTS, Width, check_out, compare
from fp4train.run.record.directory import steps_done
from fp4train.run.record.journal import read_journal, stretches
from fp4train.run.record.stretches import multiplied

_HIGH = {"BF16", "FP16", "FP32"}


@dataclass(frozen=True, kw_only=True)
class CompareOptions(CommandLine):
    baseline: Path | None = None
    out: Path | None = None
    width: Width | None = None
    labels: tuple[str, ...] = ()


def main(arguments: list[str]) -> int:
    """Print the table and draw the plot; returns the exit code."""
    line = read_line(arguments, CompareOptions, __doc__)
    out = line.out
    runs = max(line.runs, baseline_first(line.runs, line.baseline), key=len)
    if len(runs) < 2 and (not runs or out is None):
        raise UserError(f"compare needs two or more run directories: {line.usage}")
    if out is not None:
        check_out(out, OUTPUTS)
    comparison = compare(runs, quantised_share, line.labels, line.baseline)
    print(fitted(comparison.render(terminal_width())))
    print(comparison.write(out or runs[0] / "compare.png", line.width))
    return 0


def quantised_share(run: Path) -> float | None:
    """The share of the linear layers' multiply-adds, in the steps done, that were quantised; None:
    not known.

    Raises:
        UserError: the journal is damaged.
    """
    work = multiplied(stretches(read_journal(run)), steps_done(run))
    quantised = [macs for name, macs in work.items() if set(re.findall(r"\w+", name)) - _HIGH]
    total = sum(work.values())
    return sum(quantised) / total if total else None
