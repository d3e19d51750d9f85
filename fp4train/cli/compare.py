"""fp4train compare RUN RUN… [out=FILE.png|.csv|.json]

The loss gap between runs, as a table and a plot, and the keys in which their configurations differ. Runs that differ in
run.seed only are averaged.

  out=FILE         a picture (.png), the table (.csv) or everything (.json); the default is compare.png in the first RUN
"""

from __future__ import annotations

from pathlib import Path

from fp4train.cli.output import usage
from fp4train.config.overrides import Option, read_options
from fp4train.errors import UserError

USAGE = usage(__doc__)
OUTPUTS = (".png", ".csv", ".json")


def main(arguments: list[str]) -> int:
    """Print the table and draw the plot; returns the exit code."""
    from fp4train.lab.analysis.compare import compare
    from fp4train.run.record.journal import quantised_share

    line = read_options(arguments, {"out": Option(Path)})
    out, runs = line.options["out"], [Path(a) for a in line.words]
    if line.flags:
        raise UserError(f"compare knows no flag {line.flags[0]}: {USAGE}")
    if len(runs) < 2:
        raise UserError(f"compare needs two or more run directories: {USAGE}")
    if out is not None and out.suffix.lower() not in OUTPUTS:
        raise UserError(f"out={out if out.name else ''}: the name must end in {' or '.join(OUTPUTS)}")
    comparison = compare(runs, quantised_share)
    print(comparison.render())
    print(comparison.draw() if out is None else comparison.write(out))
    return 0
