"""The record that a run keeps of itself beside its checkpoints."""

from dataclasses import dataclass
from typing import Any

from fp4train.companion import RunCompanion
from fp4train.files import Folder
from fp4train.run.queued import Step, Values
from fp4train.run.record.inbox import Inbox
from fp4train.run.record.journal import Journal
from fp4train.track import NullTracker, Tracker
from fp4train.track.tensorboard import FOLDER as EVENTS
from fp4train.track.wandb import FOLDER as CHARTS


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a run. That of the lead is written when the run begins; a study's, and that of
    other ranks, stays empty.

    Args:
        folder: the run's directory, open: whatever happens to its path, the files go there.
        inbox: requests to the run.
        journal: the journal, with the random number that all parts of the run carry.
        tracker: receives metrics and events.
    """

    folder: Folder
    inbox: Inbox
    journal: Journal
    tracker: Tracker

    @classmethod
    def empty(cls, folder: Folder) -> "RunRecord":
        """A record of which nothing is written to `folder`."""
        return cls(
            folder=folder,
            inbox=Inbox(folder),
            journal=Journal(folder, None),
            tracker=NullTracker(),
        )


class Tracked(RunCompanion):
    """Hands the numbers of each step to the run's tracker."""

    folders = (CHARTS, EVENTS)

    def on_numbers(self, run: Any, step: Step, values: Values) -> None:
        run.record.tracker.log(step.index + 1, values)
