"""Silent corruption: a bit of a weight, of a moment, or of the copy that becomes a checkpoint flips, one
of the state at any time of a step, or one product of one step is wrong. The audits of the run must
find it and name its tensor.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import audit_planting
import audit_run_faults
from storms.ground import ON, SCENARIOS, STEPS, Ground, Result, call
from torch import Tensor

from fp4train.run.supervise.run_audits import RunAudits

FIRST = 5
"""The first step that the resumed run computes."""
AUDITED = ("audit.every=1", "audit.sums=1", "checkpoint.keep=9")
EVENTS = ("audit fault", "checkpoint failed")


def flip(tensor: Tensor, draw: random.Random) -> None:
    """Change a random bit of a float32 tensor."""
    audit_run_faults.flip(tensor, draw.randrange(32), draw.randrange(tensor.numel()))


def weight(run: Any, draw: random.Random) -> None:
    """A bit of any parameter flips."""
    flip(draw.choice(list(run.model.parameters())), draw)


def moment(run: Any, draw: random.Random) -> None:
    """A bit of a moment of any parameter flips."""
    states = [state for state in run.optimizer.state.values() if "exp_avg" in state]
    flip(draw.choice(states)[draw.choice(("exp_avg", "exp_avg_sq"))], draw)


HIDDEN = "hidden"
"""File beside the run that says: the bit flipped in an update, where no sum looks."""


@contextmanager
def at_a_moment(draw: random.Random, place: Path) -> Iterator[None]:
    """A bit of the state flips at a moment of a step that is uniform in its wall time."""
    moment = audit_run_faults.Moment(share=draw.random(), draw=draw)
    with audit_run_faults.flips_at([moment]):
        yield
    if moment.hidden:
        (place / HIDDEN).touch()


Planted = Callable[[], AbstractContextManager[Any]]


def planted(kind: str, draw: random.Random, place: Path) -> tuple[Planted, str]:
    """(The fault of a trial, words that what is said of it must have)."""
    if kind == "any time":
        return lambda: at_a_moment(draw, place), "its bits changed"
    if kind == "copy":
        part = draw.choice(("model", "optimizer"))
        return lambda: audit_run_faults.copied_wrongly(part), f"The copy of {part}/"
    if kind == "product":
        gemm, change, words = draw.choice(list(audit_planting.PRODUCT_FAULTS.values()))

        def plant(run: Any) -> AbstractContextManager[Any]:
            audited = run.companions.of(RunAudits).layers.layer_at(run.step)
            return audit_planting.planted_product(gemm, change, audited.layer.name)

        # In the last step the audited layer is in BF16, and its products are torch's own.
        step = draw.randint(FIRST, STEPS - 1)
        return lambda: audit_run_faults.in_one_computation(plant, step - 1), words
    act, words = {"weight": (weight, "model/"), "moment": (moment, "optimizer/")}[kind]
    step = draw.randint(FIRST, STEPS)
    return lambda: audit_run_faults.after_step(lambda run: act(run, draw), step), words


def said(place: Path) -> list[str]:
    """What the run's metrics say of faults."""
    lines = [json.loads(text) for text in (place / "runs/a/metrics.jsonl").read_text().splitlines()]
    return [
        " ".join(str(line.get(key, "")) for key in ("layer", "what", "reason", "cause"))
        for line in lines
        if line.get("event") in EVENTS
    ]


def corruption_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """A resumed run with one fault, then a resume from the last state without it."""
    kind = ("weight", "moment", "copy", "product", "any time")[number % 5]
    action = draw.choice(("warn", "stop"))
    ground.copy(place)
    around, words = planted(kind, draw, place)
    code, out = call(place, *ON, *AUDITED, f"audit.action={action}", around=around)
    told = said(place)
    accepted: tuple[str, ...] = (words,)
    if (place / HIDDEN).exists():
        if not told:
            return Result("any time, in an update", True)
        # Of the audited weight the update is repeated; of what flips after its sum was made the bits have changed.
        accepted = (words, "the update of its")
    ends = action == "stop" and kind != "copy"
    seen = ""
    if not any(words in text for words in accepted for text in told):
        seen = f"not found: {told}: {out[-400:]}"
    elif ends and (code != 1 or "Nothing more is saved" not in out):
        seen = f"the run did not end: exit {code}: {out[-400:]}"
    elif "Traceback" in out or (code and not ends and kind in ("copy", "product")):
        seen = f"exit {code}: {out[-400:]}"
    if not seen and kind != "copy":
        named = re.search(r"resume_step=(\d+)", out)
        good = named[1] if named else str(FIRST - 1)
        command = ("resume=runs/a", f"resume_step={good}", f"train.steps={STEPS}")
        code, out = call(place, *command)
        if code:
            seen = f"resume_step={good}: exit {code}: {out[-400:]}"
    scenario = SCENARIOS["resume"]
    if not seen and scenario.result(place) != ground.undisturbed("resume").result:
        seen = "the resumed run is another than the undisturbed one"
    return Result(f"{kind}, {action}", not seen, seen)
