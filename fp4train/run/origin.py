"""How a run begins: `Fresh`, with the weights of `Init`, by `Resume` of its own checkpoint, as a
`Branched` of another run's, or `Rewound` after its loss diverged.

`find.find_origin` finds the origin of a command and changes nothing. `build` reads what belongs to
it (`timeline`), has a run assembled, gives it the state of the origin (`load`), and only then
writes that the run begins or goes on (`commit`): a start that is refused leaves nothing.
"""

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig

from fp4train import checkpoint
from fp4train.checkpoint import GOOD, NAMED, Checkpoint, unflatten
from fp4train.config import Config, plain
from fp4train.config.binding import bind
from fp4train.errors import UserError
from fp4train.precision import Timeline
from fp4train.precision.report import table
from fp4train.run.bits import warn_of_other_bits
from fp4train.run.companions import FOLDERS
from fp4train.run.host import environment
from fp4train.run.initial import InitialWeights
from fp4train.run.record import directory as run_directory, journal
from fp4train.run.record.formats import check_formats
from fp4train.run.record.generation import belongs_to, keep_generation
from fp4train.run.record.journal import Record
from fp4train.run.record.trust import (
    check_belongs,
    config_text,
    identity_of,
    lost_records,
    write_config,
)
from fp4train.run.run import Run, data_begun
from fp4train.run.supervise.divergence import take_over
from fp4train.run.supervise.loss_history import HISTORY, Divergence, Rewind
from fp4train.run.timeline import build_timeline, with_swap
from fp4train.text import printable
from fp4train.track import mend, start_tracker
from fp4train.track.config import METRICS
from fp4train.track.statistics import STATISTICS

_log = logging.getLogger(__name__)


Opening = tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]
"""What the records say of a start: values of the journal's record, and events of the metrics with
their values.
"""


@dataclass(frozen=True, kw_only=True)
class Origin(ABC):
    """How a run begins.

    Args:
        config: the typed configuration.
        cfg: the composed configuration, to be kept with the run.
    """

    config: Config
    cfg: DictConfig
    draws: ClassVar[bool] = True
    """Whether the run draws initial weights, whose places a checkpoint then takes."""

    @cached_property
    def text(self) -> str:
        """The configuration as it is kept with the run."""
        return config_text(self.cfg)

    @property
    def resume_step(self) -> int | None:
        """The step from which the run goes on; None: it begins."""
        return None

    @property
    def tokenizer_of(self) -> Path | None:
        """The run directory that has the tokenizer; None: the data make one."""
        return self.config.run.dir

    @property
    def place(self) -> Path:
        """Folder of the first files: aside, until a run is possible that is not there yet."""
        directory = self.config.run.dir
        if self.config.run.overwrite or not (directory / run_directory.CONFIG).is_file():
            return directory / run_directory.ASIDE
        return directory

    @property
    def identity(self) -> str | None:
        """The identity that the run has already."""
        if self.config.run.overwrite:
            return None
        return run_directory.identity(self.config.run.dir)

    @property
    def data_begun(self) -> int:
        """The first batch of the data; see `RunRows`."""
        return 0

    @abstractmethod
    def timeline(self, *, mend_records: bool) -> Timeline:
        """The timeline of the run, whose directory and records allow this start.

        Args:
            mend_records: write anew what the journal of a run that goes on has lost.

        Raises:
            UserError: they do not allow it.
        """

    def fill(self, place: Path) -> None:
        """Copy what the data find in a run directory, its tokenizer, to `place`, where it comes from
        elsewhere.
        """
        return None

    @abstractmethod
    def load(self, run: Run) -> None:
        """Give an assembled run the state that it begins with.

        Raises:
            UserError: the state does not fit the run.
        """

    def open_journal(self, run: Run, identity: str) -> journal.Journal:
        """The journal of the run's directory."""
        return journal.Journal.read(run.record.folder, identity)

    @abstractmethod
    def open_records(
        self, run: Run, history: journal.Journal, ran_on: Mapping[str, Any]
    ) -> Opening:
        """Bring metrics and statistics to the step of the start.

        Args:
            history: the run's journal (`open_journal`).
            ran_on: environment of this start (`host.environment`).
        """

    def commit(self, run: Run) -> None:
        """Write that the run begins or goes on: configuration, journal, metrics, plan. The lead
        does it, when everything else is possible.
        """
        directory = run.directory
        identity = self.identity or secrets.token_hex(8)
        if self.config.run.overwrite:
            run_directory.start_over(directory, FOLDERS)
        if self.place != directory:
            run_directory.take_aside(directory)
        write_config(directory, self.cfg, self.text, identity)
        ran_on = environment(run.device, run.data.fingerprint, run.world.size)
        history = self.open_journal(run, identity)
        values, events = self.open_records(run, history, ran_on)
        history.add(**values, plan=run.course.plan, environment=ran_on)
        history.write()
        tracker = start_tracker(
            self.config.track,
            directory,
            self.config.run.name,
            plain(self.cfg),
            resume_step=self.resume_step,
        )
        run.record = replace(run.record, journal=history, tracker=tracker)
        for event, details in events:
            tracker.log_event(run.step, event, details)
        write_plan(directory, history.records, run.gathers())
        tracker.log_table("plan", *table(run.course.plan.rows))

    def after_commit(self, run: Run) -> None:
        """Do what every rank does once the run goes on."""
        return None


# -- a new run -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fresh(Origin):
    """A run from step 0, with weights of its own."""

    @property
    def tokenizer_of(self) -> Path | None:
        if self.config.run.overwrite:
            return None
        return self.config.run.dir

    def timeline(self, *, mend_records: bool) -> Timeline:
        if self.config.run.overwrite:
            return build_timeline(self.config)
        timeline = build_timeline(self.config, self.config.run.dir)
        run_directory.check_restart(self.config.run.dir)
        return timeline

    def load(self, run: Run) -> None:
        """Load nothing: the weights are drawn."""

    def open_records(
        self, run: Run, history: journal.Journal, ran_on: Mapping[str, Any]
    ) -> Opening:
        run.record.folder.remove(METRICS)
        run.record.folder.remove(STATISTICS)
        return {"event": "start", "step": 0, "config": plain(self.cfg)}, []


@dataclass(frozen=True, kw_only=True)
class Init(Fresh):
    """A run from step 0 with the weights of another run, or of a folder.

    Args:
        weights: the weights, opened and not read.
    """

    weights: InitialWeights
    draws: ClassVar[bool] = False

    @property
    def tokenizer_of(self) -> Path | None:
        return self.weights.run

    @property
    def place(self) -> Path:
        return self.config.run.dir / run_directory.ASIDE

    def fill(self, place: Path) -> None:
        if self.weights.run is not None:
            run_directory.copy_files(self.weights.run, place, run_directory.TOKENIZER)
        elif belongs_to(self.weights.path, getattr(self.config.data, "tokenizer", None)):
            keep_generation(self.weights.path, place)

    def load(self, run: Run) -> None:
        self.weights.load(run.model, run.inventory)

    def open_records(
        self, run: Run, history: journal.Journal, ran_on: Mapping[str, Any]
    ) -> Opening:
        came_from = {"from": str(self.weights.path)}
        values, _ = super().open_records(run, history, ran_on)
        return {**values, "event": "init", **came_from}, [("init", came_from)]


# -- a run that goes on ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Continued(Origin):
    """A run that goes on from a checkpoint.

    Args:
        checkpoint: the checkpoint.
        swap: the recipe to which the command swaps there; None: none.
        other_data: whether a branch names data of its own.
    """

    checkpoint: Checkpoint
    swap: journal.RecipeChoice | None = None
    other_data: bool = False

    @property
    def resume_step(self) -> int:
        return self.checkpoint.step

    @property
    def source(self) -> Path:
        """The directory of the run that the checkpoint is of."""
        return self.checkpoint.run

    @property
    def tokenizer_of(self) -> Path:
        return self.source

    @cached_property
    def new_swap(self) -> journal.RecipeChoice | None:
        """The swap, unless the same command has recorded it before."""
        if self.swap is None:
            return None
        recipe = self.swap.at(self.resume_step).recipe
        swaps = [swap for swap in journal.read_swaps(self.source) if swap.step <= self.resume_step]
        if swaps and swaps[-1].recipe == recipe:
            return None
        return self.swap

    def timeline(self, *, mend_records: bool) -> Timeline:
        check_belongs(self.checkpoint, self.source, mend=mend_records)
        timeline = build_timeline(self.config, self.source)
        if self.new_swap is None:
            return timeline
        return with_swap(timeline, self.new_swap.at(self.resume_step))

    @property
    def data_begun(self) -> int:
        if not self.other_data:
            return data_begun(self.checkpoint)
        table = unflatten({}, {HISTORY: self.checkpoint.state[HISTORY]})[HISTORY]
        losses: Divergence = bind(table, Divergence, HISTORY)
        return self.resume_step + losses.skipped(self.resume_step)

    def load(self, run: Run) -> None:
        run.restore(self.checkpoint, other_data=self.other_data)
        self.checkpoint.tensors.close()
        run.course.plan = run.course.plan.since(run.step)
        recorded = journal.recorded_formats(journal.read_journal(self.source))
        check_formats(run.course.plan, recorded, self.source)

    def open_records(
        self, run: Run, history: journal.Journal, ran_on: Mapping[str, Any]
    ) -> Opening:
        records = journal.read_journal(self.source)
        came_from = {"from": self.checkpoint.path.name}
        changes = _changes(records, plain(self.cfg))
        record = {"event": "resume", "step": self.resume_step, **came_from, **changes}
        for swap in journal.swaps(records):
            if swap["step"] > self.resume_step:
                _log.warning(
                    "the swap at step %d, asked for earlier, stays; fp4train swap %s lists swaps",
                    swap["step"],
                    run.directory,
                )
        events = self._mend(run, history)
        changed = {key: f"{old} → {new}" for key, (old, new) in record.get("changed", {}).items()}
        events.append(("resume", {**came_from, **({"changed": changed} if changed else {})}))
        if self.new_swap is not None:
            at = {"at": self.resume_step}
            record |= {"name": self.new_swap.name, **at, "recipe": self.new_swap.recipe}
            events.append(("swap", {"recipe": self.new_swap.name, **at}))
        environments = [past.values.get("environment") for past in records]
        warn_of_other_bits(environments, ran_on, on_cpu=run.device.type == "cpu")
        return record, events

    def _mend(self, run: Run, history: journal.Journal) -> list[tuple[str, dict[str, Any]]]:
        """Bring the metrics to the step of the checkpoint: the event that something was lost."""
        state = self.checkpoint.state
        metrics = run.directory / METRICS
        lost = list(lost_records(run.record.folder, state, history.records).values())
        mended = mend(metrics, self.resume_step, state.get("metrics"))  # type: ignore[arg-type]
        for sentence in (*(f"{metrics}: {sentence}" for sentence in mended), *lost):
            _log.warning("%s", sentence)
        if mended or lost:
            return [("metrics mended", {"found": [*mended, *lost]})]
        return []


@dataclass(frozen=True, kw_only=True)
class Resume(Continued):
    """A run that goes on in its own directory."""

    @property
    def identity(self) -> str:
        return super().identity or identity_of(self.checkpoint)

    def load(self, run: Run) -> None:
        super().load(run)
        saver = run.saver
        state = self.checkpoint.state
        doubt = self.checkpoint.doubt
        saver.saved = self.resume_step
        saver.resumed = 0 if doubt else self.resume_step
        saver.good = state.get(GOOD)  # type: ignore[assignment]
        if saver.good and saver.good not in checkpoint.steps(
            run.directory / run_directory.CHECKPOINTS
        ):
            saver.good = saver.resumed or None  # it was pruned when this one was proven
        saver.named = state.get(NAMED)  # type: ignore[assignment]

    def after_commit(self, run: Run) -> None:
        if self.config.resume_step is not None:
            abandon_later(run, self.checkpoint.doubt)


@dataclass(frozen=True, kw_only=True)
class Rewound(Resume):
    """A run that goes back to its own checkpoint, because its loss diverged.

    Args:
        rewind: how it goes on.
    """

    rewind: Rewind

    def load(self, run: Run) -> None:
        super().load(run)
        take_over(run, self.rewind)

    def open_records(
        self, run: Run, history: journal.Journal, ran_on: Mapping[str, Any]
    ) -> Opening:
        values, events = super().open_records(run, history, ran_on)
        events.append(("rewind", self.rewind.record))
        return {**values, "event": "rewind", **self.rewind.record}, events

    def after_commit(self, run: Run) -> None:
        abandon_later(run, self.checkpoint.doubt, even_if_none=True)


@dataclass(frozen=True, kw_only=True)
class Branched(Continued):
    """A run that goes on with the checkpoint of another run."""

    def timeline(self, *, mend_records: bool) -> Timeline:
        return super().timeline(mend_records=False)

    def fill(self, place: Path) -> None:
        run_directory.copy_files(self.source, place, run_directory.TOKENIZER)

    def open_journal(self, run: Run, identity: str) -> journal.Journal:
        """The journal of the run's directory, which begins as that of the other run."""
        files = [METRICS, STATISTICS]
        if run.record.folder.status(run_directory.HISTORY) is None:
            files.append(run_directory.HISTORY)
        run_directory.copy_files(self.source, run.directory, tuple(files))
        return super().open_journal(run, identity)

    def open_records(
        self, run: Run, history: journal.Journal, ran_on: Mapping[str, Any]
    ) -> Opening:
        values, events = super().open_records(run, history, ran_on)
        swaps = journal.swaps(journal.read_journal(self.source))
        for at in history.set_swaps(swaps, run.step):
            _log.warning(
                "%s: the swap at step %d is not on record: taken over",
                self.source / run_directory.HISTORY,
                at,
            )
        if self.other_data:
            _log.info("step %d: other data begin, from their first batch on", run.step)
            values = {**values, "other_data": True}
            events.append(("other data", {"fingerprint": run.data.fingerprint}))
        return {**values, "event": "branch", "from": str(self.checkpoint.path)}, events


# -- what is written -------------------------------------------------------------------------------


def _changes(records: Sequence[Record], cfg: dict[str, Any]) -> dict[str, Any]:
    """What a record says of the configuration that goes on: the changes since `records`, which are
    logged, or all of it.
    """
    earlier = journal.configuration(records)
    if earlier is None:
        return {"config": cfg}
    changed = journal.changes(earlier, journal.flat(cfg))
    for key, (old, new) in changed.items():
        replaced = new is None and "data._target_" in changed
        if key not in ("run.name", "run.dir") and not replaced:
            _log.info("changed: %s: %s → %s", key, old, new)
    return {"changed": changed}


def write_plan(directory: Path, records: Sequence[Record], gathers: Sequence[str]) -> None:
    """Keep the plan with the run, the past and the rest as the journal has them.

    Args:
        gathers: sentences about the weights that ranks send each other.
    """
    try:
        text = "\n\n".join((journal.plan_text(records), *gathers))
        run_directory.write_text(directory / run_directory.PLAN, printable(text) + "\n")
    except UserError as error:  # a copy for reading: not worth the run
        _log.warning("%s", error)


_log = logging.getLogger(__name__)


def abandon_later(run: Run, doubt: str | None, *, even_if_none: bool = False) -> None:
    """Write the state that the run goes on from anew, which removes the checkpoints of later steps.

    None of them must be found as the newest.

    Args:
        doubt: why that state may be useless; None: no reason is known.
        even_if_none: the state is another than that of its checkpoint, which a rewind has chosen.

    Raises:
        UserError: it could not be written.
    """
    newest = run.world.broadcast(
        checkpoint.steps(run.directory / run_directory.CHECKPOINTS)[-1] if run.world.lead else 0
    )
    if not even_if_none:
        if newest <= run.step:
            return
        _log.warning(
            "steps %d–%d are abandoned; run.name=… would have kept them", run.step, newest - 1
        )
    begun = run.saver.begin(proven=even_if_none and not doubt, doubt=doubt)
    with run.world.same_outcome():
        if not run.world.lead:
            return
        run.saver.wait()
        outcomes = run.saver.outcomes()
        if not begun or not outcomes or not outcomes[-1].written:
            why = next(
                (o.problem or f"{o.bad} is not finite" for o in reversed(outcomes)),
                "it is not written in time",
            )
            run.saver.close()
            raise UserError(f"resume_step={run.step}: the later steps cannot be abandoned: {why}")
