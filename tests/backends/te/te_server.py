"""Runs programs of this folder in forks of this process, which has imported Transformer Engine.

A line of JSON on standard input names one: {"program", "out", "err"}, the last two of which are
files that it writes. The answer is its exit code.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import te_on_cpu
from forked import exit_code, started


def run(program: Path, out: str, err: str) -> None:
    """The program, which prints into files."""
    for descriptor, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    if program.stem == te_on_cpu.__name__:
        te_on_cpu.main()
    else:
        runpy.run_path(str(program), run_name="__main__")


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        process = started(lambda job=job: run(Path(job["program"]), job["out"], job["err"]))
        print(exit_code(process), flush=True)


if __name__ == "__main__":
    main()
