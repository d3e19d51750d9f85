"""Texts of a chat template, rendered in a process of its own (`jinja_worker.py`)."""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4train.data.jinja_worker import EACH, SECONDS
from fp4train.errors import DataError, data_errors, reason

WORKER = Path(__file__).with_name("jinja_worker.py")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendered:
    """A text, and the characters [start, end) in it that `{% generation %}` marks."""

    text: str
    marks: tuple[tuple[int, int], ...] = ()


class Renderer:
    """Renders one template.

    Args:
        source: the Jinja2 text. variables: texts that it may name. now: what `strftime_now` writes,
            in ISO 8601.
        name: its name in errors.
    """

    def __init__(self, source: str, variables: Mapping[str, str], *, now: str, name: str) -> None:
        self.source = source
        self.variables = dict(variables)
        self.now = now
        self.name = name
        self._too_slow = False
        self._process: subprocess.Popen[bytes] | None = None
        self._generation = False
        self._names: frozenset[str] = frozenset()

    @property
    def generation(self) -> bool:
        """Whether the template marks answers with `{% generation %}`.

        Raises:
            DataError: it is no template.
        """
        self._start()
        return self._generation

    @property
    def names(self) -> frozenset[str]:
        """The variables that the template reads and does not set itself.

        Raises:
            DataError: it is no template.
        """
        self._start()
        return self._names

    def render(self, conversations: Sequence[tuple[Sequence[Message], bool]]) -> list[Rendered]:
        """The texts of conversations, each with whether it ends where an answer would begin.

        Raises:
            ValueError: the template refuses one, or costs too much.
        """
        self._start()
        renders = [
            {"messages": [dict(m) for m in messages], "prompt": prompt}
            for messages, prompt in conversations
        ]
        reply = self._ask({"renders": renders, "variables": self.variables})
        if "error" in reply:
            raise ValueError(f"{self.name} refuses it: {reply['error']}")
        marks = [tuple((start, end) for start, end in spans) for spans in reply["marks"]]
        return [Rendered(text, spans) for text, spans in zip(reply["texts"], marks, strict=True)]

    @property
    def _time(self) -> str:
        return f"{self.name} takes more than {SECONDS:g} s and {EACH * 1000:g} ms for each message"

    def _start(self) -> None:
        if self._process is not None:
            return
        if self._too_slow:
            raise ValueError(self._time)
        with data_errors(
            OSError, before=f"{self.name}: its process cannot be started: ", message=reason
        ):
            self._process = process = subprocess.Popen(
                [sys.executable, "-I", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        weakref.finalize(self, _stop, process)
        with data_errors(ValueError, before=""):
            reply = self._ask({"source": self.source, "now": self.now})
        if "error" in reply:
            self._end()
            raise DataError(f"{self.name} is no template: {reply['error']}")
        self._generation = reply["generation"]
        self._names = frozenset(reply["names"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert (
            self._process is not None
            and self._process.stdin is not None
            and self._process.stdout is not None
        )
        answer = b""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if answer:
            reply: dict[str, Any] = json.loads(answer)
            return reply
        status = self._end()
        if status == -signal.SIGPROF:
            self._too_slow = True
            raise ValueError(self._time)
        raise ValueError(f"{self.name} ended the process that renders it (status {status})")

    def _end(self) -> int:
        assert self._process is not None
        status = _stop(self._process)
        self._process = None
        return status


def _stop(process: "subprocess.Popen[bytes]") -> int:
    """End the process; returns its exit status."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    try:
        return process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
