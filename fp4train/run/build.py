"""Building of a run: its origin is found (`begin`); data, model, plan and optimizer are assembled;
the state is loaded; and only then the run directory says that the run begins.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fp4train.config import Config
from fp4train.data.cache import CacheEntry
from fp4train.data.loader import RunRows
from fp4train.data.mixture import Mixture
from fp4train.data.schedule import first_steps
from fp4train.data.source import RunData
from fp4train.errors import UserError, user_errors
from fp4train.files import Folder
from fp4train.hardware import Device
from fp4train.models.common.cut import StageCut, multiplied
from fp4train.models.common.initialise import materialise, why_not_deferred
from fp4train.models.weightless import build_weightless
from fp4train.nn import convert
from fp4train.nn.planned import PlannedLayer
from fp4train.optim import check_built, keep_bounds
from fp4train.parallel.agree import check_same
from fp4train.parallel.config import ONE, Mesh
from fp4train.parallel.experts import share_experts
from fp4train.parallel.fsdp import distribute, share_tensors
from fp4train.parallel.held import Inventory
from fp4train.parallel.pipeline import Pipeline
from fp4train.parallel.sequences import share_sequences
from fp4train.parallel.stages import cut_of, cut_stages, tied_weights
from fp4train.parallel.world import World
from fp4train.parameters import largest_values
from fp4train.precision import Timeline
from fp4train.precision.gather import gather_mode
from fp4train.precision.layers import Layer, find_blocks, find_layers
from fp4train.precision.plan import Plan, make_plan
from fp4train.run import checks
from fp4train.run.companions import FOLDERS, in_studies, in_training
from fp4train.run.fuse import compile_blocks, fuse
from fp4train.run.host import choose_device
from fp4train.run.origin import Origin
from fp4train.run.record import directory as run_directory
from fp4train.run.record.run_record import RunRecord
from fp4train.run.run import Run
from fp4train.run.state.moments import group_values
from fp4train.run.states import states_of
from fp4train.run.step import EagerSteps
from fp4train.run.step_graph import check_plan, never_replayed, recorded
from fp4train.run.supervise.saving import Saver
from fp4train.run.teacher import check_teacher_source, load_teacher
from fp4train.run.timeline import Course

_log = logging.getLogger(__name__)


def build_model(config: Config, vocab_size: int, device: torch.device) -> nn.Module:
    """The configured model with fp4train's linear layers; its weights depend on run.seed alone."""
    meta = device.type == "meta"
    with torch.random.fork_rng(devices=[]):
        if not meta:
            # it reads values of tensors while it is built: its size is not known before
            with suppress(RuntimeError):
                checks.check_memory(_built(config, vocab_size, "meta"))
        torch.manual_seed(config.run.seed)
        # Drawn on the CPU whatever the device, so that a seed gives the same weights everywhere.
        model = _built(config, vocab_size, "meta" if meta else "cpu")
    model = convert(model.to(device), backend=config.backend)
    if not meta:
        fuse(model, config.train, device.type)
        compile_blocks(model, config.train, device)
    return model


def _built(config: Config, vocab_size: int, device: str) -> nn.Module:
    with user_errors(ValueError, before="the model cannot be built: "), torch.device(device):
        build = partial(build_weightless, config.model) if device == "meta" else config.model.build
        model = build(vocab_size=vocab_size, seq_len=config.train.seq_len)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"{type(config.model).__name__}.build gave an object of {type(model).__name__}; it "
                "must return a torch.nn.Module"
            )
    return model


def build_plan(
    config: Config,
    layers: Mapping[str, Layer],
    timeline: Timeline,
    device: Device,
    mesh: Mesh = ONE,
) -> Plan:
    """The plan of a run: what will run where, and why.

    Args:
        layers: layers of the whole model, by name (`find_layers`).
        mesh: ranks of the run.

    Raises:
        UserError: a pattern of the policy matches no layer, `backend` cannot run a recipe on
            `device` or over so many stages, chunks of sequences are no whole blocks, or steps are
            to be recorded and a recipe depends on the host.
    """
    tokens = config.train.rows(mesh.data) * config.train.seq_len // mesh.context
    with user_errors(ValueError):
        plan = make_plan(
            layers.values(),
            timeline,
            config.policy,
            tokens=tokens,
            device=device,
            backend=config.backend,
            keep_values=config.train.keep_values,
        )
        plan.check_ranks(stages=mesh.pipeline)
        checks.check_chunks(plan, config.train.seq_len, mesh.context)
        if config.train.cuda_graph:
            check_plan(plan)
        return plan


def build(origin: Origin, world: World | None = None) -> Run:
    """Everything that `train` needs. The run directory must be locked by the caller, of several
    ranks by the lead.

    What it may hold is replaced only after data, model and plan turned out to be possible, on every
    rank.

    Args:
        world: the ranks; None: this process alone.

    Raises:
        UserError: something that the user can mend; the message says what.
    """
    config = origin.config
    directory = config.run.dir
    world = world or World(device=choose_device(config.device))
    with world.same_outcome():  # all that is only read
        checks.check_cut(config, world.mesh)
        if isinstance(config.data, Mixture):  # before its text is tokenised
            first_steps((stage.start for stage in config.data.stages), config.train.steps)
        _ = origin.text  # refused where it is too long to be read again
        timeline = origin.timeline(mend_records=world.lead)
        check_teacher_source(config, world.mesh, origin.tokenizer_of)
    place = origin.place
    with ExitStack() as stack:
        with world.same_outcome():
            if world.lead:
                if place != directory:
                    stack.enter_context(run_directory.folder_aside(directory, FOLDERS))
                origin.fill(place)
        run = assemble(config, place, timeline, world, draws=origin.draws, begun=origin.data_begun)
        with world.same_outcome():
            if config.train.cuda_graph:
                run.runner = recorded(run)
            origin.load(run)
        _warn(run, begins=origin.resume_step is None)
        with world.same_outcome():
            if world.lead:
                origin.commit(run)
    origin.after_commit(run)
    run.companions = in_training(run)
    return run


def _warn(run: Run, *, begins: bool) -> None:
    """Warn of valid but probably unintended settings.

    Args:
        begins: the run is at step 0, with weights that no step has changed.
    """
    checks.warn_of_few_steps(run.config)
    warnings = [*checks.plan_warnings(run.course.plan), checks.divided_blocks(run.course.plan)]
    warnings.append(never_replayed(run.config, run.device.type))
    if begins and run.pipeline is None:
        warnings = [*checks.scale_warnings(run.config, run.model), *warnings]
    for warning in filter(None, warnings):
        _log.warning("%s", warning)


def assemble(
    config: Config,
    place: Path,
    timeline: Timeline,
    world: World,
    *,
    draws: bool = True,
    begun: int = 0,
) -> Run:
    """A run at step 0 that no file knows of yet but its tokenizer's, in `place`.

    Args:
        draws: whether it needs its initial weights; the caller loads others if not.
        begun: first batch of the data (`RunRows`).

    Raises:
        UserError: data, model or plan are not possible.
    """
    data = _data(config, place, world)
    with world.same_outcome():
        model, deferred = built_or_deferred(config, data.vocab_size, world, draws)
        checks.set_masks(model, config, data.borders)
        if world.size > 1:
            share_tensors(model, world, config.parallel)
            share_sequences(model, world)
            share_experts(model, world)
        teacher = load_teacher(config, data, model, world)
        layers = find_layers(model)
        by_block, besides = multiplied(model, find_blocks(model), config.train.seq_len)
        mesh = world.mesh
        plan = build_plan(config, layers, timeline, Device.of(world.device), mesh)
        checks.check_oscillation(config, plan)
        if world.mesh.pipeline == 1:
            cut = None
        else:
            cut = stage_cut(model, config, layers)
        batch = {"batch_size": config.train.batch_size, "seq_len": config.train.seq_len}
        train_data = data.training(**batch, seed=config.run.seed + begun)
        train_data = train_data.lasting(config.train.steps, begun)
        val_data = data.validation(**batch)
    _let_layers_add(model, config, mesh)
    full_model = model
    pipeline = None
    if cut is not None:
        pipeline = cut_stages(model, *cut, config.parallel, world, config.train.seq_len)
        model = pipeline.model
    for part in (model,) if pipeline is None else pipeline.stages.values():
        _distribute(part, config, world)
    if deferred:
        with world.same_outcome(), user_errors(ValueError, before="the weights cannot be drawn: "):
            materialise(model, world.device, seed=config.run.seed if draws else None)
    optimizer = _optimizer(config, model, full_model, pipeline)
    run = Run(
        config=config,
        model=model,
        optimizer=optimizer,
        data=RunRows(train_data, val_data, data.fingerprint, world.device, begun),
        course=Course(timeline, plan),
        record=RunRecord.empty(Folder.open(config.run.dir, create=True)),
        built_groups=group_values(optimizer),
        multiplied=sum(by_block) + besides,
        pipeline=pipeline,
        teacher=teacher,
        world=world,
    )
    equip(run)
    return run


def _data(config: Config, place: Path, world: World) -> RunData:
    """The data, the same on all ranks: those that a cache keeps are tokenised by all ranks, when the
    lead has trained their tokenizer; others are read by the lead, then by one rank of each other
    machine.
    """
    if world.size > 1 and (entries_of := getattr(config.data, "entries", None)) is not None:
        entries: Sequence[CacheEntry] = world.by_machine(
            lambda: entries_of(place, config.train.seq_len)
        )
        with world.same_outcome(), world.met_after():
            for entry in entries:
                entry.ids()
    data: RunData = world.by_machine(
        lambda: config.data.build(place, config.train.seq_len, config.run.seed)
    )
    if not hasattr(data, "fingerprint"):
        raise UserError(
            f"{type(config.data).__name__}.build gave an object of {type(data).__name__}; it must "
            "return a TokenData (fp4train.data.tokens)"
        )
    if world.size > 1:
        check_same(world, {"the data": data.fingerprint})
    _log.info("%s", data.description)
    return data


def _distribute(part: nn.Module, config: Config, world: World) -> None:
    """Cut what this rank holds of the model over several ranks."""
    if world.size == 1:
        return
    fully_gathered = config.train.whole_weights is not None
    gather = gather_mode(config.parallel.gather, fully_gathered=fully_gathered)
    distribute(part, world, gather, config.parallel.reduce)


def _let_layers_add(model: nn.Module, config: Config, mesh: Mesh) -> None:
    """Let layers add up the gradients of microbatches and chunks, where there are several."""
    several = mesh.context > 1 or config.train.rows(mesh.data) < config.train.batch_size
    for module in model.modules():
        if isinstance(module, PlannedLayer):
            module.sum_gradients(several, in_product=config.train.kernels != "torch")


def _optimizer(
    config: Config, model: nn.Module, full_model: nn.Module, pipeline: Pipeline | None
) -> torch.optim.Optimizer:
    """The optimizer of what this rank holds of the model.

    Raises:
        UserError: the configuration names one that does not fit the model.
    """
    with user_errors(ValueError):
        optimizer = config.optim.build(model)
        check_built(optimizer, model, type(config.optim).__name__)
    keep_bounds(optimizer, model, largest_values(full_model))
    if pipeline is not None:
        pipeline.copy_tied()
        optimizer.register_step_post_hook(lambda *_: pipeline.copy_tied())
    return optimizer


def equip(run: Run) -> None:
    """Give a run its states and what works on it; its steps are queued kernel by kernel."""
    run.states = states_of(run)
    run.saver = Saver(run, run.world.ranks)
    run.runner = EagerSteps(run)
    run.companions = in_studies(run, run.states)


def stage_cut(
    model: nn.Module, config: Config, layers: Mapping[str, Layer]
) -> tuple[StageCut, Inventory]:
    """How a model is cut into stages, and what it holds before that.

    Raises:
        UserError: it cannot be cut into the stages of the configuration.
    """
    with user_errors(ValueError):
        cut = cut_of(model, config.parallel)
        return cut, Inventory.of(model, layers, tied_weights(model, cut))


def built_or_deferred(
    config: Config, vocab_size: int, world: World, draws: bool
) -> tuple[nn.Module, bool]:
    """The model before it is cut over the ranks, and whether it gets memory and weights after that.

    On several ranks a model that counters draw is cut first and drawn then, so that none ever holds
    all of it; another one is drawn whole. One that does not draw its weights gets its memory then,
    too. What counters draw has the same bits on every device, and is drawn on the GPU where there
    is one.
    """
    by_counter = getattr(config.model, "draw", "torch") == "counter"
    if not draws or (by_counter and (world.size > 1 or world.device.type == "cuda")):
        model = build_model(config, vocab_size, torch.device("meta"))
        if world.size == 1:
            checks.check_memory(model)
        if (reason := why_not_deferred(model)) is None:
            fuse(model, config.train, world.device.type)
            compile_blocks(model, config.train, world.device)
            return model, True
        if world.size > 1:
            _log.warning("every rank draws the whole model in main memory first: %s", reason)
    return build_model(config, vocab_size, world.device), False
