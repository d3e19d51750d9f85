"""`fp4train swap RUN recipe=NAME [at=STEP]`: change the recipe of a run, at once if it is running."""

from __future__ import annotations

from pathlib import Path

from fp4train import checkpoint
from fp4train.config import overrides, plugins
from fp4train.config.binding import bind
from fp4train.config.schema import plain
from fp4train.errors import UserError
from fp4train.precision import Recipe
from fp4train.run import directory as run_directory
from fp4train.run.swaps import request_swap


def main(arguments: list[str]) -> int:
    """Leave a request in the run's directory; returns the exit code."""
    flags, words = overrides.flags_and_words(arguments)
    folders, strange = overrides.own_folders(flags), overrides.other_flags(flags)
    if strange:
        raise UserError(f"swap knows no flag {strange[0]}, only --config-dir FOLDER, where recipes of your own are")
    # The directories of a sweep have the swept value in their names: runs/a-microbatch=2.
    paths = [a for a in words if "=" not in a or Path(a).is_dir()]
    rest = [a for a in words if a not in paths]
    if len(paths) != 1:
        raise UserError(
            "swap needs one run directory: fp4train swap RUN recipe=NAME [at=STEP]"
            + (f", not {' '.join(arguments)}" if arguments else "")
        )
    run = run_directory.require_run(Path(paths[0]))
    at = next((a.partition("=")[2] for a in rest if a.startswith("at=")), None)
    if at is not None and not at.isdecimal():
        raise UserError(f"at={at!r} must be a step (an integer ≥ 0)")
    wanted = [a for a in rest if not a.startswith("at=")]
    names = [a.partition("=")[2] for a in wanted if a.startswith("recipe=")]
    if len(names) != 1:
        raise UserError("swap needs recipe=NAME, once")
    others = [a for a in wanted if not a.startswith(("recipe=", "recipe.", "plugins="))]
    if others:
        raise UserError(f"swap changes the recipe only, not {others[0]!r}")
    overrides.check([*flags, *wanted])
    recipe = plain(overrides.compose(wanted, folders).recipe)
    with plugins.using(overrides.plugins(wanted), folders):
        bind(recipe, Recipe, "recipe")
        steps = run_directory.read_config(run).train.steps
    done = max(checkpoint.steps(run / run_directory.CHECKPOINTS), default=0)
    if at is not None and int(at) >= steps:
        raise UserError(f"at={at} is beyond the end: {run} has {steps} steps")
    if at is not None and int(at) < done:
        raise UserError(f"at={at} is past: {run} has done {done} steps")
    request_swap(run, recipe, names[0], None if at is None else int(at))
    when = "at the next step" if at is None else f"at step {at}"
    running = ""
    if not run_directory.is_running(run):
        more = " train.steps=…" if done >= steps else ""
        running = f"; no process trains in {run} now, it is picked up on resume={run}{more}"
    print(f"{run}: recipe {names[0]} {when}{running}")
    return 0
