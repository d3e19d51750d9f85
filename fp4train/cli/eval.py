"""fp4train eval RUN|FOLDER [task=NAME,FILE.yaml | text=PATH] [recipe=A,B] [step=STEP] [batches=8] [--json]

Loss and bits per byte of a run's model on its held-out text, or tasks of
lm_eval, in any recipes (docs/evaluation.md). FOLDER is a model of Hugging Face,
for task= and text=.

  recipe=A,B       and recipe.KEY=VALUE, policy=NAME; the default is high
                   precision, and the recipe that the forward pass was trained
                   in
  step=200         the checkpoint, as RUN@200; the default is the newest
{kinds}
  batches=8        at most, of held-out text; the default is all of it, and
                   eval.batches of the run gives its val/loss
  text=PATH        instead of held-out text: a text file, or those of a folder
  task=NAME        tasks of lm_eval, or a YAML file of your own; several are
                   separated by commas
  limit=100        only so many documents of each task
  shots=5          examples before each question
  chat=true        questions in the model's chat template
  rows=16          most sequences of a batch, for tasks and text
  record=false     do not keep the results; otherwise they are an event in the
                   run's metrics, and in its tracker
  data.path=PATH   paths of the run's configuration, where it is another user's
                   or machine's, or the data was moved
  plugins=[NAME]   packages of the classes of your own that the run uses
  --json           as data
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from fp4train.cli.output import print_screen
from fp4train.cli.trained import KEYS, with_model, with_weight_kinds
from fp4train.config.command_line import CommandLine, Count, WholeNumber, read_line
from fp4train.errors import UserError, user_errors
from fp4train.exchange import NamedRecipe, Score, TrainedModel, held_out
from fp4train.exchange.evaluation import record, texts
from fp4train.paths import PathText

__doc__ = with_weight_kinds(__doc__)

COUNTS = ("tokens", "bytes", "documents")
_OF = {
    "batches": "held-out text",
    "limit": "task=…",
    "shots": "task=…",
    "chat": "task=…",
    "rows": "task=… and text=…",
}
"""Options that some evaluations take, and those evaluations."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(CommandLine):
    step: WholeNumber | None = None
    task: str | None = None
    text: PathText | None = None
    batches: Count | None = None
    limit: Count | None = None
    shots: WholeNumber | None = None
    chat: bool = False
    rows: Count = 16
    record: bool = True

    def __post_init__(self) -> None:
        if self.task is not None and self.text is not None:
            raise ValueError("task=… and text=… are two evaluations: give one of them")
        kind = "held-out text"
        for key in ("task", "text"):
            if getattr(self, key) is not None:
                kind = f"{key}=…"
        for key, of in _OF.items():
            if getattr(self, key) != getattr(EvalOptions, key) and kind not in of:
                raise ValueError(f"{key}=… is of {of}, not of {kind}")


def main(arguments: list[str]) -> int:
    """Print the scores and record them; returns the exit code."""
    line = read_line(arguments, EvalOptions, __doc__, keys=KEYS, paths=True, data=True)

    def task(trained: TrainedModel, named: Sequence[NamedRecipe]) -> int:
        default_recipes = [trained.high_precision]
        if trained.trained_in is not None:
            default_recipes.append(trained.own)
        began = time.perf_counter()
        scores = list(_scores(trained, named or default_recipes, line))
        seconds = time.perf_counter() - began
        note = ""
        unrecorded = None
        try:
            if line.record:
                note = record(trained, scores)
        except UserError as error:  # the scores are shown first
            unrecorded = error
        if line.as_data:
            about = {"run": str(trained.source), "step": trained.step, "seconds": round(seconds, 3)}
            print(json.dumps({**about, "scores": [asdict(score) for score in scores]}))
        else:
            print_screen(
                "eval.txt",
                title=trained.title,
                seconds=seconds,
                scores=scores,
                shown=_shown,
                note=note,
            )
        if unrecorded is not None:
            raise UserError(f"the scores are not recorded: {unrecorded}") from unrecorded
        return 0

    return with_model(line, line.step, task)


def _scores(
    trained: TrainedModel, recipes: Sequence[NamedRecipe], options: EvalOptions
) -> Iterator[Score]:
    if options.text is not None:
        return texts(trained, recipes, options.text, options.rows)
    if options.task is None:
        return held_out(trained, recipes, options.batches)
    with user_errors(
        ImportError, before="task=… needs lm_eval (", after="): pip install 'fp4train[lm-eval]'"
    ):
        from fp4train.exchange.harness import tasks
    names = [name for name in options.task.split(",") if name]
    if not names:
        raise UserError("task= names no task")
    return tasks(
        trained,
        recipes,
        names,
        rows=options.rows,
        limit=options.limit,
        shots=options.shots,
        chat=options.chat,
    )


def _shown(values: Mapping[str, float], name: str) -> str:
    """A metric with its standard error (SE), where there is one; empty where there is no such metric."""
    value = values.get(name)
    error = values.get(_error_of(name))
    if value is None:
        return ""
    if float(value).is_integer() and name in COUNTS:
        shown = f"{value:,.0f}"
    else:
        shown = f"{value:.4f}"
    if error is None:
        return shown
    return f"{shown} (SE {error:.4f})"


def _error_of(metric: str) -> str:
    """ "acc_stderr" of "acc", "acc_stderr,strict" of "acc,strict", as lm_eval calls them."""
    name, comma, kind = metric.partition(",")
    return f"{name}_stderr{comma}{kind}"
