"""Simulate `fp4train gate` without training, and print what its test promises: both errors, number of forks.

    python scripts/paper/simulate_gate.py [--trials 2000] [--parts errors checkpoints dependent forks]

The test is that of the package (`betting.decisions`), with the default bound of ten margins; differences are drawn. A
sequence of 300 pairs is looked at after every pair: a verdict that falls at any time counts. Differences have the mean
and the scatter of the table, in margins: Gaussian, lognormal and exponential (both ways), small with a spike of nine
margins, which the bound allows, in one of ten forks (both ways). ± is two standard errors of the simulation.

errors       "within" where the mean is a margin, "beyond" where it is a margin: each must be at most 5 %
checkpoints  the same over four checkpoints whose means differ, their mean being a margin
dependent    the same over two and four checkpoints with the same mean, whose differences of a seed have the
             correlation .5 or are equal, as of forks that see the same batches and random bits
forks        pairs until "within" or "beyond" in half and in nine of ten cases; –: not by 1,000 pairs
"""

import argparse
import math
from collections.abc import Callable, Mapping
from itertools import product

import numpy as np

from fp4train.lab.gate import BOUND, decisions

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
Rates = tuple[float, float]
SPIKE = 0.9 * BOUND
"""A spike in one of ten forks, in margins."""
DEPENDENT = tuple(product((2, 4), (0.5, 1.0)))
"""Checkpoints, and the correlation of their differences of a seed."""


def spiky(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    spikes = SPIKE * (rng.random(shape) < 0.1)
    return 0.1 * rng.normal(size=shape) + spikes - 0.1 * SPIKE


def exponential(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.exponential(size=shape) - 1


def lognormal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.exp(rng.normal(size=shape)) - math.exp(0.5)


NOISE: Mapping[str, Draw] = {
    "Gaussian, .2": lambda rng, shape: 0.2 * rng.normal(size=shape),
    "Gaussian, 1": lambda rng, shape: rng.normal(size=shape),
    "exponential, .5": lambda rng, shape: 0.5 * exponential(rng, shape),
    "exponential, 2": lambda rng, shape: 2 * exponential(rng, shape),
    "exponential downwards, 2": lambda rng, shape: -2 * exponential(rng, shape),
    "lognormal, 2.2": lognormal,
    "lognormal downwards, 2.2": lambda rng, shape: -lognormal(rng, shape),
    "one fork in ten spikes, 2.7": spiky,
    "one fork in ten spikes downwards, 2.7": lambda rng, shape: -spiky(rng, shape),
}
"""Differences with mean 0 and this standard deviation, in margins."""


def rates(differences: np.ndarray) -> Rates:
    """The shares of the sequences with the verdicts within and beyond.

    Args:
        differences: [sequences, rounds, checkpoints].
    """
    kinds, _ = decisions(differences, 1.0, BOUND).T
    return float((kinds > 0).mean()), float((kinds < 0).mean())


def errors_of(noise: str, trials: int, pairs: int, seed: int = 0) -> Rates:
    """The rates where the mean is exactly a margin, so that both verdicts are wrong."""
    rng = np.random.default_rng(seed)
    return rates(1 + NOISE[noise](rng, (trials, pairs))[..., None])


def errors_over_checkpoints(noise: str, trials: int, rounds: int, seed: int = 0) -> Rates:
    """The same with four checkpoints, whose means are −1, 0, 1 and 4 margins: one on average."""
    rng = np.random.default_rng(seed)
    means = np.array([-1.0, 0.0, 1.0, 4.0])
    return rates(means + NOISE[noise](rng, (trials, rounds, 4)))


def errors_of_dependent(
    noise: str, checkpoints: int, correlation: float, trials: int, rounds: int, seed: int = 0
) -> Rates:
    """The same with checkpoints of the mean 1 whose differences of a seed depend on each other.

    Each takes the noise of the round with the probability √correlation, or noise of its own.
    """
    rng = np.random.default_rng(seed)
    shape = (trials, rounds, checkpoints)
    of_round = NOISE[noise](rng, (trials, rounds, 1))
    takes_it = rng.random(shape) < math.sqrt(correlation)
    return rates(1 + np.where(takes_it, of_round, NOISE[noise](rng, shape)))


def shown(rate: float, trials: int) -> str:
    error = 2 * math.sqrt(max(rate * (1 - rate), 1 / trials) / trials)
    return f"{rate:.3f} ± {error:.3f}"


def pairs_shown(pairs: float) -> str:
    return f"{pairs:.0f}" if math.isfinite(pairs) else "–"


def print_errors(trials: int, of: Callable[[str], Rates]) -> None:
    print("\n| differences, deviation in margins | false within | false beyond |\n|---|---|---|")
    for noise in NOISE:
        within, beyond = of(noise)
        print(f"| {noise} | {shown(within, trials)} | {shown(beyond, trials)} |", flush=True)


def print_dependent(trials: int) -> None:
    print(
        "\n| differences | checkpoints | correlation | false within | false beyond |"
        "\n|---|---|---|---|---|"
    )
    for noise, (checkpoints, correlation) in product(NOISE, DEPENDENT):
        within, beyond = errors_of_dependent(noise, checkpoints, correlation, trials, 300)
        cells = f"{shown(within, trials)} | {shown(beyond, trials)}"
        print(f"| {noise} | {checkpoints} | {correlation:g} | {cells} |", flush=True)


def print_forks(trials: int) -> None:
    print("\n| differences | gap, margins | verdict | half | nine of ten |\n|---|---|---|---|---|")
    for noise in NOISE:
        for gap in (0.0, 0.5, 2.0, 4.0):
            rng = np.random.default_rng(1)
            differences = gap + NOISE[noise](rng, (trials, 1000))[..., None]
            kinds, after = decisions(differences, 1.0, BOUND).T
            right, verdict = (1, "within") if gap < 1 else (-1, "beyond")
            waits = np.sort(np.where(kinds == right, after, np.inf))
            cells = [pairs_shown(waits[int(share * trials) - 1]) for share in (0.5, 0.9)]
            print(f"| {noise} | {gap:g} | {verdict} | {' | '.join(cells)} |", flush=True)


PARTS: Mapping[str, Callable[[int], None]] = {
    "errors": lambda trials: print_errors(trials, lambda noise: errors_of(noise, trials, 300)),
    "checkpoints": lambda trials: print_errors(
        trials, lambda noise: errors_over_checkpoints(noise, trials, 300)
    ),
    "dependent": print_dependent,
    "forks": lambda trials: print_forks(max(trials // 10, 10)),
}


def print_parts(parts: Mapping[str, Callable[[int], None]], text: str | None, trials: int) -> None:
    """Print the parts that the command line names, of so many trials.

    Args:
        text: the text that `--help` prints first.
        trials: their number where the command line names none.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--parts", nargs="*", choices=list(parts), default=list(parts))
    arguments = parser.parse_args()
    for part in arguments.parts:
        parts[part](arguments.trials)


if __name__ == "__main__":
    print_parts(PARTS, __doc__, 2000)
