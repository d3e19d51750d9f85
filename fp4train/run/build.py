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
from fp4train.run.run import Run
from fp4train.run.swaps import as_swap, check_record, read_entries, read_swaps, record_swap, write_entries
from fp4train.track import NullTracker, mend
from fp4train.track.config import METRICS

_log = logging.getLogger(__name__)

COMPILED_VARIANTS = 64
"""Graphs that blocks may need: training and evaluation, layers kept in high precision, operands that phases change."""


def choose_device(name: str) -> torch.device:
    """ "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device={name!r} is not one of auto, cpu, cuda") from error
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
        _check_belongs(start, source, mend=not branching)
    timeline = build_timeline(config, source if start or not config.run.overwrite else None)
    if start is not None and swap is not None:
        wanted = as_swap(start.step, swap[1], swap[0])
        before = [s.recipe for s in timeline.swaps if s.step <= start.step]
        if before and before[-1] == wanted.recipe:
            swap = None  # the same command again: that swap is on record
        else:
            timeline = with_swap(timeline, wanted)
            for later in (s for s in timeline.swaps if s.step > start.step):
                _log.warning("the swap to %s at step %d, asked for earlier, stays", later.name, later.step)
    overwriting = config.run.overwrite and (start is None or branching)
    identity = None if overwriting else run_directory.identity(directory)
    if start is None and not overwriting:
        run_directory.check_restart(directory, config.checkpoint.every)
    elif start is not None and not branching:
        identity = identity or _identity(start)
    with run_directory.workplace(directory, aside=overwriting) as place:
        if branching:
            run_directory.copy_files(source, place, run_directory.TOKENIZER)
        run = _build(config, place, timeline, device)
        if start is not None:
            run.restore(start)
        if overwriting:
            run_directory.start_over(directory)
            run_directory.copy_files(place, directory, run_directory.TOKENIZER)
    run.identity = identity or run_directory.new_identity()
    run_directory.write_config(directory, cfg, run.identity)
    run.saved_config = run.folder.read(run_directory.CONFIG, run_directory.CONFIG_LIMIT)
    found: list[str] = []
    if branching:
        run_directory.copy_files(source, directory, (METRICS,))
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
    run.tracker = config.track.build(
        directory, config.run.name, plain(cfg), resume_step=None if start is None else start.step
    )
    if start is not None:
        for what in found:
            _log.warning("%s: %s", directory / METRICS, what)
        if found:
            run.tracker.log_event(start.step + 1, "metrics mended", {"found": found})
        run.tracker.log_event(start.step + 1, "resume", {"from": start.path.name})
        if swap is not None:
            run.tracker.log_event(start.step + 1, "swap", {"recipe": swap[0], "at": start.step})
    run.write_plan()
    run.tracker.log_table("plan", *table(run.plan))
    return run


def _build(config: Config, place: Path, timeline: Timeline, device: torch.device) -> Run:
    """A run at step 0 that no file knows of yet but its tokenizer's, in `place`."""
    data = config.data.build(place, config.train.seq_len, config.run.seed)
    _log.info("%s", data.description)
    model = build_model(config, data.vocab_size, device)
    loaders = {
        name: Loader(tokens, batch_size=config.train.batch_size, seq_len=config.train.seq_len, seed=config.run.seed)
        for name, tokens in (("train", data.train), ("val", data.val))
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


def _identity(start: checkpoint.Checkpoint) -> str | None:
    """Of the run that a checkpoint belongs to; None for one from before runs had an identity."""
    run = start.state.get("run")
    found = run.get("id") if isinstance(run, dict) else None
    return found if isinstance(found, str) and found else None


def _check_belongs(start: checkpoint.Checkpoint, source: Path, *, mend: bool) -> None:
    """Refuse a checkpoint, or a record of swaps, that is not of the run in `source`.

    Raises:
        UserError: it is another run's; or the swaps are not those that the checkpoint was trained with.
    """
    own, theirs = run_directory.identity(source), _identity(start)
    if own is not None and theirs is not None and own != theirs:
        raise UserError(
            f"{start.path} is a checkpoint of run {theirs}, not of the run in {source} ({own}): another run left it "
            "there, or it was copied from one. Move it away, or resume the run that it belongs to"
        )
    run = start.state.get("run")
    if own is None and isinstance(run, dict) and run.get("config") not in (None, run_directory.config_checksum(source)):
        _log.warning(
            "%s has lost its first line and is not as %s was trained with",
            source / run_directory.CONFIG,
            start.path.name,
        )
    entries = start.state.get("swaps", [])
    try:
        if not isinstance(entries, list):
            raise TypeError("it is no list")
        if "swaps" in start.state:
            check_record(source, start.step, entries, mend=mend)  # type: ignore[arg-type]
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{start.path} holds no record of swaps: {error}") from error


def swap_recipe(run: Run, step: int, recipe: dict[str, Any], name: str, request: str | None = None) -> None:
    """Swap the recipe from `step` on: recorded for good, timeline and plan brought up to date.

    Args:
        run, step, recipe, name: what to swap, from when on, to what plain configuration, and what the user calls it.
        request: the key of the request that asked for it.

    Raises:
        UserError: the swap is impossible; nothing has changed then.
    """
    swap = as_swap(step, recipe, name)
    if not run.step <= swap.step < run.config.train.steps:
        raise UserError(
            f"step {step} is past: {run.step} steps are done"
            if swap.step < run.step
            else f"step {step} is beyond the end: the run has {run.config.train.steps} steps"
        )
    timeline = with_swap(run.timeline, swap)
    plan = build_plan(run.config, run.model, timeline, Device.of(run.device))
    run.swaps = record_swap(run.directory, swap.step, recipe, name, request)
    run.timeline, run.plan = timeline, plan
    run.write_plan()


def with_swap(timeline: Timeline, swap: Swap) -> Timeline:
    """`timeline` with one more swap.

    Raises:
        UserError: it does not go with the rest.
    """
    try:
        return timeline.with_swap(swap)
    except ValueError as error:
        raise UserError(str(error)) from error
