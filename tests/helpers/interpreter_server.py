"""Runs programs in forks of this process, which has imported what takes seconds.

A line on standard input asks for one: {"command", "hastened", "environment", "folder", "outputs",
"seconds"}, as `interpreted` says; "outputs" is the folder of the files out and err that it writes,
and after so many seconds it is ended. The answer is its exit code.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from forked import end_with
from interpreted import hasten

FOR_THE_FORKS = (
    "triton.language",
    "triton.runtime.interpreter",
    "fp4train.config",
    "fp4train.kernels.triton",
)


def run(job: dict[str, Any]) -> NoReturn:
    """Run the program of a job; never returns."""
    for descriptor, name in ((1, "out"), (2, "err")):
        opened = os.open(Path(job["outputs"]) / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.alarm(job["seconds"])
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])

    def program() -> None:
        if job["hastened"]:
            hasten()
        first, *rest = job["command"]
        if first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(rest[0], {"__name__": "__main__"})
        else:
            sys.argv = [first, *rest]
            sys.path.insert(0, str(Path(first).parent))
            runpy.run_path(first, run_name="__main__")

    end_with(program, failed=1)


def main() -> None:
    torch.set_num_threads(1)
    for module in FOR_THE_FORKS:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if not process:
            run(job)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
