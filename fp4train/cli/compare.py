"""fp4train compare RUN RUN… [baseline=RUN] [out=FILE.png|.svg|.pdf|.csv|.json] [margin=0.01]

The loss gap between runs, as a table and a plot, and the keys in which their
configurations differ. Runs that differ in run.seed only are averaged.

  baseline=RUN     the run that gaps are to; the default is the first one
  out=FILE         a picture (.png, .svg, .pdf), the table (.csv) or everything
                   (.json); the default is compare.png in the first RUN; of one
                   RUN its curves
  width=6.3        inches of the picture
  labels=A,B       names of the runs in tables and picture; runs that differ in
                   run.seed only may share one
  margin=0.01      nats per token: are the gaps shown to be within it, what one
                   seed cannot show (docs/gate.md)
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fp4train.cli.output import fitted, terminal_width
from fp4train.config.command_line import CommandLine, read_line
from fp4train.config.overrides import baseline_first
from fp4train.errors import UserError
from fp4train.lab.analysis import OUTPUTS, Width, check_out, compare
from fp4train.lab.gate import whole_runs
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
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.margin is not None and self.margin <= 0:
            raise ValueError(f"margin={self.margin:g} must be a number of nats per token above 0")


def main(arguments: list[str]) -> int:
    """Print the table and draw the plot; returns the exit code."""
    line = read_line(arguments, CompareOptions, __doc__)
    out = line.out
    runs = baseline_first(line.runs, line.baseline)
    if len(runs) < 2 and (not runs or out is None):
        raise UserError(f"compare needs two or more run directories: {line.usage}")
    if out is not None:
        check_out(out, OUTPUTS)
    if line.margin is not None and len(runs) < 2:
        raise UserError("margin= is about the gap between runs: name two or more")
    comparison = compare(runs, quantised_share, line.labels)
    print(fitted(comparison.render(terminal_width())))
    beside: Mapping[str, object] = {}
    if line.margin is not None:
        judged = whole_runs(comparison, line.margin)
        beside = {"margin": asdict(judged)}
        print("\n" + fitted(judged.render()))
    if out is None:
        print(comparison.draw(width=line.width))
    else:
        print(comparison.write(out, line.width, beside))
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
