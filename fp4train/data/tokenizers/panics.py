"""What a panic of a Rust library prints is kept from the terminal.

Before a panic becomes an exception of Python, the library writes "thread '<unnamed>' panicked at …"
to the descriptor of standard error, with a backtrace if RUST_BACKTRACE asks for one. The exception
says the same.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Final

_ERROR: Final = 2
"""The descriptor of standard error."""
_ALONE: Final = Lock()
"""Held while the descriptor leads elsewhere: a second thread would take that for where it led
before.
"""
_PANIC: Final = re.compile(
    rb"\n?^thread '[^'\n]*'(?: \(\d+\))? panicked at .*?(?:^note: [^\n]*\n|\Z)",
    re.DOTALL | re.MULTILINE,
)


@contextmanager
def quiet_panics() -> Iterator[None]:
    """Keep what is written to standard error, and write it in the end, without the reports of
    panics.

    Threads take turns.
    """
    with _ALONE, tempfile.TemporaryFile(buffering=0) as captured:
        original = -1
        # there is no standard error, or no descriptor is left: nothing is kept
        with suppress(OSError):
            original = os.dup(_ERROR)
            os.dup2(captured.fileno(), _ERROR)
        try:
            yield
        finally:
            if original >= 0:
                os.dup2(original, _ERROR)
                os.close(original)
                with suppress(OSError):
                    captured.seek(0)
                    os.write(_ERROR, _PANIC.sub(b"", captured.read()))
