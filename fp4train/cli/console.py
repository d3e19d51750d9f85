"""RUN/console.log: the lines that a training process prints, as they stand on the terminal when a bar has passed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TextIO

from fp4train.cli.output import written_by
from fp4train.files import Folder
from fp4train.sealed import LogWriter
from fp4train.track.wandb import CONSOLE

_log = logging.getLogger("fp4train")

WAITING = 1 << 20
"""Characters that are kept before there is a file."""


class Console:
    """Lines in memory until `write_to` names a run directory, and in its file from then on."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting = ""
        self._file: LogWriter | None = None
        self._begun: dict[int, str] = {}
        """Line without an end, by stream."""

    def write_to(self, run: Path) -> None:
        """Append to RUN/console.log, what was printed before included; a second call changes
        nothing.
        """
        if self._file is not None:
            return
        try:
            with Folder.open(run) as folder:
                status = folder.status(CONSOLE)
                self._file = LogWriter(folder, CONSOLE, 0 if status is None else status.st_size)
            with self._lock:
                self._append("")
        except OSError as error:
            _log.warning("%s is not written: %s", run / CONSOLE, error.strerror or error)

    def add(self, stream: int, text: str) -> None:
        """Take what is written to a stream. Of a line that a bar was drawn on, its last state is
        kept.
        """
        with self._lock:
            *lines, begun = (self._begun.get(stream, "") + text).split("\n")
            state = begun[-WAITING:]
            if "\r" in begun[:-1]:
                state = state.rpartition("\r")[2]
            self._begun[stream] = state
            self._append("".join(f"{line.rstrip().rpartition(chr(13))[2]}\n" for line in lines))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, lines: str) -> None:
        self._waiting = (self._waiting + lines)[-WAITING:]
        if self._file is None or not self._waiting:
            return
        try:
            self._file.write(self._waiting.encode(errors="replace"))
        except OSError:  # a full disk is no reason to end a run, whose metrics say so
            return
        self._waiting = ""


@contextmanager
def kept_console() -> Iterator[Console]:
    """Keep what is printed, and the error that ends it."""
    console = Console()

    def write(stream: TextIO, text: str) -> None:
        console.add(id(stream), text)
        with suppress(BrokenPipeError):  # its reader has gone (`fp4train | head`), the log stays
            stream.write(text)

    try:
        with written_by(write):
            yield console
    except BaseException as error:
        console.add(0, f"{type(error).__name__}: {error}\n")
        raise
    finally:
        console.close()
