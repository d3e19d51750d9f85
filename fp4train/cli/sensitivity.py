"""fp4train sensitivity RUN | model=NAME [recipe=NAME] [step=STEP] [batches=8 | budget=5min] [keep=0.15] [out=FOLDER]

Which layers and operands of a model a recipe harms, measured on its gradients; ends in a policy (docs/studies.md).
RUN is a run directory; model=NAME, with any other keys of a run, is a model as it is initialised.

  recipe=NAME      the recipe to study, and recipe.KEY=VALUE; the default is that of the run
  step=200         the checkpoint; 0: the model as it was initialised; the default is the newest
  batches=8        batches that every part is measured on; with one there is no interval
  repeats=4        passes over each with other random bits, where rounding is stochastic
  budget=5min      instead of batches: spend this time where the intervals are widest
  cells=true       also one operand of one layer at a time; the policy then chooses single GEMMs
  keep=0.15        the policy may keep this share of the multiply-adds in high precision
  gpu=B200         predict times on that GPU
  cost=0.6         with gpu=, instead of keep=: the longest time of the layers relative to BF16
  out=FOLDER       for the results; the default is RUN/studies/sensitivity-RECIPE-STEP, without a run
                   runs/studies/sensitivity-MODEL-RECIPE

The policy is judged on other batches than those that chose it. Writes policy.yaml (unless nothing is worth keeping),
sensitivity.json and sensitivity.png. A study that was killed goes on with the same command.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from fp4train import files
from fp4train.cli.launch import launch, settings
from fp4train.cli.output import usage
from fp4train.cli.study import StudyCommand, number, seconds, study_command, whole
from fp4train.config.schema import to_config
from fp4train.errors import UserError
from fp4train.hardware import find_gpu
from fp4train.run.record.journal import as_swap
from fp4train.sealed import sealed

if TYPE_CHECKING:
    from fp4train.lab.studies.summary import Report

USAGE = usage(__doc__)
OPTIONS = ("batches", "repeats", "budget", "cells", "keep", "cost", "out")
WRITTEN = ("policy.yaml", "sensitivity.json", "sensitivity.png")
KEEP = 0.15
"""Share of the multiply-adds that the policy may keep, unless another is asked for."""


def main(arguments: list[str]) -> int:
    """Measure, print the table, write policy, JSON and picture; returns the exit code."""
    if flags := {"-m", "--multirun"} & set(arguments):
        raise UserError(f"sensitivity studies one recipe at a time, without {flags.pop()}")
    command = study_command("sensitivity", arguments, OPTIONS, USAGE, modelled=True)
    return launch(command.overrides, partial(_study, command=command))


def _study(cfg: DictConfig, *, command: StudyCommand) -> int:
    from fp4train.lab.studies.parts import Parts
    from fp4train.lab.studies.progress import StudyProgress
    from fp4train.lab.studies.record import open_record
    from fp4train.lab.studies.sensitivity import Effort, Study, groups_of, identity_of
    from fp4train.lab.studies.subject import open_subject
    from fp4train.lab.studies.summary import Report
    from fp4train.lab.studies.tradeoff import trade_off
    from fp4train.run.host import keep_freed_memory
    from fp4train.run.record.trust import check_paths

    options = command.options
    budget = seconds(options, "budget")
    if budget is not None and "batches" in options:
        raise UserError("budget=… decides how many batches are measured: leave batches=… out")
    cells = options.get("cells", "false").lower()
    if cells not in ("true", "false"):
        raise UserError(f"cells={options['cells']}: true or false")
    effort = Effort(
        batches=whole(options, "batches", 8) if budget is None else None,
        repeats=whole(options, "repeats", 4),
        budget=budget,
        cells=cells == "true",
    )
    keep, cost = number(options, "keep"), number(options, "cost")
    keep_freed_memory()
    chosen, swap, named = settings(cfg)
    check_paths(chosen, named)
    config = to_config(chosen)
    gpu = find_gpu(config.gpu) if config.gpu else None
    if cost is not None and (gpu is None or keep is not None):
        raise UserError("cost=… is a time relative to BF16 on a GPU: give gpu=B200 with it, and no keep=…")
    recipe, name = config.recipe, type(config.recipe).__name__.lower()
    if command.run is None:
        name = config.run.name
    if swap is not None:
        recipe, name = as_swap(0, swap[1], swap[0]).recipe, swap[0]
    subject = open_subject(config, chosen, fresh=command.fresh)
    Parts(
        subject, recipe, repeats=effort.repeats
    )  # this and the next refuse what is impossible before a folder is made
    groups_of(subject, effort)
    folder = subject.studies / (f"sensitivity-{name}" + ("" if command.run is None else f"-{subject.step}"))
    folder = Path(options.get("out", folder))
    progress = StudyProgress("measurement", every=15.0)
    with open_record(folder, identity_of(subject, recipe, effort), subject.step) as record, progress as shown:
        study = Study(subject, recipe, effort, record)
        try:
            found = study.run(shown.show)
            trade = trade_off(
                found, keep=None if cost is not None else KEEP if keep is None else keep, cost=cost, gpu=gpu
            )
            judged = study.judge(trade.policy, shown.show) if trade.policy.keep else None
        finally:
            study.end()
    report = Report(subject=subject, found=found, trade=trade, judged=judged)
    print(report.render(_written(report, folder)))
    return 0


def _written(report: Report, folder: Path) -> list[str]:
    """Write the results; their paths.

    Raises:
        UserError: one cannot be written; what is measured is in the record.
    """
    from fp4train.lab.analysis.curves import save_figure
    from fp4train.lab.studies.picture import picture

    policy = report.policy_file()
    try:
        files.write(folder / "sensitivity.json", sealed(report.as_json(), indent=1))
        if policy is not None:
            files.write(folder / "policy.yaml", policy.encode())
        else:
            with files.Folder.open(folder) as opened:
                opened.remove("policy.yaml")  # of a call with other batches
        save_figure(picture(report), folder / "sensitivity.png")
    except OSError as error:
        raise UserError(
            f"{folder}: the results cannot be written ({error}); what is on record is kept, and the same command goes "
            "on when there is room"
        ) from error
    names = ("sensitivity.json", "sensitivity.png") if policy is None else WRITTEN
    return [str(folder / each) for each in names]
