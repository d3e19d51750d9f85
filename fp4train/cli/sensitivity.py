"""fp4train sensitivity RUN | model=NAME [recipe=NAME] [step=STEP] [batches=8] [keep=0.15] [out=FOLDER]

Which layers and operands of a model a recipe harms, measured on its gradients;
ends in a policy (docs/studies.md). RUN is a run directory; model=NAME, with any
other keys of a run, is a model as it is initialised.

  recipe=NAME      the recipe to study, and recipe.KEY=VALUE; the default is
                   that of the run
  step=200         the checkpoint; 0: the model as it was initialised; the
                   default is the newest
  batches=8        batches that every part is measured on; with one there is no
                   interval
  repeats=4        passes over each with other random bits, where rounding is
                   stochastic
  keep=0.15        the policy may keep this share of the multiply-adds in high
                   precision
  out=FOLDER       for the results; the default is
                   RUN/studies/sensitivity-RECIPE-STEP, without a run
                   runs/studies/sensitivity-MODEL-RECIPE

The policy is judged on other batches than those that chose it. Writes
policy.yaml (unless nothing is worth keeping), sensitivity.json and
sensitivity.png. A study that was killed goes on with the same command.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from fp4train import files
from fp4train.checkpoint.source import WeightSource
from fp4train.cli.launch import Command, launch
from fp4train.cli.output import fitted, terminal_width
from fp4train.config.command_line import Amount, CommandLine, Count, WholeNumber, read_line
from fp4train.errors import UserError, in_words
from fp4train.lab.analysis import PICTURE, save
from fp4train.lab.studies import (
    SENSITIVITY,
    RecipeParts,
    SensitivityResult,
    Study,
    figures,
    open_record,
    open_subject,
    study_progress,
    summary,
    trade_off,
)
from fp4train.lab.studies.sensitivity import groups_of, identity_of
from fp4train.paths import INIT_KEYS
from fp4train.run.host import keep_freed_memory
from fp4train.run.record import directory as run_directory
from fp4train.run.record.trust import check_paths
from fp4train.sealed import sealed

POLICY = "policy.yaml"
WRITTEN = (POLICY, "sensitivity.json", "sensitivity.png")
KEEP = 0.15
"""Share of the multiply-adds that the policy may keep, unless another is asked for."""


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions(CommandLine):
    step: WholeNumber | None = None
    batches: Count = 8
    repeats: Count = 4
    keep: Amount = KEEP
    out: Path | None = None


def main(arguments: list[str]) -> int:
    """Measure, print the table, write policy, JSON and picture; returns the exit code.

    Raises:
        UserError: there is no run directory and no model, or an option is refused.
    """
    if flags := {"-m", "--multirun"} & set(arguments):
        raise UserError(f"sensitivity studies one recipe at a time, without {flags.pop()}")
    line = read_line(arguments, SensitivityOptions, __doc__, keys=None)
    if len(line.runs) > 1 or not (line.runs or any(a.startswith("model=") for a in line.overrides)):
        raise UserError(f"sensitivity needs one run directory, or model=…: {line.usage}")
    if line.runs:
        run = run_directory.require_run(line.run)
    else:
        run = None
    if other := [a for a in line.overrides if a.startswith(("resume=", "resume_step="))]:
        raise UserError(
            f"sensitivity RUN names the run; step=… chooses its checkpoint, not {other[0]}"
        )
    remaining = [*line.flags, *line.overrides]
    step = line.step
    fresh = run is None or step == 0
    if run is None:
        if step:
            raise UserError(
                f"step={step} is of a run: give its directory; model=… alone is studied as "
                "initialised"
            )
        if init := [a for a in remaining if a.partition("=")[0] in INIT_KEYS]:
            raise UserError(f"{init[0]}: to study the weights of a run give its directory")
    else:
        start = WeightSource(path=run, step=None if fresh else step)
        remaining = [*start.resume_words, *remaining]
    return launch(remaining, partial(_study, line=line, fresh=fresh, of_run=run is not None))


def _study(command: Command, *, line: SensitivityOptions, fresh: bool, of_run: bool) -> int:
    """Study a run (`of_run`) or a model that is named alone; `fresh`: with its weights as they are
    initialised.
    """
    keep_freed_memory()
    config = command.config
    swap = command.swap
    check_paths(command.cfg, command.named)
    recipe = config.recipe
    if of_run:
        name = type(config.recipe).__name__.lower()
    else:
        name = config.run.name
    if swap is not None:
        recipe = swap.at(0).recipe
        name = swap.name
    subject = open_subject(command, fresh=fresh)
    # This and the next refuse what is impossible before a folder is made.
    RecipeParts(subject, recipe, repeats=line.repeats)
    groups_of(subject, line.batches)
    folder = line.out or subject.studies / (
        f"sensitivity-{name}" + (f"-{subject.step}" if of_run else "")
    )
    progress = study_progress("measurement", every=15.0)
    with (
        open_record(folder, identity_of(subject, recipe, line.repeats), subject.step) as record,
        progress as shown,
    ):
        study = Study(subject, recipe, line.batches, line.repeats, record)
        try:
            sensitivity = study.run(shown)
            trade = trade_off(sensitivity, line.keep)
            if trade.policy.keep:
                judged = study.judge(trade.policy, shown)
            else:
                judged = None
        finally:
            study.end()
    result = SensitivityResult.of(subject, sensitivity, trade, judged)
    print(fitted(summary.render(result, _written(result, folder), terminal_width())))
    return 0


def _written(result: SensitivityResult, folder: Path) -> list[str]:
    """Write the results; their paths.

    Raises:
        UserError: one cannot be written; what is measured is in the record.
    """

    policy = summary.policy_file(result)
    try:
        files.write(folder / SENSITIVITY, sealed(asdict(result), indent=1))
        if policy is not None:
            files.write(folder / POLICY, policy.encode())
        else:
            with files.Folder.open(folder) as opened:
                opened.remove(POLICY)  # of a call with other batches
        save(figures.sensitivity(result), PICTURE, folder / "sensitivity.png")
    except (OSError, UserError) as error:
        raise UserError(
            f"{folder}: the results cannot be written ({in_words(error)}); what is on record is "
            "kept, and the same command goes on when there is room"
        ) from error
    return [str(folder / name) for name in WRITTEN if name != POLICY or policy is not None]
