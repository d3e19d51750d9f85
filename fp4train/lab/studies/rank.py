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

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from fp4train import checkpoint
from fp4train.config import Config, plain, to_config
from fp4train.data.source import ready_tokenizer
from fp4train.errors import UserError, user_errors
from fp4train.lab.studies.base import Base, Branch, ForkSettings, RankRequest
from fp4train.lab.studies.candidates import (
    SECTIONS,
    Axis,
    RecipeCandidate,
    candidates,
    sweep_axes,
)
from fp4train.lab.studies.forks import (
    Fork,
    Job,
    Pool,
    branch,
    branch_of,
    checkpoint_config,
    here,
    open_checkpoint,
)
from fp4train.lab.studies.ranking import Entry, Ranking
from fp4train.lab.studies.record import Shown, StudyRecord, open_record, study_progress
from fp4train.lab.studies.sequential import Looks
from fp4train.lab.studies.subject import open_subject
from fp4train.precision.layers import find_layers
from fp4train.run.build import build_model
from fp4train.run.checks import learning_rate, nothing_quantised
from fp4train.run.host import choose_device
from fp4train.run.record import directory as run_directory
from fp4train.text import counted

_log = logging.getLogger(__name__)

_THREADS = "threads"
"""The record's entry for the number of threads, on which the last bits of a sum depend."""


def open_bases(request: RankRequest) -> list[Base]:
    """The checkpoints that a ranking asks for.

    Raises:
        UserError: there is no such checkpoint or option, or one is named twice.
    """
    requested = [
        (source, step)
        for source in map(run_directory.require_run, request.runs)
        for step in request.steps_at
    ]
    places = [(source, _step(source, step)) for source, step in requested]
    axes = sweep_axes(request.sweep, request.folders)
    checkpoints = [_configured(request, source, step) for source, step in places]
    planned = [_planned(request, axes, chosen) for chosen in checkpoints]
    if all(planned):
        _different([branches for branches in planned if branches])  # refused before data is read
    bases: dict[str, Base] = {}
    for chosen in checkpoints:
        base = _open(request, axes, chosen, keep=len(places) == 1)
        if (same := bases.setdefault(base.mark, base)) is not base:
            raise UserError(f"{base.title} and {same.title} are the same checkpoint: name it once")
    return list(bases.values())


def _step(source: Path, requested: int | None) -> int:
    have = checkpoint.steps(source / run_directory.CHECKPOINTS)
    if not have:
        raise UserError(
            f"{source} has no checkpoint yet: forks need the weights and the moments of one"
        )
    if requested is not None and requested not in have:
        raise UserError(
            f"step={requested}: {source} has no such checkpoint; it has {', '.join(map(str, have))}"
        )
    return have[-1] if requested is None else requested


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    """A checkpoint before it is opened.

    Args:
        source: run directory.
        step: optimizer steps of the checkpoint.
        saved: configuration of the run, as it was read.
        cfg: the composed one that opens the checkpoint.
        config: typed configuration of the same.
        settings: settings of the forks.
    """

    source: Path
    step: int
    saved: Mapping[str, Any]
    cfg: DictConfig
    config: Config
    settings: ForkSettings

    def candidates(self, axes: Sequence[Axis], baseline: str | None) -> list[RecipeCandidate]:
        """The candidates of a sweep; what it does not name is the run's own."""
        sections = {name: self.saved[name] for name in SECTIONS}
        if self.settings.schedule == "linear":
            sections["phases"] = {}  # those of the run belong to its own schedule
        return candidates(axes, sections, baseline)


def _configured(request: RankRequest, source: Path, step: int) -> _Checkpoint:
    saved = plain(run_directory.read_config(source))
    cfg = checkpoint_config(source, step, request.paths, saved)
    config = to_config(cfg)
    return _Checkpoint(
        source=source,
        step=step,
        saved=saved,
        cfg=cfg,
        config=config,
        settings=_settings(request, config, step),
    )


def _planned(
    request: RankRequest, axes: Sequence[Axis], chosen: _Checkpoint
) -> list[Branch] | None:
    """The candidates at a checkpoint, planned without its data and weights; None: the data or the
    model says only when it is read what that takes.

    Raises:
        UserError: see `branch`.
    """
    config = chosen.config
    vocab_size = getattr(config.data, "vocab_size", None)
    if (tokenizer := ready_tokenizer(config.data, chosen.source)) is not None:
        vocab_size = tokenizer.vocab_size
    if not isinstance(vocab_size, int):
        return None
    try:
        model = build_model(config, vocab_size, torch.device("meta"))
    except RuntimeError:  # it reads values of tensors while it is built
        return None
    layers = find_layers(model)
    device = choose_device(config.device)
    return [
        branch_of(config, layers, device, chosen.step, candidate, chosen.settings)
        for candidate in chosen.candidates(axes, request.baseline)
    ]


def _open(request: RankRequest, axes: Sequence[Axis], chosen: _Checkpoint, *, keep: bool) -> Base:
    settings = chosen.settings
    subject = open_subject(chosen.config, chosen.cfg, chosen.saved, optimizer=True)
    train = subject.run.config.train
    batches = min(settings.batches, max(1, subject.run.val_data.batches_per_epoch))
    return Base(
        source=chosen.source,
        step=chosen.step,
        settings=settings,
        run=subject.identity["run"] or str(chosen.source),
        trained=subject.run.config.recipe.name,
        tokens=batches * train.tokens,
        identity={"study": "rank", **subject.identity, **asdict(settings)},
        branches=[
            branch(subject, candidate, settings)
            for candidate in chosen.candidates(axes, request.baseline)
        ],
        subject=subject if keep else None,
    )


def _settings(request: RankRequest, config: Config, step: int) -> ForkSettings:
    left = config.train.steps - step
    own_schedule = request.schedule == "own"
    if own_schedule and left < 1:
        raise UserError(
            f"schedule=own: the run ends at step {config.train.steps}, no step is left after "
            f"step {step}; give an "
            "earlier step=…, or schedule=linear"
        )
    if own_schedule and request.lr is not None:
        raise UserError(
            "schedule=own has the rates of the run: leave out lr=, or give schedule=linear"
        )
    if own_schedule and request.steps is not None and request.steps > left:
        raise UserError(
            f"steps={request.steps}: the run has {counted(left, 'step')} left after step {step}"
        )
    if request.steps is not None:
        steps = request.steps
    elif own_schedule:
        steps = left
    else:
        steps = 24
    if request.lr is None:
        lr = learning_rate(config, min(step, config.train.steps - 1))
    else:
        lr = request.lr
    with user_errors(ValueError):
        return ForkSettings(
            steps=steps,
            schedule=request.schedule,
            lr=lr,
            batches=config.eval.batches if request.batches is None else request.batches,
        )


class Forks:
    """The forks of the candidates at one checkpoint, made where its record lacks them."""

    def __init__(self, request: RankRequest, base: Base, record: StudyRecord) -> None:
        self.request = request
        self.base = base
        self.record = record
        self.threads = self._threads(request.processes)

    def _threads(self, processes: int) -> int:
        """The threads of each process; a ranking that goes on keeps those that it began with."""
        now = max(1, torch.get_num_threads() // processes)
        if _THREADS not in self.record:
            self.record.add(_THREADS, {_THREADS: now})
        recorded = int(self.record[_THREADS][_THREADS])
        if recorded != now:
            _log.info(
                "threads: %d in each process, as the ranking began, so that its numbers stay "
                "the same",
                recorded,
            )
        return recorded

    def of(self, key: str, count: int) -> list[Fork | None]:
        """The first `count` forks of a candidate; None for one that is not recorded."""
        keys = [f"{key}/{number}" for number in range(count)]
        return [
            Fork(**self.record[fork_key]) if fork_key in self.record else None for fork_key in keys
        ]

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
        with ExitStack() as stack:
            for (index, number), fork in self._run(jobs, stack):
                branch = self.base.branches[index]
                self.record.add(f"{branch.key}/{number}", asdict(fork))
                done += 1
                # no loss: that would be a look
                ended = ", diverged" if fork.recipe is None else ""
                where = "" if self.base.subject else f"{self.base.title}: "
                shown(done, most, f"{where}{branch.candidate.name}, seed {number}{ended}")

    def _run(self, jobs: Sequence[Job], stack: ExitStack) -> Iterator[tuple[Job, Fork]]:
        if not jobs:
            return iter(())
        base = self.base
        request = self.request
        if request.processes > 1:
            count = min(request.processes, len(jobs))
            return stack.enter_context(Pool(base, request, self.threads, count)).run(jobs)
        subject = base.subject or open_checkpoint(base.source, base.step, request.paths)
        return here(subject, base.branches, base.settings, self.threads, jobs)


def rank(request: RankRequest) -> tuple[Ranking, list[Path]]:
    """Make the forks that the records lack; the ranking, and the folders that it belongs to: one of
    each checkpoint.

    Raises:
        UserError: there is no such checkpoint or option, nothing to rank, or the reference
            diverged.
    """
    bases = _distinct(open_bases(request))
    with ExitStack() as stack:
        folders = [_folder(base, request.out, alone=len(bases) == 1) for base in bases]
        records = {
            base.mark: stack.enter_context(open_record(folder, base.identity, base.step))
            for base, folder in zip(bases, folders, strict=True)
        }
        forks = [Forks(request, base, records[base.mark]) for base in bases]
        count = max(request.forks, min(base_forks.recorded for base_forks in forks))
        looks = Looks(records, [base.branches[0].key for base in bases])
        _make(forks, count)
        ranking = _ranking(request, forks, count, looks)
    if request.out is not None:
        folders = [request.out]
    return ranking, folders


def _folder(base: Base, out: Path | None, *, alone: bool) -> Path:
    if out is None:
        return base.folder
    if alone:
        return out
    return out / f"{base.source.name}-{base.step}-{base.mark}"


def _make(forks: Sequence[Forks], count: int) -> None:
    jobs = [base_forks.missing(count) for base_forks in forks]
    most = count * sum(len(base_forks.base.branches) for base_forks in forks)
    done = most - sum(map(len, jobs))
    with study_progress("fork") as shown:
        shown(done, most)
        for base_forks, mine in zip(forks, jobs, strict=True):
            base_forks.make(mine, shown, done, most)
            done += len(mine)


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
