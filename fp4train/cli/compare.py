"""`fp4train compare RUN RUN… [out=FILE.png]`: the loss gap between runs, as a table and a plot."""

from __future__ import annotations

from pathlib import Path

from fp4train.errors import UserError


def main(arguments: list[str]) -> int:
    """Print the table and draw the plot; returns the exit code."""
    from fp4train.analysis.compare import compare

    out = next((Path(a.partition("=")[2]) for a in arguments if a.startswith("out=")), None)
    runs = [Path(a) for a in arguments if not a.startswith("out=")]
    usage = "fp4train compare RUN RUN… [out=FILE.png]"
    if flags := [a for a in arguments if a.startswith("-")]:
        raise UserError(f"compare knows no flag {flags[0]}: {usage}")
    if len(runs) < 2:
        raise UserError(f"compare needs two or more run directories: {usage}")
    if out is not None and out.suffix.lower() != ".png":
        raise UserError(f"out={out if out.name else ''}: the picture is a PNG, its name must end in .png")
    comparison = compare(runs)
    print(comparison.render())
    print(comparison.draw(out))
    return 0
