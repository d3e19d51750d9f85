"""The ranks of a machine compile each kernel once, and a rank that dies or hangs keeps nobody
waiting for ever.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (Linux only: pip install triton)")

from fp4train.quantize.triton_compile import locked

RANK = """
import logging, os, sys, time
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from fp4train.kernels.triton.quantize import amax_tensor
from fp4train.quantize import Launch

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
cache, ranks = Path(triton.knobs.cache.dir), int(sys.argv[1])
launches = []


class OnGpu:
    '''A pointer into a GPU's memory.'''

    is_cuda, itemsize, dtype = True, 2, torch.bfloat16
    get_device = data_ptr = lambda self: 0
    view = lambda self, dtype: self


class Kernel:
    def __getitem__(self, grid):
        return lambda *arguments: launches.append(arguments)


def run(self, *arguments, grid, warmup, **options):
    '''What Triton does: a kernel that the disk lacks is compiled, which takes a while.'''
    kernel = cache / f"kernel of {arguments[2] % 16}"
    found = kernel.exists()
    if not found:
        time.sleep(0.5)
        kernel.write_text("compiled")
        with (cache / "compiled").open("a") as file:
            file.write(f"{kernel.name}\\n")
    if triton.knobs.compilation.listener is not None:
        triton.knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=found)
    if not warmup:
        launches.append(arguments)
    return Kernel()


(cache / f"ready {os.getpid()}").touch()
while len(list(cache.glob("ready *"))) < ranks:
    time.sleep(0.005)
with mock.patch.object(JITFunction, "run", run), mock.patch.object(torch.cuda, "current_device", lambda: 0):
    for size in (32, 33):
        launch = Launch(amax_tensor, 1, (size, 8, 8, 1, 1), {"ROWS": 8, "COLS": 64})
        for _ in range(3):
            launch(OnGpu(), OnGpu())
assert len(launches) == 6, launches
"""


def start(cache: Path, ranks: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-c", RANK, str(ranks)]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.long
def test_processes_that_start_together_compile_each_kernel_once_and_one_says_so(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    processes = [start(cache, ranks=2) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert sorted((cache / "compiled").read_text().splitlines()) == ["kernel of 0", "kernel of 1"]
    message = f"compiling GPU kernels for this machine; later starts find them in {cache}\n"
    assert {message} <= set(said) <= {message, ""}, said
    later = start(cache, ranks=1)
    assert (later.communicate(timeout=120)[0], later.returncode) == ("", 0)
    assert len((cache / "compiled").read_text().splitlines()) == 2


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_process_that_hangs_is_waited_for_within_a_bound_and_one_that_dies_not_at_all(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kernel.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            began = time.monotonic()
            with locked(path, patience=0.3):
                waited = time.monotonic() - began
            assert 0.3 <= waited < 10
        finally:
            holder.kill()
    began = time.monotonic()
    with locked(path, patience=30):
        waited = time.monotonic() - began
    assert waited < 10


def test_kernels_are_compiled_where_no_lock_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with locked(tmp_path / "file" / "kernel.lock"):
        pass
