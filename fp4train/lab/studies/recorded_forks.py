"""The forks at one checkpoint: those that its record holds, and those that it lacks."""

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict

import torch

from fp4train.lab.studies.base import Base, ForkRequest
from fp4train.lab.studies.forks import Fork, Job, here, in_processes, open_checkpoint
from fp4train.lab.studies.record import Shown, StudyRecord, open_record

_log = logging.getLogger(__name__)

_THREADS = "threads"
"""The record's entry for the number of threads, on which the last bits of a sum depend."""


class Forks:
    """The forks of the candidates at one checkpoint, made where its record lacks them."""

    def __init__(self, request: ForkRequest, base: Base, record: StudyRecord) -> None:
        self.request = request
        self.base = base
        self.record = record
        self.threads = self._threads(request.processes)
        self._bound: dict[str, Fork] = {}
        """Key → fork, of those that were read."""

    def _threads(self, processes: int) -> int:
        """The threads of each process; a study that goes on keeps those that it began with."""
        now = max(1, torch.get_num_threads() // processes)
        if _THREADS not in self.record:
            self.record.add(_THREADS, {_THREADS: now})
        recorded = int(self.record[_THREADS][_THREADS])
        if recorded != now:
            _log.info(
                "threads: %d in each process, as the %s began, so that its numbers stay the same",
                recorded,
                self.request.noun,
            )
        return recorded

    def of(self, key: str, count: int) -> list[Fork | None]:
        """The first `count` forks of a candidate; None for one that is not recorded."""
        return [self._fork(f"{key}/{number}") for number in range(count)]

    def _fork(self, key: str) -> Fork | None:
        """A fork by its key in the record; None where it is not recorded."""
        if key not in self._bound and key in self.record:
            self._bound[key] = self.record.bound(key, Fork)
        return self._bound.get(key)

    @property
    def recorded(self) -> int:
        """How many forks of each candidate are recorded."""
        return self.missing(len(self.record.known) + 1)[0][1]

    @property
    def candidates(self) -> list[str]:
        """The keys of all candidates in the record, whoever asked for them."""
        every = (
            key.rpartition("/")[0]
            for key, values in self.record.known.items()
            if "recipe" in values
        )
        return list(dict.fromkeys(every))

    def missing(self, count: int) -> list[Job]:
        """The forks with the numbers below `count` that are not recorded, seed by seed."""
        return [
            (index, number)
            for number in range(count)
            for index, branch in enumerate(self.base.branches)
            if f"{branch.key}/{number}" not in self.record
        ]

    def make(self, jobs: Sequence[Job], shown: Shown, done: int, most: int) -> None:
        """Make the forks of `jobs`; `done` of `most` are made before."""
        with closing(self._run(jobs)) as forks:
            for (index, number), fork in forks:
                branch = self.base.branches[index]
                self.record.add(f"{branch.key}/{number}", asdict(fork))
                done += 1
                # no loss: that would be a look
                ended = ", diverged" if fork.recipe is None else ""
                where = "" if self.base.subject else f"{self.base.title}: "
                shown(done, most, f"{where}{branch.candidate.name}, seed {number}{ended}")

    def _run(self, jobs: Sequence[Job]) -> Generator[tuple[Job, Fork]]:
        base = self.base
        request = self.request
        if not jobs:
            return
        if request.processes > 1:
            yield from in_processes(base, request, self.threads, jobs)
        else:
            subject = base.subject or open_checkpoint(base.source, base.step, request.paths)
            yield from here(subject, base.branches, base.settings, self.threads, jobs)


@contextmanager
def recorded_forks(request: ForkRequest, bases: Sequence[Base]) -> Iterator[list[Forks]]:
    """The forks at each checkpoint, with their records open.

    Raises:
        UserError: another process has one open, or it is of another study.
    """
    with ExitStack() as records:
        yield [
            Forks(
                request,
                base,
                records.enter_context(
                    open_record(
                        base.folder_in(request.out, alone=len(bases) == 1), base.identity, base.step
                    )
                ),
            )
            for base in bases
        ]


def make_missing(forks: Sequence[Forks], count: int, most: int, shown: Shown) -> None:
    """Make the first `count` forks of every candidate where a record lacks them, of `most`."""
    jobs = [base_forks.missing(count) for base_forks in forks]
    candidates = sum(len(base_forks.base.branches) for base_forks in forks)
    total = most * candidates
    done = count * candidates - sum(map(len, jobs))
    shown(done, total)
    for base_forks, missing in zip(forks, jobs, strict=True):
        base_forks.make(missing, shown, done, total)
        done += len(missing)
