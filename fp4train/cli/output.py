"""What a command prints: log lines beside a progress bar, and output whose reader has gone."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress


class _Handler(logging.Handler):
    """Prints log lines on standard error without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        prefix = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        with suppress(OSError):  # a terminal that was closed is no reason to end a run
            tqdm.write(prefix + record.getMessage(), file=sys.stderr)


def configure_logging() -> None:
    """Print what the package logs, from INFO up."""
    log = logging.getLogger("fp4train")
    log.handlers[:] = [_Handler()]
    log.setLevel(logging.INFO)
    log.propagate = False


def discard_output() -> int:
    """The exit code when the reader of standard output has closed it (`fp4train plan | head`), which is no error.

    What is still buffered goes to the null device, so that Python does not fail on it when it exits.
    """
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
