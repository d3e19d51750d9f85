"""Checkpoints that are written while the next steps run.

Of several ranks the lead writes; the others give it their parts of the tensors.

The loop pays for a copy of the state in main memory, whose buffers are kept from one checkpoint to the next; a thread
checks that it is finite, writes it, and reports. Two never overlap: the loop waits, within bounds, for one that is not
done when the next is due. One that fails is tried again after 1, 2, 4, … steps, and at the end after a pause.

A checkpoint whose weights or moments are not finite is not written. One from which nothing has been computed yet is not
proven: weights may be finite and useless. It pushes out no other until the next step has given a finite loss.

Of several ranks each copies and writes the parts that it owns. Their threads agree on what went wrong over a process
group of their own, and all report the same outcome.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fp4train import checkpoint
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.parallel.whole import whole
from fp4train.run import directory as run_directory
from fp4train.run.guard import first_non_finite
from fp4train.shards import Part, owned, separate
from fp4train.track.config import METRICS
from fp4train.track.metrics import LIMIT as METRICS_LIMIT
from fp4train.track.statistics import STATISTICS
from fp4train.track.tracker import mark, sync

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

WAIT_SECONDS = 600.0
"""For a checkpoint that is being written; then it is left behind."""
PAUSES = (0.5, 1.0, 2.0)
"""Seconds before the last checkpoint of a run is tried again."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one checkpoint: written, or why not.

    Args:
        step: optimizer steps done at it.
        problem: why it could not be written; None if it was, at least to `checkpoint.also`.
        bad: the tensor that is not finite, in which case nothing was written.
    """

    step: int
    problem: str | None = None
    bad: str | None = None

    @property
    def written(self) -> bool:
        return self.problem is None and self.bad is None


class Saver:
    """Writes the checkpoints of one run.

    Args:
        ranks: those that write them together; all call `begin`, `prove` and `wait` after the same steps.
    """

    def __init__(self, run: Run, ranks: checkpoint.Ranks = checkpoint.ALONE) -> None:
        self.run, self.ranks = run, ranks
        self.saved: int | None = None
        """The newest step that is written."""
        self.last: Outcome | None = None
        self._buffers: dict[str, Tensor] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._pending, self._lock = 0, threading.Lock()
        self._thread: threading.Thread | None = None
        self._begun: int | None = None
        self._failures = 0
        self._retry_at: int | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint that failed should be tried again after `step` steps."""
        return self._retry_at is not None and step >= self._retry_at

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of `step` is written or being written."""
        return self._begun == step and not (self.last is not None and self.last.step == step and not self.last.written)

    def begin(self, *, proven: bool = False) -> bool:
        """Copy the state of the run and have it written; False if the one before is not done in time.

        Args:
            proven: a finite loss has been computed from this state.
        """
        run, step = self.run, self.run.step
        if not run.world.of_lead(self._idle.wait(WAIT_SECONDS)):
            _log.error("the checkpoint of step %s is not written after %g s: a slow disk?", self._begun, WAIT_SECONDS)
            return False
        tensors, state = checkpoint.flatten(run.state())
        tensors = whole(tensors, keep=run.world.lead)
        if not run.world.lead:
            return True
        state["metrics"] = mark(run.tracker)  # type: ignore[assignment]
        weights = {f"model/{checkpoint.escaped(name)}" for name, _ in run.model.named_parameters()}
        checked = [n for n in tensors if n in weights or n.startswith("optimizer/")]
        parts = owned(tensors, leads=self.ranks.leads)
        held = {n: parts[n].tensor for n in checked if n in parts}
        bad = first_non_finite(held) if run.device.type != "cpu" else None
        copies = self._copy(parts)
        self._begun = step

        def job() -> None:
            worst = bad
            if run.device.type == "cpu":
                worst = first_non_finite({n: copies[n].tensor for n in held})
            try:
                worst = self.ranks.agree(worst)
            except RuntimeError:
                self._outcomes.put(Outcome(step=step, problem="a rank has ended, or does not answer"))
                return
            self._outcomes.put(
                Outcome(step=step, bad=worst) if worst else self._write(step, copies, state, unproven=not proven)
            )

        self._do(job)
        return True

    def prove(self, step: int) -> None:
        """A finite loss has been computed from the state of `step`: what is too many by now may go."""
        if self._begun == step:
            keep = self.run.config.checkpoint.keep

            def job() -> None:
                if self.saved == step and self.ranks.first:
                    with self.run.folder.folder(run_directory.CHECKPOINTS) as folder:
                        checkpoint.prune(folder, step, keep)

            self._do(job)

    def outcomes(self) -> list[Outcome]:
        """What has ended since the last call."""
        found: list[Outcome] = []
        while True:
            try:
                found.append(self._outcomes.get_nowait())
            except queue.Empty:
                break
        for outcome in found:
            self.last = outcome
            if outcome.written:
                self._failures, self._retry_at = 0, None
            elif outcome.problem is not None:
                self._retry_at = outcome.step + 2**self._failures
                self._failures += 1
        return found

    def wait(self) -> None:
        """Wait, within bounds, until nothing is being written; `outcomes` then says how it went."""
        if not self._idle.wait(WAIT_SECONDS):
            _log.error(
                "the checkpoint of step %s is not written after %g s; it is left behind", self._begun, WAIT_SECONDS
            )

    def close(self) -> None:
        """End the thread when it has done what it was given, and free the copy."""
        if self._thread is not None:
            self._jobs.put(self._leave)
            self._thread.join(WAIT_SECONDS)
            self._thread = None
        self._buffers.clear()

    # -- the loop's part ------------------------------------------------------------------------------------------

    def _copy(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        stored, aliases = separate({name: part.tensor for name, part in parts.items()})
        pin = self.run.device.type == "cuda"
        copies: dict[str, Part] = {}
        for name, tensor in stored.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            copies[name] = replace(parts[name], tensor=buffer.copy_(tensor, non_blocking=pin))
        if pin:
            torch.cuda.synchronize(self.run.device)
        self._buffers = {name: part.tensor for name, part in copies.items()}
        return copies | {name: copies[target] for name, target in aliases.items()}

    # -- the thread's ---------------------------------------------------------------------------------------------

    def _write(self, step: int, parts: Mapping[str, Part], state: Mapping[str, Any], *, unproven: bool) -> Outcome:
        run, problems = self.run, []
        try:
            self._agreed(lambda: sync(run.tracker))  # the lines that the checkpoint counts on
            self._write_in(run.folder, step, parts, state, unproven)
        except Exception as error:
            problems.append(str(error))
        if run.config.checkpoint.also is not None:
            try:
                self._write_also(run.config.checkpoint.also / run.config.run.name, step, parts, state, unproven)
            except Exception as error:
                _log.error("checkpoint.also: %s", error)
            else:
                if problems:
                    _log.error("%s It is in %s.", problems.pop(), run.config.checkpoint.also / run.config.run.name)
        if not problems:
            self.saved = step
        return Outcome(step=step, problem=problems[0] if problems else None)

    def _write_in(
        self, place: Folder, step: int, parts: Mapping[str, Part], state: Mapping[str, Any], unproven: bool
    ) -> None:
        keep = self.run.config.checkpoint.keep
        with ExitStack() as stack:
            folder = self._agreed(lambda: stack.enter_context(place.folder(run_directory.CHECKPOINTS, create=True)))
            checkpoint.save(folder, step, parts, state, keep=keep, unproven=unproven, ranks=self.ranks)

    def _write_also(
        self, place: Path, step: int, parts: Mapping[str, Part], state: Mapping[str, Any], unproven: bool
    ) -> None:
        """A second run directory, which can be resumed like the first."""
        with ExitStack() as stack:
            also = self._agreed(lambda: stack.enter_context(self._also(place)))
            self._write_in(also, step, parts, state, unproven)

    def _also(self, place: Path) -> Folder:
        """The second run directory, open, with the first one's files."""
        run = self.run
        also = Folder.open(place, create=True)
        if not self.ranks.first:
            return also
        try:
            there = run_directory.identity(place)
            if there not in (None, run.identity):
                raise UserError(f"{place} holds another run ({there}): nothing is written there")
            copies = {run_directory.CONFIG: run.saved_config}
            for name in (run_directory.SWAPS, run_directory.HISTORY, METRICS, STATISTICS, *run_directory.TOKENIZER):
                if run.folder.has_file(name):
                    copies[name] = run.folder.read(name, METRICS_LIMIT)
            for name, data in copies.items():
                if data is not None:
                    also.write(name, data)
        except BaseException:
            also.close()
            raise
        return also

    def _agreed(self, task: Callable[[], Result]) -> Result:
        """What `task` gives; where it fails on one rank, all raise that rank's reason."""
        given: list[Result] = []
        problem = None
        try:
            given.append(task())
        except Exception as error:
            problem = str(error)
        if problem := self.ranks.agree(problem):
            raise checkpoint.CheckpointError(problem)
        return given[0]

    def _do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
            self._thread.start()
        with self._lock:
            self._pending += 1
            self._idle.clear()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job == self._leave:
                return
            try:
                job()
            except Exception as error:  # pruning; what is written reports by itself
                _log.warning("old checkpoints could not be removed: %s", error)
            with self._lock:
                self._pending -= 1
                if not self._pending:
                    self._idle.set()

    def _leave(self) -> None:
        """Marks the end of the thread's work."""
