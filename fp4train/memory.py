"""CPU memory that is freed stays with the process, to be used again.

glibc gives large blocks back to the system at once and asks for fresh ones the next time. The system hands those out
page by page, zeroed, when they are first touched: a fresh 32 MB tensor costs 14 ms of page faults, where writing it
takes 2. A training step frees and asks for the same sizes over and over, so keeping them pays for every recipe.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt (malloc.h) and what they are set to.
_SETTINGS = (
    (-4, 0),  # M_MMAP_MAX: no blocks of their own, which would be given back
    (-1, 2**31 - 1),  # M_TRIM_THRESHOLD: the heap does not shrink
    (-2, 2**28),  # M_TOP_PAD: it grows by 256 MB at a time
)


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory; False where it is not glibc, and nothing changes.

    For the whole process and for good, so only programs call this, never `import fp4train`.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([bool(mallopt(parameter, value)) for parameter, value in _SETTINGS])
