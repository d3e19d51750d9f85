"""Starts the command line as the ranks of a run, in processes that are forked from this one: it has imported all.

A line on standard input asks for a job: {"ranks", "arguments", "folder", "environment", "patch"}; the answers are the
processes' ids, and when all have ended their exit codes. What rank N printed is in FOLDER/rankN.err and rankN.out.
"""

import json
import os
import socket
import sys
import traceback
from typing import Any

import torch
import torch._inductor.config  # FSDP imports the compiler, which takes seconds

import fp4train.analysis.curves as curves
import fp4train.run.build
import fp4train.run.resume
import fp4train.train  # noqa: F401 - for the forks
from fp4train.cli import main as command_line


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def rank(number: int, job: dict[str, Any], port: int) -> None:
    """Be a rank; never returns."""
    os.chdir(job["folder"])
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"rank{number}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    size = str(job["ranks"])
    place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    if job["ranks"] > 1:
        os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update({name: value.replace("{rank}", str(number)) for name, value in job["environment"].items()})
    code = 70
    try:
        if job["patch"]:
            exec(job["patch"], {"rank": number})
        command_line([each.replace("{rank}", str(number)) for each in job["arguments"]])
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    curves.draw_curves = lambda run: run / "curves.png"
    print("ready", flush=True)
    for line in sys.stdin:
        job, port, processes = json.loads(line), free_port(), []
        for number in range(job["ranks"]):
            process = os.fork()
            if not process:
                rank(number, job, port)
            processes.append(process)
        print(json.dumps(processes), flush=True)
        codes = {}
        while len(codes) < len(processes):
            process, status = os.wait()
            codes[process] = os.waitstatus_to_exitcode(status)
        print(json.dumps([codes[each] for each in processes]), flush=True)


if __name__ == "__main__":
    main()
