"""The companions of a run, in the order in which they hear of a moment; a new one is a class and a line
in `COMPANIONS`.

`fp4train/companion.py` says what each moment is.
"""

from collections.abc import Iterable

from fp4train.companion import HOOKS, Companion, RunCompanion
from fp4train.measure.profile import Profiler
from fp4train.run.judge import CheckpointJudges
from fp4train.run.moments import Companions
from fp4train.run.observe import CalledLayers, OperandStatistics, PartShares
from fp4train.run.pace import Pace
from fp4train.run.record.run_record import Tracked
from fp4train.run.run import Run
from fp4train.run.supervise.divergence import FollowedLoss
from fp4train.run.supervise.ledger import Progress
from fp4train.run.supervise.run_audits import RunAudits
from fp4train.run.supervise.watch import Watch

COMPANIONS: tuple[type[RunCompanion], ...] = (
    OperandStatistics,
    RunAudits,
    Profiler,
    Pace,
    PartShares,
    Progress,
    FollowedLoss,
    CheckpointJudges,
    Watch,
)
"""Those between the states of a run and the hooks of users."""
FOLDERS = (HOOKS, *Tracked.folders, *(name for kind in COMPANIONS for name in kind.folders))
"""Folders in a run's directory that companions write to."""


def in_training(run: Run) -> Companions:
    """The companions of a run that trains."""
    ours = [kind(run) for kind in COMPANIONS if kind.used(run.config)]
    return Companions(
        run, [*of_steps(run, run.states), *ours], hooks=run.config.hooks, trackers=[Tracked(run)]
    )


def in_studies(run: Run, states: Iterable[Companion]) -> Companions:
    """Those of a run whose steps are studied, which keeps no record."""
    return Companions(run, of_steps(run, states))


def of_steps(run: Run, states: Iterable[Companion]) -> list[Companion]:
    """The companions without which a step is not whole."""
    return [CalledLayers(run), *states]
