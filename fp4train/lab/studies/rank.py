"""A ranking: forks of every candidate at one checkpoint or several, and what follows from all that their records hold.

Every finished fork is recorded in RUN/studies/rank-STEP-…/measurements.jsonl, by what it was made with. A ranking that
was interrupted goes on from there, one with other candidates, checkpoints or more forks uses what is there; so does the
same command once more, which then measures nothing. Forks are made checkpoint by checkpoint and seed by seed, all
candidates of a seed before the next one.

Whatever is asked for, the tests are those of the whole record: all candidates that it holds are compared, with all
forks that those asked for have, and each new table is counted as a look (`fp4train.lab.studies.sequential`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp4train.errors import UserError
from fp4train.lab.studies.bases import Base, Forks, open_bases
from fp4train.lab.studies.progress import StudyProgress
from fp4train.lab.studies.ranking import Entry, Ranking
from fp4train.lab.studies.record import open_record
from fp4train.lab.studies.sequential import Looks
from fp4train.run.advice import nothing_quantised

MOST = 10_000
"""Forks of a candidate, or processes, beyond this are a slip of the hand."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for.

    Args:
        runs, steps_at: the checkpoints: of every run those of these steps; None: the newest.
        sweep: "recipe=a,b", "policy=…", …: the candidates; the first combination is the reference.
        forks: for each candidate at each checkpoint.
        steps, schedule, lr, batches: see `ForkSettings`; None: for `lr` the rate of the checkpoint, for `batches` the
            run's, for `steps` 24, or with schedule="own" the rest of the run.
        margin: nats per token; differences below it do not matter.
        processes: that make forks at the same time.
        out: the folder of the ranking; None: one in RUN/studies.
        packages, folders: of the user's own classes and options.
        paths: full key → path, of what the runs' configurations have elsewhere, or name and this user did not.
    """

    runs: Sequence[Path]
    steps_at: Sequence[int | None] = (None,)
    sweep: Sequence[str]
    forks: int = 6
    steps: int | None = None
    schedule: str = "linear"
    lr: float | None = None
    batches: int | None = None
    margin: float = 0.0005
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


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """A candidate that is measured: its place in the sweep, whether it was asked for, and others that run alike."""

    index: int
    asked: bool
    same: list[str]


def rank(request: Request) -> tuple[Ranking, list[Path]]:
    """Make the forks that the records lack; the ranking, and the folders that it belongs to: one of each checkpoint.

    Raises:
        UserError: there is no such checkpoint or option, nothing to rank, or the reference diverged.
    """
    bases = open_bases(request)
    chosen = _distinct(bases)
    with ExitStack() as stack:
        folders = [_folder(base, request.out, alone=len(bases) == 1) for base in bases]
        records = {
            base.mark: stack.enter_context(open_record(folder, base.identity, base.step))
            for base, folder in zip(bases, folders, strict=True)
        }
        indices = [each.index for each in chosen]
        forks = [Forks(request, base, indices, records[base.mark]) for base in bases]
        count = max(request.forks, min(each.recorded for each in forks))
        looks = Looks(records, [base.branches[chosen[0].index].key for base in bases])
        _make(forks, count)
        ranking = _ranking(request, forks, chosen, count, looks)
    if request.out is not None:
        folders = [request.out]
    return ranking, folders


def _folder(base: Base, out: Path | None, *, alone: bool) -> Path:
    return base.folder if out is None else out if alone else out / f"{base.source.name}-{base.step}-{base.mark}"


def _make(forks: Sequence[Forks], count: int) -> None:
    jobs = [each.missing(count) for each in forks]
    most = count * sum(len(each.chosen) for each in forks)
    done = most - sum(map(len, jobs))
    with StudyProgress("fork") as progress:
        progress.show(done, most)
        for each, mine in zip(forks, jobs, strict=True):
            each.make(mine, progress, done, most)
            done += len(mine)


def _ranking(request: Request, forks: Sequence[Forks], chosen: Sequence[_Chosen], count: int, looks: Looks) -> Ranking:
    """The ranking, whose look is recorded."""
    bases = [each.base for each in forks]
    entries = [
        Entry(
            name=bases[0].branches[each.index].candidate.name,
            key=bases[0].branches[each.index].key,
            forks=[fork for at in forks for fork in at.of(at.base.branches[each.index].key, count)],
            asked=each.asked,
            same=each.same,
        )
        for each in chosen
    ]
    own = {branch.key for base in bases for branch in base.branches}
    keys = dict.fromkeys(key for at in forks for key in at.candidates if key not in own)
    made = {key: [fork for at in forks for fork in at.of(key, count)] for key in keys}
    hidden = [Entry(name=key, key=key, forks=each) for key, each in made.items() if any(each)]
    ranking = Ranking(
        bases=bases,
        entries=entries,
        others=[*(each for each in entries if not each.asked and each.key in looks.seen), *hidden],
        margin=request.margin,
        first=looks.reference,
        earlier=looks.earlier,
        next_look=looks.next,
    )
    if diverged := ranking.reference.diverged:
        raise UserError(
            f"the reference {ranking.reference.name} diverged, so that there is nothing to compare with: "
            f"{diverged[0]}. Put another candidate first, or give a lower lr=…"
        )
    ranking = replace(ranking, look=looks.number(ranking.table, ranking.forks))
    if ranking.look is not None:
        looks.take(ranking.table, [entry.key for entry in ranking.compared_entries], ranking.compared)
    return ranking


def _distinct(bases: Sequence[Base]) -> list[_Chosen]:
    """The candidates that differ in what they compute at any checkpoint.

    Raises:
        UserError: fewer than two were asked for that differ.
    """
    candidates = [branch.candidate for branch in bases[0].branches]
    found: dict[object, _Chosen] = {}
    for index, each in enumerate(candidates):
        signature = tuple(base.branches[index].signature for base in bases)
        first = found.setdefault(signature, _Chosen(index=index, asked=each.asked, same=[]))
        if each.name not in (candidates[first.index].name, *first.same):
            first.same.append(each.name)
    kept = list(found.values())
    if sum(each.asked for each in kept) == 1:
        (others,) = (each.same for each in kept if each.asked)
        asked = [index for index, each in enumerate(candidates) if each.asked]
        if len(asked) > 1 or "BF16" in others:
            names = ", ".join(dict.fromkeys(candidates[index].name for index in asked))
            reasons = [why for index in asked if (why := nothing_quantised(bases[0].branches[index].plan))]
            what = "run every GEMM of this model alike" if len(asked) > 1 else "is one candidate"
            raise UserError(f"there is nothing to rank: {names} {what}" + (f"; {reasons[0]}" if reasons else ""))
        # One recipe is compared with the floor's BF16.
        kept = [
            _Chosen(index=each.index, asked=each.asked or candidates[each.index].name == "BF16", same=each.same)
            for each in kept
        ]
    return kept
