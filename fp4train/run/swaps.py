"""Recipe changes of a run: swaps.json in its directory records them, swap_requests/ asks a running process for them.

`fp4train swap` writes one request file per swap. The training process takes it between two steps, records the swap with
its step, and from then on it belongs to the run: a resumed run repeats it. Recipes are stored as plain configuration
values; `as_swap` binds them, and refuses whatever is no recipe.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp4train.config.binding import bind
from fp4train.errors import UserError
from fp4train.precision import Recipe, Swap
from fp4train.run.directory import REQUESTS, SWAPS, write_text


def read_swaps(run: Path) -> list[Swap]:
    """The recorded swaps of a run, by step."""
    path = run / SWAPS
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [as_swap(e["step"], e["recipe"], e["name"]) for e in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def record_swap(run: Path, step: int, recipe: dict[str, Any], name: str) -> None:
    """Add a swap to the run's record; it replaces an earlier one at the same step."""
    path = run / SWAPS
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    entries = [e for e in entries if e["step"] != step] + [{"step": step, "name": name, "recipe": recipe}]
    write_text(path, json.dumps(sorted(entries, key=lambda e: e["step"]), indent=1))


def as_swap(step: int, recipe: dict[str, Any], name: str) -> Swap:
    """The swap that a recorded or requested entry describes.

    Raises:
        UserError: the step is no integer; or the recipe has invalid values, or is neither fp4train's nor of a plugin
            that this command names.
    """
    return Swap(step=bind(step, int, "step"), recipe=bind(recipe, Recipe, "recipe"), name=str(name))


def request_swap(run: Path, recipe: dict[str, Any], name: str, at: int | None) -> Path:
    """Ask the process that trains in `run` (now, or after a resume) to change the recipe at step `at`.

    Args:
        recipe: plain configuration values.
        name: what the user calls it ("mxfp8").
        at: None: at the next step.

    Raises:
        UserError: the request cannot be written.
    """
    folder = run / REQUESTS
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
    path = folder / f"{time.time_ns()}.json"
    write_text(path, json.dumps({"recipe": recipe, "name": name, "at": at}))
    return path


def take_requests(run: Path) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Remove and yield each pending request, as (request, "") or (None, why it cannot be read)."""
    folder = run / REQUESTS
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError:
        return
    for path in paths:
        try:
            request = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(request, dict) or not {"recipe", "name", "at"} <= set(request):
                raise ValueError("it does not hold recipe, name and at")
        except (OSError, ValueError, RecursionError) as error:
            _set_aside(path)
            yield None, f"request {path.name} cannot be read: {error}"
        else:
            yield request, ""
            _set_aside(path)


def _set_aside(request: Path) -> None:
    """Remove a request, or rename it, so that it is not taken again."""
    try:
        request.unlink(missing_ok=True)
    except OSError:
        with suppress(OSError):
            request.rename(request.with_suffix(".refused"))
