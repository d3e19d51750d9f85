"""fp4train swap RUN recipe=NAME [at=STEP] [wait=SECONDS]

Change the recipe of a run, at once if it is running. Without recipe= it lists
the swaps that are recorded and pending.

  recipe=NAME      and recipe.KEY=VALUE
  at=200           the step; the default is the next one
  wait=10          seconds to wait for the answer of the process that trains; 0:
                   do not wait
  cancel=ID        instead of recipe=: take back a swap that has not begun, by
                   its ID or step; cancel=all: each of them
  plugins=[NAME]   packages of classes of your own; --config-dir FOLDER: recipes
                   of your own

Exit code: 0 accepted (or, where no process trains, left for the next resume), 1
refused, 2 no answer yet.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4train import checkpoint
from fp4train.cli.output import fitted, print_screen
from fp4train.config.command_line import Amount, CommandLine, WholeNumber, read_line
from fp4train.config.composition import composed
from fp4train.config.schema import plain, to_config
from fp4train.errors import UserError
from fp4train.run.record import directory as run_directory
from fp4train.run.record.inbox import ask, cancel_request, pending, wait_for_answer
from fp4train.run.record.journal import RecipeChoice, read_journal, read_swaps
from fp4train.run.timeline import build_timeline, with_swap
from fp4train.text import counted, counted_are, typed, whole_number

NO_ANSWER = 2


@dataclass(frozen=True, kw_only=True)
class SwapOptions(CommandLine):
    at: WholeNumber | None = None
    wait: Amount = 10.0
    cancel: str | None = None


def main(arguments: list[str]) -> int:
    """Ask for a swap and report the answer; or list, or cancel. Returns the exit code."""
    line = read_line(arguments, SwapOptions, __doc__, keys=("recipe", "plugins"))
    run = run_directory.require_run(line.run)
    with line.using_plugins():
        if line.cancel is not None:
            if line.chosen or line.at is not None:
                beside = [*line.chosen, f"at={line.at}"][0]
                raise UserError(f"swap cancel={line.cancel} stands alone, not with {beside}")
            return _cancel(run, line.cancel, line.wait)
        if not line.chosen and (line.at, line.wait) == (None, SwapOptions.wait):
            done = run_directory.steps_done(run)
            print_screen(
                "swaps.txt",
                run=run,
                history=run_directory.HISTORY,
                done=done,
                swaps=read_swaps(run),
                requests=pending(run),
                lost=bool(done) and not read_journal(run),
            )
            return 0
        return _swap(run, line)


def _swap(run: Path, line: SwapOptions) -> int:
    at = line.at
    wait = line.wait
    names = [word.partition("=")[2] for word in line.chosen if word.startswith("recipe=")]
    if len(names) != 1:
        raise UserError("swap needs recipe=NAME, once")
    (command,) = composed([*line.flags, *line.chosen])
    options = [key for key in command.changed if key.startswith("recipe.")]
    choice = RecipeChoice.chosen(names[0], plain(command.cfg)["recipe"], options)
    done = max(checkpoint.steps(run / run_directory.CHECKPOINTS), default=0)
    choice.at(0)
    saved = run_directory.read_trained(run)
    steps = saved.train.steps
    if at is not None and at >= steps:
        raise UserError(f"at={at} is beyond the end: {run} has {counted(steps, 'step')}")
    if at is not None and at < done:
        raise UserError(f"at={at} is past: {run} has done {counted(done, 'step')}")
    if not run_directory.is_running(run):
        # what the process that resumes the run would refuse
        timeline = build_timeline(to_config(saved), run)
        with_swap(timeline, choice.at(done if at is None else at))
    more = " train.steps=…" if done >= steps else ""
    when = f"recipe {choice.name} " + ("at the next step" if at is None else f"at step {at}")
    later = f"{when}; no process trains in {run} now, it is picked up on resume={typed(run)}{more}"
    return _ask(run, {"recipe": choice.recipe, "name": choice.name, "at": at}, wait, when, later)


def _ask(run: Path, body: dict[str, Any], wait: float, what: str, later: str) -> int:
    """Ask for `what`; wait for the process that trains, and say what it answered, or `later` where
    none does.
    """
    request = ask(run, body)
    if not run_directory.is_running(run):
        print(fitted(f"{run}: {later}"))
        return 0
    answer = wait_for_answer(run, request, wait)
    if answer is None:
        if run_directory.is_running(run):
            ended = ""
        else:
            ended = "the process has ended; "
        asked = (
            f"{run}: {what} is asked for, no answer in {wait:g} s; {ended}it is taken between "
            "two steps, or on resume"
        )
        print(
            fitted(
                f"{asked}. fp4train swap {run} shows what became of it, cancel={request} "
                "takes it back"
            )
        )
        return NO_ANSWER
    accepted, text = answer
    if not accepted:
        raise UserError(f"{run} refuses {what}: {text}")
    print(fitted(f"{run}: accepted, {text}"))
    return 0


def _cancel(run: Path, what: str, wait: float) -> int:
    """Take back a pending request, or ask the training process to forget a recorded swap."""
    open_requests = pending(run)
    done = run_directory.steps_done(run)
    recorded = [swap.step for swap in read_swaps(run) if swap.step >= done]
    if what == "all":
        taken = [request for request in open_requests if cancel_request(run, request)]
        code = max((_forget(run, step, wait) for step in recorded), default=0)
        if not taken and not recorded:
            print(fitted(f"{run}: no swap is pending"))
        elif taken:
            print(fitted(f"{run}: {counted_are(len(taken), 'pending request')} cancelled"))
        return code
    if what in open_requests and cancel_request(run, what):
        print(fitted(f"{run}: request {what} is cancelled"))
        return 0
    if (number := whole_number(what)) is not None and number in recorded:
        return _forget(run, number, wait)
    if names := [*open_requests, *map(str, recorded)]:
        there = f"it has {', '.join(names)}"
    else:
        there = "none is pending (what has begun stays)"
    raise UserError(f"cancel={what}: {run} has no such pending swap; {there}")


def _forget(run: Path, step: int, wait: float) -> int:
    at = f"the swap at step {step}"
    return _ask(
        run,
        {"recipe": None, "name": "", "at": step},
        wait,
        f"to cancel {at}",
        f"{at} is cancelled when the run is resumed",
    )
