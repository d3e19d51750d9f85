"""The output of commands: text that no terminal acts on, logs beside a progress bar, output whose reader has gone."""

import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

from fp4train.errors import UserError, in_words, reason
from fp4train.text import printable, screen, wrapped

HANGING = 4
"""Characters by which lines are indented that go on with the line above them."""


def open_streams() -> None:
    """Lead standard streams that were closed at the start (`2>&-`) to the null device.

    Otherwise Python has None for them, and the next files that are opened get their numbers: what a
    library prints would land in these.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - until the process ends
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _Wrapped:
    """A stream whose texts another function writes."""

    def __init__(self, stream: TextIO, write: Callable[[TextIO, str], object]) -> None:
        self._stream = stream
        self._write = write

    def write(self, text: str) -> int:
        self._write(self._stream, text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def written_by(write: Callable[[TextIO, str], object]) -> Iterator[None]:
    """Standard output and error whose texts `write` writes to the streams that they are now."""
    out, err = (cast(TextIO, _Wrapped(stream, write)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


def write_printable(stream: TextIO, text: str) -> None:
    """Write a text, with names out of run directories in it, so that what a terminal would act on
    is escaped.

    A carriage return begins and ends what a progress bar writes; elsewhere it would hide what is
    before it.
    """
    body = text.strip("\r")
    begin, _, end = text.partition(body) if body else (text, "", "")
    stream.write(f"{begin}{printable(body)}{end}")


class _Handler(logging.Handler):
    """Prints log lines on standard error without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        if record.levelno == logging.INFO:
            prefix = ""
        else:
            prefix = f"{record.levelname.lower()}: "
        if isinstance(record.args, tuple):
            said = " ".join(str(part) for part in record.args if not isinstance(part, OSError))
            record.args = tuple(
                in_words(part, said) if isinstance(part, OSError) else part for part in record.args
            )
        with suppress(OSError):  # a terminal that was closed is no reason to end a run
            tqdm.write(message(prefix + record.getMessage(), sys.stderr), file=sys.stderr)


def configure_logging() -> None:
    """Print what the package logs, from INFO up."""
    log = logging.getLogger("fp4train")
    log.handlers[:] = [_Handler()]
    log.setLevel(logging.INFO)
    log.propagate = False


def discard_output() -> int:
    """The exit code when the reader of standard output has closed it (`fp4train plan | head`),
    which is no error.

    What is still buffered goes to the null device, so that Python does not fail on it when it
    exits.
    """
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def explained(task: Callable[[], int]) -> int:
    """The exit code of `task`; an error that the user can act on is one message on standard
    error.
    """
    try:
        return task()
    except UserError as error:
        print(message(f"fp4train: {error}", sys.stderr), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return discard_output()
    except OSError as error:
        print(f"fp4train: {of_system(error)}", file=sys.stderr)
        return 1


def of_system(error: OSError) -> str:
    """Message of an error of the operating system: the file, and what is wrong."""
    return f"{error.filename or 'a file'}: {reason(error)}"


def terminal_width() -> int:
    """Columns of the terminal that tables and texts are fitted to, at least 60; 80 where there is
    none.
    """
    return max(60, shutil.get_terminal_size().columns)


def fitted(text: str) -> str:
    """A text in the terminal's width: a line that is too long goes on below where its last column
    begins, or indented where that has too little room.

    A word that is too long, such as a path, stays whole.
    """
    width = terminal_width()
    lines: list[str] = []
    for line in text.split("\n"):
        gaps = [gap.end() for gap in re.finditer(r"(?<=\S) {2,}", line)]
        column = gaps[-1] if gaps else 0
        if not 0 < column < width * 2 // 3:
            column = len(line) - len(line.lstrip()) + HANGING
        lines += wrapped(line, width, " " * column) if len(line) > width else [line]
    return "\n".join(lines)


def print_screen(name: str, **values: object) -> None:
    """Print a template of this package (`fp4train.text.screen`) in the terminal's width."""
    print(fitted(screen(__package__, name, width=terminal_width(), **values)))


def message(text: str, stream: TextIO) -> str:
    """A message in the terminal's width, or that of COLUMNS; in a file it stays on its line, to be
    searched.
    """
    if stream.isatty() or os.environ.get("COLUMNS"):
        return fitted(text)
    return text
