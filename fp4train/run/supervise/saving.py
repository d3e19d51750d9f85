"""Checkpoints that are written while the next steps run.

The loop pays for a copy of the state in main memory; a thread checks that it is finite, writes it,
and reports. Two never overlap: the loop waits, within bounds, for one that is not done when the
next is due. One that fails is tried again after 1, 2, 4, … steps, and at the end after a pause.

The buffers of the copy are kept from one checkpoint to the next. Memory that a process has never
touched costs a page fault per 4 KiB, on a virtual machine up to 2.5 s per GB, so the thread makes
and touches the buffers after the first step. A checkpoint that is due before it is done waits for
it.

A checkpoint whose weights or moments are not finite is not written. One from which nothing has been
computed yet is not proven: weights may be finite and useless. It pushes out no other until the next
step has given a loss within its past (`divergence`).

One that is saved while the loss is far above its past is doubtful, and so are those from the
beginning of a divergence that is seen later: a mark in their state says so to who loads them. If a
rise of the loss was but noise, it takes its marks with it. Beside the newest `checkpoint.keep` there
stay

    the good one               the newest that is proven, so that doubtful ones never stand alone; and the one that
                               was it when the loss last diverged, even if the loss is back within its past
    the one gone on from       after a resume, until a later one is proven
    the one before cooldown    `checkpoint.keep_before_cooldown`: a longer run goes on from it
    milestones                 number k of `checkpoint.milestones` (from 0) is the oldest whose age, in units of
                               `checkpoint.every` times `checkpoint.keep`, is from 4ᵏ to below 4ᵏ⁺¹

Of several ranks each copies and writes the parts that it owns. Their threads agree on what went
wrong over a process group of their own, and all report the same outcome.
"""

from __future__ import annotations

import logging
import mmap
import queue
from collections.abc import Collection, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4train import checkpoint
from fp4train.checkpoint.tree import JSON
from fp4train.checkpoint.writing import ENDED
from fp4train.run.finite import first_non_finite
from fp4train.run.record import directory as run_directory
from fp4train.run.remote import upload
from fp4train.run.supervise.checkpoints import Outcome
from fp4train.run.supervise.sums import BitSums, changed_copy, same_extent, sums_of
from fp4train.shards import TensorShard, local, owned, separate
from fp4train.track.tracker import mark, sync
from fp4train.worker import Worker

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)

WAIT_SECONDS = checkpoint.WRITE_SECONDS
LOOK_SECONDS = 5.0
"""Of that wait, after which the ranks that still write are named."""
PAUSES = (0.5, 1.0, 2.0)
"""Seconds before the last checkpoint of a run is tried again."""


class Saver:
    """Writes the checkpoints of one run.

    Args:
        ranks: those that write them together; all call `begin` and `prove` after the same steps.
    """

    def __init__(self, run: Run, ranks: checkpoint.CheckpointGroup = checkpoint.ALONE) -> None:
        self.run = run
        self.ranks = ranks
        self.saved: int | None = None
        """The newest step that is written."""
        self.good: int | None = None
        """The newest step whose state gave a loss within its past."""
        self.named: int | None = None
        """The good one when the loss last diverged: messages name it, and it stays, also after a resume."""
        self.resumed = 0
        self.last: Outcome | None = None
        self._expected: Mapping[str, int] = {}
        """Sums of the coming checkpoint's tensors that were taken before."""
        self._uploaded: Collection[int] = ()
        """Steps whose checkpoints the run had when its copy on a store was made last."""
        self._buffers: dict[str, Tensor] = {}
        self._prepared = False
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._worker = Worker(
            "checkpoints", lambda error: _log.warning("checkpoints, beside the loop: %s", error)
        )
        self._begun: int | None = None
        self._failures = 0
        self._retry_at: int | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint that failed should be tried again after `step` steps."""
        return self._retry_at is not None and step >= self._retry_at

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of `step` is written or being written."""
        return self.saved == step or (
            self._begun == step
            and not (self.last is not None and self.last.step == step and not self.last.written)
        )

    def expect(self, sums: Mapping[str, int]) -> None:
        """The copy of the coming checkpoint must have these sums of bits, by tensor."""
        self._expected = sums

    def begin(self, *, proven: bool = False, doubt: str | None = None) -> bool:
        """Copy the state of the run and have it written; False if the one before is not done in
        time.

        Args:
            proven: a loss within its past has been computed from this state.
            doubt: why this state may be useless; None: no reason is known.
        """
        if not self._is_written():
            _log.error(
                "the checkpoint of step %s is not written after %g s: a slow disk?",
                self._begun,
                WAIT_SECONDS,
            )
            return False
        run = self.run
        step = self.run.step
        tensors, state = self._marked_state(proven, doubt)
        checked = [name for name in tensors if run.must_be_finite(name)]
        parts = owned(tensors, leads=self.ranks.leads, orders=run.row_orders())
        kept = {n: parts[n].tensor for n in checked if n in parts}
        if run.device.type != "cpu":
            bad = first_non_finite(kept)
        else:
            bad = None
        sums = self._sums(tensors, parts)
        if sums and run.world.size == 1:  # other ranks may load other parts
            state[checkpoint.SUMS] = sums  # type: ignore[assignment]
        copies = self._copy(parts)
        if self._begun is None and run.config.checkpoint.also:
            self._uploaded = checkpoint.steps(run.directory / run_directory.CHECKPOINTS)
        self._begun = step

        def job() -> None:
            worst = bad
            if run.device.type == "cpu":
                worst = first_non_finite({n: copies[n].tensor for n in kept})
            try:
                problem = changed_copy(sums, copies)
            except Exception as error:  # the other ranks wait to agree
                _log.warning("the copy of step %d could not be compared: %s", step, error)
                problem = None
            try:
                problem = self.ranks.agree(problem)
                worst = self.ranks.agree(worst)
            except RuntimeError:
                self._outcomes.put(Outcome(step=step, problem=ENDED))
                return
            if worst:
                self._outcomes.put(Outcome(step=step, bad=worst))
                return
            if problem:
                self._outcomes.put(Outcome(step=step, problem=problem))
                return
            previous_good = self.good
            self.good = step if proven else self.good
            outcome = self._write(step, copies, state, unproven=not proven)
            if not outcome.written:
                self.good = previous_good
            self._outcomes.put(outcome)
            if outcome.written and self.ranks.first and run.config.checkpoint.also:
                self._upload(step)

        self._worker.put(job)
        return True

    def _marked_state(
        self, proven: bool, doubt: str | None
    ) -> tuple[dict[str, Tensor], dict[str, JSON]]:
        """The run's tensors and other state, with what is known of its worth."""
        run = self.run
        tensors, state = checkpoint.flatten(run.state())
        if not run.world.stage:
            state["metrics"] = mark(run.record.tracker)  # type: ignore[assignment]
            state[checkpoint.GOOD] = run.step if proven else self.good
            if self.named is not None:
                state[checkpoint.NAMED] = self.named
            if doubt is not None:
                state[checkpoint.DOUBT] = doubt
        return tensors, state

    def prove(self, step: int) -> None:
        """A loss within its past has been computed from the state of `step`: surplus checkpoints
        are pruned.

        After the first step of a run that saves now and then, the buffers of the copy are begun,
        too.
        """
        if self.run.config.checkpoint.every and not self._prepared:
            self._prepared = True  # the optimizer has its moments since the first step
            tensors = checkpoint.flatten(self.run.state())[0]
            orders = self.run.row_orders()
            parts = owned(tensors, leads=self.ranks.leads, orders=orders)
            stored, _ = separate({name: part.tensor for name, part in parts.items()})
            self._worker.put(
                partial(self._prepare, {name: (t.shape, t.dtype) for name, t in stored.items()})
            )
        if (begun := self._begun == step) or self.saved == step:

            def job() -> None:
                if self.saved == step:
                    self.good = step
                    if begun:
                        self._prune(step)

            self._worker.put(job)

    def set_doubt(self, since: int, doubt: str | None) -> None:
        """Mark the checkpoints from step `since` on as doubtful, for the reason `doubt`, but for
        the good one; None: take the marks away.
        """

        newest = self.saved if self._begun is None else self._begun

        def job() -> None:
            if doubt is not None:
                self.named = self.good
            place = self.run.record.folder
            is_later = newest is not None and newest >= since
            if (
                self.ranks.first
                and is_later
                and place.status(run_directory.CHECKPOINTS) is not None
            ):
                with place.folder(run_directory.CHECKPOINTS) as folder:
                    checkpoint.set_doubt(folder, since, doubt, good=self.good)

        self._worker.put(job)

    def outcomes(self) -> list[Outcome]:
        """The outcomes since the last call."""
        # only the loop takes any
        finished = [self._outcomes.get_nowait() for _ in range(self._outcomes.qsize())]
        for outcome in finished:
            self.last = outcome
            if outcome.written:
                self._failures = 0
                self._retry_at = None
            elif outcome.problem is not None:
                self._retry_at = outcome.step + 2**self._failures
                self._failures += 1
        return finished

    def wait(self) -> None:
        """Wait, within bounds, until nothing is being written; `outcomes` then says how it went."""
        if not self._worker.wait(WAIT_SECONDS):
            _log.error(
                "the checkpoint of step %s is not written after %g s; it is left behind",
                self._begun,
                WAIT_SECONDS,
            )

    def close(self) -> None:
        """End the thread when it has done what it was given, and free the copy."""
        self._worker.leave(WAIT_SECONDS)
        self._buffers.clear()

    # -- the loop's part ---------------------------------------------------------------------------

    def _is_written(self) -> bool:
        """Whether no rank writes any more, waited for within bounds. The slow ones are named, and
        none of the others is longer in a collective than they look at their disks.
        """
        world = self.run.world
        look = min(LOOK_SECONDS, WAIT_SECONDS)
        if world.size > 1:
            look = min(look, world.timeout / 4)
        for turn in range(round(WAIT_SECONDS / look)):
            by_rank = world.gathered((self._worker.wait(look), self.ranks.waits))
            if all(done for done, _ in by_rank):
                return True
            late = [rank for rank, ends in enumerate(by_rank) if not any(ends)]
            if turn == 0:
                _log.warning(
                    "the checkpoint of step %s is being written after %g s%s: a slow disk? The run "
                    "waits, up to %g s",
                    self._begun,
                    look,
                    f" by {world.meeting.named(late)}" if world.meeting and late else "",
                    WAIT_SECONDS,
                )
        return False

    def _sums(self, tensors: Mapping[str, Tensor], parts: Mapping[str, TensorShard]) -> BitSums:
        """The sums that the copy must have: those that are expected, else those of now; empty: it
        is not compared.
        """
        run = self.run
        expected = self._expected
        self._expected = {}
        if not run.config.audit.sums:
            return {}
        try:
            sums = {
                name: expected[name]
                for name, part in parts.items()
                if name in expected and same_extent(part.tensor, local(tensors[name]))
            }
            later = {name: part.tensor for name, part in parts.items() if name not in sums}
            return sums | sums_of(later)
        except Exception as error:  # an audit must not end the run
            _log.warning("the copy of step %d is not compared: %s", run.step, error)
            return {}

    def _copy(self, parts: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
        stored, aliases = separate({name: part.tensor for name, part in parts.items()})
        copies: dict[str, TensorShard] = {}
        for name, tensor in stored.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = self._buffer(tensor.shape, tensor.dtype)
            copies[name] = replace(parts[name], tensor=buffer.copy_(tensor, non_blocking=self._pin))
        if self._pin:
            torch.cuda.synchronize(self.run.device)
        self._buffers = {name: part.tensor for name, part in copies.items()}
        return copies | {name: copies[target] for name, target in aliases.items()}

    @property
    def _pin(self) -> bool:
        return self.run.device.type == "cuda"

    def _buffer(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pin)

    # -- the thread's ------------------------------------------------------------------------------

    def _prune(self, newest: int) -> None:
        if self.ranks.first:
            with self.run.record.folder.folder(run_directory.CHECKPOINTS) as folder:
                checkpoint.prune(folder, newest, self._kept)

    def _kept(self, past: list[int], *, unproven: bool = False) -> set[int]:
        """The steps of `past` whose checkpoints stay.

        Args:
            unproven: nothing has been computed from the newest one yet, and it does not count among
                `checkpoint.keep`.
        """
        config = self.run.config
        settings = config.checkpoint
        cooldown = config.schedule.cooldown_start(config.train.steps)
        ours = (self.good, self.named, max(self.resumed, self.good or 0))
        stay = {step for step in past if step in ours}
        stay |= set(past[-settings.keep - unproven :])
        if settings.keep_before_cooldown and cooldown is not None:
            stay |= set([step for step in past if step <= cooldown][-1:])
        for number in range(settings.milestones if settings.every else 0):
            age = settings.every * settings.keep * 4**number
            stay |= set([step for step in past if age <= past[-1] - step < 4 * age][:1])
        return stay

    def _prepare(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Make the buffers and touch each page of them; the loop does not use them before this is
        done.
        """
        with torch.cuda.device(self.run.device) if self._pin else nullcontext():
            for name, (shape, dtype) in shapes.items():
                buffer = self._buffers[name] = self._buffer(shape, dtype)
                buffer.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].zero_()

    def _write(
        self,
        step: int,
        parts: Mapping[str, TensorShard],
        state: Mapping[str, Any],
        *,
        unproven: bool,
    ) -> Outcome:
        place = self.run.record.folder
        try:
            self.ranks.same_outcome(self._sync)
            with ExitStack() as stack:
                folder = self.ranks.same_outcome(
                    lambda: stack.enter_context(
                        place.folder(run_directory.CHECKPOINTS, create=True)
                    )
                )
                checkpoint.save(
                    folder,
                    step,
                    parts,
                    state,
                    keep=partial(self._kept, unproven=unproven),
                    ranks=self.ranks,
                    kinds={state.key: state.file for state in self.run.states},
                )
        except Exception as error:
            return Outcome(step=step, problem=str(error))
        self.saved = step
        return Outcome(step=step)

    def _upload(self, step: int) -> None:
        """Bring the copy on a store up to date: the first rank, for all share the folder."""
        place = f"{self.run.config.checkpoint.also}/{self.run.directory.name}"
        try:
            self._uploaded = upload(self.run.record.folder, place, self._uploaded)
        except Exception as error:
            _log.warning(
                "checkpoint.also: %s; step %d is in %s alone, and is tried again with the next "
                "checkpoint: see to the store and its credentials",
                error,
                step,
                self.run.directory,
            )

    def _sync(self) -> None:
        """Make durable what the checkpoint counts on: the lines of the metrics, and the record of
        the swaps.
        """
        sync(self.run.record.tracker)
        self.run.record.inbox.sync(self.run.record.journal)
