"""Subjects as tests open them, without a command line."""

from dataclasses import replace
from pathlib import Path

from fp4train.lab.studies import Subject, open_subject
from fp4train.precision import LayerPolicy
from fp4train.run.find import Command
from fp4train.run.record import directory as run_directory


def subject_of(
    run: Path,
    *,
    step: int | None = None,
    fresh: bool = False,
    optimizer: bool = False,
    policy: LayerPolicy | None = None,
) -> Subject:
    """The checkpoint of a run; `policy` replaces that of the run."""
    cfg = run_directory.read_config(run)
    cfg.resume, cfg.resume_step, cfg.run.dir = str(run), step, str(run)
    command = Command.of(cfg)
    if policy is not None:
        command = replace(command, config=replace(command.config, policy=policy))
    return open_subject(command, fresh=fresh, optimizer=optimizer)
