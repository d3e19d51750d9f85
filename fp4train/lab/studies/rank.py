"""A ranking: forks of every candidate at one checkpoint or several, and what follows from all that
their records hold.

Every finished fork is recorded in RUN/studies/rank-STEP-…/measurements.jsonl, by what it was made
with. A ranking that was interrupted goes on from there, one with other candidates, checkpoints or
more forks uses what is there; so does the same command once more, which then measures nothing.
Forks are made checkpoint by checkpoint and seed by seed, all candidates of a seed before the next
one.

Whatever is asked for, the tests are those of the whole record: all candidates that it holds are
compared, with all forks that those asked for have, and each new table is counted as a look
(`fp4train.lab.studies.sequential`).
"""

from collections.abc import Sequence
from dataclasses import replace

from fp4train.errors import UserError
from fp4train.lab.studies.base import Base, Branch, RankRequest
from fp4train.lab.studies.bases import open_bases
from fp4train.lab.studies.candidates import RecipeCandidate, candidates, sweep_axes
from fp4train.lab.studies.ranking import Entry, Ranking
from fp4train.lab.studies.record import study_progress
from fp4train.lab.studies.recorded_forks import Forks, make_missing, recorded_forks
from fp4train.lab.studies.sequential import Looks
from fp4train.run.checks import nothing_quantised

DEFAULT = "recipe=bf16,mxfp8,nvfp4,mxfp4"
"""The candidates of a ranking that names none."""


def rank(request: RankRequest) -> Ranking:
    """The ranking, after the forks are made that the records lack.

    Raises:
        UserError: there is no such checkpoint or option, nothing to rank, or the reference
            diverged.
    """
    axes = sweep_axes(request.chosen or [DEFAULT], request.folders)
    bases = _distinct(
        open_bases(request, lambda sections: candidates(axes, sections, request.baseline))
    )
    with recorded_forks(request, bases) as forks, study_progress("fork") as shown:
        count = max(request.forks, min(base_forks.recorded for base_forks in forks))
        records = {base_forks.base.mark: base_forks.record for base_forks in forks}
        looks = Looks(records, [base.branches[0].key for base in bases])
        make_missing(forks, count, count, shown)
        return _ranking(request, forks, count, looks)


def _ranking(request: RankRequest, forks: Sequence[Forks], count: int, looks: Looks) -> Ranking:
    """The ranking, whose look is recorded."""
    bases = [base_forks.base for base_forks in forks]
    entries = [
        Entry(
            name=branch.candidate.name,
            key=branch.key,
            forks=[
                fork
                for base_forks in forks
                for fork in base_forks.of(base_forks.base.branches[index].key, count)
            ],
            asked=branch.candidate.asked,
            same=branch.candidate.same,
        )
        for index, branch in enumerate(bases[0].branches)
    ]
    branch_keys = {branch.key for base in bases for branch in base.branches}
    keys = dict.fromkeys(
        key for base_forks in forks for key in base_forks.candidates if key not in branch_keys
    )
    hidden_forks = {
        key: [fork for base_forks in forks for fork in base_forks.of(key, count)] for key in keys
    }
    hidden = [
        Entry(name=key, key=key, forks=made_forks)
        for key, made_forks in hidden_forks.items()
        if any(made_forks)
    ]
    floor = [entry for entry in entries if not entry.asked and entry.key in looks.seen]
    ranking = Ranking(
        bases=bases,
        entries=entries,
        unasked=[*floor, *hidden],
        margin=request.margin,
        first_reference=looks.reference,
        earlier=looks.earlier,
        next_look=looks.next,
    )
    if diverged := ranking.reference.diverged:
        raise UserError(
            f"the reference {ranking.reference.name} diverged, so that there is nothing to "
            "compare with: "
            f"{diverged[0]}. Put another candidate first, or give a lower lr=…"
        )
    ranking = replace(ranking, look=looks.number(ranking.table, ranking.forks))
    if ranking.look is not None:
        looks.take(
            ranking.table, [entry.key for entry in ranking.compared_entries], ranking.compared
        )
    return ranking


def _distinct(bases: Sequence[Base]) -> list[Base]:
    """The bases with the candidates of `_different`."""
    kept = _different([base.branches for base in bases])
    return [
        replace(
            base,
            branches=[
                replace(base.branches[index], candidate=candidate)
                for index, candidate in kept.items()
            ],
        )
        for base in bases
    ]


def _different(by_base: Sequence[Sequence[Branch]]) -> dict[int, RecipeCandidate]:
    """The candidates that differ in what they compute at any base, by their place; each names those
    that run alike.

    Args:
        by_base: the candidates at each base, in the same order.

    Raises:
        UserError: fewer than two were asked for that differ.
    """
    candidates = [branch.candidate for branch in by_base[0]]
    alike: dict[object, list[int]] = {}
    for index in range(len(candidates)):
        alike.setdefault(tuple(branches[index].signature for branches in by_base), []).append(index)
    kept = {}
    for leader, *followers in alike.values():
        name = candidates[leader].name
        names = dict.fromkeys(candidates[index].name for index in followers)
        same = [follower for follower in names if follower != name]
        kept[leader] = replace(candidates[leader], same=same)
    if sum(candidate.asked for candidate in kept.values()) == 1:
        (only,) = (candidate for candidate in kept.values() if candidate.asked)
        asked = [index for index, candidate in enumerate(candidates) if candidate.asked]
        if len(asked) > 1 or "BF16" in only.same:
            named = ", ".join(dict.fromkeys(candidates[index].name for index in asked))
            reasons = [why for index in asked if (why := nothing_quantised(by_base[0][index].plan))]
            if len(asked) > 1:
                what = "run every GEMM of this model alike"
            else:
                what = "is one candidate"
            raise UserError(
                f"there is nothing to rank: {named} {what}" + (f"; {reasons[0]}" if reasons else "")
            )
        # One recipe is compared with the floor's BF16.
        kept = {
            index: replace(candidate, asked=candidate.asked or candidate.name == "BF16")
            for index, candidate in kept.items()
        }
    return kept
