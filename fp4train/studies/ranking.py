"""What a ranking found: the gap of every candidate to the first, with intervals, tests and groups; as text and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from fp4train.studies.candidates import FLOOR
from fp4train.studies.forks import Fork, ForkSettings
from fp4train.studies.sequential import ALPHA, Pair, compare, groups, looks
from fp4train.studies.statistics import Estimate, paired
from fp4train.text import columns, p_value, tabulate

VERDICTS = {"apart": "told apart", "alike": "alike", "open": "not told apart"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One candidate.

    Args:
        name: what the tables call it.
        forks: in the order of their seeds.
        asked: False: it is there for the floor of the noise only.
        same: other candidates that run every GEMM as this one does.
    """

    name: str
    forks: Sequence[Fork]
    asked: bool = True
    same: Sequence[str] = ()

    @property
    def stands_for(self) -> list[str]:
        """Those of `same` that were asked for."""
        return [name for name in self.same if name not in FLOOR]

    @property
    def diverged(self) -> list[str]:
        """What ended the forks that diverged."""
        return [fork.problem for fork in self.forks if fork.problem is not None]

    def losses(self, measure: str) -> list[float]:
        """In the recipe ("recipe"), in high precision ("high") or in training ("train"), by fork."""
        return [float(getattr(fork, measure)) for fork in self.forks if fork.problem is None]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What was measured, and what follows from it. Losses and gaps are in nats per token.

    Args:
        run, step: whose checkpoint.
        settings: of the forks.
        entries: the first one is the reference; then in the order of the sweep.
        margin: differences below it do not matter.
        most: forks that were asked for; fewer were made where the answer was clear.
    """

    run: str
    step: int
    settings: ForkSettings
    entries: Sequence[Entry]
    margin: float
    most: int

    @property
    def reference(self) -> Entry:
        return self.entries[0]

    @property
    def forks(self) -> int:
        return len(self.reference.forks)

    @cached_property
    def ranked(self) -> list[Entry]:
        """The candidates that were asked for, by their mean loss in the recipe; without those that diverged."""
        whole = [entry for entry in self.entries if entry.asked and not entry.diverged]
        return sorted(whole, key=lambda entry: math.fsum(entry.losses("recipe")))

    @cached_property
    def pairs(self) -> list[Pair]:
        """All pairs of `ranked`, the better one first."""
        return compare({entry.name: entry.losses("recipe") for entry in self.ranked}, margin=self.margin)

    @cached_property
    def groups(self) -> dict[str, str]:
        """By candidate the letters of the groups within which nothing is told apart."""
        return groups([entry.name for entry in self.ranked], self.pairs)

    @property
    def clear(self) -> bool:
        """Whether every pair is told apart or alike."""
        return bool(looks(self.forks)) and all(pair.verdict != "open" for pair in self.pairs)

    @cached_property
    def floor(self) -> Estimate | None:
        """FP32 − BF16: what rounding alone does. None where one of them diverged."""
        by_name = {name: entry for entry in self.entries for name in (entry.name, *entry.same)}
        bf16, fp32 = (by_name[name] for name in FLOOR)
        return None if bf16.diverged or fp32.diverged else paired(bf16.losses("recipe"), fp32.losses("recipe"))

    def gap(self, entry: Entry, measure: str = "recipe") -> Estimate:
        """The loss of a candidate minus that of the reference."""
        return paired(self.reference.losses(measure), entry.losses(measure))

    def against_reference(self, entry: Entry) -> Pair | None:
        """The pair of a candidate and the reference; None for the reference itself."""
        wanted = {entry.name, self.reference.name}
        return next((pair for pair in self.pairs if {pair.first, pair.second} == wanted), None)

    def neighbours(self) -> list[Pair]:
        """The pairs of candidates that follow each other in the order."""
        order = pairwise(entry.name for entry in self.ranked)
        return [next(p for p in self.pairs if (p.first, p.second) == each) for each in order]

    # -- text ---------------------------------------------------------------------------------------------------------

    def render(self) -> str:
        """One screen: the table, the order, the floor, and what the words mean."""
        parts = [self._title(), "", *self._table()]
        for entry in self.entries:
            if entry.diverged:
                parts.append(
                    f"{entry.name}: {len(entry.diverged)} of {len(entry.forks)} forks diverged, it is not compared; "
                    f"the first: {entry.diverged[0]}"
                )
        parts += [
            f"{entry.name} stands for {', '.join(entry.stands_for)}, too: every GEMM runs alike"
            for entry in self.entries
            if entry.stands_for
        ]
        parts += ["", *self._order(), *self._floor(), *self._words()]
        return "\n".join(parts)

    def _title(self) -> str:
        s = self.settings
        rate = f"learning rate {s.lr:.3g} → 0" if s.schedule == "linear" else "the run's own schedule"
        count = f"{self.forks} fork{'s' * (self.forks != 1)} of {s.steps} steps each"
        return f"{self.run}, step {self.step}: {count}, {rate}\ngap to {self.reference.name}, nats per token"

    def _table(self) -> list[str]:
        header = ["", "", "in the recipe", "high precision", "t", "p", "verdict", "group"]
        rows = []
        for place, entry in enumerate(self.ranked, start=1):
            pair = self.against_reference(entry)
            if pair is None:
                mean = math.fsum(entry.losses("recipe")) / self.forks
                rows.append([str(place), entry.name, f"loss {mean:.4f}", "", "", "", "", self.groups[entry.name]])
                continue
            gap = self.gap(entry)
            p = p_value(pair.p) if looks(self.forks) else "–"
            verdict = VERDICTS[pair.verdict] if looks(self.forks) else "–"
            cells = [show(gap), show(self.gap(entry, "high")), _t(gap), p, verdict, self.groups[entry.name]]
            rows.append([str(place), entry.name, *cells])
        rows += [["–", entry.name, "diverged", "", "", "", "", ""] for entry in self.entries if entry.diverged]
        return tabulate([header, *rows], right=(0, 2, 3, 4, 5))

    def _order(self) -> list[str]:
        if not looks(self.forks) or len(self.ranked) < 2:
            return []
        rows = [
            [f"{p.first} < {p.second}", show(p.difference), f"t {_t(p.difference)}", p_value(p.p), VERDICTS[p.verdict]]
            for p in self.neighbours()
        ]
        return ["neighbours in the order", *columns(rows, right=(1,)), ""]

    def _floor(self) -> list[str]:
        return [] if self.floor is None else [f"floor of the noise: FP32 − BF16 = {show(self.floor)}"]

    def _words(self) -> list[str]:
        if self.forks == 1:
            return ["one fork: no interval, and nothing is told apart; forks=6 gives both"]
        lines = [f"±: 95 % interval of a difference alone, over {self.forks} pairs of forks"]
        if not looks(self.forks):
            return [*lines, f"{self.forks} forks: no tests, the first are made after 4"]
        count = len(self.pairs)
        lines += [
            f"p: corrected for {count} comparison{'s' * (count != 1)} and for looks after "
            f"{', '.join(map(str, looks(self.forks)))} forks",
            f"told apart: p ≤ {ALPHA}; the probability of any false one among them all is at most {ALPHA:.0%}",
        ]
        if any(pair.verdict == "alike" for pair in self.pairs):
            lines.append(f"alike: the difference lies within ±{self.margin:g}")
        if self.forks < self.most:
            lines.append(f"stopped after {self.forks} of {self.most} forks: every pair is told apart or alike")
        elif open_ := sum(pair.verdict == "open" for pair in self.pairs):
            lines.append(f"{open_} of {count} pairs are not told apart: forks={looks(4 * self.forks)[-3]} goes on")
        return lines

    # -- JSON ---------------------------------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON values; an interval that is not known is null."""
        return {
            "run": self.run,
            "step": self.step,
            "settings": asdict(self.settings),
            "reference": self.reference.name,
            "forks": self.forks,
            "looks": looks(self.forks),
            "margin": self.margin,
            "alpha": ALPHA,
            "floor": None if self.floor is None else _plain(self.floor),
            "candidates": [self._plain_entry(entry) for entry in self.entries],
            "order": [entry.name for entry in self.ranked],
            "pairs": [
                {
                    "first": pair.first,
                    "second": pair.second,
                    **_plain(pair.difference),
                    "together": [each if math.isfinite(each) else None for each in pair.together],
                    "p": pair.p,
                    "verdict": pair.verdict,
                }
                for pair in self.pairs
            ],
        }

    def _plain_entry(self, entry: Entry) -> dict[str, Any]:
        gaps: Mapping[str, Any] = {}
        if not entry.diverged:
            gaps = {"gap": _plain(self.gap(entry)), "gap_high": _plain(self.gap(entry, "high"))}
        return {
            "name": entry.name,
            "asked": entry.asked,
            "same": list(entry.same),
            "group": self.groups.get(entry.name),
            "diverged": entry.diverged,
            **gaps,
            "forks": [fork.plain() for fork in entry.forks],
        }


def show(found: Estimate) -> str:
    """ "+0.00092 ± 0.00041", or without an interval where there is none."""
    half = found.half_width()
    return f"{found.mean:+.5f}" + (" ± –" if half is None else f" ± {half:.5f}")


def _t(found: Estimate) -> str:
    return "–" if found.t is None else f"{found.t:.1f}" if abs(found.t) < 1000 else ">999"


def _plain(found: Estimate) -> dict[str, Any]:
    interval = found.interval()
    t = found.t
    return {
        "mean": found.mean,
        "error": found.error,
        "low": None if interval is None else interval[0],
        "high": None if interval is None else interval[1],
        "t": t if t is None or math.isfinite(t) else None,
    }
