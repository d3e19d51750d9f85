"""Recipe changes of a run: swaps.json in its directory records them, swap_requests/ asks a running process for them.

`fp4train swap` writes one request file per swap, ID.json. The training process takes it between two steps: it renames
it to ID.taken, so that it can no longer be cancelled, records the swap with its step, and writes ID.answer. From then
on the swap belongs to the run: a resumed run repeats it. Recipes are stored as plain configuration values; `as_swap`
binds them, and refuses whatever is no recipe.

A request holds {"recipe", "name", "at"}, or {"cancel": STEP} for a recorded swap that has not begun.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4train.config.binding import bind
from fp4train.errors import UserError
from fp4train.precision import Recipe, Swap
from fp4train.run.directory import REQUESTS, SWAPS, is_running, write_text

KEPT_ANSWERS = 20
POLL = 0.05
"""Seconds between two looks for an answer."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that the training process has taken.

    Args:
        id: its file's name without the suffix.
        body: what it asks for; None where it cannot be read.
        problem: why it cannot be read.
    """

    folder: Path
    id: str
    body: dict[str, Any] | None
    problem: str = ""

    def answer(self, accepted: bool, text: str) -> None:
        """Tell whoever waits; a disk that takes no answer costs nothing but the answer."""
        with suppress(UserError, OSError):
            write_text(self.folder / f"{self.id}.answer", json.dumps({"accepted": accepted, "text": text}))
            for old in sorted(self.folder.glob("*.answer"))[:-KEPT_ANSWERS]:
                old.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the training process made of a request."""

    accepted: bool
    text: str


def read_swaps(run: Path) -> list[Swap]:
    """The recorded swaps of a run, by step."""
    path = run / SWAPS
    try:
        return [as_swap(e["step"], e["recipe"], e["name"]) for e in _entries(run)]
    except (ValueError, KeyError, TypeError, RecursionError, UserError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def plain_swaps(run: Path) -> dict[int, dict[str, Any]]:
    """Step → plain recipe of the recorded swaps."""
    return {e["step"]: e["recipe"] for e in _entries(run)}


def record_swap(run: Path, step: int, recipe: dict[str, Any], name: str) -> None:
    """Add a swap to the run's record; it replaces an earlier one at the same step."""
    _write(run, [e for e in _entries(run) if e["step"] != step] + [{"step": step, "name": name, "recipe": recipe}])


def remove_swap(run: Path, step: int) -> None:
    """Take a swap that has not begun out of the run's record."""
    _write(run, [e for e in _entries(run) if e["step"] != step])


def _entries(run: Path) -> list[dict[str, Any]]:
    path = run / SWAPS
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, list) or not all(isinstance(e, dict) for e in found):
            raise ValueError("it is no list of swaps")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return found


def _write(run: Path, entries: list[dict[str, Any]]) -> None:
    write_text(run / SWAPS, json.dumps(sorted(entries, key=lambda e: int(e["step"])), indent=1))


def as_swap(step: int, recipe: dict[str, Any], name: str) -> Swap:
    """The swap that a recorded or requested entry describes.

    Raises:
        UserError: the step is no integer; or the recipe has invalid values, or is neither fp4train's nor of a plugin
            that this command names.
    """
    return Swap(step=bind(step, int, "step"), recipe=bind(recipe, Recipe, "recipe"), name=str(name))


# -- asking -----------------------------------------------------------------------------------------------------------


def request_swap(run: Path, recipe: dict[str, Any], name: str, at: int | None) -> str:
    """Ask the process that trains in `run` (now, or after a resume) to change the recipe at step `at`; returns an ID.

    Args:
        recipe: plain configuration values.
        name: what the user calls it ("mxfp8").
        at: None: at the next step.

    Raises:
        UserError: the request cannot be written.
    """
    return _ask(run, {"recipe": recipe, "name": name, "at": at})


def request_cancel(run: Path, step: int) -> str:
    """Ask the process that trains in `run` to forget the recorded swap at `step`; returns the request's ID."""
    return _ask(run, {"cancel": step})


def _ask(run: Path, body: dict[str, Any]) -> str:
    folder = run / REQUESTS
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
    number = time.time_ns()
    write_text(folder / f"{number}.json", json.dumps(body))
    return str(number)


def wait_for_answer(run: Path, request: str, seconds: float) -> Answer | None:
    """The answer of the process that trains in `run`; None: it gave none in time, or ended."""
    path = run / REQUESTS / f"{request}.answer"
    deadline = time.monotonic() + seconds
    while True:
        running = is_running(run)
        if path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                path.unlink(missing_ok=True)
                return Answer(accepted=bool(found["accepted"]), text=str(found["text"]))
            except (OSError, ValueError, KeyError, TypeError):
                return None
        if not running or time.monotonic() >= deadline:
            return None
        time.sleep(POLL)


def pending(run: Path) -> dict[str, dict[str, Any]]:
    """The requests that no process has taken yet, by ID; one that cannot be read is empty."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((run / REQUESTS).glob("*.json")):
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            body = {}
        found[path.stem] = body if isinstance(body, dict) else {}
    return found


def cancel_request(run: Path, request: str) -> bool:
    """Remove a pending request; False: it has been taken."""
    try:
        (run / REQUESTS / f"{request}.json").unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UserError(f"request {request} cannot be removed: {error}") from error
    return True


# -- answering --------------------------------------------------------------------------------------------------------


def take_requests(run: Path) -> Iterator[Request]:
    """Remove and yield each pending request, oldest first; also those that a killed process had taken."""
    folder = run / REQUESTS
    try:
        paths = sorted([*folder.glob("*.json"), *folder.glob("*.taken")])
    except OSError:
        return
    for path in paths:
        taken = path.with_suffix(".taken")
        try:
            path.rename(taken)
            body = json.loads(taken.read_text(encoding="utf-8"))
            if not isinstance(body, dict) or not ({"recipe", "name", "at"} <= set(body) or "cancel" in body):
                raise ValueError("it does not hold recipe, name and at")
        except FileNotFoundError:  # cancelled since
            continue
        except (OSError, ValueError, RecursionError) as error:
            _set_aside(taken if taken.exists() else path)
            problem = f"request {path.stem}.json cannot be read: {error}"
            yield Request(folder=folder, id=path.stem, body=None, problem=problem)
        else:
            yield Request(folder=folder, id=path.stem, body=body)
            _set_aside(taken)


def _set_aside(request: Path) -> None:
    """Remove a request, or rename it, so that it is not taken again."""
    try:
        request.unlink(missing_ok=True)
    except OSError:
        with suppress(OSError):
            request.rename(request.with_suffix(".refused"))
