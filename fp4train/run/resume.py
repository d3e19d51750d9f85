"""Which checkpoint a run goes on from, and whether its directory belongs to the same configuration."""

from __future__ import annotations

import logging
from pathlib import Path

from omegaconf import DictConfig

from fp4train import checkpoint
from fp4train.config import Config, plain
from fp4train.config.binding import complete, flattened, unknown_keys
from fp4train.errors import UserError
from fp4train.parallel.config import DROPPED, why_absent
from fp4train.parallel.world import World
from fp4train.run.record import directory as run_directory
from fp4train.run.record import journal

_log = logging.getLogger(__name__)


def find_start(config: Config, cfg: DictConfig, world: World) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from, the lead's choice on every rank; None starts at step 0. Nothing is changed yet.

    Raises:
        UserError: as `find_source`, or no checkpoint is usable.
    """
    with world.together():
        source = find_source(config, cfg) if world.lead else None
        chosen = None if source is None else (source, _chosen_step(config, source))
    if (chosen := world.of_lead(chosen)) is None:
        return None
    with world.together():
        found = checkpoint.load(chosen[0] / run_directory.CHECKPOINTS, chosen[1], ranks=world.ranks)
    for path, reason in found.skipped:
        _log.warning("checkpoint %s cannot be used (%s); going on from step %d", path.name, reason, found.step)
    return found


def start_step(config: Config, source: Path) -> int:
    """The step that a run goes on from, by the names of the checkpoints of `source` alone.

    Raises:
        UserError: `resume_step` names no checkpoint.
    """
    have, wanted = checkpoint.steps(source / run_directory.CHECKPOINTS), _chosen_step(config, source)
    if wanted is not None and wanted not in have:
        raise UserError(f"resume_step={wanted}: {source} has no such checkpoint; it has {', '.join(map(str, have))}")
    return have[-1] if wanted is None else wanted


def _chosen_step(config: Config, source: Path) -> int | None:
    """`resume_step`, where it is about `source`: a branch that has checkpoints of its own goes on from its newest."""
    return config.resume_step if config.resume and Path(config.resume).resolve() == source.resolve() else None


def find_source(config: Config, cfg: DictConfig) -> Path | None:
    """The run directory whose checkpoints the run goes on from; None where it starts at step 0. Only looks.

    Raises:
        UserError: the run directory, or the run to resume, belongs to another configuration; or it has no checkpoint.
    """
    directory = config.run.dir
    source = Path(config.resume) if config.resume else directory
    branching = source.resolve() != directory.resolve()
    if config.run.overwrite and config.resume and not branching:
        raise UserError(f"resume={source} and run.overwrite=true contradict each other: leave one of them out")
    held = (directory / run_directory.CONFIG).is_file()
    if not held and (strange := [name for name in run_directory.PARTS if (directory / name).exists()]):
        raise UserError(
            f"{directory} holds {strange[0]} but no {run_directory.CONFIG}: choose another run.name or run.dir"
        )
    if config.run.overwrite and not branching:
        return None
    if held and not config.run.overwrite:
        saved = run_directory.read_config(directory)
        if branching and Path(str(saved.get("resume"))).resolve() != source.resolve():
            raise UserError(f"{directory} holds a run already: choose another run.name for the branch of {source}")
        _check_same(saved, cfg, directory, resuming=bool(config.resume))
        _check_edits(directory, saved)
        if checkpoint.steps(directory / run_directory.CHECKPOINTS):
            return directory
        if not config.resume and saved.get("resume"):
            raise UserError(f"{directory} is a branch that has no checkpoint yet: add resume={saved.resume}")
    if config.resume is None:
        return None
    check_source(source, cfg)
    if not checkpoint.steps(source / run_directory.CHECKPOINTS):
        raise UserError(f"resume={config.resume}: the run has no checkpoint yet")
    return source


def check_source(source: Path, cfg: DictConfig) -> None:
    """Refuse a configuration that is not one of the run in `source` with changes that a resume allows.

    Raises:
        UserError: it would be another run, or the saved configuration was edited to be one.
    """
    saved = run_directory.read_config(source)
    _check_same(saved, cfg, source, resuming=True)
    _check_edits(source, saved)


def _check_same(saved: DictConfig, cfg: DictConfig, run: Path, *, resuming: bool) -> None:
    changed = _differences(saved, cfg, run_directory.RESUMED if resuming else run_directory.CONTINUED)
    if changed:
        shown = "; ".join(changed[:4]) + ("; …" if len(changed) > 4 else "")
        advice = (
            "this would be another run" if resuming else "choose another run.name, or run.overwrite=true to start over"
        )
        raise UserError(f"{run} belongs to another configuration ({shown}): {advice}")


def _differences(old: DictConfig, new: DictConfig, allowed: tuple[str, ...]) -> list[str]:
    """The differences between two configurations, as "key: old → new", without keys that start with one of `allowed`.

    A missing key counts as its class's default: options that are newer than a saved run did not change it.
    """
    a, b = (flattened(complete(plain(each), Config)) for each in (old, new))
    keys = [k for k in {**a, **b} if a.get(k) != b.get(k) and not k.startswith(allowed)]
    gone = set(unknown_keys(plain(old), Config))
    return [f"{k}: {a.get(k)} → {'no longer an option' if k in gone else b.get(k)}" for k in keys]


def _check_edits(run: Path, saved: DictConfig) -> None:
    """Refuse a config.yaml that somebody edited where that would make it another run; report other edits."""
    recorded = journal.configuration(journal.read_journal(run))
    if recorded is None:
        if run_directory.identity(run) is not None:
            missing = run / run_directory.HISTORY
            _log.warning("%s is missing or empty: what ran before is not on record, and edits are not noticed", missing)
        return
    edits = journal.changes(recorded, journal.flat(plain(saved)))
    path = run / run_directory.CONFIG
    for key, (old, new) in edits.items():
        if (name := key.removeprefix("parallel.")) in DROPPED:
            _log.warning("%s: %s=%s is dropped: %s", path, key, old, why_absent(name))
            continue
        if not key.startswith(run_directory.RESUMED):
            raise UserError(f"{path} was edited: {key} is {new}, the run was trained with {old}; put it back")
        _log.warning("%s was edited: %s: %s → %s; this is taken over and recorded", path, key, old, new)
