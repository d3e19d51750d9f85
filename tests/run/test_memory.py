"""Freed memory stays with a training process."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from fp4train.run.host import keep_freed_memory
kept = keep_freed_memory()
for _ in range(16):
    torch.ones(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    torch.ones(1 << 24)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults of glibc's allocator")
def test_a_tensor_of_a_size_that_was_freed_costs_no_page_faults() -> None:
    """Eight fresh 64 MB tensors would fault 131072 pages of 4 kB; the ones before fit the heap to
    them.
    """
    kept, faults = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout.split()
    if kept == "False":
        pytest.skip("the C library has no mallopt")
    assert int(faults) < 1311, "a hundredth: the system may take pages back that look unused"
