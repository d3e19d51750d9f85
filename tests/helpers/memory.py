"""What a piece of code takes of memory."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path


def most_memory(act: Callable[[], object]) -> int:
    """The bytes that this process held at most while `act` ran, beyond those that it held before.
    What was taken and freed earlier counts for nothing, however much it was.
    """
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, or `act` could take it unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is held now
    before = _peak()
    act()
    return _peak() - before


def _peak() -> int:
    line = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None
    return int(line[1]) * 1024
