"""`fp4train [train] key=value…`: train a run, or go on with it."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from fp4train.cli.launch import launch, settings
from fp4train.config.schema import Config, to_config
from fp4train.errors import UserError
from fp4train.run import directory as run_directory
from fp4train.track.config import METRICS

if TYPE_CHECKING:
    from fp4train.train import Result

_log = logging.getLogger("fp4train")


def main(arguments: list[str]) -> int:
    """Train; returns the exit code."""
    return launch(arguments, _train)


def _train(cfg: DictConfig) -> int:
    from fp4train.precision.report import summarise
    from fp4train.run.advice import before_cooldown, rate_jump
    from fp4train.run.build import build
    from fp4train.run.determinism import determinism
    from fp4train.run.gpu import explain
    from fp4train.run.host import keep_freed_memory
    from fp4train.run.resume import find_start
    from fp4train.train import train

    keep_freed_memory()
    chosen, swap = settings(cfg)
    config = to_config(chosen)
    directory = config.run.dir
    with run_directory.locked(directory), determinism(config.train.deterministic):
        start = find_start(config, chosen)
        if start is not None and start.step >= config.train.steps:
            print(_finished(config, start.path.parent.parent, start.step))
            return 0
        before = None if start is None else to_config(run_directory.read_config(start.path.parent.parent))
        run = build(config, chosen, start, swap)
        code = 1
        try:
            _log.info("%s: %s", directory, run.description)
            _log.info("%s\nevery layer and GEMM: %s\n", summarise(run.plan), directory / run_directory.PLAN)
            if start is not None:
                _log.info("going on from step %d of %s", run.step, start.path.parent.parent)
            if start is not None and before is not None and (jump := rate_jump(before, config, run.step)):
                _log.warning("%s; %s", jump, before_cooldown(start.path.parent.parent, before))
            try:
                result = train(run)
            except (RuntimeError, MemoryError) as error:
                if (text := explain(error, run)) is None:
                    raise
                raise UserError(text) from error
            code = 128 + result.signal if result.signal is not None else 0 if result.saved else 1
        finally:
            run.tracker.finish(code)
            picture = _draw(directory)
    print(_summary(directory, result) + picture)
    return code


def _finished(config: Config, run: Path, step: int) -> str:
    """What can be done with a run that has done its steps, and what its learning rate would do."""
    from fp4train.run.advice import before_cooldown, learning_rate

    text = (
        f"{run} is finished: {step} steps are done. resume={run} train.steps=… goes on, "
        "run.name=… starts another run, run.overwrite=true this one again"
    )
    cooldown = config.schedule.cooldown_start(config.train.steps)
    if cooldown is None or step <= cooldown:
        return text
    last = learning_rate(config, step - 1)
    text += f". Its cooldown has brought the learning rate down to {last:.3g}; more steps begin near "
    return f"{text}{config.optim.lr:.3g} again; {before_cooldown(run, config)}"


def _draw(directory: Path) -> str:
    """Draw the curves of a run that has some; a failure to draw them does not change the exit code."""
    from fp4train.analysis.curves import draw_curves

    if not (directory / METRICS).exists():
        return "; no curves, because track=none keeps no metrics"
    try:
        return f"; {draw_curves(directory)}"
    except (UserError, OSError) as error:
        return f"; no curves ({error})"


def _summary(directory: Path, result: Result) -> str:
    names = {"train/loss": "train loss", "val/loss": "val loss", "val/loss_recipe": "in the recipe"}
    losses = ", ".join(f"{name} {float(result.metrics[k]):.4f}" for k, name in names.items() if k in result.metrics)
    ended = "done" if result.saved else "done, but its end is not saved"
    if result.signal is not None:
        name = signal.Signals(result.signal).name
        last = f"resume={directory} goes on" if result.saved else "but its end is not saved"
        ended = f"stopped by {name}, {last}"
    return f"{directory}: step {result.step}, {ended}; {losses}; {result.seconds:.0f} s"
