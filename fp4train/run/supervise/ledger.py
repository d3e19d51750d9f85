"""The results of the steps, read one step late so that the host does not wait for the device, and
their progress.

A step is queued on the device as a whole: forward, backward, the gradients' norm, and an optimizer
that does nothing if loss or norm is not finite. Its numbers are copied to the host beside that and
read when the next step is queued, or at once where something depends on them (an evaluation, a
checkpoint, a loss scale). After a step that failed no other one changes the weights, so that the
state before it is still there when its numbers are read.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from tqdm.utils import disp_len

from fp4train.companion import RunCompanion
from fp4train.run.queued import Step, Values
from fp4train.run.state.numbers import begin_loss_scale
from fp4train.run.supervise.guard import NonFiniteError, blame

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)
BAR: Any = {"dynamic_ncols": True, "smoothing": 0.1}
"""The look of a progress bar."""
_SPARE = 4
"""Characters that times and rates may grow by until they are displayed."""
_COUNT = "{l_bar}{bar}| {n_fmt}/{total_fmt}"
_FORMS = {
    "rate": _COUNT + " [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    "time": _COUNT + " [{elapsed}<{remaining}{postfix}]",
    "count": _COUNT + "{postfix}",
}
"""Lines of tqdm around a bar, from the longest."""
_LINES = 20
"""Lines in the log of a whole run that has no terminal."""


class Ledger:
    """Holds the step whose numbers are not read yet, and tells the run's companions when they
    are.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics: Values = {}
        self._step: Step | None = None

    def add(self, step: Step) -> None:
        """A step was queued: the one before it is read.

        Raises:
            NonFiniteError: see `check`.
        """
        waiting = self._step
        self._step = step
        if waiting is not None:
            self._tell(waiting)
        if (scaling := step.recipe.loss_scaling) is not None:
            self.check()
            run = self.run
            finite = math.isfinite(step.read()[1])
            good_steps = run.loss_scale.good_steps
            value, good_steps = scaling.update(step.loss_scale, good_steps, finite)
            run.loss_scale = replace(run.loss_scale, value=value, good_steps=good_steps)
            run.failed = None  # skipped, and none of the next ones' business

    def check(self) -> None:
        """Wait for the step that was added last.

        Raises:
            NonFiniteError: its loss, or a gradient that no smaller loss scale can mend, is not
                finite. The run is as it was before that step then.
        """
        if self._step is not None:
            self._check(self._step)

    def flush(self, values: Mapping[str, float | str] | None = None) -> None:
        """Wait for the step that was added last, whose line of metrics gets `values`.

        Raises:
            NonFiniteError: see `check`.
        """
        waiting = self._step
        self._step = None
        if waiting is not None:
            waiting.values |= values or {}
            self._tell(waiting)

    def _check(self, step: Step) -> None:
        run, (loss, norm) = self.run, step.read()
        if math.isfinite(loss) and (math.isfinite(norm) or step.can_be_skipped):
            return
        self._step = None
        run.step = step.index
        run.failed = None
        run.load_scaling(step.scaling)
        begin_loss_scale(run, step.recipe)  # a phase may have begun since
        run.optimizer.zero_grad(set_to_none=True)
        if math.isfinite(loss):
            bad = run.world.least(
                step.bad_gradient(), lambda name: -run.place_of(name.rpartition(".")[0])
            )
            if bad:
                where = f"gradient of {bad}"
            else:
                where = "the norm itself (finite gradients, overflowing sum)"
            raise NonFiniteError(step.index, "gradient norm", norm, where, step.recipe.name)
        where = blame(run, step.recipe)
        run.load_scaling(step.scaling)
        raise NonFiniteError(step.index, "loss", loss, where, step.recipe.name)

    def _tell(self, step: Step) -> None:
        self._check(step)
        loss, norm = step.read()
        values = {"train/loss": loss, "train/grad_norm": norm} | step.values
        for late in step.late:
            values |= late()
        self.run.companions.on_numbers(step, values)
        self.metrics |= values


class Progress(RunCompanion):
    """The display while a run trains: a bar on a terminal, a line now and then elsewhere. It times
    the steps; what comes between two of them, an evaluation or a checkpoint, is not training.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        train = run.config.train
        self.step = run.step
        self.steps = train.steps
        self.tokens = train.step_tokens
        self.peak = run.peak_tokens_per_s()
        self.ranks = run.world.size
        self.terminal = sys.stderr.isatty() and run.world.lead  # of several ranks one has a bar
        self.every = max(1, train.steps // _LINES)
        self.smooth: float | None = None
        self._interrupted = False

    def begin(self, run: Run) -> None:
        self.bar = tqdm(
            total=self.steps, initial=self.step, disable=not self.terminal, unit="step", **BAR
        )
        self.last = time.perf_counter()

    def after_evaluation(self, run: Run, values: Values) -> None:
        self._interrupted = True

    def on_save(self, run: Run) -> None:
        self._interrupted = True

    def before_step(self, run: Run) -> None:
        if self._interrupted:
            self.last = time.perf_counter()
            self._interrupted = False

    def on_numbers(self, run: Run, step: Step, values: Values) -> None:
        """Count a step that is done, and add its speed."""
        loss, _ = step.read()
        recipe = step.recipe.name
        at = step.numbers.at
        speed = self.tokens / (at - self.last)
        self.last = at
        self.step += 1
        if self.smooth is None:
            self.smooth = speed
        else:
            self.smooth = 0.9 * self.smooth + 0.1 * speed
        with suppress(OSError):  # a terminal that was closed is no reason to end a run
            self._describe(f"loss {loss:.3f}", recipe)
            self.bar.update()
        if not self.terminal and (self.step % self.every == 0 or self.step in (1, self.steps)):
            left = tqdm.format_interval((self.steps - self.step) * self.tokens / self.smooth)
            words = (self.step, self.steps, loss, self.speed, left, recipe)
            _log.info("step %d/%d  loss %.3f  %s  %s left  %s", *words)
        values["perf/tokens_per_s"] = speed
        if self.ranks > 1:
            values["perf/tokens_per_s_per_rank"] = speed / self.ranks
        if self.peak is not None:
            values["perf/mfu"] = speed / self.ranks / self.peak

    def _describe(self, loss: str, recipe: str) -> None:
        """Choose the fields beside the bar: as many as leave it ten characters.

        Steps per second go first, for the tokens per second say the same; then the speed, the
        recipe and the times.
        """
        if not self.terminal:
            return
        assert self.smooth is not None
        values = {**self.bar.format_dict, "rate": self.smooth / self.tokens}
        width = values["ncols"]
        choices = (
            ("rate", f"{loss}, {self.speed}, {recipe}"),
            ("time", f"{loss}, {self.speed}, {recipe}"),
            ("time", f"{loss}, {self.total_speed}, {recipe}"),
            ("time", f"{loss}, {recipe}"),
            ("time", f"{loss}, {self.total_speed}"),
            ("time", loss),
            ("count", loss),
        )
        for form, fields in choices:
            shape = {"bar_format": _FORMS[form], "postfix": fields, "ncols": None}
            line = tqdm.format_meter(**{**values, **shape})  # its bar has ten characters
            if width is None or disp_len(line) + _SPARE <= width:
                break
        self.bar.bar_format = _FORMS[form]
        self.bar.set_postfix_str(fields, refresh=False)

    @property
    def total_speed(self) -> str:
        """Tokens per second, a mean over some steps."""
        assert self.smooth is not None
        return f"{self.smooth / 1e3:.1f}k tokens/s"

    @property
    def speed(self) -> str:
        """Tokens per second, a mean over some steps; of several ranks for each as well."""
        assert self.smooth is not None
        if self.ranks == 1:
            return self.total_speed
        return f"{self.total_speed} ({self.smooth / self.ranks / 1e3:.2f}k per rank)"

    def close(self, run: Run, error: BaseException | None) -> None:
        with suppress(OSError):
            self.bar.close()
