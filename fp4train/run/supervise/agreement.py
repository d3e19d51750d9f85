"""Agreement of the ranks between two steps: whether a signal ends the run, and what the lead asks
every rank to do.

A signal asks a run to end after its current step, so that it can save and close its trackers.

| signal | who sends it |
|---|---|
| SIGTERM, SIGINT, SIGQUIT | a person, a container, a job that is cancelled |
| SIGHUP | a terminal that is closed |
| SIGUSR1, SIGUSR2 | a scheduler, some time before the job's end (Slurm: --signal) |
| SIGXCPU | the system, when the limit of CPU time is reached, and every second after it |
"""

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fp4train.errors import DataError
from fp4train.run.host import peak_memory
from fp4train.run.pace import Pace
from fp4train.run.queued import Values
from fp4train.run.record.change import follow_swaps, pick_up_swaps
from fp4train.run.record.journal import swaps
from fp4train.run.run import Run
from fp4train.run.step import row_range
from fp4train.run.supervise.divergence import divergence_request, end_or_rewind
from fp4train.run.supervise.ledger import Ledger
from fp4train.run.supervise.rescue import refuse, report, save, save_at_end

AT_ONCE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask for the end; a second one acts as it would have outside."""
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that little time is left; to repeat them takes none away."""

_RANKS = 1 << 20
"""A number above that of all ranks: one number holds an amount of memory, or of time, and the rank
that takes it.
"""


@contextmanager
def stop_on_signals(run: Run, *, quietly: bool = False) -> Iterator[None]:
    """Turn the first such signal into a request, `run.signal`; a second one of `AT_ONCE` acts as it
    would have outside.

    Args:
        quietly: say nothing about it (of several ranks, which all receive it, one does).
    """
    run.signal = None
    # only the main thread may handle signals
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Who ignores one of them (nohup, a shell's background) wants it ignored.
    handlers = {
        n: signal.getsignal(n)
        for n in (*AT_ONCE, *WARNINGS)
        if signal.getsignal(n) != signal.SIG_IGN
    }

    def handle(number: int, frame: FrameType | None) -> None:
        if run.signal is None:
            run.signal = number
            text = (
                f"\n{signal.Signals(number).name}: ending after this step; once more ends at once\n"
            )
            with suppress(OSError):  # not through logging, which may be what the signal interrupted
                os.write(2, b"" if quietly else text.encode())
        for other in handlers.keys() & set(AT_ONCE):
            signal.signal(other, handlers[other])

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if run.signal == signal.SIGHUP:
            _leave_closed_terminal()


def _leave_closed_terminal() -> None:
    """Send output nowhere whose terminal is gone: writing to it would be an error that hides how
    the run ended.
    """
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            gone = stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor)
            gone = gone and not os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
        except OSError:
            gone = True
        if gone:
            with suppress(OSError, ValueError):
                stream.flush()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


@dataclass(frozen=True, kw_only=True)
class StepAgreement:
    """The signal, requests and memory that all ranks agree on between two steps.

    Args:
        signal: the number of a signal that one rank or more received; None: none.
        requests: the lead's requests of every rank; empty: none.
        values: metrics of the ranks: their memory, and what holds them up.
        trouble: whether a companion of some rank has a reason to end the run.
    """

    signal: int | None
    requests: dict[str, Any]
    values: Values
    trouble: bool

    @property
    def ends(self) -> bool:
        """Whether the run ends before its next step."""
        return self.signal is not None or self.trouble


def agree(run: Run) -> StepAgreement:
    """Agree on the next step: one small all-reduce, and a broadcast where the lead has requests.

    Raises:
        AgreedError: one of several ranks cannot read its rows of the next step.
    """
    world = run.world
    memory = peak_memory(run.device)
    trouble = run.companions.trouble is not None
    requests = lead_requests(run, ends=trouble) if world.lead else {}
    if run.step < run.config.train.steps:
        problem = run.data.feed.problem(*row_range(run))
    else:
        problem = None
    waited = run.data.feed.waited()
    if world.size == 1:
        return StepAgreement(
            signal=run.signal,
            requests=requests,
            values={"perf/memory_gb": memory / 1e9, "perf/data_wait": waited},
            trouble=trouble,
        )
    pace = round(run.companions.of(Pace).seconds() * 1e6)
    number, asks, most, least, unread, troubles, longest, slowest, fastest = world.largest_numbers(
        run.signal or 0,
        int(bool(requests)),
        memory * _RANKS + world.place.rank,
        -memory,
        int(problem is not None),
        int(trouble),
        round(waited * 1e6),
        pace * _RANKS + world.place.rank,
        -pace,
    )
    if unread:
        with world.same_outcome():
            if problem is not None:
                raise DataError(problem)
    shown: Values = {
        "perf/memory_gb": most // _RANKS / 1e9,
        "perf/memory_gb_least": -least / 1e9,
        "perf/memory_rank": most % _RANKS,
        "perf/data_wait": longest / 1e6,
    }
    if fastest:
        lag = slowest // _RANKS / -fastest
        shown |= {"perf/slowest_rank": slowest % _RANKS, "perf/slowest_lag": lag}
    return StepAgreement(
        signal=number or None,
        requests=world.broadcast(requests) if asks else {},
        values=shown,
        trouble=bool(troubles),
    )


def lead_requests(run: Run, *, ends: bool) -> dict[str, Any]:
    """Requests of the lead to every rank before the next step; only those that there are.

    Args:
        ends: the lead knows that there is no next step.
    """
    requests: dict[str, Any] = {}
    if (bad := report(run)) is not None:
        requests["bad"] = bad
    if not ends and run.step < run.config.train.steps and pick_up_swaps(run):
        requests["swaps"] = swaps(run.record.journal.records)
    if run.saver.due(run.step):
        requests["save"] = True
    if (diverged := divergence_request(run)) is not None:
        requests["diverged"] = diverged
    return requests


def apply_requests(run: Run, ledger: Ledger, requests: dict[str, Any]) -> None:
    """Do what the lead asks of every rank.

    Raises:
        NonFiniteError: a checkpoint was not written because weights or moments are not finite.
        DivergedError: the loss diverged, and more than a warning is wanted.
    """
    if not run.world.lead:
        run.saver.outcomes()  # the lead has told them
    if "bad" in requests:
        refuse(requests["bad"])
    if "diverged" in requests:
        if requests["diverged"]["back"] is None:
            ledger.flush()
            save_at_end(run)
        end_or_rewind(run, requests["diverged"])
    if "swaps" in requests and not run.world.lead:
        follow_swaps(run, requests["swaps"])
    if "save" in requests:
        ledger.flush()
        save(run)
