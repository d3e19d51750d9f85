"""fp4train [train] key=value…

Train a run, or go on with it; the keys are listed below.

  recipe=nvfp4     and the other groups: model, data, optim, schedule, policy,
                   phases, track; GROUP=FILE.yaml, too
  run.name=NAME    the run is written to runs/NAME; run.overwrite=true replaces
                   one that is there
  data=text data.path=PATH   UTF-8 text; data.suffixes=[.txt,.md] are the files
                             that are read of a folder
  data=hf data.name=NAME     of Hugging Face, or
                             data.path=FILE.jsonl|FILE.parquet;
                             data.column=text, data.max_tokens=…
  data=tokens data.path=PATH data.vocab_size=N    ids of tokens,
                                                  data.val_path=PATH those of
                                                  validation
  resume=RUN       go on from its newest checkpoint, or resume_step=200; with
                   run.name=NAME as another run
  init=RUN         a new run with the weights of another, of its newest
                   checkpoint or init_step=200 (RUN@200)
  init=FOLDER      a new run with the weights, model and tokenizer of a Hugging
                   Face folder (docs/exchange.md)
  parallel.KEY=N   how the ranks that torchrun or srun starts share the run
                   (docs/scale.md)
  plugins=[NAME]   packages of classes of your own; --config-dir FOLDER: options
                   of your own
  -m KEY=A,B       a sweep: one run after another
  --cfg job        the configuration, nothing trained
Exit code 0: done; 3: the loss has diverged, and the message says what to do
(docs/guide.md); 1: an error
"""

import gc
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp4train.cli.console import Console, kept_console
from fp4train.cli.launch import Command, SweepJob, launch
from fp4train.cli.output import fitted, message, terminal_width
from fp4train.config import overrides, plugins
from fp4train.config.binding import bind
from fp4train.config.schema import Config, plain
from fp4train.errors import LostError, OtherRunError, UserError
from fp4train.optim import Optimizer
from fp4train.optim.schedule import Schedule
from fp4train.parallel import agree
from fp4train.parallel.agree import check_same, check_shared
from fp4train.parallel.launch import ProcessRank, find_place
from fp4train.parallel.world import AgreedError, World
from fp4train.precision.report import summarise
from fp4train.run.bits import computing_threads, determinism
from fp4train.run.build import build
from fp4train.run.checks import before_cooldown, beyond_its_end, learning_rate, rate_jump
from fp4train.run.find import find_origin, find_rewound
from fp4train.run.fuse import kernels_of_layers
from fp4train.run.host import choose_device, keep_freed_memory, libraries
from fp4train.run.origin import Continued, Origin
from fp4train.run.record import directory as run_directory, journal
from fp4train.run.record.trust import check_paths, forget_charts
from fp4train.run.run import Run
from fp4train.run.supervise.audit_report import Coverage
from fp4train.run.supervise.divergence import DivergedError, ended_diverged
from fp4train.run.supervise.loss_history import Rewind
from fp4train.run.supervise.rescue import explain
from fp4train.text import screen
from fp4train.train import Result, train

_log = logging.getLogger("fp4train")
_ENDINGS = {0: "", DivergedError.exit_code: "diverged"}
"""Remarks on the end of a job in the table of a sweep, by exit code."""


def main(arguments: list[str]) -> int:
    """Train; returns the exit code. Of several ranks each is a process that ends here."""
    place = find_place(os.environ)
    if place.size > 1:
        return _as_rank(arguments, place)

    jobs: list[SweepJob] = []

    def task(command: Command) -> int:
        job = SweepJob(point=command.point, config=command.config)
        jobs.append(job)
        with determinism(command.config.train.deterministic):
            code = _train(command, _world(command.config, place), job)
        job.ending = _ENDINGS.get(code, f"exit code {code}")
        return code

    try:
        return launch(arguments, task)
    finally:
        if any(job.point for job in jobs):
            from fp4train.cli.endings import table

            print("", table(jobs), sep="\n")


def _as_rank(arguments: list[str], place: ProcessRank) -> int:
    """Train as one rank of several. What all of them have to say, the lead alone says."""
    # Before the ranks have met, each machine speaks for itself.
    speaks = place.local_rank == 0
    world: World | None = None
    if not place.lead:
        logging.getLogger("fp4train").setLevel(logging.ERROR)

    def task(command: Command) -> int:
        nonlocal world, speaks
        config = command.config
        try:
            with determinism(config.train.deterministic):
                world = _world(config, place)
                speaks = place.lead
                return _train(command, world)
        except AgreedError as error:
            if speaks:
                raise
            return error.exit_code
        except BaseException as error:
            if world is not None:
                world.fail(error)
            if isinstance(error, LostError):
                speaks = error.speaks
            if speaks or not isinstance(error, UserError):
                raise
            return error.exit_code

    try:
        if overrides.SWEEP & set(arguments):
            raise UserError(
                f"-m trains one run after another, and {place.size} ranks train one together: "
                "start each point of the sweep by itself"
            )
        code = launch(arguments, task)
    except UserError as error:
        if speaks:
            raise
        code = error.exit_code
    return code if world is None else world.end(code)


def _world(config: Config, place: ProcessRank) -> World:
    """The ranks, each with its device; within `determinism`, because cuBLAS is told before a GPU is
    asked anything.
    """
    return World.start(place, config.parallel, choose_device(config.device, place))


def _train(command: Command, world: World, job: SweepJob | None = None) -> int:
    if not world.lead:
        return _trained(command, world, None, job)
    with kept_console() as console:
        return _trained(command, world, console, job)


def _trained(command: Command, world: World, console: Console | None, job: SweepJob | None) -> int:
    """Train; the lead keeps what it prints in `console`, and `job` gets the last metrics."""
    keep_freed_memory()
    config = command.config
    chosen = command.cfg
    directory = command.config.run.dir
    if world.size > 1:
        check_same(world, {**journal.flat(plain(chosen)), "the swap": command.swap, **_software()})
    with world.same_outcome():
        if world.lead:  # the others' machines may have another key
            check_paths(chosen, command.named, sending=True)
    with ExitStack() as stack:
        stack.enter_context(computing_threads(config.train.threads))
        with world.same_outcome():
            if world.lead:
                stack.enter_context(run_directory.locked(directory))
                forget_charts(chosen)
        if world.size > 1:
            check_shared(world, directory)
        try:
            origin = find_origin(command, world)
        except OtherRunError:
            if job is not None:
                job.other_run = True
            from fp4train.run.planned import check_possible

            check_possible(config)  # what is wrong with the command itself comes first
            raise
        if isinstance(origin, Continued):
            if origin.resume_step >= config.train.steps:
                if world.lead:
                    print(message(_finished(config, origin.source, origin.resume_step), sys.stdout))
                return DivergedError.exit_code if ended_diverged(origin.checkpoint) else 0
            _warn_of_jump(origin, command.saved, world)
        try:
            in_sweep = bool(command.point)
            result: Result | Rewind = _to_its_end(origin, world, console, in_sweep)
            while isinstance(result, Rewind):
                gc.collect()  # what the diverged run held, before as much is built again
                origin = find_rewound(origin, world, result)
                result = _to_its_end(origin, world, console, in_sweep)
        finally:
            if world.lead:
                from fp4train.cli.endings import draw, summary  # a start waits for no pictures

                picture = draw(directory)
    if job is not None:
        job.metrics = result.metrics
    if world.lead:
        print(message(summary(directory, result) + picture, sys.stdout))
    return _code(result)


def _software() -> dict[str, str]:
    """What besides the configuration decides what this rank computes, for `check_same`."""
    versions = {f"the version of {name}": version for name, version in libraries().items()}
    sources = agree.source_values({**agree.own_files(), **plugins.source_files()})
    return {**versions, **agree.outside_settings(), **sources}


def _warn_of_jump(origin: Continued, resumed: Mapping[str, Any] | None, world: World) -> None:
    """Warn where the learning rate jumps at the step from which a run goes on.

    Args:
        resumed: the saved configuration of `resume`; None: the same command goes on.
    """
    if resumed is None:
        return
    with world.same_outcome():
        earlier = _as_it_was(origin, resumed)
    if jump := rate_jump(earlier, origin.config, origin.resume_step):
        _log.warning("%s; %s", jump, before_cooldown(origin.source, earlier))


def _as_it_was(origin: Continued, resumed: Mapping[str, Any]) -> Config:
    """The configuration that goes on, with the learning rates of the run as it was.

    Args:
        resumed: the saved configuration of `resume`; a branch that has checkpoints goes on with its
            own.
    """
    config = origin.config
    source = origin.source
    same = source.resolve() == Path(str(config.resume)).resolve()
    if same:
        saved = resumed
    else:
        saved = plain(run_directory.read_config(source))
    steps = bind(saved["train"]["steps"], int, "train.steps")
    return replace(
        config,
        optim=bind(saved["optim"], Optimizer, "optim"),
        schedule=bind(saved["schedule"], Schedule, "schedule"),
        train=replace(config.train, steps=steps),
    )


def _to_its_end(
    origin: Origin, world: World, console: Console | None, in_sweep: bool
) -> Result | Rewind:
    """Train to the end of the run, or to where it is to go back to a checkpoint because its loss
    diverged. A job of a sweep names the file of its plan alone.
    """
    run = build(origin, world)
    code = 1
    if console is not None:
        console.write_to(run.directory)
    try:
        _log.info("%s: %s", run.directory, run.description)
        paragraphs = [] if in_sweep else _plan_of(run)
        plan = run.directory / run_directory.PLAN
        if plan.is_file():
            paragraphs.append(f"every layer and GEMM: {plan}")
        _log.info("%s\n", "\n".join(paragraphs))
        if isinstance(origin, Continued):
            _log.info("going on from step %d of %s", run.step, origin.source)
        try:
            result = train(run)
        except DivergedError as error:
            if error.rewind is None:
                raise
            _log.error("%s", error)
            code = 0
            return error.rewind
        except (RuntimeError, MemoryError) as error:
            if (explained := explain(error, run)) is None:
                raise
            raise explained from error
        code = _code(result)
        return result
    finally:
        run.record.tracker.finish(code)


def _plan_of(run: Run) -> list[str]:
    """The plan of a run, and what its layers run in and audits cover."""
    layers = kernels_of_layers(
        run.model, run.device.type, deterministic=run.config.train.deterministic
    )
    audits = Coverage.of(run.config, run.model).described(run.course.plan, run.world.mesh)
    sentences = [fitted(line) for line in (*run.gathers(), *layers, audits)]
    return [summarise(run.course.plan.sections, terminal_width()), *sentences]


def _code(result: Result) -> int:
    if result.signal is not None:
        return 128 + result.signal
    if not result.saved:
        return 1
    return DivergedError.exit_code if result.diverged else 0


def _finished(config: Config, run: Path, step: int) -> str:
    """Ways to go on with a run that has done its steps, and the learning rate that they would begin
    with; of one that has done more than `config` asks for, the earlier checkpoint.
    """
    if config.train.steps < step:
        return beyond_its_end(config, run, step)
    cooldown = config.schedule.cooldown_start(config.train.steps)
    cooled = cooldown is not None and step > cooldown
    return screen(
        __package__,
        "finished.txt",
        run=run,
        step=step,
        last_rate=learning_rate(config, step - 1) if cooled else None,
        rate=config.optim.lr,
        before_cooldown=before_cooldown(run, config) if cooled else "",
    )
