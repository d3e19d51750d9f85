"""What a command starts from, and the origin of its run: whether its directory and the run that it
goes on with are of the same configuration, and from which checkpoint. Nothing is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fp4train import checkpoint
from fp4train.checkpoint import ALONE, Checkpoint, CheckpointGroup
from fp4train.config import Config, plain, to_config
from fp4train.config.binding import differing_keys, unknown_keys
from fp4train.errors import OtherRunError, UserError
from fp4train.keys import MayDiffer, in_sections
from fp4train.parallel.world import World
from fp4train.run.checks import check_cut
from fp4train.run.host import free_memory
from fp4train.run.initial import open_init
from fp4train.run.origin import Branched, Fresh, Init, Origin, Resume, Rewound
from fp4train.run.record import directory as run_directory, journal
from fp4train.run.record.journal import RecipeChoice
from fp4train.run.supervise.loss_history import Rewind
from fp4train.text import typed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Command:
    """The configuration that a command starts from.

    Args:
        config: the typed configuration.
        cfg: the plain configuration, to be kept with the run.
        saved: configuration that RUN of resume=RUN holds, as it was read; None: there is no such
            run, or it was not read.
        swap: recipe that a resumed run swaps to; None: it keeps its own.
        named: the keys that the command line gives.
        point: overrides of this job of a sweep that its other jobs do not share.
    """

    config: Config
    cfg: DictConfig
    saved: Mapping[str, Any] | None = None
    swap: RecipeChoice | None = None
    named: Collection[str] = ()
    point: str = ""

    @classmethod
    def of(cls, cfg: DictConfig, saved: Mapping[str, Any] | None = None) -> Command:
        """The command that a composed configuration is.

        Raises:
            UserError: see `to_config`.
        """
        return cls(config=to_config(cfg), cfg=cfg, saved=saved)


def find_origin(command: Command, world: World) -> Origin:
    """How the run of a command begins, on every rank.

    Raises:
        UserError: see `find_checkpoint`, `check_cut` and `new_origin`.
    """
    config = command.config
    start = find_checkpoint(command, world)
    if start is None:
        with world.same_outcome():
            check_cut(config, world.mesh)  # before weights are read, which takes long
            return new_origin(command, world.ranks)
    kind = Resume if start.run.resolve() == config.run.dir.resolve() else Branched
    return kind(
        config=config,
        cfg=command.cfg,
        checkpoint=start,
        swap=command.swap,
        other_data="data" in command.named and kind is Branched,
    )


def new_origin(command: Command, ranks: CheckpointGroup = ALONE) -> Origin:
    """How a run begins at step 0.

    Raises:
        UserError: the weights of `config.init` cannot be opened.
    """
    weights = open_init(command.config, ranks)
    if weights is None:
        return Fresh(config=command.config, cfg=command.cfg)
    return Init(config=command.config, cfg=command.cfg, weights=weights)


def find_rewound(origin: Origin, world: World, rewind: Rewind) -> Rewound:
    """How a run that began as `origin` goes on after its loss diverged.

    Raises:
        UserError: see `find_checkpoint`.
    """
    run = replace(origin.config.run, overwrite=False)
    config = replace(origin.config, resume=str(run.dir), resume_step=rewind.step, run=run)
    start = find_checkpoint(Command(config=config, cfg=origin.cfg), world)
    assert start is not None
    return Rewound(config=config, cfg=origin.cfg, checkpoint=start, rewind=rewind)


def find_checkpoint(command: Command, world: World) -> Checkpoint | None:
    """The checkpoint to go on from, the lead's choice on every rank; None starts at step 0. Nothing
    is changed yet.

    Raises:
        UserError: see `find_source`; or no checkpoint is usable.
    """
    chosen = None
    with world.same_outcome():
        if world.lead and (source := find_source(command)) is not None:
            chosen = (source, _chosen_step(command.config, source))
    chosen = world.broadcast(chosen)
    if chosen is None:
        return None
    run, step = chosen
    with world.same_outcome():
        room = (free_memory() or 0) // 2 // world.place.local_size
        return checkpoint.load(run / run_directory.CHECKPOINTS, step, ranks=world.ranks, room=room)


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
    resumed = config.resumed
    if resumed is None or resumed.path.resolve() != source.resolve():
        return None
    return resumed.step


def find_source(command: Command) -> Path | None:
    """The run directory whose checkpoints the run goes on from; None where it starts at step 0.
    Only looks.

    Raises:
        UserError: the run directory, or the run to resume, belongs to another configuration; or it
            has no checkpoint.
    """
    config = command.config
    directory = config.run.dir
    source = None if config.resumed is None else config.resumed.path
    if source is not None and source.resolve() == directory.resolve():
        if config.run.overwrite:
            raise UserError(
                f"resume={source} and run.overwrite=true contradict each other: leave one of them "
                "out"
            )
    elif _is_run(directory) and not config.run.overwrite:
        saved = plain(run_directory.read_config(directory))
        begun_from = saved.get("resume")
        if source is not None and Path(str(begun_from)).resolve() != source.resolve():
            raise UserError(
                f"{directory} holds a run already: choose another run.name for the branch of "
                f"{source}"
            )
        _check_same(saved, command.cfg, directory, resuming=source is not None)
        if _has_checkpoints(directory):
            return directory
        if source is None and begun_from:
            raise UserError(
                f"{directory} is a branch that has no checkpoint yet: add resume={typed(begun_from)}"
            )
    if source is None:
        return None
    other_data = "data" in command.named and source.resolve() != directory.resolve()
    check_source(source, command.cfg, command.saved, other_data=other_data)
    if not _has_checkpoints(source):
        raise UserError(f"resume={config.resume}: the run has no checkpoint yet")
    return source


def _is_run(directory: Path) -> bool:
    """Whether `directory` is that of a run.

    Raises:
        UserError: it holds results without their configuration.
    """
    if (directory / run_directory.CONFIG).is_file():
        return True
    kind = run_directory.kind_of_config(directory)
    if kind:
        without = (
            f"and its {run_directory.CONFIG} is {kind}, not a file: put the run's own back, or"
        )
    else:
        without = f"but no {run_directory.CONFIG}:"
    for name in run_directory.PARTS:
        if (directory / name).exists():
            raise UserError(
                f"{directory} holds {name} {without} choose another run.name or run.dir"
            )
    return False


def _has_checkpoints(run: Path) -> bool:
    return bool(checkpoint.steps(run / run_directory.CHECKPOINTS))


def check_source(
    source: Path,
    cfg: DictConfig,
    saved_config: Mapping[str, Any] | None = None,
    *,
    other_data: bool = False,
) -> None:
    """Refuse a configuration that is not one of the run in `source` with changes that a resume
    allows.

    Args:
        saved_config: the saved configuration of `source`; None: it is read here.
        other_data: whether the data may be others.

    Raises:
        UserError: it would be another run, or the saved configuration was edited to be one.
    """
    if saved_config is None:
        saved_config = plain(run_directory.read_config(source))
    _check_same(saved_config, cfg, source, resuming=True, besides="data" if other_data else "")


def _check_same(
    saved: Mapping[str, Any], cfg: DictConfig, run: Path, *, resuming: bool, besides: str = ""
) -> None:
    """Refuse where `cfg` differs from the configuration of `run` by more than may change, or that
    was edited.

    A missing key counts as its class's default: options that are newer than a saved run did not
    change it.

    Args:
        besides: a section that may differ besides.
    """
    use = MayDiffer.RESUMED if resuming else MayDiffer.REPEATED
    allowed = [*differing_keys(plain(cfg), Config, use), *([besides] if besides else [])]
    gone = set(unknown_keys(saved, Config))
    differences = {
        key: values
        for key, values in journal.changes(journal.flat(saved), journal.flat(plain(cfg))).items()
        if not in_sections(key, allowed)
    }
    changed = [
        f"{key}: {was} → {'no longer an option' if key in gone else now}"
        for key, (was, now) in differences.items()
    ]
    if changed:
        shown = "; ".join(changed[:4]) + ("; …" if len(changed) > 4 else "")
        if resuming:
            advice = "this would be another run"
        else:
            advice = (
                "choose another run.name, or run.overwrite=true to start over: "
                "run.name=NAME writes to runs/NAME"
            )
            if set(differences) == {"train.steps"}:
                before, steps = differences["train.steps"]
                if steps > before:
                    advice = f"resume={typed(run)} train.steps={steps} goes on to that step; else {advice}"
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
        if not in_sections(key, allowed):
            raise UserError(
                f"{path} was edited: {key} is {new}, the run was trained with {old}; put it back"
            )
        if chosen.get(key) == new:
            _log.warning(
                "%s was edited: %s: %s → %s; this is taken over and recorded", path, key, old, new
            )
