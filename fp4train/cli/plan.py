"""`fp4train plan key=value…`: which precision every GEMM of a run would have, and why; trains nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig

from fp4train import checkpoint
from fp4train.cli.launch import launch, settings
from fp4train.config.schema import Config, to_config
from fp4train.errors import UserError
from fp4train.precision import Timeline
from fp4train.run import directory as run_directory
from fp4train.run.swaps import as_swap

if TYPE_CHECKING:
    from fp4train.hardware import Gpu
    from fp4train.precision.plan import Plan


def main(arguments: list[str]) -> int:
    """Print the plan; returns the exit code."""
    return launch(arguments, _plan)


def _plan(cfg: DictConfig) -> int:
    from fp4train.data.vocabulary import planned_vocab_size
    from fp4train.hardware import find_gpu
    from fp4train.run.build import build_model, build_plan, build_timeline, choose_device, find_source, with_swap

    chosen, swap = settings(cfg)
    config = to_config(chosen)
    try:
        gpu = find_gpu(config.gpu) if config.gpu else None
    except ValueError as error:
        raise UserError(str(error)) from error
    source = find_source(config, chosen) if config.resume else None
    timeline = build_timeline(config, source)
    if source is not None and swap is not None:
        done = checkpoint.steps(source / run_directory.CHECKPOINTS)
        timeline = with_swap(timeline, as_swap(done[-1], swap[1], swap[0]))
    model = build_model(config, planned_vocab_size(config.data), torch.device("meta"))
    plan = build_plan(config, model, timeline, choose_device(config.device))
    print(config.recipe, plan.render(), sep="\n\n")
    if gpu is not None:
        print("", _estimate(config, plan, timeline, gpu), sep="\n")
    return 0


def _estimate(config: Config, plan: Plan, timeline: Timeline, gpu: Gpu) -> str:
    """The time that the plan's GEMMs would take on `gpu`."""
    from fp4train.costs.estimate import estimate

    microbatches = config.train.batch_size // (config.train.microbatch or config.train.batch_size)
    cost = estimate(
        plan, gpu, timeline=timeline, policy=config.policy, microbatches=microbatches, backend=config.backend
    )
    return cost.render()
