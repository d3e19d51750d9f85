"""Forks one after another, or in several processes of which each has its own copy of the model and the data.

A process that ends takes no result with it: what it had finished was sent. When the parent ends, however it ends, the
connection closes, and its processes end after the fork that they are at.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fp4train.config import plugins
from fp4train.errors import UserError
from fp4train.lab.studies.candidates import Candidate
from fp4train.lab.studies.forks import Branch, Fork, ForkSettings, branch, fork, open_checkpoint
from fp4train.lab.studies.subject import Subject

Job = tuple[int, int]
"""The index of a candidate, and the number of the fork."""


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """What a process needs to make the same forks as any other.

    Args:
        source, step: the run and its checkpoint.
        candidates, settings: of the forks.
        threads: of torch in each process; sums of another number of threads differ in their last bits.
        packages, folders: of the user's own classes. paths: see `open_checkpoint`.
    """

    source: Path
    step: int
    candidates: Sequence[Candidate]
    settings: ForkSettings
    threads: int
    packages: Sequence[str] = ()
    folders: Sequence[Path] = ()
    paths: Mapping[str, str | None] = field(default_factory=dict)


def here(
    subject: Subject, branches: Sequence[Branch], settings: ForkSettings, threads: int, jobs: Sequence[Job]
) -> Iterator[tuple[Job, Fork]]:
    """The forks of `jobs` in this process, each as it ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for index, number in jobs:
            yield (index, number), fork(subject, branches[index], settings, number)
    finally:
        torch.set_num_threads(before)


class Pool:
    """Processes that make forks. A context manager; leaving it ends them."""

    def __init__(self, place: Workplace, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}
        for _ in range(processes):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, place), daemon=True)
            process.start()
            theirs.close()
            self._processes[mine] = process

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *raised: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            process.terminate()
        for process in self._processes.values():
            process.join()

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Fork]]:
        """The forks of `jobs`, each as it ends.

        Raises:
            UserError: a process ended, or said so.
        """
        waiting = list(jobs)
        busy = list(self._processes)[: len(waiting)]
        for connection in busy:
            self._send(connection, waiting.pop(0))
        while busy:
            ready = wait(busy)
            for connection in [each for each in busy if each in ready]:
                job, found = self._receive(connection)
                if waiting:
                    self._send(connection, waiting.pop(0))
                else:
                    busy.remove(connection)
                yield job, found

    def _send(self, connection: Connection, job: Job) -> None:
        try:
            connection.send(job)
        except OSError as error:
            raise self._ended(connection) from error

    def _receive(self, connection: Connection) -> tuple[Job, Fork]:
        try:
            job, found = connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended(connection) from error
        if isinstance(found, str):
            raise UserError(found)
        return job, found

    def _ended(self, connection: Connection) -> UserError:
        process = self._processes[connection]
        process.join(5)
        code = process.exitcode
        why = f"signal {-code}" if isinstance(code, int) and code < 0 else f"exit code {code}"
        return UserError(
            f"a process of the ranking ended ({why}): if the memory is not enough for {len(self._processes)} of them, "
            "give processes=1. The forks that were done are recorded; the same command goes on"
        )


def _work(connection: Connection, place: Workplace) -> None:
    """A process: receives jobs and sends forks until the parent closes the connection."""
    logging.getLogger("fp4train").addHandler(logging.NullHandler())
    logging.getLogger("fp4train").propagate = False
    torch.set_num_threads(place.threads)
    with suppress(EOFError, OSError, KeyboardInterrupt), plugins.using(place.packages, place.folders):
        subject: Subject | None = None
        branches: list[Branch] = []
        while True:
            job = connection.recv()
            try:
                if subject is None:
                    subject = open_checkpoint(place.source, place.step, place.paths)
                    branches = [branch(subject, each, place.settings) for each in place.candidates]
                found: Fork | str = fork(subject, branches[job[0]], place.settings, job[1])
            except (UserError, MemoryError, RuntimeError) as error:
                found = f"{place.candidates[job[0]].name}, fork {job[1]}: {error or type(error).__name__}"
            connection.send((job, found))
