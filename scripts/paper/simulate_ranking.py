"""Simulate `fp4train rank` without training, and print what its tests promise: false findings, power, intervals.

    python scripts/paper/simulate_ranking.py [--trials 1000] [--parts errors asking power found t spread]

The tests are those of the package (`sequential.compare`, `looks.Looks`); the losses are drawn. A fork has what its seed
does to all candidates, and noise of its own by candidate: Gaussian, lognormal, exponential, or small with a large spike
in one of ten forks. Equal candidates are exchangeable: they draw from the same distribution. ± is two standard errors
of the simulation.

errors  any false "told apart" among all pairs of equal candidates, by one look at 6, 8 and 12 forks
asking  the same however one asks: in pieces, with more forks, with every reference, with subsets of the checkpoints;
        and at three checkpoints one by one, which have 5 % each
power   one of the candidates is worse by 2 standard deviations of a difference: how often it is told from the reference
found   gaps that were told apart: how far they are overstated, and how often their intervals hold
t       differences with mean zero that are not symmetric (equal in mean, not in distribution): t and sign flips
spread  base runs that differ: intervals over them, and false "told apart" beyond them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from simulate_gate import print_parts, shown

from fp4train.lab.intervals import estimate, over_units
from fp4train.lab.studies import ALPHA, Looks, Pair
from fp4train.lab.studies.sequential import compare, corrected, needed, share

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
NOISE: Mapping[str, Draw] = {
    "Gaussian": lambda rng, shape: rng.normal(size=shape),
    "lognormal": lambda rng, shape: np.exp(rng.normal(size=shape)),
    "exponential": lambda rng, shape: rng.exponential(size=shape),
    "one-in-ten spiky": lambda rng, shape: (
        0.1 * rng.normal(size=shape) + 10 * (rng.random(shape) < 0.1)
    ),
}
Losses = dict[str, list[float]]


class Record:
    """What `Looks` needs of a record, in memory."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.known

    def __getitem__(self, key: str) -> Any:
        return self.known[key]

    def add(self, key: str, values: Any) -> None:
        self.known[key] = values


def draw(rng: np.random.Generator, noise: str, forks: int, candidates: int) -> Losses:
    """By candidate the losses of its forks."""
    rows = NOISE[noise](rng, (candidates, forks)) + 3 * rng.normal(size=forks)
    return {f"c{i}": row.tolist() for i, row in enumerate(rows)}


def look(
    records: Mapping[str, Record], losses: Losses, reference: str, units: Sequence[object] = ()
) -> list[Pair]:
    """The table that `rank` would show of these losses, and its look in the records."""
    looks = Looks(records, [reference] * len(records))  # type: ignore[arg-type]
    number = looks.number(losses, len(losses[reference]))
    pairs = compare(
        losses, reference=looks.reference, look=number, margin=0, units=units, earlier=looks.earlier
    )
    if number is not None:
        looks.take(losses, list(losses), pairs)
    return pairs


def told_apart(pairs: Sequence[Pair], *verdicts: str) -> bool:
    return any(pair.verdict in (verdicts or ("different", "here")) for pair in pairs)


def in_pieces(rng: np.random.Generator, noise: str) -> Iterator[list[Pair]]:
    """Candidates are added one by one."""
    losses = draw(rng, noise, 12, 8)
    records = {"a": Record()}
    for count in range(2, 9):
        yield look(records, dict(list(losses.items())[:count]), "c0")


def more_forks(rng: np.random.Generator, noise: str) -> Iterator[list[Pair]]:
    """6 forks, then 12, 18, 24."""
    losses = draw(rng, noise, 24, 4)
    records = {"a": Record()}
    for forks in (6, 12, 18, 24):
        yield look(records, {name: values[:forks] for name, values in losses.items()}, "c0")


def every_reference(rng: np.random.Generator, noise: str) -> Iterator[list[Pair]]:
    """Each candidate is the reference once; then each two alone."""
    losses = draw(rng, noise, 12, 6)
    records = {"a": Record()}
    for name in losses:
        yield look(records, losses, name)
    # what else the record holds is in the table, whatever is shown
    for two in combinations(losses, 2):
        yield [p for p in look(records, losses, two[0]) if {p.first, p.second} == set(two)]


def chosen_checkpoints(rng: np.random.Generator, noise: str) -> Iterator[list[Pair]]:
    """Three checkpoints together, each two of them, each alone."""
    drawn = [draw(rng, noise, 8, 4) for _ in range(3)]
    records = [Record() for _ in range(3)]
    for subset in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
        losses = {name: [loss for i in subset for loss in drawn[i][name]] for name in drawn[0]}
        units = [i for i in subset for _ in range(8)]
        yield look({str(i): records[i] for i in subset}, losses, "c0", units)


def one_by_one(rng: np.random.Generator, noise: str) -> Iterator[list[Pair]]:
    """Three checkpoints, each alone: 5 % each."""
    for _ in range(3):
        yield look({"a": Record()}, draw(rng, noise, 8, 4), "c0")


Way = Callable[[np.random.Generator, str], Iterator[list[Pair]]]
WAYS: Sequence[Way] = (in_pieces, more_forks, every_reference, chosen_checkpoints)
"""Looks at one record, or at several that were begun together, which have 5 % in all."""


def one_look(rng: np.random.Generator, noise: str, forks: int, candidates: int) -> list[Pair]:
    return look({"a": Record()}, draw(rng, noise, forks, candidates), "c0")


def rate(outcomes: Sequence[bool]) -> str:
    return shown(sum(outcomes) / len(outcomes), len(outcomes))


def errors(trials: int) -> None:
    shares = (f"{share(number):.3f} (from {needed(number)} forks)" for number in range(1, 6))
    print("look 1, 2, 3, … has", ", ".join(shares))
    print("\n| equal candidates | forks |", " | ".join(NOISE), "|\n|---|---|" + "---|" * len(NOISE))
    for candidates in (2, 3, 5, 10, 22):
        for forks in (6, 8, 12):
            rng = np.random.default_rng((candidates, forks))
            count = trials if candidates < 20 else max(trials // 2, 100)
            cells = [
                rate([told_apart(one_look(rng, n, forks, candidates)) for _ in range(count)])
                for n in NOISE
            ]
            print(f"| {candidates} | {forks} |", " | ".join(cells), "|", flush=True)


def asking(trials: int) -> None:
    print("\n| asked |", " | ".join(NOISE), "|\n|---|" + "---|" * len(NOISE))
    for way in (*WAYS, one_by_one):
        rng = np.random.default_rng(1)
        cells = [
            rate([any(told_apart(table) for table in way(rng, noise)) for _ in range(trials)])
            for noise in NOISE
        ]
        print(f"| {(way.__doc__ or '').rstrip('.')} |", " | ".join(cells), "|", flush=True)


def power(trials: int) -> None:
    print(
        "\n| candidates | forks | from the reference | from another | t, Bonferroni "
        "|\n|---|---|---|---|---|"
    )
    for candidates in (3, 5, 10):
        for forks in (6, 8, 12, 18):
            rng = np.random.default_rng((candidates, forks))
            trial_verdicts = []
            for _ in range(trials):
                losses = draw(rng, "Gaussian", forks, candidates)
                worse = f"c{candidates - 1}"
                losses[worse] = [loss + 2 * math.sqrt(2) for loss in losses[worse]]
                pairs = look({"a": Record()}, losses, "c0")
                verdict = {(pair.first, pair.second): pair.verdict == "here" for pair in pairs}
                t = (
                    estimate([b - a for a, b in zip(losses["c0"], losses[worse], strict=True)]).p
                    or 0.0
                )
                trial_verdicts.append(
                    (verdict["c0", worse], verdict["c1", worse], t <= ALPHA / len(pairs))
                )
            print(
                f"| {candidates} | {forks} |",
                " | ".join(rate(column) for column in zip(*trial_verdicts, strict=True)),
                "|",
                flush=True,
            )


def overstated(trials: int) -> None:
    print(
        "\n| gap, standard deviations | told apart | mean gap of these | their ± holds "
        "|\n|---|---|---|---|"
    )
    for gap in (0.5, 1.0, 2.0):
        rng = np.random.default_rng(0)
        gaps = []
        covered = []
        for _ in range(trials):
            losses = draw(rng, "Gaussian", 6, 2)
            losses["c1"] = [loss + gap * math.sqrt(2) for loss in losses["c1"]]
            (pair,) = look({"a": Record()}, losses, "c0")
            if pair.verdict == "here":
                low, high = pair.difference.interval() or (0.0, 0.0)
                gaps.append(pair.difference.mean / math.sqrt(2))
                covered.append(low <= gap * math.sqrt(2) <= high)
        print(
            f"| {gap} | {len(gaps) / trials:.3f} | {np.mean(gaps):.2f} | {rate(covered)} |",
            flush=True,
        )


def skewed(trials: int) -> None:
    print(
        "\n| differences with mean zero | forks | t | sign flips | sign flips, as a first "
        "look |\n|---|---|---|---|---|"
    )
    kinds: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
        "lognormal, σ = .5": lambda rng, n: np.exp(0.5 * rng.normal(size=n)) - math.exp(0.125),
        "exponential": lambda rng, n: rng.exponential(size=n) - 1,
        "one fork in ten spikes": lambda rng, n: (
            0.1 * rng.normal(size=n) + 10 * (rng.random(n) < 0.1) - 1
        ),
    }
    for name, kind in kinds.items():
        for forks in (6, 12, 24):
            rng = np.random.default_rng(forks)
            trial_verdicts = []
            for _ in range(trials):
                values = kind(rng, forks)
                (p,) = corrected(values[:, None], [1.0])
                trial_verdicts.append(
                    (
                        (estimate(values.tolist()).p or 0.0) <= ALPHA,
                        p <= ALPHA,
                        p <= ALPHA * share(1),
                    )
                )
            print(
                f"| {name} | {forks} |",
                " | ".join(rate(column) for column in zip(*trial_verdicts, strict=True)),
                "|",
                flush=True,
            )


def spread(trials: int) -> None:
    print(
        "\n| base runs | forks at each | spread between / noise within | ± holds the mean | "
        "forks alone hold it | ",
        end="",
    )
    print("false, on these | false, beyond | found, 4 of both |\n|---|---|---|---|---|---|---|---|")
    for runs in (2, 3, 4, 6):
        for between in (0.0, 0.5, 2.0):
            rng = np.random.default_rng(runs)
            trial_verdicts = []
            forks = 4
            for _ in range(trials):
                units = np.repeat(np.arange(runs), forks)
                effects = between * rng.normal(size=(3, runs))[:, units]
                noise = rng.normal(size=(3, len(units)))
                values = noise[1] - noise[0] + effects[1] - effects[0]
                covered = []
                for estimated in (
                    over_units(values.tolist(), units.tolist()),
                    estimate(values.tolist()),
                ):
                    low, high = estimated.interval() or (0.0, 0.0)
                    covered.append(low <= 0 <= high)
                losses = {f"c{i}": (noise[i] + effects[i]).tolist() for i in range(3)}
                pairs = look({"a": Record()}, losses, "c0", units.tolist())
                moved = {
                    **losses,
                    "c1": [x + 4 * math.sqrt(2 + 2 * between**2) for x in losses["c1"]],
                }
                (far,) = (
                    p
                    for p in look({"a": Record()}, moved, "c0", units.tolist())
                    if p.second + p.first == "c1c0"
                )
                trial_verdicts.append(
                    (
                        *covered,
                        told_apart(pairs),
                        told_apart(pairs, "different"),
                        far.verdict == "different",
                    )
                )
            cells = " | ".join(rate(column) for column in zip(*trial_verdicts, strict=True))
            print(f"| {runs} | {forks} | {between} | {cells} |", flush=True)


PARTS: Mapping[str, Callable[[int], None]] = {
    "errors": errors,
    "asking": asking,
    "power": power,
    "found": overstated,
    "t": skewed,
    "spread": spread,
}


if __name__ == "__main__":
    print_parts(PARTS, __doc__, 1000)
