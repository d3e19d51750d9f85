"""fp4train plan [key=value…] | RUN

What every GEMM of a run would run in, and why; trains nothing. Takes the keys of a run, which are listed below.

  full=true        every layer and GEMM, not folded
  gpu=B200         with the time of each GEMM on that GPU: A100, H100, H200, B200, GB200, B300, GB300
  gpus=64          on so many of them: what each holds, sends and computes; with parallel.tp=8 and the like
  parallel=auto    with gpus=, the cheapest mesh that fits
  --json           as data, not of RUN
  resume=RUN       what is left of a run
  RUN              what a run was told, what it ran, and what is planned for the rest; with full=true too
"""

import json
import logging
from collections.abc import Collection
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp4train.checkpoint import ALONE
from fp4train.cli.launch import Start, launch
from fp4train.cli.output import fitted, terminal_width
from fp4train.config.folders import option_of
from fp4train.config.overrides import Option, read_options, truth
from fp4train.config.schema import Config
from fp4train.data.source import planned_tokenizer, planned_vocab_size
from fp4train.errors import UserError
from fp4train.hardware import Device, find_gpu
from fp4train.nn.conversion import weight_groups
from fp4train.parallel.config import MOST_RANKS, Mesh, Parallel
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import Plan
from fp4train.precision.report import render, summarise
from fp4train.run.begin import find_source, start_step
from fp4train.run.build import build_model, build_plan
from fp4train.run.checks import (
    check_cut,
    check_oscillation,
    check_repeat,
    plan_warnings,
    scale_warnings,
    warn_of_schedule,
)
from fp4train.run.fuse import kernels_of, kernels_of_layers, operations_in_c
from fp4train.run.host import choose_device
from fp4train.run.initial import load_init
from fp4train.run.produced import produced_by, produced_in
from fp4train.run.record import directory as run_directory
from fp4train.run.record import journal
from fp4train.run.record.stretches import RecordedStretch
from fp4train.run.record.trust import check_paths
from fp4train.run.state.moments import Moments
from fp4train.run.state.weights import ModelWeights
from fp4train.run.states import bytes_per_parameter
from fp4train.run.supervise.layer_audits import described
from fp4train.run.teacher import check_teacher
from fp4train.run.timeline import build_timeline, with_swap
from fp4train.text import columns, counted, short, span, tabulate

if TYPE_CHECKING:
    from fp4train.lab.costs.mesh_plan import MeshPlan

_log = logging.getLogger("fp4train")

AUTO = "parallel=auto"
KEYS = tuple(f"parallel.{f.name}" for f in fields(Parallel) if f.name not in ("amax", "timeout"))
"""Keys of section `parallel` that a plan depends on."""


def _gpus(text: str) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    if number > MOST_RANKS:
        raise UserError(f"gpus={text} is more than {MOST_RANKS}")
    if number < 1:
        raise UserError(f"gpus={text} must be at least 1")
    return number


OPTIONS = {
    "full": Option(
        truth, "full={}: full=true lists every layer and GEMM, full=false folds equal ones", False
    ),
    "gpus": Option(_gpus, "gpus={} must be a whole number"),
    "parallel": Option(
        lambda text: text.lower() == "auto" or None,
        "parallel={}: parallel takes auto, or sizes by key: " + ", ".join(KEYS),
    ),
}


def asks_for_mesh(
    parallel: Parallel, gpus: int | None, auto: bool | None, named: Collection[str]
) -> bool:
    """Whether a command, which gives the keys `named`, or its configuration asks for a mesh.

    Raises:
        UserError: the mesh is to be proposed (auto), of no number of GPUs or with sizes that are
            given.
    """
    sizes = [key for key in KEYS if key in named]
    if auto and gpus is None:
        raise UserError(f"{AUTO} needs the number of GPUs: gpus=N")
    if auto and sizes:
        raise UserError(f"{AUTO} chooses the mesh itself: leave {', '.join(sizes)} out")
    names = [key.removeprefix("parallel.") for key in KEYS]
    return (
        gpus is not None
        or bool(sizes)
        or any(getattr(parallel, n) != getattr(Parallel(), n) for n in names)
    )


def main(arguments: list[str]) -> int:
    """Print the plan, folded to a screen or, with full=true, with a row per GEMM; returns the exit
    code.
    """
    line = read_options([a for a in arguments if a != "--json"], OPTIONS)
    full, gpus, auto = (line.options[key] for key in OPTIONS)
    as_data = "--json" in arguments
    remaining = [*line.flags, *line.words]
    if line.runs and remaining[0] == line.runs[0]:
        if gpus is not None or auto or as_data:
            raise UserError("plan RUN shows the run as it is, without gpus=, parallel.* and --json")
        if remaining[1:]:
            raise UserError(
                f"plan RUN shows the run as it is; with {remaining[1]} write plan "
                f"resume={remaining[0]} {remaining[1]}"
            )
        print(fitted(_of_run(run_directory.require_run(Path(remaining[0])), full=full)))
        return 0
    return launch(
        remaining, partial(_plan, full=full, gpus=gpus, auto=auto, as_data=as_data, words=remaining)
    )


def _of_run(run: Path, *, full: bool) -> str:
    """Journal of a run as text: its configurations and requests, the stretches that ran, and the
    plan of the rest.
    """
    records = journal.read_journal(run)
    if not records:
        raise UserError(
            f"{run} has no {run_directory.HISTORY}: put it back, or ask what a resume would "
            f"run by plan resume={run}"
        )
    done = run_directory.steps_done(run)
    stretches = journal.stretches(records)
    steps = stretches[-1].stop if stretches else 0
    entries = [
        (f"step {r.step}", r.event, r.time.replace("+00:00", " UTC"), r.describe()) for r in records
    ]
    head = [
        f"{run}: {done} of {counted(steps, 'step')} {'is' if done == 1 else 'are'} done",
        "",
        *columns(entries),
        "",
    ]
    split = [part for stretch in stretches for part in _split(stretch, done)]
    if full:
        body = [f"{_state(s, done)}: {s.render(full=True)}\n" for s in split]
        return "\n".join([*head, *body]).rstrip()
    rows = [
        (
            span(s.start, s.stop),
            _state(s, done),
            s.recipe,
            ", ".join(f"{name} {share:.1%}" for name, share in s.shares.items()),
            ", ".join(dict.fromkeys(row[4] for row in s.rows)),
            s.reason,
        )
        for s in split
    ]
    table = tabulate(
        [("steps", "", "recipe", "multiply-adds of linear layers", "backends", "why"), *rows],
        width=terminal_width(),
    )
    return "\n".join([*head, *table])


def _split(stretch: RecordedStretch, done: int) -> list[RecordedStretch]:
    if not stretch.start < done < stretch.stop:
        return [stretch]
    return [replace(stretch, stop=done), replace(stretch, start=done)]


def _state(stretch: RecordedStretch, done: int) -> str:
    return "ran" if stretch.stop <= done else "planned"


def _plan(
    command: Start,
    *,
    full: bool,
    gpus: int | None,
    auto: bool | None,
    as_data: bool,
    words: list[str],
) -> int:
    config = command.config
    chosen = command.cfg
    swap = command.swap
    check_paths(chosen, command.named)
    gpu = find_gpu(config.gpu) if config.gpu else None
    if config.resume:
        source = find_source(config, chosen, command.saved)
    else:
        source = None
    start = 0 if source is None else start_step(config, source)
    timeline = build_timeline(config, source)
    if source is not None and swap is not None:
        timeline = with_swap(timeline, swap.at(start))
    if source is None:
        init = load_init(config, ALONE, verify=False)
    else:
        init = None
    tokenizer_of = source if init is None else init.run
    vocab_size = planned_vocab_size(
        config.data, getattr(config.model, "vocab_size", None), tokenizer_of
    )
    model = build_model(config, vocab_size, torch.device("meta"))
    if init is not None:
        init.check(model)
    if config.teacher is not None:
        tokenizer = planned_tokenizer(config.data, tokenizer_of)
        check_teacher(config, model, vocab_size, tokenizer)
    warn_of_schedule(config)
    for warning in scale_warnings(config, model):
        _log.warning("%s", warning)
    if asks_for_mesh(config.parallel, gpus, auto, command.named):
        if gpu is None:
            raise UserError(
                "a plan for several GPUs needs their name: gpu=H100, H200, B200, GB200, "
                "B300, GB300 or A100"
            )
        # with gpu= alone: a plan of this machine begins without it
        from fp4train.lab.costs.mesh_plan import MeshPlan

        mesh_plan = MeshPlan(config, gpus, auto, model, timeline, gpu, command.named)
        if auto:
            return _search(mesh_plan, words, as_data)
        return _on_mesh(mesh_plan, full=full, as_data=as_data)
    if gpu is None:
        device = Device.of(choose_device(config.device))
    else:
        device = Device.elsewhere(gpu)
    plan = build_plan(config, find_layers(model), timeline, device).since(start)
    check_cut(config, Mesh())
    check_repeat(config, device.type)
    check_oscillation(config, plan)
    if gpu is not None:
        kernels = ""
    else:
        kernels = kernels_of(config.train, device.type)[1]
    for warning in plan_warnings(plan):
        _log.warning("%s", warning)
    if as_data:
        print(_json({"recipe": config.recipe.name, **_data(plan, model)}))
        return 0
    if source is not None and start:
        past = [
            s
            for stretch in journal.stretches(journal.read_journal(source))
            for s in _split(stretch, start)
        ]
        ran = [s.title for s in past if s.stop <= start]
        print(
            "\n".join(
                [
                    f"past, as {source / run_directory.HISTORY} has it (fp4train plan {source}):",
                    *ran,
                ]
            ),
            "\n",
        )
    width = terminal_width()
    print(fitted(_whole_run(config)), end="\n\n")
    if full:
        shown = render(plan.sections, full=True, width=width)
    else:
        shown = summarise(plan.sections, width)
    print(config.recipe.shown(width), shown, sep="\n\n")
    print("", _weights(model), "", fitted(_checkpoint(model, config)), sep="\n")
    if gpu is None:
        layers = kernels_of_layers(model, device.type, deterministic=config.train.deterministic)
        layers += operations_in_c(
            model, config.train, device.type, plan.stretches[0].recipe.torch_dtype, plan.tokens
        )
        norms = [
            produced_in(model, stretch, config.train, device.type, plan.tokens)
            for stretch in plan.stretches
        ]
        sentences = produced_by(model, plan.stretches, norms, device.type)
        for sentence in (kernels, *layers, *sentences, described(plan, config, Mesh())):
            print(fitted(sentence))
    if gpu is not None:
        from fp4train.lab.costs.estimate import estimate
        from fp4train.lab.costs.mesh_plan import MeshPlan
        from fp4train.lab.costs.screen import render_step, step_costs

        on_one_gpu = MeshPlan(config, 1, None, model, timeline, gpu, command.named)
        cost = estimate(plan, gpu, microbatches=config.train.microbatches)
        norms = [
            produced_in(model, stretch, config.train, "cuda", plan.tokens, elsewhere=True)
            for stretch in plan.stretches
        ]
        sentences = produced_by(model, plan.stretches, norms, "cuda")
        print("", fitted(cost.render(width)), "", sep="\n")
        step = render_step(step_costs(on_one_gpu, plan), width)
        for text in (step, on_one_gpu.kernels[1], *sentences):
            print(fitted(text))
    return 0


def _whole_run(config: Config) -> str:
    """What the run trains on, how long, and at which rates, in words."""
    train = config.train
    schedule = config.schedule
    warmup = schedule.warmup
    if isinstance(warmup, int):
        of_run = counted(warmup, "step")
    else:
        of_run = f"{warmup:.3g} of the run"
    kind = option_of("schedule", type(schedule))
    rates = f"learning rate {config.optim.lr:g}, warm-up {of_run}, then {kind}"
    data = getattr(config.data, "name", None) or getattr(config.data, "path", None) or ""
    tokenizer = getattr(config.data, "tokenizer", None)
    named = f" {getattr(tokenizer, 'name', None) or ''}".rstrip()
    read = f"{option_of('data', type(config.data))} {data}".rstrip()
    if tokenizer is not None:
        text = f"{read} in ids of {option_of('data/tokenizer', type(tokenizer))}{named}"
    else:
        text = read
    size = (
        f"{counted(train.steps, 'step')} of {train.batch_size:,} × {train.seq_len:,} tokens, "
        f"{short(train.steps * train.tokens)} in all"
    )
    every = config.checkpoint.every
    if every == 1:
        saved = "a checkpoint at every step"
    elif every:
        saved = f"checkpoints every {every:,} steps"
    else:
        saved = "a checkpoint at the end"
    return f"{size}; {text}; {rates}; {saved}"


def _weights(model: nn.Module) -> str:
    """All parameters of the model, and those that a token meets, by what becomes of them."""
    groups = weight_groups(model)
    total = ("together", *(sum(column) for column in list(zip(*groups, strict=True))[1:4]), None)
    rows = [
        (kind, *(f"{count:,}" for count in counts), why or "")
        for kind, *counts, why in (*groups, total)
    ]
    header = ("parameters", "tensors", "all", "of a token", "why no recipe touches them")
    return "\n".join(tabulate([header, *rows], right={1, 2, 3}, width=terminal_width()))


def _checkpoint(model: nn.Module, config: Config) -> str:
    """Size of a checkpoint in words."""
    states = bytes_per_parameter(config)
    beside = sum(size for title, size in states.items() if title != ModelWeights.title)
    total = sum(p.numel() * (p.element_size() + beside) for p in model.parameters())
    spoken = {ModelWeights.title: "weights", Moments.title: "two moments"}
    *names, last = (spoken.get(title, title) for title in states)
    what = f"{', '.join(names)} and {last}"
    if total >= 1e9:
        size = f"{total / 1e9:,.2f} GB"
    else:
        size = f"{total / 1e6:,.1f} MB"
    return (
        f"A checkpoint holds about {size} ({what}); main memory holds a copy while it is written."
    )


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


def _on_mesh(mesh_plan: "MeshPlan", *, full: bool, as_data: bool) -> int:
    """Print what the mesh will hold, send and cost."""
    from fp4train.lab.costs.screen import cluster_json, render_cluster

    plan, costs = mesh_plan.costs()
    if as_data:
        stretches = [cluster_json(*stretch_cost) for stretch_cost in costs]
        head = {
            "recipe": mesh_plan.config.recipe.name,
            "notes": mesh_plan.notes,
            "stretches": stretches,
        }
        print(_json({**head, **_data(plan, mesh_plan.model)}))
        return 0
    width = terminal_width()
    if full:
        shown = render(plan.sections, full=True, width=width)
    else:
        shown = summarise(plan.sections, width)
    print(fitted(_whole_run(mesh_plan.config)), end="\n\n")
    print(shown, _weights(mesh_plan.model), fitted(render_cluster(costs, width)), sep="\n\n")
    for note in mesh_plan.notes:
        print(fitted(f"note: {note}"))
    return 0


def _search(mesh_plan: "MeshPlan", command: list[str], as_data: bool) -> int:
    """Print the cheapest meshes, and the command that asks for the best."""
    from fp4train.lab.costs.screen import cluster_json, render_candidates
    from fp4train.lab.costs.search import distinct

    candidates, batch = mesh_plan.search()
    fitting = distinct([candidate for candidate in candidates if candidate.cost.fits], 6)
    too_large = distinct([candidate for candidate in candidates if not candidate.cost.fits], 3)
    if not fitting:
        by_memory = sorted(candidates, key=lambda candidate: candidate.cost.memory.total)
        too_large = distinct(by_memory, 6)
    kept = [
        a
        for a in command
        if a.partition("=")[0] not in ("train.batch_size", "train.microbatch", "model.recompute")
    ]
    best = (fitting or too_large)[0]
    text = " ".join(["fp4train plan", *kept, f"train.batch_size={batch}", *best.overrides()])
    if as_data:
        listed = [
            {"overrides": candidate.overrides(), **cluster_json("", 0, candidate.cost)}
            for candidate in (*fitting, *too_large)
        ]
        print(
            _json(
                {"notes": mesh_plan.notes, "command": text if fitting else None, "meshes": listed}
            )
        )
    else:
        print(fitted(render_candidates(candidates, [*fitting, *too_large], text, terminal_width())))
        for note in mesh_plan.notes:
            print(fitted(f"note: {note}"))
    return 0 if fitting else 1
