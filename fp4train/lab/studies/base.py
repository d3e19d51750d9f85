"""What forks are asked for, and the checkpoints that its forks begin from, each with its candidates
made ready.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from fp4train.config import Config
from fp4train.config.command_line import Amount, CommandLine, Count
from fp4train.lab.studies.candidates import RecipeCandidate
from fp4train.lab.studies.record import MEASUREMENTS
from fp4train.lab.studies.subject import STUDIES, Subject, digest
from fp4train.precision import LossScaling, Timeline
from fp4train.precision.plan import Plan, PlannedStretch

ForkSchedule = Literal["linear", "own"]


@dataclass(frozen=True, kw_only=True)
class ForkRequest(CommandLine):
    """The forks that a command asks for.

    Args:
        step: step or steps of the checkpoints of every run; None: the newest.
        steps, schedule, lr, batches: see `ForkSettings`; None: for `lr` the rate of the checkpoint,
            for `batches` the run's, for `steps` 24, or with schedule="own" the rest of the run.
        processes: number of processes that make forks at the same time.
        out: folder of the results; None: one in RUN/studies.
    """

    study: ClassVar[str]
    """The name of the study, in its records and folders."""
    noun: ClassVar[str]
    """The word for the study in messages."""

    step: int | tuple[int, ...] | None = None
    steps: Count | None = None
    schedule: ForkSchedule = "linear"
    lr: float | None = None
    batches: Count | None = None
    processes: Count = 1
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.checkpoint_steps:
            raise ValueError("step=[] names no checkpoint")

    @property
    def checkpoint_steps(self) -> Sequence[int | None]:
        """The steps of the checkpoints; None: the newest."""
        if isinstance(self.step, tuple):
            return self.step
        return (self.step,)


@dataclass(frozen=True, kw_only=True)
class RankRequest(ForkRequest):
    """The question that a ranking answers.

    Args:
        baseline: the name of the candidate that is the reference instead.
        forks: number of forks of each candidate at each checkpoint.
        margin: nats per token; differences below it do not matter.
    """

    study: ClassVar[str] = "rank"
    noun: ClassVar[str] = "ranking"

    forks: Count = 6
    margin: Amount = 0.0005
    baseline: str | None = None


@dataclass(frozen=True, kw_only=True)
class ForkSettings:
    """The settings that all forks of a ranking share.

    Args:
        steps: optimizer steps of a fork.
        schedule: "linear": from `lr` to zero over the steps; "own": the run's schedule from the
            checkpoint's step on.
        lr: learning rate of the first step.
        batches: validation batches.
    """

    steps: int
    schedule: ForkSchedule
    lr: float
    batches: int

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr={self.lr} must be a positive number")


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A candidate made ready for a subject: its forks differ in their seeds only."""

    candidate: RecipeCandidate
    config: Config
    timeline: Timeline
    plan: Plan

    @property
    def signature(self) -> tuple[object, ...]:
        """The computation, whatever the recipes are called: equal for candidates whose forks are
        equal. Forks of older records that scale the loss have another one: they may have had
        another scale.
        """
        return tuple(
            (stretch.start, stretch.stop, stretch.recipe.dtype, name, *gemm, *_scaled(stretch))
            for stretch in self.plan.stretches
            for name, layer in stretch.layers.items()
            for gemm in layer.computation
        )

    @cached_property
    def key(self) -> str:
        """The name of its forks in a record, whatever the candidate is called."""
        return digest(self.signature)[:16]


def _scaled(stretch: PlannedStretch) -> tuple[LossScaling, ...]:
    """How the loss is scaled in a stretch; empty: it is not."""
    scaling = stretch.recipe.loss_scaling
    return () if scaling is None else (scaling,)


@dataclass(frozen=True, kw_only=True)
class Base:
    """A checkpoint.

    Args:
        study: name of the study whose forks begin here.
        source, step: run directory, and step of the checkpoint.
        settings: settings of its forks.
        run: identity of the run; copies of a run have the same.
        trained: name of the recipe that the run is trained in.
        targets: number of validation targets that count in each pass of an evaluation.
        identity: identity of its record.
        branches: candidates, in the order of the sweep.
        subject: open checkpoint; None: it is opened again when forks are made.
    """

    study: str = RankRequest.study
    source: Path
    step: int
    settings: ForkSettings
    run: str
    trained: str
    targets: Sequence[int]
    identity: Mapping[str, Any] = field(repr=False, default_factory=dict)
    branches: Sequence[Branch] = field(repr=False, default=())
    subject: Subject | None = field(repr=False, default=None)

    @property
    def title(self) -> str:
        """ "runs/a, step 200"."""
        return f"{self.source}, step {self.step}"

    @property
    def mark(self) -> str:
        """The mark in the name of its folder: forks of another checkpoint, or with other settings,
        have another one.
        """
        return self._mark_with(self.settings)

    @property
    def training_mark(self) -> str:
        """The mark of all forks here that train alike, however many batches evaluate them."""
        settings = asdict(self.settings)
        del settings["batches"]
        return self._mark_with(settings)

    @property
    def training_identity(self) -> dict[str, Any]:
        """`identity` without what only evaluates the forks."""
        return {key: value for key, value in self.identity.items() if key != "batches"}

    def _mark_with(self, settings: object) -> str:
        subject = {key: self.identity[key] for key in ("run", "step", "weights", "data", "device")}
        return digest([{**subject, "settings": None}, settings])[:8]

    @property
    def folder(self) -> Path:
        """The folder of the study's forks of this checkpoint."""
        return self.source / STUDIES / f"{self.study}-{self.step}-{self.mark}"

    def folder_in(self, out: Path | None, *, alone: bool) -> Path:
        """The folder of the record, where results go to `out`; `alone`: there is no other base."""
        if out is None:
            return self.folder
        if alone:
            return out
        return out / f"{self.source.name}-{self.step}-{self.mark}"

    @property
    def elsewhere(self) -> int:
        """The number of other such studies of the run at this step, with other settings."""
        records = (self.source / STUDIES).glob(f"{self.study}-{self.step}-*/{MEASUREMENTS}")
        return sum(path.parent != self.folder for path in records)
