"""The start of a run, or its going on: from which checkpoint, whether its directory is of the same
configuration, and what is written: configuration, journal, metrics, plan. The lead writes it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fp4train import checkpoint
from fp4train.checkpoint import Checkpoint
from fp4train.config import Config, plain
from fp4train.config.binding import differing_keys, unknown_keys
from fp4train.errors import OtherRunError, UserError
from fp4train.keys import MayDiffer, lies_in
from fp4train.parallel.world import World
from fp4train.run.bits import differences
from fp4train.run.host import environment
from fp4train.run.initial import InitialWeights
from fp4train.run.record import directory as run_directory
from fp4train.run.record import journal
from fp4train.run.record.journal import Record
from fp4train.run.record.trust import config_text, lost_records, write_config
from fp4train.run.run import Run
from fp4train.run.supervise.loss_history import Rewind
from fp4train.sealed import CONFIG_LIMIT
from fp4train.text import printable
from fp4train.track import mend
from fp4train.track.config import METRICS
from fp4train.track.statistics import STATISTICS

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The state that a run begins with, or goes on with.

    Args:
        config: the typed configuration; cfg: the composed one, to be kept with the run.
        checkpoint: the checkpoint from which it goes on (`find_start`); None: step 0.
        swap: a recipe to change to there.
        rewind: why it goes on from there, if its loss diverged.
    """

    config: Config
    cfg: DictConfig
    checkpoint: Checkpoint | None = None
    swap: journal.RecipeChoice | None = None
    rewind: Rewind | None = None

    @cached_property
    def text(self) -> str:
        """The configuration as it is kept with the run."""
        return config_text(self.cfg)

    @property
    def source(self) -> Path:
        """The directory of the run that it goes on with; its own at step 0."""
        if self.checkpoint is None:
            return self.config.run.dir
        return self.checkpoint.path.parent.parent

    @property
    def branching(self) -> bool:
        """Whether it goes on with another run's checkpoint."""
        return self.source.resolve() != self.config.run.dir.resolve()


# -- from where ------------------------------------------------------------------------------------


def find_start(
    config: Config, cfg: DictConfig, world: World, saved_config: Mapping[str, Any] | None = None
) -> Checkpoint | None:
    """The checkpoint to go on from, the lead's choice on every rank; None starts at step 0. Nothing
    is changed yet.

    Args:
        saved_config: see `find_source`.

    Raises:
        UserError: see `find_source`; or no checkpoint is usable.
    """
    with world.together():
        if world.lead:
            source = find_source(config, cfg, saved_config)
        else:
            source = None
        if source is None:
            chosen = None
        else:
            chosen = (source, _chosen_step(config, source))
    if (chosen := world.of_lead(chosen)) is None:
        return None
    with world.together():
        return checkpoint.load(chosen[0] / run_directory.CHECKPOINTS, chosen[1], ranks=world.ranks)


def start_step(config: Config, source: Path) -> int:
    """The step that a run goes on from, by the names of the checkpoints of `source` alone.

    Raises:
        UserError: `resume_step` names no checkpoint.
    """
    have = checkpoint.steps(source / run_directory.CHECKPOINTS)
    chosen = _chosen_step(config, source)
    if chosen is not None and chosen not in have:
        raise UserError(
            f"resume_step={chosen}: {source} has no such checkpoint; it has "
            f"{', '.join(map(str, have))}"
        )
    return have[-1] if chosen is None else chosen


def _chosen_step(config: Config, source: Path) -> int | None:
    """`resume_step`, where it is about `source`: a branch that has checkpoints of its own goes on
    from its newest.
    """
    if config.resume and Path(config.resume).resolve() == source.resolve():
        return config.resume_step
    return None


def find_source(
    config: Config, cfg: DictConfig, saved_config: Mapping[str, Any] | None = None
) -> Path | None:
    """The run directory whose checkpoints the run goes on from; None where it starts at step 0.
    Only looks.

    Args:
        saved_config: the saved configuration of `config.resume`, where the command has read it;
            None: it is read here.

    Raises:
        UserError: the run directory, or the run to resume, belongs to another configuration; or it
            has no checkpoint.
    """
    directory = config.run.dir
    source = Path(config.resume) if config.resume else directory
    branching = source.resolve() != directory.resolve()
    if config.run.overwrite and config.resume and not branching:
        raise UserError(
            f"resume={source} and run.overwrite=true contradict each other: leave one of them out"
        )
    is_run = (directory / run_directory.CONFIG).is_file()
    if not is_run and (
        strange := [name for name in run_directory.PARTS if (directory / name).exists()]
    ):
        raise UserError(
            f"{directory} holds {strange[0]} but no {run_directory.CONFIG}: choose another "
            "run.name or run.dir"
        )
    if config.run.overwrite and not branching:
        return None
    if is_run and not config.run.overwrite:
        saved = _saved(directory, None if branching else saved_config)
        if branching and Path(str(saved.get("resume"))).resolve() != source.resolve():
            raise UserError(
                f"{directory} holds a run already: choose another run.name for the branch of "
                f"{source}"
            )
        _check_same(saved, cfg, directory, resuming=bool(config.resume))
        if checkpoint.steps(directory / run_directory.CHECKPOINTS):
            return directory
        if not config.resume and saved.get("resume"):
            raise UserError(
                f"{directory} is a branch that has no checkpoint yet: add resume={saved['resume']}"
            )
    if config.resume is None:
        return None
    check_source(source, cfg, saved_config)
    if not checkpoint.steps(source / run_directory.CHECKPOINTS):
        raise UserError(f"resume={config.resume}: the run has no checkpoint yet")
    return source


def _saved(run: Path, saved_config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if saved_config is None:
        return plain(run_directory.read_config(run))
    return saved_config


def check_source(
    source: Path, cfg: DictConfig, saved_config: Mapping[str, Any] | None = None
) -> None:
    """Refuse a configuration that is not one of the run in `source` with changes that a resume
    allows.

    Args:
        saved_config: the saved configuration of `source`; None: it is read here.

    Raises:
        UserError: it would be another run, or the saved configuration was edited to be one.
    """
    _check_same(_saved(source, saved_config), cfg, source, resuming=True)


def _check_same(saved: Mapping[str, Any], cfg: DictConfig, run: Path, *, resuming: bool) -> None:
    """Refuse where `cfg` differs from the configuration of `run` by more than may change, or that
    was edited.

    A missing key counts as its class's default: options that are newer than a saved run did not
    change it.
    """
    use = MayDiffer.RESUMED if resuming else MayDiffer.REPEATED
    allowed = differing_keys(plain(cfg), Config, use)
    gone = set(unknown_keys(saved, Config))
    changed = [
        f"{key}: {was} → {'no longer an option' if key in gone else now}"
        for key, (was, now) in journal.changes(
            journal.flat(saved), journal.flat(plain(cfg))
        ).items()
        if not lies_in(key, allowed)
    ]
    if changed:
        shown = "; ".join(changed[:4]) + ("; …" if len(changed) > 4 else "")
        advice = (
            "this would be another run"
            if resuming
            else "choose another run.name, or run.overwrite=true to start over: "
            "run.name=NAME writes to runs/NAME"
        )
        message = f"{run} belongs to another configuration ({shown}): {advice}"
        raise UserError(message) if resuming else OtherRunError(message)
    _check_edits(run, saved, journal.flat(plain(cfg)))


def _check_edits(run: Path, saved: Mapping[str, Any], chosen: Mapping[str, Any]) -> None:
    """Refuse a config.yaml that somebody edited where that would make it another run; report other
    edits, unless the configuration that goes on has another value there.

    Args:
        chosen: the configuration that goes on, by full keys.
    """
    recorded = journal.configuration(journal.read_journal(run))
    if recorded is None:
        if run_directory.identity(run) is not None:
            missing = run / run_directory.HISTORY
            _log.warning(
                "%s is missing or empty: what ran before is not on record, and edits are not "
                "noticed",
                missing,
            )
        return
    edits = journal.changes(recorded, journal.flat(saved))
    path = run / run_directory.CONFIG
    allowed = differing_keys(saved, Config, MayDiffer.RESUMED)
    for key, (old, new) in edits.items():
        if not lies_in(key, allowed):
            raise UserError(
                f"{path} was edited: {key} is {new}, the run was trained with {old}; put it back"
            )
        if chosen.get(key) == new:
            _log.warning(
                "%s was edited: %s: %s → %s; this is taken over and recorded", path, key, old, new
            )


# -- what is written -------------------------------------------------------------------------------


def begin(run: Run, begun: RunStart, init: InitialWeights | None) -> None:
    """Write that the run begins or goes on: configuration, journal, metrics.

    Args:
        init: the weights that it begins with.
    """
    directory = run.directory
    source = begun.source
    start = begun.checkpoint
    swap = begun.swap
    rewind = begun.rewind
    records = journal.read_journal(source)
    swapped = journal.swaps(records)
    write_config(directory, begun.cfg, begun.text, run.identity)
    run.saved_config = run.folder.read(run_directory.CONFIG, CONFIG_LIMIT)
    if begun.branching:
        unrecorded = run.folder.status(run_directory.HISTORY) is None
        run_directory.copy_files(
            source,
            directory,
            (METRICS, STATISTICS, *((run_directory.HISTORY,) if unrecorded else ())),
        )
    run.journal = journal.Journal.read(run.folder, run.identity)
    for at in run.journal.set_swaps(swapped, run.step):
        _log.warning(
            "%s: the swap at step %d is not on record: taken over",
            source / run_directory.HISTORY,
            at,
        )
    record = _start_record(begun, init, records)
    if start is not None:
        for at in (swap["step"] for swap in swapped if swap["step"] > start.step):
            _log.warning(
                "the swap at step %d, asked for earlier, stays; fp4train swap %s lists swaps",
                at,
                directory,
            )
        if swap is not None:
            record |= {"name": swap.name, "at": start.step, "recipe": swap.recipe}
    if rewind is not None:
        record |= {"event": "rewind", **rewind.record}
    warnings = list[str]()
    lost = list[str]()
    if start is None:
        run.folder.remove(METRICS)
        run.folder.remove(STATISTICS)
    else:
        if not begun.branching:
            run.saver.saved, run.saver.good = start.step, start.state.get("good")  # type: ignore[assignment]
        lost = list(lost_records(run.folder, start.state, run.journal.records).values())
        warnings = mend(directory / METRICS, start.step, start.state.get("metrics"))  # type: ignore[arg-type]
    ran_on = environment(run.device, run.fingerprint, run.world.size)
    if start is not None:
        _say_other_bits(records, ran_on, on_cpu=run.device.type == "cpu")
    run.journal.add(**record, plan=run.plan, environment=ran_on)
    run.journal.write()
    run.swaps = journal.swaps(run.journal.records)
    run.tracker = run.config.track.build(
        directory,
        run.config.run.name,
        plain(begun.cfg),
        resume_step=None if start is None else start.step,
    )
    if start is not None:
        for what in (*(f"{directory / METRICS}: {warning}" for warning in warnings), *lost):
            _log.warning("%s", what)
        if warnings or lost:
            run.tracker.log_event(start.step + 1, "metrics mended", {"found": [*warnings, *lost]})
        changed = {key: f"{old} → {new}" for key, (old, new) in record.get("changed", {}).items()}
        run.tracker.log_event(
            start.step + 1,
            "resume",
            {"from": start.path.name, **({"changed": changed} if changed else {})},
        )
        if rewind is not None:
            run.tracker.log_event(start.step + 1, "rewind", rewind.record)
        if swap is not None:
            run.tracker.log_event(start.step + 1, "swap", {"recipe": swap.name, "at": start.step})
    elif init is not None:
        run.tracker.log_event(1, "init", {"from": str(init.path)})


def _say_other_bits(records: Sequence[Record], now: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Warn where what ran last had threads, a processor or libraries with which sums have another
    order.
    """
    ran_on = [
        environment
        for record in records
        if isinstance(environment := record.values.get("environment"), dict)
    ]
    if not ran_on or not (changed := differences(ran_on[-1], now, on_cpu=on_cpu)):
        return
    threads = ran_on[-1].get("threads")
    if any(c.startswith("threads ") for c in changed):
        cure = f"; train.threads={threads} keeps the threads"
    else:
        cure = ""
    _log.warning(
        "the run goes on, and not in the same bits as without a stop: %s%s",
        ", ".join(changed),
        cure,
    )


def abandon_later(run: Run, *, even_if_none: bool = False) -> None:
    """Write the state that the run goes on from anew, which removes the checkpoints of later steps.

    None of them must be found as the newest.

    Args:
        even_if_none: the state is another than that of its checkpoint.

    Raises:
        UserError: it could not be written.
    """
    newest = run.world.of_lead(
        checkpoint.steps(run.directory / run_directory.CHECKPOINTS)[-1] if run.world.lead else 0
    )
    if not even_if_none:
        if newest <= run.step:
            return
        _log.warning(
            "steps %d–%d are abandoned; run.name=… would have kept them", run.step, newest - 1
        )
    begun = run.saver.begin(proven=True)
    with run.world.together():
        if not run.world.lead:
            return
        run.saver.wait()
        outcomes = run.saver.outcomes()
        if not begun or not outcomes or not outcomes[-1].written:
            why = next(
                (o.problem or f"{o.bad} is not finite" for o in reversed(outcomes)),
                "it is not written in time",
            )
            run.saver.close()
            raise UserError(f"resume_step={run.step}: the later steps cannot be abandoned: {why}")


def _start_record(
    begun: RunStart, init: InitialWeights | None, records: Sequence[Record]
) -> dict[str, Any]:
    """Record of this start for the journal: event, step, origin, changes since `records`, which are
    logged.
    """
    cfg = plain(begun.cfg)
    start = begun.checkpoint
    if start is None:
        record: dict[str, Any] = {
            "event": "start" if init is None else "init",
            "step": 0,
            "config": cfg,
        }
        if init is None:
            return record
        return record | {"from": str(init.path)}
    record = {"event": "resume", "step": start.step, "from": start.path.name}
    if begun.branching:
        record |= {"event": "branch", "from": str(start.path)}
    earlier_config = journal.configuration(records)
    if earlier_config is None:
        return record | {"config": cfg}
    changed = journal.changes(earlier_config, journal.flat(cfg))
    for key, (old, new) in changed.items():
        if key not in ("run.name", "run.dir"):
            _log.info("changed: %s: %s → %s", key, old, new)
    return record | {"changed": changed}


def write_plan(directory: Path, records: Sequence[Record], gathers: Sequence[str]) -> None:
    """Keep the plan with the run, the past and the rest as the journal has them.

    Args:
        gathers: sentences about the weights that ranks send each other.
    """
    try:
        text = "\n\n".join((journal.plan_text(records), *gathers))
        run_directory.write_text(directory / run_directory.PLAN, printable(text) + "\n")
    except UserError as error:  # a copy for reading: not worth the run
        _log.warning("%s", error)
