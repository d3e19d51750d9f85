"""What a person sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from types import TracebackType

from tqdm import tqdm

_log = logging.getLogger(__name__)
_LINES = 20
"""Lines in the log of a whole run that has no terminal."""


class Progress:
    """Counts steps and times them.

    Args:
        step: steps done; steps: of the whole run; tokens: a step.
        peak: tokens a second at the device's peak, where that is known.
        ranks: that share the tokens.
        quietly: show no bar (of several ranks one does).
    """

    def __init__(
        self, step: int, steps: int, tokens: int, peak: float | None = None, *, ranks: int = 1, quietly: bool = False
    ) -> None:
        self.ranks = ranks
        self.peak = peak
        self.step, self.steps, self.tokens = step, steps, tokens
        self.terminal = sys.stderr.isatty() and not quietly
        self.every = max(1, steps // _LINES)
        self.smooth: float | None = None

    def __enter__(self) -> Progress:
        self.bar = tqdm(
            total=self.steps,
            initial=self.step,
            disable=not self.terminal,
            unit="step",
            dynamic_ncols=True,
            smoothing=0.1,
        )
        self.last = time.perf_counter()
        return self

    def advance(self, loss: float, recipe: str, at: float) -> dict[str, float | str]:
        """One more step was done at `at`, by `time.perf_counter`; returns its speed."""
        speed = self.tokens / (at - self.last)
        self.last = at
        self.step += 1
        self.smooth = speed if self.smooth is None else 0.9 * self.smooth + 0.1 * speed
        with suppress(OSError):  # a terminal that was closed is no reason to end a run
            self.bar.set_postfix_str(f"loss {loss:.3f}, {self.speed}, {recipe}", refresh=False)
            self.bar.update()
        if not self.terminal and (self.step % self.every == 0 or self.step in (1, self.steps)):
            left = (self.steps - self.step) * self.tokens / self.smooth
            _log.info(
                "step %d/%d  loss %.3f  %s  %s left  %s",
                self.step,
                self.steps,
                loss,
                self.speed,
                tqdm.format_interval(left),
                recipe,
            )
        values: dict[str, float | str] = {"perf/tokens_per_s": speed}
        if self.ranks > 1:
            values["perf/tokens_per_s_per_rank"] = speed / self.ranks
        return values if self.peak is None else values | {"perf/mfu": speed / self.ranks / self.peak}

    @property
    def speed(self) -> str:
        """Tokens per second, a mean over some steps; of several ranks for each as well."""
        assert self.smooth is not None
        whole = f"{self.smooth / 1e3:.1f}k tokens/s"
        return whole if self.ranks == 1 else f"{whole} ({self.smooth / self.ranks / 1e3:.2f}k per rank)"

    def resume_timing(self) -> None:
        """Time from here: what came since the last step (an evaluation, a checkpoint) was not training."""
        self.last = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self.bar.close()
