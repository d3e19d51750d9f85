"""`fp4train plan key=value… [full=true]`: what every GEMM of a run would run in, and why; trains nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig

from fp4train import checkpoint
from fp4train.cli.launch import launch, settings
from fp4train.config.schema import Config, to_config
from fp4train.errors import UserError
from fp4train.hardware import Device
from fp4train.precision.report import render, summarise
from fp4train.run import directory as run_directory
from fp4train.run.swaps import as_swap

if TYPE_CHECKING:
    from fp4train.hardware import Gpu
    from fp4train.precision.plan import Plan

FULL = {"full=true": True, "full=false": False}


def main(arguments: list[str]) -> int:
    """Print the plan, folded to a screen or, with full=true, with a row per GEMM; returns the exit code."""
    wanted = [a for a in arguments if a.startswith("full=")]
    if wrong := [a for a in wanted if a.lower() not in FULL]:
        raise UserError(f"{wrong[0]}: full=true lists every layer and GEMM, full=false folds equal ones")
    full = any(FULL[a.lower()] for a in wanted)
    return launch([a for a in arguments if a not in wanted], partial(_plan, full=full))


def _plan(cfg: DictConfig, *, full: bool) -> int:
    from fp4train.data.vocabulary import planned_vocab_size
    from fp4train.hardware import find_gpu
    from fp4train.run.build import build_model, build_plan, build_timeline, choose_device, with_swap
    from fp4train.run.resume import find_source

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
    device = Device.of(choose_device(config.device)) if gpu is None else Device.elsewhere(gpu)
    plan = build_plan(config, model, timeline, device)
    print(config.recipe, render(plan, full=True) if full else summarise(plan), sep="\n\n")
    if gpu is not None:
        print("", _estimate(config, plan, gpu), sep="\n")
    return 0


def _estimate(config: Config, plan: Plan, gpu: Gpu) -> str:
    """The time that the plan's GEMMs would take on `gpu`."""
    from fp4train.costs.estimate import estimate

    microbatches = config.train.batch_size // (config.train.microbatch or config.train.batch_size)
    return estimate(plan, gpu, microbatches=microbatches).render()
