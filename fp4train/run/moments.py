"""The moments of a run's steps, of which its companions are told. `fp4train/companion.py` says what
each is, and who hears of it first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

from fp4train.companion import Companion
from fp4train.config.plugins import describe_failure
from fp4train.precision import Recipe
from fp4train.run.queued import Step, Values
from fp4train.run.state.base import Trained
from fp4train.text import first_line

C = TypeVar("C", bound=Companion)

_log = logging.getLogger(__name__)


class Companions:
    """The companions of one run, told of each moment in their order; a context of its loop.

    Args:
        hooks: companions of users, of which one that raises is named and left out from then on.
        ours: the others, whose errors are the run's.
        trackers: hear of each moment after all others.
    """

    def __init__(
        self,
        run: Trained,
        ours: Iterable[Companion],
        hooks: Iterable[Companion] = (),
        trackers: Iterable[Companion] = (),
    ) -> None:
        self.run = run
        self._hooks = [hook for hook in hooks if run.world.lead or not hook.lead_only]
        self._all = [*ours, *self._hooks, *trackers]
        self._begun: list[Companion] = []
        self._failure: str | None = None
        self._hearing: dict[str, list[Companion]] = {}

    def of(self, kind: type[C]) -> C:
        """The companion of this class."""
        return next(companion for companion in self._all if isinstance(companion, kind))

    @property
    def trouble(self) -> str | None:
        """Why the run is to end before its next step; None: it goes on."""
        if self._failure is not None:
            return self._failure
        return next((c.trouble for c in self._all if c.trouble is not None), None)

    # -- the moments -------------------------------------------------------------------------------

    def __enter__(self) -> Companions:
        try:
            for companion in self._all:
                with self._guarding(companion, "begin"):
                    companion.begin(self.run)
                self._begun.append(companion)
        except BaseException as error:
            self._close(error)
            raise
        return self

    def before_step(self) -> None:
        self._tell("before_step")

    @contextmanager
    def around_step(self, recipe: Recipe) -> Iterator[None]:
        """The contexts of all companions, the first one outermost, within those of hooks."""
        companions = self._that_hear("around_step")
        with ExitStack() as stack:
            for companion in sorted(companions, key=lambda c: c not in self._hooks):
                if companion in self._hooks:
                    stack.enter_context(self._around(companion, recipe))
                else:
                    stack.enter_context(companion.around_step(self.run, recipe))
            yield

    def after_step(self, step: Step) -> None:
        self._tell("after_step", step)

    def on_numbers(self, step: Step, values: Values) -> None:
        for companion in self._that_hear("on_numbers"):
            self._add(companion, "on_numbers", values, step)

    def after_evaluation(self, values: Values) -> None:
        for companion in self._that_hear("after_evaluation"):
            self._add(companion, "after_evaluation", values)

    def on_save(self) -> None:
        self._tell("on_save")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(error)

    # -- how they are told -------------------------------------------------------------------------

    def _that_hear(self, moment: str) -> list[Companion]:
        """Those whose class defines a moment, found when it first comes."""
        if moment not in self._hearing:
            default = getattr(Companion, moment)
            self._hearing[moment] = [c for c in self._all if getattr(type(c), moment) != default]
        return self._hearing[moment]

    def _tell(self, moment: str, *arguments: Any) -> None:
        for companion in self._that_hear(moment):
            with self._guarding(companion, moment):
                getattr(companion, moment)(self.run, *arguments)

    def _add(self, companion: Companion, moment: str, values: Values, *arguments: Any) -> None:
        """Tell of numbers, and take over what a companion adds to them."""
        with self._guarding(companion, moment):
            line: dict[str, Any] = dict(values)
            getattr(companion, moment)(self.run, *arguments, line)
            values |= _plain(line)

    @contextmanager
    def _around(self, hook: Companion, recipe: Recipe) -> Iterator[None]:
        """The context of a hook, which hides no error of the step."""
        context: AbstractContextManager[object] | None = None
        with self._guarding(hook, "around_step"):
            entered = hook.around_step(self.run, recipe)
            entered.__enter__()
            context = entered
        raised: BaseException | None = None
        try:
            yield
        except BaseException as error:
            raised = error
            raise
        finally:
            if context is not None:
                with self._guarding(hook, "around_step"):
                    trace = None if raised is None else raised.__traceback__
                    context.__exit__(None if raised is None else type(raised), raised, trace)

    @contextmanager
    def _guarding(self, companion: Companion, moment: str) -> Iterator[None]:
        """A context of a moment of a companion: a hook that raises is named and left out."""
        try:
            with ExitStack() as stack:
                for other in self._that_hear("around_hook") if companion in self._hooks else ():
                    stack.enter_context(other.around_hook(self.run))
                yield
        except (Exception, SystemExit) as error:
            if companion not in self._hooks:
                raise
            problem = self._problem(companion, moment, error)
            _log.error("%s", problem)
            if self._failure is None:
                self._failure = f"{problem}; mend it, or go on without it (hooks=[])"
            for heard, listeners in self._hearing.items():
                self._hearing[heard] = [other for other in listeners if other is not companion]

    def _problem(self, hook: Companion, moment: str, error: BaseException) -> str:
        """A sentence about a hook that raised."""
        run = self.run
        kind = type(hook)
        where = f"after step {run.step}"
        if run.world.size > 1:
            where += f", rank {run.world.place.rank}"
        return (
            f"{where}: {moment} of the hook {kind.__module__}.{kind.__qualname__} raised "
            f"{describe_failure(error)}"
        )

    def _close(self, error: BaseException | None) -> None:
        """Close those that have begun, whatever one of them raises: the first error is told."""
        failures: list[Exception] = []
        while self._begun:
            companion = self._begun.pop(0)
            try:
                with self._guarding(companion, "close"):
                    companion.close(self.run, error)
            except Exception as failure:
                failures.append(failure)
        if failures and error is None:
            raise failures[0]
        for later in failures:
            _log.error("%s", first_line(later))


def _plain(line: Mapping[str, Any]) -> Values:
    """The values of a line of metrics as plain numbers and texts.

    Raises:
        TypeError: one is neither.
    """
    plain: Values = {}
    for key, value in line.items():
        if hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, int | float | str | None):
            raise TypeError(f"{key} is a {type(value).__name__}, neither a number nor a text")
        plain[key] = value  # type: ignore[assignment]
    return plain
