"""fp4train check RUN [step=200] [--json] [key=value…]

Whether this machine computes what the plan of a run says: one step at a
checkpoint, on the batch that comes next, with every layer's three GEMMs made
again by the readable reference and compared (docs/audit.md), and each distinct
quantiser and layer of the plan on small random tensors. Nothing is trained or
written. Exit code 0: all is equal; 1: not; 2: no GEMM could be compared, an
audit failed, or there is no such run, checkpoint or option.

  step=200         the checkpoint; the default is the newest
  --json           as data
  backend=… device=…  and other keys that a resume may change: what is checked
                      is the run as it would go on
  plugins=[NAME]   packages of classes of your own that the run needs
"""

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fp4train.checkpoint.source import WeightSource
from fp4train.cli.launch import Command, launch
from fp4train.cli.output import print_screen
from fp4train.config.command_line import CommandLine, WholeNumber, read_line
from fp4train.errors import UserError
from fp4train.lab.check import check
from fp4train.lab.studies import open_subject
from fp4train.run.host import keep_freed_memory
from fp4train.run.record import directory as run_directory
from fp4train.run.record.trust import check_paths


@dataclass(frozen=True, kw_only=True)
class CheckOptions(CommandLine):
    step: WholeNumber | None = None


class NotCheckedError(UserError):
    """A check that compares nothing; 1 is the exit code of a fault."""

    exit_code = 2


def main(arguments: list[str]) -> int:
    """Check, and print what was found; returns the exit code.

    Raises:
        NotCheckedError: there is no run directory, or an option is refused.
    """
    codes: list[int] = []

    def task(command: Command, *, as_data: bool) -> int:
        codes.append(_check(command, as_data=as_data))
        return codes[-1]

    try:
        ended = _launch(arguments, task)
    except UserError as error:
        if error.exit_code != UserError.exit_code:
            raise
        raise NotCheckedError(str(error)) from error
    except Exception:  # uncaught it would end with 1, a fault
        traceback.print_exc()
        ended = 1
    return codes[0] if codes else max(ended, NotCheckedError.exit_code)


def _launch(arguments: list[str], task: Callable[..., int]) -> int:
    line = read_line(arguments, CheckOptions, __doc__, keys=None, data=True)
    run = run_directory.require_run(line.run)
    words = WeightSource(path=run, step=line.step).resume_words
    return launch([*words, *line.flags, *line.overrides], partial(task, as_data=line.as_data))


def _check(command: Command, *, as_data: bool) -> int:
    keep_freed_memory()
    check_paths(command.cfg, command.named)
    subject = open_subject(command)
    checked = check(subject)
    if as_data:
        data = {
            "step": subject.step,
            "layers": {audited.layer: list(audited.gemms) for audited in checked.audits},
            "faults": [fault.values() for fault in checked.faults],
            "uncovered": checked.uncovered,
            "failed": list(checked.failed),
        }
        print(json.dumps(data))
    else:
        print_screen("check.txt", checked=checked, subject=subject)
    if checked.faults:
        return 1
    return 0 if checked.complete else 2
