"""Starts ranks in processes that are forked from this one: it has imported all that a rank imports,
taken a rank's first steps, and composed the job's configuration, so that a rank begins in a
fraction of a second.

A line on standard input asks for a job: {"ranks", "arguments", "folder", "environment", "patch",
"program"}. A rank runs the command line with the arguments, after the code `patch`; or, if there is
a `program`, that code as one of so many gloo ranks. The answers are the processes' ids, and when
all have ended their exit codes. What rank N printed is in FOLDER/rankN.err and rankN.out.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NoReturn

import first_steps
import torch
import torch.distributed as dist
from compositions import parsing_once, remembering
from forked import end_with
from hydra.core.override_parser.overrides_parser import OverridesParser
from ports import free_port
from tqdm import tqdm
from unflushed import checked

import fp4train.lab.analysis.curves as curves
from fp4train.cli import launch, main as command_line
from fp4train.config import composition
from fp4train.config.composition import Composed
from fp4train.errors import UserError
from fp4train.parallel import agree

FOR_THE_FORKS = (
    "torch._inductor.config",  # FSDP imports the compiler, which takes seconds
    "torch.distributed.checkpoint",
    "torch.profiler._cupti_monitor",
    "numpy.ma",
    "fp4train.lab.analysis.heatmap",
    "fp4train.kernels.cpu",
    "fp4train.models.llama",
    "fp4train.optim.adamw",
    "fp4train.parallel.fsdp",
    "fp4train.quantize.cpu",
    "fp4train.run.build",
    "fp4train.run.bits",
    "fp4train.run.find",
    "fp4train.train",
    "fp4train.cli.train",
    "fp4train.run.from_run",
    "torch.distributed.pipelining",
)


def composed_before(arguments: list[str]) -> Callable[[list[str]], Iterator[Composed]]:
    """`composed` of a job's ranks, which have what these arguments make in this folder. With options
    of folders, or plugins, they compose themselves; they raise a user's errors, too.
    """
    if any(word.startswith(("--", "plugins")) for word in arguments):
        return composition.composed
    try:
        compositions = list(composition.composed(arguments))
    except UserError:
        return composition.composed

    def composed(words: list[str]) -> Iterator[Composed]:
        if words == arguments:
            return iter(compositions)
        return composition.composed(words)

    return composed


def rank(number: int, job: dict[str, Any], port: int) -> NoReturn:
    """Be a rank; never returns."""
    os.chdir(job["folder"])
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(
            os.open(f"rank{number}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            descriptor,
        )
    size = str(job["ranks"])
    place = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }
    if job["ranks"] > 1:
        os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(
        {name: value.replace("{rank}", str(number)) for name, value in job["environment"].items()}
    )

    def program() -> None:
        if job["program"]:
            run_program(number, job, port)
            return
        # kept while the rank runs: a context that the patch entered ends with its name
        names = {"rank": number}
        exec(job["patch"], names)
        command_line([each.replace("{rank}", str(number)) for each in job["arguments"]])

    end_with(program)


def run_program(number: int, job: dict[str, Any], port: int) -> None:
    """A program sees `rank`, `world` and `arguments`, and gives its results to `report`."""

    def report(value: Any) -> None:
        print("RESULT " + json.dumps(value), flush=True)

    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=job["ranks"])
    names = {"rank": number, "world": job["ranks"], "arguments": job["arguments"], "report": report}
    exec(job["program"], {"__name__": "program", **names})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    os.fsync = checked
    tqdm.monitor_interval = 0  # its thread may hold a lock that no rank could open after the fork
    curves.draw_curves = lambda run: run / "curves.png"
    for module in (*FOR_THE_FORKS, *sys.argv[1:]):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            # torch has some from a version on, and does without before
            if not module.startswith("torch."):
                raise
    composition.hydra_compose = remembering(composition.hydra_compose)
    parse = parsing_once(OverridesParser.parse_override)
    OverridesParser.parse_override = parse  # type: ignore[method-assign]
    agree.own_files = cache(agree.own_files)
    agree._checksum = cache(agree._checksum)
    agree.source_values(agree.own_files())  # each rank compares them, and none of them changes
    first_steps.take()
    gc.collect()
    gc.freeze()  # a rank's collector does not look at, and so does not copy, what all of them share
    # whether there are any is all that a run asks; a count takes long
    gc.get_freeze_count = lambda: 1
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        port = free_port()
        processes = []
        if "train.compile=true" in job["arguments"]:
            # in a second, and not in one of each rank
            importlib.import_module("torch._inductor.compile_fx")
        with contextlib.chdir(job["folder"]):  # where its ranks would compose
            launch.composed = composed_before([] if job["program"] else job["arguments"])
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
