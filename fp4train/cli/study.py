"""What the verbs of studies have in common: RUN, options of the verb, and overrides as other verbs take them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from fp4train.config import overrides
from fp4train.errors import UserError
from fp4train.run.record import directory as run_directory
from fp4train.text import whole_number

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|min|h)?")


@dataclass(frozen=True, kw_only=True)
class StudyCommand:
    """The arguments of a study's verb.

    Args:
        run: the run directory; None: the model is named by the overrides, and studied as it is initialised.
        options: those of the verb, key → text.
        overrides: the rest, for `launch`: resume=RUN, if there is one, and what is changed for the study.
        fresh: the model as it was initialised is studied (step=0).
    """

    run: Path | None
    options: dict[str, str]
    overrides: list[str]
    fresh: bool


def study_command(
    verb: str, arguments: list[str], options: Collection[str], usage: str, *, modelled: bool = False
) -> StudyCommand:
    """Take a study's command line apart.

    Args:
        options: the keys that are the verb's own; `step` is of all studies.
        modelled: a model without a run can be studied, too: model=… instead of RUN.

    Raises:
        UserError: there is no run directory, or an option is given twice.
    """
    words = [a for a in arguments if not a.startswith(("-", "~", "+"))]
    paths = [a for a in words if overrides.names_folder(a)]
    paths = paths if "--config-dir" not in arguments else [a for a in paths if a != _after(arguments, "--config-dir")]
    named = modelled and any(a.startswith("model=") for a in words)
    if len(paths) > 1 or (not paths and not named):
        raise UserError(f"{verb} needs one run directory{', or model=…' * modelled}: {usage}")
    run = run_directory.require_run(Path(paths[0])) if paths else None
    found: dict[str, str] = {}
    rest: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument in paths:
            continue
        if equals and key in (*options, "step"):
            if key in found:
                raise UserError(f"{key}=… is given twice")
            found[key] = value
        elif equals and key in ("resume", "resume_step"):
            raise UserError(f"{verb} RUN names the run; step=… chooses its checkpoint, not {argument}")
        else:
            rest.append(argument)
    text = found.pop("step", None)
    step = None if text is None else whole_number(text)
    if text is not None and step is None:
        raise UserError(f"step={text!r} must be the step of a checkpoint, or 0 for the model as it was initialised")
    fresh = run is None or step == 0
    if run is None:
        if step:
            raise UserError(f"step={step} is of a run: give its directory; model=… alone is studied as initialised")
        if init := [a for a in words if a.startswith(("init=", "init_step="))]:
            raise UserError(f"{init[0]}: to study the weights of a run give its directory")
        return StudyCommand(run=None, options=found, overrides=rest, fresh=True)
    chosen = [] if step is None or fresh else [f"resume_step={step}"]
    return StudyCommand(run=run, options=found, overrides=[f"resume={run}", *chosen, *rest], fresh=fresh)


def _after(arguments: list[str], flag: str) -> str | None:
    place = arguments.index(flag) + 1
    return arguments[place] if place < len(arguments) else None


def whole(options: dict[str, str], key: str, default: int, least: int = 1) -> int:
    """The whole number that an option gives.

    Raises:
        UserError: it is none, or below `least`.
    """
    text = options.get(key, str(default))
    if (found := whole_number(text)) is None or found < least:
        raise UserError(f"{key}={text!r} must be a whole number from {least}")
    return found


def number(options: dict[str, str], key: str) -> float | None:
    """The number that an option gives; None where it is not given.

    Raises:
        UserError: it is no finite number ≥ 0.
    """
    text = options.get(key)
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise UserError(f"{key}={text!r} must be a number ≥ 0")
    return found


def seconds(options: dict[str, str], key: str) -> float | None:
    """The seconds of a duration (90s, 5min, 1h); None where it is not given.

    Raises:
        UserError: it is no duration above 0.
    """
    text = options.get(key)
    if text is None:
        return None
    found = _DURATION.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise UserError(f"{key}={text!r} must be a duration above 0: 90s, 5min, 1h")
    return float(found[1]) * SECONDS[found[2] or "s"]
