"""From a configuration to a run that is ready: data, model, plan, optimizer, checkpoint, tracker, run directory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from fp4train import checkpoint
from fp4train.config import Config, plain
from fp4train.data import Loader
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.hardware import Device
from fp4train.nn import convert
from fp4train.precision import Swap, Timeline
from fp4train.precision.layers import find_blocks, find_layers
from fp4train.precision.plan import Plan, make_plan
from fp4train.precision.report import table
from fp4train.run import directory as run_directory
from fp4train.run import history
from fp4train.run.advice import nothing_quantised, warn_of_schedule
from fp4train.run.belonging import check_belongs, identity_of
from fp4train.run.environment import environment
from fp4train.run.gpu import check_gpu
from fp4train.run.run import Run
from fp4train.run.swaps import as_swap, plain_swaps, read_entries, read_swaps, record_swap, write_entries
from fp4train.run.weights import load_init, load_weights
from fp4train.track import NullTracker, mend
from fp4train.track.config import METRICS

_log = logging.getLogger(__name__)

COMPILED_VARIANTS = 64
"""Graphs that blocks may need: training and evaluation, layers kept in high precision, operands that phases change."""


VALIDATION_SEED = 0
"""Chooses the validation sequences of every run, whatever its run.seed."""


def choose_device(name: str) -> torch.device:
    """ "auto" is a GPU where there is one."""
    check_gpu(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device={name!r} is not one of auto, cpu, cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={name!r} is not one of auto, cpu, cuda: fp4train has no kernels for {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name}: torch sees no GPU here; use device=cpu")
    return device


def build_model(config: Config, vocab_size: int, device: torch.device) -> nn.Module:
    """The configured model with fp4train's linear layers; its weights depend on run.seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        # Drawn on the CPU whatever the device, so that a seed gives the same weights everywhere.
        with torch.device("meta" if device.type == "meta" else "cpu"):
            model = config.model.build(vocab_size=vocab_size, seq_len=config.train.seq_len)
    model = convert(model.to(device), backend=config.backend)
    if config.train.compile and device.type != "meta":
        _compile(model, device)
    return model


def _compile(model: nn.Module, device: torch.device) -> None:
    """Let torch.compile have the blocks, each by itself: those that are alike share a graph."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise UserError(
                "train.compile=true needs a C++ compiler on a CPU, and none is found (CXX, PATH)"
            ) from error
    for block in find_blocks(model):
        block.compile(recompile_limit=COMPILED_VARIANTS)


def build_timeline(config: Config, directory: Path | None = None) -> Timeline:
    """Recipe, phases in the order of their steps, and what was swapped before."""
    steps = config.train.steps
    cooldown = config.schedule.cooldown_start(steps)

    for name, phase in config.phases.items():
        if phase.step(steps, cooldown) is None:
            _log.warning("phase %s never starts: %s has no cooldown", name, type(config.schedule).__name__)

    def order(phase: Any) -> int:
        step = phase.step(steps, cooldown)
        return steps if step is None else step

    try:
        return Timeline(
            recipe=config.recipe,
            steps=steps,
            cooldown=cooldown,
            phases=tuple(sorted(config.phases.values(), key=order)),
            swaps=tuple(read_swaps(directory)) if directory else (),
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def build_plan(config: Config, model: nn.Module, timeline: Timeline, device: Device) -> Plan:
    """What will run where, and why.

    Raises:
        UserError: a pattern of the policy matches no layer, or `backend` cannot run a recipe on `device`.
    """
    tokens = (config.train.microbatch or config.train.batch_size) * config.train.seq_len
    layers = find_layers(model).values()
    try:
        return make_plan(layers, timeline, config.policy, tokens=tokens, device=device, backend=config.backend)
    except ValueError as error:
        raise UserError(str(error)) from error


def build(
    config: Config,
    cfg: DictConfig,
    start: checkpoint.Checkpoint | None = None,
    swap: tuple[str, dict[str, Any]] | None = None,
) -> Run:
    """Everything that `train` needs. The run directory must be locked by the caller.

    What it may hold is replaced only after data, model and plan turned out to be possible.

    Args:
        config: the typed configuration; cfg: the composed one, to be kept with the run.
        start: where to go on from (`find_start`).
        swap: name and plain configuration of a recipe to change to where the run goes on.

    Raises:
        UserError: something that the user can mend; the message says what.
    """
    directory = config.run.dir
    source = directory if start is None else start.path.parent.parent
    branching = source.resolve() != directory.resolve()
    device = choose_device(config.device)
    if start is not None:
        check_belongs(start, source, mend=not branching)
    timeline = build_timeline(config, source if start or not config.run.overwrite else None)
    if start is not None and swap is not None:
        wanted = as_swap(start.step, swap[1], swap[0])
        before = [s.recipe for s in timeline.swaps if s.step <= start.step]
        if before and before[-1] == wanted.recipe:
            swap = None  # the same command again: that swap is on record
        else:
            timeline = with_swap(timeline, wanted)
    init = load_init(config) if start is None else None
    warn_of_schedule(config)
    overwriting = config.run.overwrite and (start is None or branching)
    identity = None if overwriting else run_directory.identity(directory)
    if start is None and not overwriting:
        run_directory.check_restart(directory, config.checkpoint.every)
    elif start is not None and not branching:
        identity = identity or identity_of(start)
    origin = source if init is None else init.path.parent.parent
    with run_directory.workplace(directory, aside=overwriting or init is not None) as place:
        if branching or init is not None:
            run_directory.copy_files(origin, place, run_directory.TOKENIZER)
        run = assemble(config, place, timeline, device)
        if start is not None:
            run.restore(start)
            run.plan = run.plan.since(run.step)
        if init is not None:
            load_weights(run.model, init)
        if overwriting:
            run_directory.start_over(directory)
        if place != directory:
            run_directory.copy_files(place, directory, run_directory.TOKENIZER)
    if warning := nothing_quantised(run.plan):
        _log.warning("%s", warning)
    record = _begin_record(config, cfg, source, directory, start, init, swap)
    run.identity = identity or run_directory.new_identity()
    run_directory.write_config(directory, cfg, run.identity)
    run.saved_config = run.folder.read(run_directory.CONFIG, run_directory.CONFIG_LIMIT)
    found: list[str] = []
    if branching:
        unrecorded = run.folder.status(run_directory.HISTORY) is None
        run_directory.copy_files(source, directory, (METRICS, *((run_directory.HISTORY,) if unrecorded else ())))
        if entries := read_entries(source):
            write_entries(directory, entries)
    if start is None:
        run.folder.remove(METRICS)
    else:
        run.saver.saved = None if branching else start.step
        found = mend(directory / METRICS, start.step, start.state.get("metrics"))  # type: ignore[arg-type]
        if swap is not None:
            record_swap(directory, start.step, swap[1], swap[0])
    run.swaps = read_entries(directory)
    record["environment"] = environment(run.device, run.fingerprint)
    history.append(directory, plan=run.plan, **record)
    run.tracker = config.track.build(
        directory, config.run.name, plain(cfg), resume_step=None if start is None else start.step
    )
    if start is not None:
        for what in found:
            _log.warning("%s: %s", directory / METRICS, what)
        if found:
            run.tracker.log_event(start.step + 1, "metrics mended", {"found": found})
        changed = {key: f"{old} → {new}" for key, (old, new) in record.get("changed", {}).items()}
        run.tracker.log_event(
            start.step + 1, "resume", {"from": start.path.name, **({"changed": changed} if changed else {})}
        )
        if swap is not None:
            run.tracker.log_event(start.step + 1, "swap", {"recipe": swap[0], "at": start.step})
        if not branching and config.resume_step is not None:
            _abandon_later(run)
    elif init is not None:
        run.tracker.log_event(1, "init", {"from": str(init.path)})
    write_plan(run)
    run.tracker.log_table("plan", *table(run.plan))
    return run


def _abandon_later(run: Run) -> None:
    """Write the state that the run goes on from anew, which removes the checkpoints of later steps.

    None of them must be found as the newest.

    Raises:
        UserError: it could not be written.
    """
    newest = checkpoint.steps(run.directory / run_directory.CHECKPOINTS)[-1]
    if newest <= run.step:
        return
    _log.warning("steps %d–%d are abandoned; run.name=… would have kept them", run.step, newest - 1)
    begun = run.saver.begin(proven=True)
    run.saver.wait()
    outcomes = run.saver.outcomes()
    if not begun or not outcomes or not outcomes[-1].written:
        why = next((o.problem or f"{o.bad} is not finite" for o in reversed(outcomes)), "it is not written in time")
        run.saver.close()
        raise UserError(f"resume_step={run.step}: the later steps cannot be abandoned: {why}")


def _begin_record(
    config: Config,
    cfg: DictConfig,
    source: Path,
    directory: Path,
    start: checkpoint.Checkpoint | None,
    init: checkpoint.Checkpoint | None,
    swap: tuple[str, dict[str, Any]] | None,
) -> dict[str, Any]:
    """What the history says of this start: event, step, where from, what changed. A resume logs its changes."""
    if start is None:
        return {
            "event": "start" if init is None else "init",
            "step": 0,
            "config": plain(cfg),
            **({} if init is None else {"from": str(init.path)}),
        }
    branching = source.resolve() != directory.resolve()
    record: dict[str, Any] = {
        "event": "branch" if branching else "resume",
        "step": start.step,
        "from": str(start.path) if branching else start.path.name,
    }
    records = history.read_history(source)
    before = history.configuration(records)
    if before is None:
        record["config"] = plain(cfg)
    else:
        record["changed"] = history.changes(before, history.flat(plain(cfg)))
    swaps = plain_swaps(source)
    for step, recipe in swaps.items():
        known = history.recorded_swaps(records).get(step)
        if known != recipe:
            _log.warning("%s: the swap at step %d is not on record: taken over", source / run_directory.SWAPS, step)
            record.setdefault("changed", {})[f"{run_directory.SWAPS}, step {step}"] = (known, recipe)
    for key, (old, new) in record.get("changed", {}).items():
        if key not in ("run.name", "run.dir"):
            _log.info("changed: %s: %s → %s", key, old, new)
    for later in (step for step in swaps if step > start.step):
        _log.warning("the swap at step %d, asked for earlier, stays; fp4train swap %s lists swaps", later, directory)
    if swap is not None:
        record |= {"name": swap[0], "at": start.step, "recipe": swap[1]}
    return record


def write_plan(run: Run) -> None:
    """Keep the plan with the run: the past as the history has it, the rest as it is planned."""
    try:
        text = history.plan_text(run.directory, run.plan, run.step)
        run_directory.write_text(run.directory / run_directory.PLAN, text + "\n")
    except UserError as error:  # a copy for reading: not worth the run
        _log.warning("%s", error)


def assemble(config: Config, place: Path, timeline: Timeline, device: torch.device) -> Run:
    """A run at step 0 that no file knows of yet but its tokenizer's, in `place`.

    Raises:
        UserError: data, model or plan are not possible.
    """
    data = config.data.build(place, config.train.seq_len, config.run.seed)
    _log.info("%s", data.description)
    model = build_model(config, data.vocab_size, device)
    loaders = {
        name: Loader(tokens, batch_size=config.train.batch_size, seq_len=config.train.seq_len, seed=seed)
        # The validation sequences are the same for every seed, so that the losses of seeds compare.
        for name, tokens, seed in (("train", data.train, config.run.seed), ("val", data.val, VALIDATION_SEED))
    }
    scaling = config.recipe.loss_scaling
    return Run(
        config=config,
        directory=config.run.dir,
        device=device,
        model=model,
        optimizer=config.optim.build(model),
        train_data=loaders["train"],
        val_data=loaders["val"],
        timeline=timeline,
        plan=build_plan(config, model, timeline, Device.of(device)),
        tracker=NullTracker(),
        step=0,
        loss_scale=scaling.initial if scaling else 1.0,
        good_steps=0,
        fingerprint=data.fingerprint,
        folder=Folder.open(config.run.dir, create=True),
    )


def with_swap(timeline: Timeline, swap: Swap) -> Timeline:
    """`timeline` with one more swap.

    Raises:
        UserError: it does not go with the rest.
    """
    try:
        return timeline.with_swap(swap)
    except ValueError as error:
        raise UserError(str(error)) from error
