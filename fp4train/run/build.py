"""From a configuration to a run that is ready: data, model, plan, optimizer, checkpoint, tracker, run directory."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from fp4train import checkpoint
from fp4train.backends.te import region as te_region
from fp4train.config.schema import Config, plain
from fp4train.data import Loader
from fp4train.errors import UserError
from fp4train.hardware import detect, peak_flops
from fp4train.nn import Linear, convert
from fp4train.precision import LayerPolicy, Recipe, Swap, Timeline
from fp4train.precision.layers import find_blocks, find_layers
from fp4train.precision.plan import Plan, make_plan
from fp4train.run import directory as run_directory
from fp4train.run.swaps import as_swap, read_swaps, record_swap
from fp4train.track import NullTracker, Tracker
from fp4train.track.config import METRICS

_log = logging.getLogger(__name__)

COMPILED_VARIANTS = 64
"""Graphs that blocks may need: training and evaluation, layers kept in high precision, operands that phases change."""


@dataclass
class Run:
    """A run ready to train; `step` is the number of optimizer steps done."""

    config: Config
    directory: Path
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train_data: Loader
    val_data: Loader
    timeline: Timeline
    plan: Plan
    tracker: Tracker
    step: int
    loss_scale: float
    good_steps: int
    fingerprint: str

    @property
    def policy(self) -> LayerPolicy:
        return self.config.policy

    @property
    def description(self) -> str:
        """Model, batch and device in a line."""
        count = sum(p.numel() for p in self.model.parameters())
        size = f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        return (
            f"{type(self.config.model).__name__}, {size} parameters; {self.config.train.steps:,} steps of "
            f"{self.config.train.tokens:,} tokens; {device}"
        )

    def te_region(self, recipe: Recipe) -> AbstractContextManager[None]:
        """What surrounds a forward pass for TE's delayed scaling; nothing where TE does not run."""
        if self.device.type != "cuda":
            return nullcontext()
        recipes = {
            wanted
            for module in self.linears()
            if (wanted := self.policy.recipe_for(module.layer, recipe)).quantised
            and module.why_not_te(wanted, self.device.type) is None
        }
        return te_region(*recipes) if recipes else nullcontext()

    def eagerly(self) -> AbstractContextManager[object]:
        """Where every module runs by itself, so that hooks on modules inside of a block see them."""
        return torch.compiler.set_stance("force_eager") if self.config.train.compile else nullcontext()

    def linears(self) -> list[Linear]:
        """The model's converted layers."""
        return [m for m in self.model.modules() if isinstance(m, Linear)]

    def peak_tokens_per_s(self) -> float | None:
        """Tokens a second if the GPU did nothing but this model's linear layers at its BF16 peak; None if unknown.

        The denominator of the model FLOP/s utilisation (arXiv:2204.02311), with BF16's peak for every recipe, so that
        recipes compare; 6 FLOP a weight and token, attention products and recomputation not counted.
        """
        gpu = detect(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        flops = 6 * sum(m.in_features * m.out_features for m in self.linears())
        return None if gpu is None else peak_flops(gpu, "BF16") / flops

    def scaling(self) -> dict[str, dict[str, torch.Tensor]]:
        """By layer, what delayed scaling has seen; empty dicts without it."""
        return {m.layer.name: m.scaling_state() for m in self.linears()}

    def load_scaling(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Take over what `scaling` gave."""
        for module in self.linears():
            module.load_scaling_state(state.get(module.layer.name, {}))

    def state(self) -> dict[str, Any]:
        """Everything that the future of the run depends on, besides the configuration and the recorded swaps."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaling": self.scaling(),
            "loss_scale": self.loss_scale,
            "good_steps": self.good_steps,
            "data": self.fingerprint,
        }

    def write_plan(self) -> None:
        """Keep the plan, every row of it, with the run."""
        try:
            run_directory.write_text(self.directory / run_directory.PLAN, self.plan.render(full=True) + "\n")
        except UserError as error:  # a copy for reading: not worth the run
            _log.warning("%s", error)

    def save(self) -> Path:
        """Write a checkpoint of the current step.

        Raises:
            CheckpointError: it could not be written; the earlier ones are untouched.
        """
        tensors, state = checkpoint.flatten(self.state())
        folder = self.directory / run_directory.CHECKPOINTS
        return checkpoint.save(folder, self.step, tensors, state, keep=self.config.checkpoint.keep)

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint."""
        state = checkpoint.unflatten(found.tensors, found.state)
        try:
            self.model.load_state_dict(state["model"])
            # Its constants are the configuration's, which a resume may change; its moments are the checkpoint's.
            constants = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
            self.optimizer.load_state_dict(state["optimizer"])
            for group, values in zip(self.optimizer.param_groups, constants, strict=True):
                group |= values
            self.load_scaling(state["scaling"])
            self.step, self.loss_scale, self.good_steps = found.step, state["loss_scale"], state["good_steps"]
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{found.path} does not fit this model: {str(error).splitlines()[0]}") from error
        if state["data"] != self.fingerprint:
            raise UserError(
                f"{found.path} was trained on other data (fingerprint {state['data']}, now {self.fingerprint}): "
                "give the run the data that it began with"
            )


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


def build_plan(config: Config, model: nn.Module, timeline: Timeline, device: torch.device) -> Plan:
    """What will run where, and why."""

    def explain(layer: Any, recipe: Recipe, gemm: str) -> tuple[str, str]:
        module = model.get_submodule(layer.name)
        if not isinstance(module, Linear):
            return "torch", f"{type(module).__name__} is not converted"
        return module.explain(recipe, gemm, device.type)

    tokens = (config.train.microbatch or config.train.batch_size) * config.train.seq_len
    try:
        return make_plan(find_layers(model).values(), timeline, config.policy, tokens=tokens, explain=explain)
    except ValueError as error:
        raise UserError(str(error)) from error


def find_start(config: Config, cfg: DictConfig) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from; None starts at step 0. Nothing is changed yet.

    Raises:
        UserError: as `find_source`, or no checkpoint is usable.
    """
    source = find_source(config, cfg)
    return None if source is None else _load(source)


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
        if checkpoint.steps(directory / run_directory.CHECKPOINTS):
            return directory
        if not config.resume and saved.get("resume"):
            raise UserError(f"{directory} is a branch that has no checkpoint yet: add resume={saved.resume}")
    if config.resume is None:
        return None
    _check_same(run_directory.read_config(source), cfg, source, resuming=True)
    if not checkpoint.steps(source / run_directory.CHECKPOINTS):
        raise UserError(f"resume={config.resume}: the run has no checkpoint yet")
    return source


def _check_same(saved: DictConfig, cfg: DictConfig, run: Path, *, resuming: bool) -> None:
    changed = run_directory.differences(saved, cfg, run_directory.RESUMED if resuming else run_directory.CONTINUED)
    if changed:
        shown = "; ".join(changed[:4]) + ("; …" if len(changed) > 4 else "")
        advice = (
            "this would be another run" if resuming else "choose another run.name, or run.overwrite=true to start over"
        )
        raise UserError(f"{run} belongs to another configuration ({shown}): {advice}")


def _load(run: Path) -> checkpoint.Checkpoint:
    found = checkpoint.load(run / run_directory.CHECKPOINTS)
    for path, reason in found.skipped:
        _log.warning("checkpoint %s cannot be used (%s); going on from step %d", path.name, reason, found.step)
    return found


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
    with run_directory.workplace(directory, aside=overwriting) as place:
        if branching:
            run_directory.copy_files(source, place, run_directory.TOKENIZER)
        run = _build(config, place, timeline, device)
        if start is not None:
            run.restore(start)
        if overwriting:
            run_directory.start_over(directory)
            run_directory.copy_files(place, directory, run_directory.TOKENIZER)
    run_directory.write_config(directory, cfg)
    if branching:
        run_directory.copy_files(source, directory, (run_directory.SWAPS, METRICS))
    if start is None:
        (directory / METRICS).unlink(missing_ok=True)
    elif swap is not None:
        record_swap(directory, start.step, swap[1], swap[0])
    run.tracker = config.track.build(
        directory, config.run.name, plain(cfg), resume_step=None if start is None else start.step
    )
    if start is not None:
        run.tracker.log_event(start.step + 1, "resume", {"from": start.path.name})
        if swap is not None:
            run.tracker.log_event(start.step + 1, "swap", {"recipe": swap[0], "at": start.step})
    run.write_plan()
    run.tracker.log_table("plan", *run.plan.table())
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
        plan=build_plan(config, model, timeline, device),
        tracker=NullTracker(),
        step=0,
        loss_scale=scaling.initial if scaling else 1.0,
        good_steps=0,
        fingerprint=data.fingerprint,
    )


def swap_recipe(run: Run, step: int, recipe: dict[str, Any], name: str) -> None:
    """Swap the recipe from `step` on: recorded for good, timeline and plan brought up to date.

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
    plan = build_plan(run.config, run.model, timeline, run.device)
    record_swap(run.directory, swap.step, recipe, name)
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
