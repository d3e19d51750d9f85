"""A companion of the steps: it hears of each moment of a training loop, and acts beside it.

States that follow the weights, audits, statistics, the profiler, the display, trackers and hooks of
one's own are companions. `run/companions.py` lists them in the order in which a moment reaches them:

    what belongs to the step     states, statistics, audits, the profiler
    the run's own watch          display and speed, the loss, the heartbeat
    hooks of one's own           in the order of hooks=[…]
    the trackers                 they log what the others added to the numbers

So a hook sees the state that the step left, with its moving averages, and numbers that are complete.
Where a step is evaluated and saved, `after_evaluation` comes first, then `on_numbers` of the step,
whose line has the losses of the evaluation, and `on_save` last.

Every rank has its companions, except where one says `lead_only`. In a moment a companion may call a
collective only if it does so on every rank.

A hook that raises is named with its file and line, and hears nothing more. All ranks end before
their next step, and the state is saved.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

HOOKS = "hooks"
"""The folder in a run's directory that has one for each class of hooks."""


class Companion:
    """Does nothing in any moment; a subclass has those that it hears of.

    In each moment `run` is the run (`run.run.Run`), whose `step` counts the optimizer steps that
    are done.

    Attributes:
        folders: names of the folders in the run's directory that it writes to;
            run.overwrite=true removes them.
        lead_only: whether the first rank alone has it.
        trouble: why the run is to end before its next step, with its state saved; None: it goes on.
    """

    folders: ClassVar[Collection[str]] = ()
    lead_only: ClassVar[bool] = False
    trouble: str | None = None

    def begin(self, run: Any) -> None:
        """The loop begins: at step 0, on a resume, or where a run goes back to a checkpoint."""

    def before_step(self, run: Any) -> None:
        """The ranks have agreed on the next step, and its recipe is applied."""

    def around_step(self, run: Any, recipe: Any) -> AbstractContextManager[object]:
        """A context of the passes and the update of a step in `recipe`."""
        return nullcontext()

    def around_hook(self, run: Any) -> AbstractContextManager[object]:
        """A context in which a hook hears of a moment, and may write weights."""
        return nullcontext()

    def after_step(self, run: Any, step: Any) -> None:
        """A step is queued (`run.queued.Step`), and nobody has waited for it: its numbers are not
        known. `run.step` does not count it yet.
        """

    def on_numbers(self, run: Any, step: Any, values: dict[str, Any]) -> None:
        """The numbers of a step are known, when the next one is queued or something waits for them.

        Args:
            values: the line of metrics, to which more may be added: numbers and short texts, with
                keys like "mine/share".
        """

    def after_evaluation(self, run: Any, values: dict[str, Any]) -> None:
        """The state was evaluated; what is added to `values` is logged with them."""

    def on_save(self, run: Any) -> None:
        """The state is about to be copied for a checkpoint."""

    def close(self, run: Any, error: BaseException | None) -> None:
        """The loop has ended.

        Args:
            error: the error that ended it early; None: it ended as it should, on every rank.
        """

    def folder(self, run: Any) -> Path:
        """A folder in the run's directory for the files of a hook, which run.overwrite=true
        removes.
        """
        name = type(self).__name__
        with run.record.folder.folder(HOOKS, create=True) as hooks:
            hooks.folder(name, create=True).close()  # a folder of the run, and no link out of it
        place: Path = run.directory / HOOKS / name
        return place


class RunCompanion(Companion):
    """A companion that a run has by its configuration, and not as a hook."""

    def __init__(self, run: Any) -> None:
        self.run = run

    @classmethod
    def used(cls, config: Any) -> bool:
        """Whether a run of this configuration (`config.Config`) has it."""
        return True
