"""RUN/swap_requests/, the inbox: how the process that trains in a run directory is asked to change
the recipe.

`fp4train swap` writes one file per request, ID.json. The training process takes it between two
steps: it renames it to ID.taken, so that it can no longer be cancelled, records the swap with its
step and the ID in the journal, and writes ID.answer.

A request holds {"recipe", "name", "at"}: its recipe is null where the swap at that step, which has
not begun, is taken back. Another kind, {"evaluation": {"step", "scores"}}, has results that are to
be logged. Requests and answers carry a checksum.
"""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fp4train.errors import UserError, in_words, user_errors
from fp4train.files import Folder
from fp4train.run.record.directory import REQUESTS, is_running
from fp4train.run.record.journal import Journal
from fp4train.sealed import sealed, unsealed
from fp4train.worker import Worker

_log = logging.getLogger(__name__)

EVALUATION = "evaluation"
"""The key of a request to log results, and the event that they are logged as."""
REQUEST_LIMIT = 1 << 20
"""Bytes of a request, or of an answer, that are read."""
AT_ONCE = 100
"""Requests that are taken between two steps."""
WAIT_SECONDS = 1.0
"""Seconds for the disk to say which requests there are, or to record a swap; then the loop goes
on.
"""
SYNC_SECONDS = 30.0
"""Seconds for the record of the swaps that a checkpoint was trained with; then the checkpoint has
failed.
"""
POLL = 0.05
"""Seconds between two looks for an answer."""


class SwapRequest(NamedTuple):
    """A request that the training process has taken.

    Args:
        id: its file's name without the suffix.
        body: the request; None where it cannot be read.
        problem: why it cannot be read.
    """

    id: str
    body: dict[str, Any] | None
    problem: str


@contextmanager
def _requests(run: Path, *, create: bool = False) -> Iterator[Folder]:
    """The folder of the requests to the process that trains in `run`, open."""
    with Folder.open(run) as folder, folder.folder(REQUESTS, create=create) as requests:
        yield requests


# -- asking ----------------------------------------------------------------------------------------


def ask(run: Path, body: Mapping[str, Any]) -> str:
    """Leave a request for the process that trains in `run` now, or after a resume; returns its ID.

    Args:
        body: "recipe" (plain configuration values; None: the swap is taken back), "name" (what
            the user calls it) and "at" (the step; None: the next one); or EVALUATION: results.

    Raises:
        UserError: the request cannot be written.
    """
    key = f"{time.time_ns()}-{secrets.token_hex(4)}"
    with (
        user_errors(OSError, before=f"{run / REQUESTS} cannot be written: "),
        _requests(run, create=True) as requests,
    ):
        requests.write(f"{key}.json", sealed(body))
    return key


def wait_for_answer(run: Path, request: str, seconds: float) -> tuple[bool, str] | None:
    """Whether the process that trains in `run` accepts, and its text; None: it gave no answer in
    time, or ended.
    """
    deadline = time.monotonic() + seconds
    while True:
        running = is_running(run)
        try:
            with _requests(run) as requests:
                answer = unsealed(requests.read(f"{request}.answer", REQUEST_LIMIT))
                with suppress(OSError):
                    requests.remove(f"{request}.answer")
            return bool(answer["accepted"]), str(answer["text"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, RecursionError):
            return None
        if not running or time.monotonic() >= deadline:
            return None
        time.sleep(POLL)


def pending(run: Path) -> dict[str, dict[str, Any]]:
    """The requests that no process has taken yet, by ID; one that cannot be read is empty.

    Raises:
        UserError: the folder of the requests cannot be read, or is a link.
    """
    waiting: dict[str, dict[str, Any]] = {}
    refused = user_errors(OSError, before="requests cannot be read: ")
    with refused, suppress(FileNotFoundError), _requests(run) as requests:
        for name in [name for name in requests.names() if name.endswith(".json")]:
            try:
                waiting[name.removesuffix(".json")] = unsealed(requests.read(name, REQUEST_LIMIT))
            except FileNotFoundError:  # taken since
                continue
            except (OSError, ValueError, RecursionError):
                waiting[name.removesuffix(".json")] = {}
    return waiting


def cancel_request(run: Path, request: str) -> bool:
    """Remove a pending request; False: it has been taken.

    Raises:
        UserError: it cannot be removed.
    """
    withdrawn = f"{request}.withdrawn"
    refused = user_errors(OSError, before=f"request {request} cannot be removed: ")
    with refused, suppress(FileNotFoundError), _requests(run) as requests:
        # either this or the training process's rename succeeds
        requests.rename(f"{request}.json", withdrawn)
        requests.remove(withdrawn)
        return True
    return False


# -- answering -------------------------------------------------------------------------------------


class Inbox:
    """The requests to the process that trains in a run directory.

    A thread looks for them, writes the journal, and writes the answers. The loop waits for it up to
    `WAIT_SECONDS`; a disk that takes longer is reported and left behind, and requests are taken
    again when it answers. A swap that is recorded late takes effect at its step all the same: no
    checkpoint is written before its record (`sync`), so that a run that is killed in between goes
    on from before the swap and finds the request again.

    Args:
        folder: the run's directory.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._worker = Worker("requests", self._failed)
        self._behind = False
        self._found: list[SwapRequest] = []
        self._problem = ""

    def take(self, done: Collection[object]) -> Iterator[SwapRequest]:
        """Take each pending request, oldest first, and those that a killed process had taken.

        A request is removed when the caller asks for the next one.

        Args:
            done: IDs of requests that are on record: each was carried out before a kill, and only
                goes.
        """
        if self._behind and not self._worker.wait(0):
            return
        if not self._behind:
            self._worker.put(lambda: self._look(done))
        if not self._in_time():
            return
        while self._found and not self._behind:
            request = self._found.pop(0)
            yield request
            self._worker.put(partial(self._remove, request.id))
            self._in_time()

    def answer(self, request: SwapRequest, accepted: bool, text: str) -> None:
        """Tell whoever waits; a disk that takes no answer costs nothing but the answer."""

        def write() -> None:
            with self._folder.folder(REQUESTS) as requests:
                requests.write(f"{request.id}.answer", sealed({"accepted": accepted, "text": text}))

        self._worker.put(write)

    def record(self, journal: Journal, tell: Callable[[], None]) -> None:
        """Have the record that was added to `journal` last written, and then `tell` called; waits
        within bounds.

        One that cannot be written after the loop has gone on is tried again by `sync`.

        Raises:
            UserError: it could not be written in time; the journal is as before it was added.
        """
        failed: list[UserError] = []

        def job() -> None:
            try:
                journal.write()
            except UserError as error:
                failed.append(error)
                if self._behind:
                    raise
            else:
                tell()

        self._worker.put(job)
        if self._in_time() and failed:
            journal.take_back()
            raise failed[0]

    def sync(self, journal: Journal) -> None:
        """Make sure that the journal is written; another thread than the loop's may do so.

        Raises:
            OSError: the disk does not take it, or does not answer.
        """
        if journal.waiting:
            self._worker.put(journal.write)
        if not self._worker.wait(SYNC_SECONDS) or journal.waiting:
            raise TimeoutError(f"the swaps are not recorded after {SYNC_SECONDS:g} s")

    def close(self) -> None:
        """Take no more requests. What waits is done first, unless the disk does not answer."""
        self._worker.leave(0 if self._behind else WAIT_SECONDS)

    def _in_time(self) -> bool:
        done = self._worker.wait(0 if self._behind else WAIT_SECONDS)
        if not done and not self._behind:
            _log.error(
                "%s does not answer in %g s: swaps wait for it, steps go on", REQUESTS, WAIT_SECONDS
            )
        self._behind = not done
        return done

    # -- the thread's ------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        if str(error) != self._problem:
            self._problem = str(error)
            _log.error("requests: %s", error)

    def _look(self, done: Collection[object]) -> None:
        try:
            requests = self._folder.folder(REQUESTS)
        except FileNotFoundError:
            return
        with requests:
            for name in [name for name in requests.names() if name.endswith((".json", ".taken"))][
                :AT_ONCE
            ]:
                key = name.rpartition(".")[0]
                if key in done:
                    _set_aside(requests, name)
                    continue
                with suppress(FileNotFoundError):  # cancelled since
                    self._found.append(_taken(requests, name, key))

    def _remove(self, key: str) -> None:
        with self._folder.folder(REQUESTS) as requests:
            if requests.status(f"{key}.taken") is not None:
                _set_aside(requests, f"{key}.taken")


def _taken(requests: Folder, name: str, key: str) -> SwapRequest:
    """The request in the file `name`, which gets the name of a taken one; one that cannot be read
    is removed.

    Raises:
        FileNotFoundError: it is gone.
    """
    taken = f"{key}.taken"
    try:
        requests.rename(name, taken)
        body = unsealed(requests.read(taken, REQUEST_LIMIT))
        if not ({"recipe", "name", "at"} <= set(body) or set(body) == {EVALUATION}):
            raise ValueError("it does not hold recipe, name and at, nor evaluation alone")
        return SwapRequest(key, body, "")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        _set_aside(requests, taken if requests.status(taken) is not None else name)
        return SwapRequest(key, None, f"request {key}.json cannot be read: {in_words(error)}")


def _set_aside(requests: Folder, name: str) -> None:
    """Remove a request, so that it is not taken again."""
    with suppress(OSError):
        requests.remove_all(name)
