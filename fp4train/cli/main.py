"""The command line: `fp4train [VERB] key=value…`; VERB is train (default), plan, swap, compare or formats.

Training and planning are composed by Hydra, so its flags work: `-m` for sweeps, `--cfg job`, `--help`, `--config-dir`.
Errors that a user can act on are one message and an exit code other than 0, never a traceback.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from fp4train import __version__, checkpoint
from fp4train.config import overrides
from fp4train.config.binding import bind, unknown_keys
from fp4train.config.schema import CONFIGS, Config, plain, to_config
from fp4train.errors import UserError
from fp4train.precision import Recipe
from fp4train.run import directory as run_directory
from fp4train.text import near_miss, tabulate

if TYPE_CHECKING:
    from fp4train.hardware import Gpu
    from fp4train.precision.plan import Plan
    from fp4train.train import Result

_log = logging.getLogger("fp4train")

USAGE = """fp4train [VERB] key=value…

  fp4train recipe=nvfp4                       train (the default verb)
  fp4train plan model=llama_1b recipe=nvfp4   which precision every GEMM runs in, and why; trains nothing
  fp4train plan model=llama_8b gpu=B200       … and the time each GEMM would take on that GPU
  fp4train -m recipe=bf16,mxfp8,nvfp4         a sweep
  fp4train resume=runs/a recipe=mxfp8         go on from a checkpoint, here with another recipe
  fp4train swap runs/a recipe=bf16 at=200     change the recipe of a run that is running
  fp4train compare runs/a runs/b              loss gap, table and plot
  fp4train formats                            the number formats
  fp4train --cfg job                          the whole configuration
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 0, 1 for an error that was explained, or 128 + the signal that ended a run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbs: dict[str, Callable[[list[str]], int]] = {
        "train": lambda rest: _hydra(rest, _train),
        "plan": lambda rest: _hydra(rest, _plan),
        "swap": _swap,
        "compare": _compare,
        "formats": _formats,
    }
    verb = "train"
    if arguments and arguments[0] in verbs:
        verb = arguments.pop(0)
    try:
        if verb not in ("train", "plan") and {"-h", "--help"} & set(arguments):
            print(USAGE, end="")
            sys.exit(0)
        if "--version" in arguments:
            print(f"fp4train {__version__}")
            sys.exit(0)
        if verb == "train" and arguments and arguments[0].replace("_", "").isalnum():
            raise UserError(f"{_no_verb(arguments, verbs)}\n\n{USAGE}".rstrip())
        _configure_logging()
        code = verbs[verb](arguments)
        sys.stdout.flush()
    except UserError as error:
        print(f"fp4train: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("fp4train: interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        code = _closed_output()
    sys.exit(code)


def _no_verb(arguments: list[str], verbs: Iterable[str]) -> str:
    """What is wrong with a command whose first word is neither a verb nor key=value."""
    first, *rest = arguments
    if (first == "resume" or first in overrides.groups()) and rest and "=" not in rest[0]:
        return f"unknown verb {first!r}; did you mean {first}={rest[0]}?"
    return f"unknown verb {first!r}{near_miss(first, verbs)}"


def _closed_output() -> int:
    """`fp4train plan | head`: the reader has seen enough, which is no error. What is buffered has nowhere to go."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _Handler(logging.Handler):
    """Log lines that do not break a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        prefix = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        with suppress(OSError):  # a terminal that was closed is no reason to end a run
            tqdm.write(prefix + record.getMessage(), file=sys.stderr)


def _configure_logging() -> None:
    _log.handlers[:] = [_Handler()]
    _log.setLevel(logging.INFO)
    _log.propagate = False


def _hydra(arguments: list[str], task: Callable[[DictConfig], int]) -> int:
    """Run `task` on the composed configuration; with -m on each of the sweep's."""
    if {"-m", "--multirun"} & set(arguments) and {"--cfg", "-c", "--info", "-i"} & set(arguments):
        raise UserError("--cfg and --info: Hydra shows one configuration, not a sweep's; leave out -m")
    resumed = [a for a in arguments if a.startswith("resume=") and a != "resume=null"]
    if "resume=" in resumed:
        raise UserError("resume= names no run: resume=RUN")
    if resumed:
        arguments = overrides.for_resume(arguments)
    if not {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"} & set(arguments):
        overrides.check(arguments)
    codes: list[int] = []
    swept = overrides.swept_keys(arguments)
    if resumed and set(swept) - {"resume"} and not {"run.name", "run.dir"} & set(overrides.changed_keys(arguments)):
        raise UserError(f"a sweep over {swept[0]} makes a branch of {resumed[0]} at each point: name them, run.name=…")

    def job(cfg: DictConfig) -> None:
        # Hydra prints a traceback for what escapes a job, and a sweep should go on after one bad point.
        try:
            _name_point(cfg, swept)
            codes.append(task(cfg))
        except UserError as error:
            print(f"fp4train: {error}", file=sys.stderr)
            codes.append(1)
        except BrokenPipeError:
            codes.append(_closed_output())
        except torch.OutOfMemoryError as error:
            print(
                f"fp4train: {str(error).splitlines()[0]} Try train.microbatch=… or model.recompute=true.",
                file=sys.stderr,
            )
            codes.append(1)
        if codes[-1] > 128:  # a signal ends the sweep, not only the point that it came in
            raise SystemExit(codes[-1])

    if {"--help", "-h"} & set(arguments):
        print(USAGE)
    saved, sys.argv = sys.argv, ["fp4train", *overrides.flags_first(arguments)]
    try:
        hydra.main(config_path=str(CONFIGS), config_name="train", version_base="1.3")(job)()
    finally:
        sys.argv = saved
    return max(codes, default=0)


def _name_point(cfg: DictConfig, swept: Sequence[str]) -> None:
    """Give every point of a sweep a name, and so a directory, of its own: what its name lacks is appended."""
    if not swept:
        return
    name = str(OmegaConf.to_container(cfg.run, resolve=False)["name"])  # type: ignore[index, call-overload]
    choices = HydraConfig.get().runtime.choices
    for key in swept:
        if f"choices.{key}}}" not in name and not key.startswith(("run.name", "run.dir")):
            value = choices[key] if key in choices else OmegaConf.select(cfg, key)
            cfg.run.name = f"{cfg.run.name}-{key.rpartition('.')[2]}={str(value).replace('/', '_')}"


def _settings(cfg: DictConfig) -> tuple[DictConfig, tuple[str, dict[str, Any]] | None]:
    """The configuration to run, and the recipe to swap to, its name and its plain configuration.

    That is the composed configuration; with resume=RUN it is the saved one with the overrides applied, except that
    another recipe does not change what the run began with: it is a swap.
    """
    resolved = OmegaConf.create(plain(cfg))
    if not resolved.resume:
        return resolved, None
    source = Path(str(resolved.resume))
    saved = run_directory.read_config(source)
    changed = overrides.changed_keys(list(HydraConfig.get().overrides.task))
    if "experiment" in changed:
        raise UserError("resume=… takes single keys (train.steps=…, policy.last=…), no experiment=")
    swap = None
    if "recipe" in changed:
        swap = str(HydraConfig.get().runtime.choices["recipe"]), plain(resolved)["recipe"]
    elif options := [key for key in changed if key.startswith("recipe.")]:
        raise UserError(f"resume=… {options[0]}=… is a swap: name its recipe, too (recipe=NAME {options[0]}=…)")
    unknown = set(unknown_keys(plain(saved), Config))
    with open_dict(saved):
        saved.run.overwrite = False
        for key in changed:
            if key.split(".")[0] != "recipe":
                OmegaConf.update(saved, key, OmegaConf.select(resolved, key), merge=False, force_add=True)
        # In its own directory, unless a new name asks for a branch of the run.
        saved.run.dir = resolved.run.dir if {"run.name", "run.dir"} & set(changed) else str(source)
    if gone := [key for key in unknown_keys(plain(saved), Config) if key in unknown]:
        raise UserError(
            f"{source / run_directory.CONFIG} holds {gone[0]}, which is no longer an option: take it out of that file "
            "to go on without it"
        )
    return saved, swap


def _train(cfg: DictConfig) -> int:
    from fp4train.precision.report import summarise
    from fp4train.run.build import build
    from fp4train.run.host import keep_freed_memory
    from fp4train.run.resume import find_start
    from fp4train.train import train

    keep_freed_memory()
    settings, swap = _settings(cfg)
    config = to_config(settings)
    directory = config.run.dir
    with run_directory.locked(directory):
        start = find_start(config, settings)
        if start is not None and start.step >= config.train.steps:
            print(
                f"{directory} is finished: {start.step} steps are done. resume={directory} train.steps=… goes on, "
                "run.name=… starts another run, run.overwrite=true this one again"
            )
            return 0
        run = build(config, settings, start, swap)
        code = 1
        try:
            _log.info("%s: %s", directory, run.description)
            _log.info("%s\nevery layer and GEMM: %s\n", summarise(run.plan), directory / run_directory.PLAN)
            if start is not None:
                _log.info("going on from step %d of %s", run.step, start.path.parent.parent)
            result = train(run)
            code = 128 + result.signal if result.signal is not None else 0 if result.saved else 1
        finally:
            run.tracker.finish(code)
            picture = _draw(directory)
    print(_summary(directory, result) + picture)
    return code


def _draw(directory: Path) -> str:
    """Draw the curves of a run that has some; a picture is never worth a run's exit code."""
    from fp4train.analysis.curves import draw_curves

    try:
        return f"; {draw_curves(directory)}"
    except (UserError, OSError) as error:
        return f"; no curves ({error})"


def _summary(directory: Path, result: Result) -> str:
    names = {"train/loss": "train loss", "val/loss": "val loss", "val/loss_recipe": "in the recipe"}
    losses = ", ".join(f"{name} {float(result.metrics[k]):.4f}" for k, name in names.items() if k in result.metrics)
    ended = "done" if result.saved else "done, but its end is not saved"
    if result.signal is not None:
        ended = f"stopped by {signal.Signals(result.signal).name}, resume={directory} goes on"
    return f"{directory}: step {result.step}, {ended}; {losses}; {result.seconds:.0f} s"


def _plan(cfg: DictConfig) -> int:
    from fp4train.data.vocabulary import planned_vocab_size
    from fp4train.hardware import Device, find_gpu
    from fp4train.precision.report import render
    from fp4train.run.build import build_model, build_plan, build_timeline, choose_device, with_swap
    from fp4train.run.resume import find_source

    settings, swap = _settings(cfg)
    config = to_config(settings)
    try:
        gpu = find_gpu(config.gpu) if config.gpu else None
    except ValueError as error:
        raise UserError(str(error)) from error
    source = find_source(config, settings) if config.resume else None
    timeline = build_timeline(config, source)
    if source is not None and swap is not None:
        done = checkpoint.steps(source / run_directory.CHECKPOINTS)
        timeline = with_swap(timeline, run_directory.as_swap(done[-1], swap[1], swap[0]))
    model = build_model(config, planned_vocab_size(config.data), torch.device("meta"))
    device = Device.of(choose_device(config.device)) if gpu is None else Device.elsewhere(gpu)
    plan = build_plan(config, model, timeline, device)
    print(config.recipe, render(plan), sep="\n\n")
    if gpu is not None:
        print("", _estimate(config, plan, gpu), sep="\n")
    return 0


def _estimate(config: Config, plan: Plan, gpu: Gpu) -> str:
    """The time that the plan's GEMMs would take on `gpu`."""
    from fp4train.costs.estimate import estimate

    microbatches = config.train.batch_size // (config.train.microbatch or config.train.batch_size)
    return estimate(plan, gpu, microbatches=microbatches).render()


def _swap(arguments: list[str]) -> int:
    flags, words = overrides.flags_and_words(arguments)
    folders, strange = overrides.own_folders(flags), overrides.other_flags(flags)
    if strange:
        raise UserError(f"swap knows no flag {strange[0]}, only --config-dir FOLDER, where recipes of your own are")
    # A sweep puts what it varied into the names of its directories: runs/a-microbatch=2.
    paths = [a for a in words if "=" not in a or Path(a).is_dir()]
    rest = [a for a in words if a not in paths]
    if len(paths) != 1:
        raise UserError(
            "swap needs one run directory: fp4train swap RUN recipe=NAME [at=STEP]"
            + (f", not {' '.join(arguments)}" if arguments else "")
        )
    run = run_directory.require_run(Path(paths[0]))
    at = next((a.partition("=")[2] for a in rest if a.startswith("at=")), None)
    if at is not None and not at.isdecimal():
        raise UserError(f"at={at!r} must be a step (an integer ≥ 0)")
    wanted = [a for a in rest if not a.startswith("at=")]
    names = [a.partition("=")[2] for a in wanted if a.startswith("recipe=")]
    if len(names) != 1:
        raise UserError("swap needs recipe=NAME, once")
    others = [a for a in wanted if not a.startswith(("recipe=", "recipe."))]
    if others:
        raise UserError(f"swap changes the recipe only, not {others[0]!r}")
    overrides.check([*flags, *wanted])
    recipe = plain(overrides.compose(wanted, folders).recipe)
    bind(recipe, Recipe, "recipe")
    steps = run_directory.read_config(run).train.steps
    done = max(checkpoint.steps(run / run_directory.CHECKPOINTS), default=0)
    if at is not None and int(at) >= steps:
        raise UserError(f"at={at} is beyond the end: {run} has {steps} steps")
    if at is not None and int(at) < done:
        raise UserError(f"at={at} is past: {run} has done {done} steps")
    run_directory.request_swap(run, recipe, names[0], None if at is None else int(at))
    when = "at the next step" if at is None else f"at step {at}"
    running = ""
    if not run_directory.is_running(run):
        more = " train.steps=…" if done >= steps else ""
        running = f"; no process trains in {run} now, it is picked up on resume={run}{more}"
    print(f"{run}: recipe {names[0]} {when}{running}")
    return 0


def _compare(arguments: list[str]) -> int:
    from fp4train.analysis.compare import compare

    out = next((Path(a.partition("=")[2]) for a in arguments if a.startswith("out=")), None)
    runs = [Path(a) for a in arguments if not a.startswith("out=")]
    usage = "fp4train compare RUN RUN… [out=FILE.png]"
    if flags := [a for a in arguments if a.startswith("-")]:
        raise UserError(f"compare knows no flag {flags[0]}: {usage}")
    if len(runs) < 2:
        raise UserError(f"compare needs two or more run directories: {usage}")
    if out is not None and out.suffix.lower() != ".png":
        raise UserError(f"out={out if out.name else ''}: the picture is a PNG, its name must end in .png")
    comparison = compare(runs)
    print(comparison.render())
    print(comparison.draw(out))
    return 0


def _formats(arguments: list[str]) -> int:
    from fp4train.formats.table import formats_table

    if arguments:
        raise UserError(f"formats takes no arguments, not {' '.join(arguments)}")
    header = ("format", "bits", "largest", "smallest normal", "smallest", "binades", "specials")
    rows = [
        (
            r.name,
            str(r.bits),
            f"{r.largest:.6g}",
            f"{r.smallest_normal:.3g}",
            f"{r.smallest:.3g}",
            f"{r.binades:.1f}",
            r.specials,
        )
        for r in formats_table()
    ]
    print("\n".join(tabulate([header, *rows])))
    return 0
