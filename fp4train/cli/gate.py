"""fp4train gate RUN… recipe=nvfp4 margin=0.01 [against=bf16] [policy=…] [phases=…] [step=…]

Is a recipe good enough? Whether its loss is within ±margin of another's: a
sequential test on paired forks of checkpoints (docs/gate.md). How many forks it
will need is said first. Forks are made until the verdict falls.

Exit code: 0 within, 1 beyond, 2 undecided, 3 for an error, whatever it is.

  recipe=nvfp4     the recipe; policy=, phases= and their keys, recipe.KEY=,
                   belong to it
  margin=0.01      nats per token; the largest gap that does not matter
  against=bf16     the reference, under the run's own policy
  step=100,200     the checkpoints of each run; the default is the newest
  forks=40         most seeds at each checkpoint; the default is enough for a
                   gap of half the margin; 0: only say how many it will need
  bound=0.1        nats per token; the largest difference that one fork may
                   have; the default is ten margins
  deviation=0.002  from seed to seed, for the number of forks; the default is as
                   measured, or a quarter of the margin
  steps=24         optimizer steps of a fork; the default with schedule=own is
                   the rest of the run
  schedule=linear  the learning rate falls to zero over the steps; own: as the
                   run's would
  lr=1e-3          that it falls from; the default is that of the checkpoint
  batches=8        validation batches; the default is the run's
  processes=1      forks at the same time, each with a copy of the model
  plugins=[NAME]   packages of the classes of your own that the run uses
  data.path=PATH   paths of the run's configuration, where it is another user's
                   or machine's, or the data was moved
  out=FOLDER       for the record and the results; the default is a folder in
                   RUN/studies

Writes gate.json. Finished forks and answers are recorded: the same command goes
on, and a verdict stands.
"""

import sys
import traceback

from fp4train.cli.forks import making_forks, write_results
from fp4train.cli.output import discard_output, fitted, of_system
from fp4train.config.command_line import read_line
from fp4train.errors import UserError
from fp4train.lab.gate import EXIT_CODES, Estimated, GateRequest as GateOptions, gate
from fp4train.lab.studies import GATE
from fp4train.lab.studies.candidates import SECTIONS
from fp4train.text import first_line


class RefusedError(UserError):
    """A question without an answer; 0, 1 and 2 are the exit codes of verdicts."""

    exit_code = 3


def main(arguments: list[str]) -> int:
    """Ask, print the answer, and write gate.json; returns the exit code of the verdict.

    Raises:
        RefusedError: there is no answer, whatever the reason.
    """
    try:
        code = _main(arguments)
        sys.stdout.flush()  # a reader that has gone is noticed here
    except UserError as error:
        if error.exit_code not in EXIT_CODES.values():
            raise
        raise RefusedError(str(error)) from error
    except BrokenPipeError as error:
        discard_output()
        raise RefusedError(
            "the reader of the output has gone; forks that were made are recorded, "
            "the same command goes on"
        ) from error
    except OSError as error:
        raise RefusedError(of_system(error)) from error
    except Exception as error:  # uncaught it would end with 1, a verdict
        raise RefusedError(_unexpected(error)) from error
    return code


def _unexpected(error: Exception) -> str:
    """Message of an error that nothing expects: its class, its text and its line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({where.filename}, line {where.lineno})"


def _main(arguments: list[str]) -> int:
    request = read_line(arguments, GateOptions, __doc__, keys=(*SECTIONS, "plugins"), paths=True)
    if not any(word.partition("=")[0] == "recipe" for word in request.chosen):
        raise UserError(f"gate needs recipe=…, the recipe that is tested: {request.usage}")

    def announce(estimated: Estimated) -> None:
        print(fitted(estimated.render()) + "\n", flush=True)

    with making_forks(request):
        answered = gate(request, announce)
    print(fitted(answered.render()) + "\n")
    for file in write_results(GATE, answered.result, request, answered.bases):
        print(file)
    return EXIT_CODES[answered.result.verdict]
