"""Forks one after another, or in several processes of which each has its own copy of the model and the data.

A process that ends takes no result with it: what it had finished was sent. When the parent ends, however it ends, the
connection closes, and its processes end after the fork that they are at.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch

from fp4train.config import plugins
from fp4train.errors import UserError
from fp4train.lab.studies.candidates import RecipeCandidate
from fp4train.lab.studies.forks import Branch, Fork, ForkSettings, branch, fork, open_checkpoint
from fp4train.lab.studies.subject import Subject

if TYPE_CHECKING:
    from fp4train.lab.studies.bases import Base, RankRequest

Job = tuple[int, int]
"""The index of a candidate, and the number of the fork."""


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

    def __init__(self, base: Base, request: RankRequest, threads: int, processes: int) -> None:
        candidates = [each.candidate for each in base.branches]
        task = replace(base, subject=None, branches=()), candidates, request, threads
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}
        for _ in range(processes):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, *task), daemon=True)
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


def _work(
    connection: Connection, base: Base, candidates: Sequence[RecipeCandidate], request: RankRequest, threads: int
) -> None:
    """A process: receives jobs and sends forks until the parent closes the connection."""
    logging.getLogger("fp4train").addHandler(logging.NullHandler())
    logging.getLogger("fp4train").propagate = False
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError, KeyboardInterrupt), plugins.using(request.packages, request.folders):
        subject: Subject | None = None
        branches: list[Branch] = []
        while True:
            index, number = connection.recv()
            try:
                if subject is None:
                    subject = open_checkpoint(base.source, base.step, request.paths)
                    branches = [branch(subject, each, base.settings) for each in candidates]
                found: Fork | str = fork(subject, branches[index], base.settings, number)
            except (UserError, MemoryError, RuntimeError) as error:
                found = f"{candidates[index].name}, fork {number}: {error or type(error).__name__}"
            connection.send(((index, number), found))
