"""fp4train plan [key=value…] | RUN

What every GEMM of a run would run in, and why; trains nothing. Takes the keys
of a run, which are listed below.

  full=true        every layer and GEMM, not folded
  gpu=B200         with the time of each GEMM on that GPU: A100, H100, H200,
                   B200, GB200, B300, GB300, RTX-5090, RTX-5080, RTX-PRO-6000,
                   MI300X, MI325X, MI350X, MI355X
  gpus=64          on so many of them: what each holds, sends and computes; with
                   parallel.tp=8 and the like
  --json           as data, not of RUN
  resume=RUN       what is left of a run
  RUN              what a run was told, what it ran, and what is planned for the
                   rest; with full=true too
"""

import json
import logging
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from torch import nn

from fp4train.cli.launch import Command, launch
from fp4train.cli.output import print_screen, terminal_width
from fp4train.config.command_line import CommandLine, Within, read_line
from fp4train.config.composition import check_flags
from fp4train.config.folders import option_of
from fp4train.config.overrides import names_folder
from fp4train.config.schema import Config
from fp4train.errors import UserError
from fp4train.hardware import Device, Gpu, find_gpu
from fp4train.nn.conversion import weight_groups
from fp4train.parallel.config import MOST_RANKS, Mesh, Parallel
from fp4train.precision.phases import Timeline
from fp4train.precision.plan import Plan
from fp4train.precision.recipe import Recipe
from fp4train.precision.report import render, summarise
from fp4train.run.checks import (
    check_oscillation,
    plan_warnings,
    scale_warnings,
    warn_of_few_steps,
)
from fp4train.run.find import find_source, start_step
from fp4train.run.fuse import kernels_of, kernels_of_layers, operations_in_c
from fp4train.run.host import choose_device
from fp4train.run.planned import plan_on, planned_model, planned_passes
from fp4train.run.record import directory as run_directory, journal
from fp4train.run.record.stretches import RecordedStretch
from fp4train.run.record.trust import check_paths
from fp4train.run.state.weights import ModelWeights
from fp4train.run.states import bytes_per_parameter
from fp4train.run.supervise.audit_report import Coverage
from fp4train.run.timeline import build_timeline, with_swap
from fp4train.text import short, typed

_log = logging.getLogger("fp4train")

KEYS = tuple(f"parallel.{f.name}" for f in fields(Parallel) if f.name != "timeout")
"""Keys of section `parallel` that a plan depends on."""
_GPUS = f"a number of GPUs from 1 to {MOST_RANKS}"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(CommandLine):
    full: bool = False
    gpus: Annotated[int, Within(1, _GPUS, most=MOST_RANKS)] | None = None


def asks_for_mesh(parallel: Parallel, gpus: int | None, named: Collection[str]) -> bool:
    """Whether a command, which gives the keys `named`, or its configuration asks for a mesh."""
    names = [key.removeprefix("parallel.") for key in KEYS]
    return (
        gpus is not None
        or any(key in named for key in KEYS)
        or any(getattr(parallel, n) != getattr(Parallel(), n) for n in names)
    )


def main(arguments: list[str]) -> int:
    """Print the plan, folded to a screen or, with full=true, with a row per GEMM; returns the exit
    code.
    """
    line = read_line(arguments, PlanOptions, __doc__, keys=None, data=True)
    if line.words and names_folder(line.words[0]):
        run = line.words[0]
        beside = [word for word in arguments if word != run and not word.startswith("full=")]
        if beside:
            check_flags(list(line.flags))
            words = shlex.join(beside)
            raise UserError(
                f"plan RUN shows the run as it is; with {words} write plan resume={typed(run)} {words}"
            )
        _show_run(run_directory.require_run(Path(run)), full=line.full)
        return 0
    return launch([*line.flags, *line.words], partial(_plan, line=line))


def _show_run(run: Path, *, full: bool) -> None:
    """Print the journal of a run: its configurations and requests, the stretches that ran, and the
    plan of the rest.
    """
    records = journal.read_journal(run)
    if not records:
        raise UserError(
            f"{run} has no {run_directory.HISTORY}: put it back, or ask what a resume would "
            f"run by plan resume={typed(run)}"
        )
    done = run_directory.steps_done(run)
    stretches = journal.stretches(records)
    print_screen(
        "plan_of_run.txt",
        run=run,
        records=records,
        done=done,
        steps=stretches[-1].stop if stretches else 0,
        stretches=[part for stretch in stretches for part in _split(stretch, done)],
        full=full,
    )


def _split(stretch: RecordedStretch, done: int) -> list[RecordedStretch]:
    if not stretch.start < done < stretch.stop:
        return [stretch]
    return [replace(stretch, stop=done), replace(stretch, start=done)]


def _plan(command: Command, *, line: PlanOptions) -> int:
    config = command.config
    check_paths(command.cfg, command.named)
    gpu = find_gpu(config.gpu) if config.gpu else None
    source = find_source(command) if config.resume else None
    start = 0 if source is None else start_step(config, source)
    timeline = build_timeline(config, source)
    if source is not None and command.swap is not None:
        timeline = with_swap(timeline, command.swap.at(start))
    model = planned_model(config, source)
    warn_of_few_steps(config)
    for warning in scale_warnings(config, model):
        _log.warning("%s", warning)
    if asks_for_mesh(config.parallel, line.gpus, command.named):
        return _on_mesh(config, model, timeline, gpu, line)
    device = Device.elsewhere(gpu) if gpu else Device.of(choose_device(config.device))
    plan = plan_on(device, config, model, timeline, start)
    for warning in plan_warnings(plan):
        _log.warning("%s", warning)
    if line.as_data:
        print(_json({"recipe": config.recipe.name, **_data(plan, model)}))
        return 0
    sentences = [kernels_of(config.train, device.type, elsewhere=not device.here)[1]]
    estimated = [] if gpu is None else _estimated(config, model, timeline, gpu, plan)
    if gpu is None:
        sentences += kernels_of_layers(model, device.type, deterministic=config.train.deterministic)
        sentences += operations_in_c(
            model, config.train, device.type, plan.stretches[0].recipe.torch_dtype, plan.tokens
        )
    _show(
        config,
        plan,
        model,
        full=line.full,
        source=source,
        past=[] if source is None else _titles_until(start, source),
        states=_checkpoint(model, config),
        estimated=estimated,
        sentences=[*sentences, Coverage.of(config, model).described(plan, Mesh())],
    )
    return 0


def _titles_until(start: int, source: Path) -> list[str]:
    """The titles of the stretches that a run has on record before a step."""
    ran = journal.stretches(journal.read_journal(source)) if start else []
    parts = [part for stretch in ran for part in _split(stretch, start)]
    return [part.title for part in parts if part.stop <= start]


def _estimated(
    config: Config, model: nn.Module, timeline: Timeline, gpu: Gpu, plan: Plan
) -> list[str]:
    """The time of the linear layers and of a step on a GPU."""
    # with gpu= alone: a plan of this machine begins without it
    from fp4train.cli.cost_screens import render_step
    from fp4train.lab.costs import estimate
    from fp4train.lab.costs.mesh_plan import MeshPlan

    width = terminal_width()
    on_one_gpu = MeshPlan(config=config, model=model, timeline=timeline, gpu=gpu, gpus=1)
    layers = estimate(plan, gpu, microbatches=config.train.microbatches).render(width)
    return [layers, render_step(on_one_gpu, plan, width)]


def _show(
    config: Config,
    plan: Plan,
    model: nn.Module,
    *,
    full: bool,
    states: Mapping[str, int] | None = None,
    **values: object,
) -> None:
    """Print a plan: what the run trains on, what its GEMMs run in, its weights, and the `values` of
    the template beside these.
    """
    width = terminal_width()
    if full:
        gemms = render(plan.sections, full=True, width=width)
    else:
        gemms = summarise(plan.sections, width)
    print_screen(
        "plan.txt",
        config=config,
        passes=planned_passes(config),
        history=run_directory.HISTORY,
        gemms=gemms,
        further=further_recipes(config),
        groups=weight_groups(model),
        option=lambda group, setting: option_of(group, type(setting)),
        short=short,
        states=states,
        **values,
    )


def further_recipes(config: Config) -> dict[str, Recipe]:
    """Key → the recipe that quantises there, beside the run's: those of layers and of phases."""
    by_key = {
        f"policy.recipes, {', '.join(entry.layers)}": entry.recipe
        for entry in config.policy.recipes
    }
    by_key["policy.recipe_for_kept"] = config.policy.recipe_for_kept
    for name, phase in config.phases.items():
        by_key[f"phases.{name}"] = phase.recipe
    return {
        key: recipe
        for key, recipe in by_key.items()
        if recipe.quantised and recipe != config.recipe
    }


def _checkpoint(model: nn.Module, config: Config) -> dict[str, int]:
    """Title of each state in a checkpoint → its bytes."""
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    weights = sum(parameter.nbytes for parameter in parameters)
    sizes = {
        title: round(size * count) for title, size in bytes_per_parameter(config, model).items()
    }
    del sizes[ModelWeights.title]
    return {"weights": weights, **sizes}


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _data(plan: Plan, model: nn.Module) -> dict[str, object]:
    """Parameters by group, and one entry per GEMM."""
    fields_shown = ("gemm", "size", "elements", "backend", "why")
    rows = [
        {
            "steps": [row.start, row.stop],
            "layer": row.layer.name,
            **{key: getattr(row, key) for key in fields_shown},
        }
        for row in plan.rows
    ]
    return {"weights": [group._asdict() for group in weight_groups(model)], "gemms": rows}


def _on_mesh(
    config: Config, model: nn.Module, timeline: Timeline, gpu: Gpu | None, line: PlanOptions
) -> int:
    """Print what the mesh will hold, send and cost."""
    from fp4train.cli.cost_screens import cluster_json, notes, render_mesh, stretch_costs
    from fp4train.lab.costs.mesh_plan import MeshPlan

    if gpu is None:
        raise UserError(
            "a plan for several GPUs needs their name: gpu=H100, H200, B200, GB200, B300, GB300 or "
            "A100"
        )
    mesh_plan = MeshPlan(config=config, model=model, timeline=timeline, gpu=gpu, gpus=line.gpus)
    mesh_plan.check()
    plan = mesh_plan.plan()
    check_oscillation(config, plan)
    costs = stretch_costs(mesh_plan, plan)
    sentences = notes(mesh_plan, plan)
    if line.as_data:
        stretches = [cluster_json(*stretch_cost) for stretch_cost in costs]
        head = {"recipe": config.recipe.name, "notes": sentences, "stretches": stretches}
        print(_json({**head, **_data(plan, model)}))
        return 0
    covered = Coverage.of(config, model).described(plan, mesh_plan.mesh)
    _show(
        config,
        plan,
        model,
        full=line.full,
        on_mesh=render_mesh(costs, terminal_width()),
        sentences=[*(f"note: {note}" for note in sentences), covered],
    )
    return 0
