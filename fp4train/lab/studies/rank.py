"""A ranking: forks of every candidate at one checkpoint or several, and what follows from all that their records hold.

Every finished fork is recorded in RUN/studies/rank-STEP-…/measurements.jsonl, by what it was made with. A ranking that
was interrupted goes on from there, one with other candidates, checkpoints or more forks uses what is there; so does the
same command once more, which then measures nothing. Forks are made checkpoint by checkpoint and seed by seed, all
candidates of a seed before the next one.

Whatever is asked for, the tests are those of the whole record: all candidates that it holds are compared, with all
forks that those asked for have, and each new table is counted as a look (`fp4train.lab.studies.sequential`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from fp4train.errors import UserError
from fp4train.lab.studies.bases import Base, Forks, RankRequest, open_bases
from fp4train.lab.studies.progress import study_progress
from fp4train.lab.studies.ranking import Entry, Ranking
from fp4train.lab.studies.record import open_record
from fp4train.lab.studies.sequential import Looks
from fp4train.run.checks import nothing_quantised


def rank(request: RankRequest) -> tuple[Ranking, list[Path]]:
    """Make the forks that the records lack; the ranking, and the folders that it belongs to: one of each checkpoint.

    Raises:
        UserError: there is no such checkpoint or option, nothing to rank, or the reference diverged.
    """
    bases = _distinct(open_bases(request))
    with ExitStack() as stack:
        folders = [_folder(base, request.out, alone=len(bases) == 1) for base in bases]
        records = {
            base.mark: stack.enter_context(open_record(folder, base.identity, base.step))
            for base, folder in zip(bases, folders, strict=True)
        }
        forks = [Forks(request, base, records[base.mark]) for base in bases]
        count = max(request.forks, min(each.recorded for each in forks))
        looks = Looks(records, [base.branches[0].key for base in bases])
        _make(forks, count)
        ranking = _ranking(request, forks, count, looks)
    if request.out is not None:
        folders = [request.out]
    return ranking, folders


def _folder(base: Base, out: Path | None, *, alone: bool) -> Path:
    return base.folder if out is None else out if alone else out / f"{base.source.name}-{base.step}-{base.mark}"


def _make(forks: Sequence[Forks], count: int) -> None:
    jobs = [each.missing(count) for each in forks]
    most = count * sum(len(each.base.branches) for each in forks)
    done = most - sum(map(len, jobs))
    with study_progress("fork") as shown:
        shown(done, most)
        for each, mine in zip(forks, jobs, strict=True):
            each.make(mine, shown, done, most)
            done += len(mine)


def _ranking(request: RankRequest, forks: Sequence[Forks], count: int, looks: Looks) -> Ranking:
    """The ranking, whose look is recorded."""
    bases = [each.base for each in forks]
    entries = [
        Entry(
            name=first.candidate.name,
            key=first.key,
            forks=[fork for at in forks for fork in at.of(at.base.branches[index].key, count)],
            asked=first.candidate.asked,
            same=first.candidate.same,
        )
        for index, first in enumerate(bases[0].branches)
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


def _distinct(bases: Sequence[Base]) -> list[Base]:
    """The bases with the candidates that differ in what they compute at any of them; each names those that run alike.

    Raises:
        UserError: fewer than two were asked for that differ.
    """
    candidates = [branch.candidate for branch in bases[0].branches]
    alike: dict[object, list[int]] = {}
    for index in range(len(candidates)):
        alike.setdefault(tuple(base.branches[index].signature for base in bases), []).append(index)
    kept = {}
    for first, *others in alike.values():
        names = dict.fromkeys(candidates[index].name for index in others)
        kept[first] = replace(candidates[first], same=[name for name in names if name != candidates[first].name])
    if sum(each.asked for each in kept.values()) == 1:
        (only,) = (each for each in kept.values() if each.asked)
        asked = [index for index, each in enumerate(candidates) if each.asked]
        if len(asked) > 1 or "BF16" in only.same:
            named = ", ".join(dict.fromkeys(candidates[index].name for index in asked))
            reasons = [why for index in asked if (why := nothing_quantised(bases[0].branches[index].plan))]
            what = "run every GEMM of this model alike" if len(asked) > 1 else "is one candidate"
            raise UserError(f"there is nothing to rank: {named} {what}" + (f"; {reasons[0]}" if reasons else ""))
        # One recipe is compared with the floor's BF16.
        kept = {index: replace(each, asked=each.asked or each.name == "BF16") for index, each in kept.items()}
    return [
        replace(base, branches=[replace(base.branches[index], candidate=each) for index, each in kept.items()])
        for base in bases
    ]
