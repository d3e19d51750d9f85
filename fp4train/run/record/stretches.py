"""The plan of a run as its journal keeps it: by stretch of steps, which recipe held, and what every
GEMM ran in.

In a record a stretch has its distinct kinds of GEMMs (size, elements, backend, why), and for each
layer the kinds of its three GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp4train.backends import GEMMS
from fp4train.config.schema import MOST_STEPS
from fp4train.precision.plan import Plan
from fp4train.precision.report import section, shares
from fp4train.text import printable, step_span

MOST_MACS = 10**30
"""Most multiply-adds of a stretch that anyone can run."""


@dataclass(frozen=True, kw_only=True)
class RecordedStretch:
    """Steps [start, stop) as they were planned, or ran.

    Args:
        recipe, reason: its name, and why it holds.
        rows: per GEMM: layer, GEMM, size, elements, backend, why.
        macs: per row: its multiply-adds.
    """

    start: int
    stop: int
    recipe: str
    reason: str
    rows: tuple[tuple[str, ...], ...]
    macs: tuple[int, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Share of the linear layers' multiply-adds by elements."""
        return shares(
            (elements, count)
            for (_, _, _, elements, *_), count in zip(self.rows, self.macs, strict=True)
        )

    @property
    def title(self) -> str:
        return printable(
            f"{step_span(self.start, self.stop)}: {self.recipe} ({self.reason})", kept=""
        )

    def render(self, *, full: bool) -> str:
        """The stretch as text, in the form of `fp4train.precision.report.render`."""
        return section(self.title, list(self.rows), self.shares, full=full)

    def goes_on_as(self, other: RecordedStretch) -> bool:
        """Whether `other` runs the same after it."""
        mine = (self.stop, self.recipe, self.reason, self.rows)
        return mine == (other.start, other.recipe, other.reason, other.rows)


def joined(records: Iterable[tuple[int, Sequence[RecordedStretch]]]) -> list[RecordedStretch]:
    """Stretches that ran or are planned, in order, from (step, what was planned from that step on),
    oldest first.
    """
    stretches: list[RecordedStretch] = []
    for step, planned in records:
        if not planned:
            continue
        while stretches and stretches[-1].start >= step:
            stretches.pop()
        if stretches and stretches[-1].stop > step:
            stretches[-1] = replace(stretches[-1], stop=step)
        for stretch in planned:
            if stretches and stretches[-1].goes_on_as(stretch):
                stretches[-1] = replace(stretches[-1], stop=stretch.stop)
            else:
                stretches.append(stretch)
    return stretches


def multiplied(stretches: Iterable[RecordedStretch], done: int) -> dict[str, float]:
    """Multiply-adds of the linear layers by elements, a microbatch in each of the first `done`
    steps.
    """
    by_elements: dict[str, float] = {}
    for stretch in stretches:
        macs = float(sum(stretch.macs)) * max(0, min(stretch.stop, done) - stretch.start)
        for elements, share in stretch.shares.items():
            by_elements[elements] = by_elements.get(elements, 0.0) + share * macs
    return by_elements


def compact(plan: Plan) -> list[dict[str, Any]]:
    """The stretches of a plan as a record holds them: plain JSON."""
    entries = []
    for stretch in plan.stretches:
        kinds: dict[tuple[tuple[int, ...], str, str, str], int] = {}
        layers: dict[str, list[int]] = {}
        for row in plan.rows:
            if row.start == stretch.start:
                kind = (tuple(row.size), row.elements, row.backend, row.why)
                layers.setdefault(row.layer.name, []).append(kinds.setdefault(kind, len(kinds)))
        node = {
            "start": stretch.start,
            "stop": stretch.stop,
            "recipe": stretch.recipe.name,
            "reason": stretch.reason,
        }
        entries.append({**node, "kinds": [list(kind) for kind in kinds], "layers": layers})
    return entries


def expanded(node: Mapping[str, Any]) -> RecordedStretch:
    """A stretch, from what `compact` made of it.

    Raises:
        ValueError, LookupError, TypeError, OverflowError, AttributeError: it is none, or has
            numbers that no plan has.
    """
    start = node["start"]
    stop = node["stop"]
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= MOST_STEPS:
        raise ValueError("a stretch of impossible steps")
    macs = [math.prod(size) for size, *_ in node["kinds"]]
    kinds = [
        ("×".join(map(str, size)), str(elements), str(backend), str(why))
        for size, elements, backend, why in node["kinds"]
    ]
    rows = [
        (str(name), gemm, index)
        for name, indices in node["layers"].items()
        for gemm, index in zip(_gemms(len(indices)), indices, strict=True)
    ]
    if sum(macs[index] for *_, index in rows) > MOST_MACS:
        raise ValueError(f"more than {MOST_MACS:.0e} multiply-adds")
    return RecordedStretch(
        start=start,
        stop=stop,
        recipe=str(node["recipe"]),
        reason=str(node["reason"]),
        rows=tuple((name, gemm, *kinds[index]) for name, gemm, index in rows),
        macs=tuple(macs[index] for *_, index in rows),
    )


def _gemms(products: int) -> tuple[str, ...]:
    """The GEMMs of a layer's products: three for each part of its in features, then those of
    fprop's residuals.
    """
    parts, residuals = divmod(products, len(GEMMS))
    return (*GEMMS * parts, *GEMMS[:1] * residuals)
