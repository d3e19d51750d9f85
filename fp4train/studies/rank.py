"""A ranking: forks of every candidate, seed by seed, until the answer is clear or all forks are made.

Every finished fork is recorded in RUN/studies/rank-STEP-…/measurements.jsonl, by what it was made with. A ranking that
was interrupted goes on from there, one with other candidates or more forks uses what is there; so does the same command
once more, which then measures nothing. Forks are made seed by seed, all candidates of a seed before the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from fp4train import checkpoint
from fp4train.config import plain
from fp4train.config.schema import Config
from fp4train.errors import UserError
from fp4train.run import directory as run_directory
from fp4train.run.advice import learning_rate, nothing_quantised
from fp4train.studies.candidates import SECTIONS, candidates
from fp4train.studies.forks import Branch, Fork, ForkSettings, branch, open_checkpoint
from fp4train.studies.identity import digest
from fp4train.studies.progress import StudyProgress
from fp4train.studies.ranking import Entry, Ranking
from fp4train.studies.record import StudyRecord, open_record
from fp4train.studies.sequential import looks
from fp4train.studies.subject import STUDIES, Subject
from fp4train.studies.workers import Job, Pool, Workplace, here

_log = logging.getLogger(__name__)

MOST = 10_000
"""Forks of a candidate, or processes, beyond this are a slip of the hand."""
_THREADS = "threads"
"""The record's entry for the number of threads, on which the last bits of a sum depend."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for.

    Args:
        run, step: the checkpoint; None: the newest.
        sweep: "recipe=a,b", "policy=…", …: the candidates; the first combination is the reference.
        forks: at most, for each candidate.
        steps, schedule, lr, batches: see `ForkSettings`; None: for `lr` the rate of the checkpoint, for `batches` the
            run's, for `steps` 24, or with schedule="own" the rest of the run.
        margin: nats per token; differences below it do not matter.
        stop: whether to stop when every pair is told apart or alike.
        processes: that make forks at the same time.
        out: the folder of the ranking; None: one in RUN/studies.
        packages, folders: of the user's own classes and options.
        paths: full key → path, of what the run's configuration has elsewhere, or names and this user did not.
    """

    run: Path
    step: int | None = None
    sweep: Sequence[str]
    forks: int = 6
    steps: int | None = None
    schedule: str = "linear"
    lr: float | None = None
    batches: int | None = None
    margin: float = 0.0005
    stop: bool = True
    processes: int = 1
    out: Path | None = None
    packages: Sequence[str] = ()
    folders: Sequence[Path] = ()
    paths: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("forks", "processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
            if getattr(self, name) > MOST:
                raise ValueError(f"{name}={getattr(self, name)} must be at most {MOST}")
        if not 0 <= self.margin < float("inf"):
            raise ValueError(f"margin={self.margin} must be a number of nats per token, 0 or more")


def rank(request: Request) -> tuple[Ranking, Path]:
    """Make the forks that the record lacks; the ranking, and the folder that it belongs to.

    Raises:
        UserError: there is no such checkpoint or option, nothing to rank, or the reference diverged.
    """
    source = run_directory.require_run(request.run)
    step = _step(source, request.step)
    subject = open_checkpoint(source, step, request.paths)
    settings = _settings(request, subject.config, step)
    saved = plain(run_directory.read_config(source))
    sections = {name: saved[name] for name in SECTIONS}
    if settings.schedule == "linear":
        sections["phases"] = {}  # those of the run belong to its own schedule
    asked = candidates(request.sweep, sections, request.folders)
    branches, same = _distinct([branch(subject, each, settings) for each in asked])
    folder = request.out or source / STUDIES / f"rank-{step}-{_digest(subject, settings)}"
    identity = {"study": "rank", **subject.identity, **asdict(settings)}
    with (
        open_record(folder, identity, step) as record,
        _Forks(request, source, subject, settings, branches, record) as forks,
    ):
        for count in [*(n for n in looks(request.forks) if request.stop), request.forks]:
            forks.make(count)
            entries = [
                Entry(name=b.candidate.name, forks=forks.of(b, count), asked=b.candidate.asked, same=others)
                for b, others in zip(branches, same, strict=True)
            ]
            ranking = Ranking(
                run=str(source),
                step=step,
                settings=settings,
                entries=entries,
                margin=request.margin,
                most=request.forks,
            )
            if diverged := ranking.reference.diverged:
                raise UserError(
                    f"the reference {ranking.reference.name} diverged, so that there is nothing to compare with: "
                    f"{diverged[0]}. Put another candidate first, or give a lower lr=…"
                )
            if ranking.clear and request.stop:
                break
    return ranking, folder


def _step(source: Path, wanted: int | None) -> int:
    have = checkpoint.steps(source / run_directory.CHECKPOINTS)
    if not have:
        raise UserError(f"{source} has no checkpoint yet: forks need the weights and the moments of one")
    if wanted is not None and wanted not in have:
        raise UserError(f"step={wanted}: {source} has no such checkpoint; it has {', '.join(map(str, have))}")
    return have[-1] if wanted is None else wanted


def _settings(request: Request, config: Config, step: int) -> ForkSettings:
    left = config.train.steps - step
    own = request.schedule == "own"
    if own and left < 1:
        raise UserError(
            f"schedule=own: the run ends at step {config.train.steps}, no step is left after step {step}; give an "
            "earlier step=…, or schedule=linear"
        )
    if own and request.lr is not None:
        raise UserError("schedule=own has the rates of the run: leave out lr=, or give schedule=linear")
    if own and request.steps is not None and request.steps > left:
        raise UserError(f"steps={request.steps}: the run has {left} steps left after step {step}")
    lr = learning_rate(config, min(step, config.train.steps - 1)) if request.lr is None else request.lr
    try:
        return ForkSettings(
            steps=(left if own else 24) if request.steps is None else request.steps,
            schedule=request.schedule,
            lr=lr,
            batches=config.eval.batches if request.batches is None else request.batches,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def _distinct(branches: Sequence[Branch]) -> tuple[list[Branch], list[list[str]]]:
    """Branches that differ in what they compute, and for each of them the names of the others that compute the same.

    Raises:
        UserError: fewer than two were asked for that differ.
    """
    found: dict[tuple[object, ...], tuple[Branch, list[str]]] = {}
    for each in branches:
        first, others = found.setdefault(each.signature, (each, []))
        if each.candidate.name not in (first.candidate.name, *others):
            others.append(each.candidate.name)
    kept = list(found.values())
    if sum(each.candidate.asked for each, _ in kept) == 1:
        (others,) = (others for each, others in kept if each.candidate.asked)
        asked = [each for each in branches if each.candidate.asked]
        if len(asked) > 1 or "BF16" in others:
            names = ", ".join(dict.fromkeys(each.candidate.name for each in asked))
            reasons = [why for each in asked if (why := nothing_quantised(each.plan))]
            what = "run every GEMM of this model alike" if len(asked) > 1 else "is one candidate"
            raise UserError(f"there is nothing to rank: {names} {what}" + (f"; {reasons[0]}" if reasons else ""))
        # One recipe is compared with the floor's BF16.
        kept = [
            (replace(b, candidate=replace(b.candidate, asked=True)) if b.candidate.name == "BF16" else b, others)
            for b, others in kept
        ]
    return [each for each, _ in kept], [others for _, others in kept]


def _digest(subject: Subject, settings: ForkSettings) -> str:
    """Names the folder of a ranking: forks of another checkpoint, or with other settings, have another one."""
    return digest([{**subject.identity, "settings": None}, settings])[:8]


class _Forks:
    """The forks of a ranking, made where the record lacks them. A context manager."""

    def __init__(
        self,
        request: Request,
        source: Path,
        subject: Subject,
        settings: ForkSettings,
        branches: Sequence[Branch],
        record: StudyRecord,
    ) -> None:
        self.subject, self.settings, self.branches, self.record = subject, settings, branches, record
        self.threads = self._threads(request.processes)
        self.place = Workplace(
            source=source,
            step=subject.step,
            candidates=[each.candidate for each in branches],
            settings=settings,
            threads=self.threads,
            packages=request.packages,
            folders=request.folders,
            paths=request.paths,
        )
        self.processes, self.most = request.processes, request.forks
        self.progress, self.done = StudyProgress("fork"), 0
        self.stack = ExitStack()
        self.pool: Pool | None = None

    def __enter__(self) -> _Forks:
        self.stack.enter_context(self.progress)
        return self

    def __exit__(self, *raised: object) -> None:
        self.stack.close()

    def _threads(self, processes: int) -> int:
        """In each process; a ranking that goes on keeps those that it began with."""
        now = max(1, torch.get_num_threads() // processes)
        if _THREADS not in self.record:
            self.record.add(_THREADS, {_THREADS: now})
        known = int(self.record[_THREADS][_THREADS])
        if known != now:
            _log.info("threads: %d in each process, as the ranking began, so that its numbers stay the same", known)
        return known

    def of(self, branch: Branch, count: int) -> list[Fork]:
        """The first `count` forks of a candidate, from the record."""
        return [Fork(**self.record[_key(branch, number)]) for number in range(count)]

    def make(self, count: int) -> None:
        """Make the forks with the numbers below `count` that are not recorded."""
        missing = [
            (index, number)
            for number in range(self.most)
            for index, each in enumerate(self.branches)
            if _key(each, number) not in self.record
        ]
        most = self.most * len(self.branches)
        self.done = most - len(missing)
        self.progress.show(self.done, most)
        for (index, number), found in self._run([job for job in missing if job[1] < count]):
            chosen = self.branches[index]
            self.record.add(_key(chosen, number), found.plain())
            self.done += 1
            loss = "diverged" if found.recipe is None else f"loss {found.recipe:.4f}"
            self.progress.show(self.done, most, f"{chosen.candidate.name}, seed {number}, {loss}")

    def _run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Fork]]:
        if self.processes == 1 or not jobs:
            return here(self.subject, self.branches, self.settings, self.threads, jobs)
        if self.pool is None:
            self.pool = self.stack.enter_context(Pool(self.place, min(self.processes, len(jobs))))
        return self.pool.run(jobs)


def _key(branch: Branch, number: int) -> str:
    return f"{branch.key}/{number}"
