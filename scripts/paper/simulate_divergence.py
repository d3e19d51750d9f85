"""False alarms of the divergence rule on simulated losses that fall from 5.5 to 1.5 nats, by kind.

    python scripts/paper/simulate_divergence.py [RUNS]         # of 2,000 steps each; the default is 500

Prints a table in Markdown: of each kind of noise, spikes, and changes of phase and of rate, in how
many runs the rule of `run/supervise/loss_history.py` tells a divergence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import numpy as np

from fp4train.run.supervise.loss_history import Divergence

Curves = Callable[[np.random.Generator, np.ndarray], np.ndarray]
STEPS = 2000
UNIFORM = 5.5
"""Loss of equally likely tokens, where all curves begin."""


def spikes(draw: np.random.Generator, loss: np.ndarray) -> np.ndarray:
    heights = draw.uniform(1, 4, loss.shape) * (draw.random(loss.shape) < 0.1)
    return loss + draw.normal(0, 0.1, loss.shape) + heights


def bursts(draw: np.random.Generator, loss: np.ndarray) -> np.ndarray:
    """Ten times three batches in a row that are one to three nats higher."""
    noisy = loss + draw.normal(0, 0.1, loss.shape)
    for index in range(20, STEPS, 200):
        noisy[index : index + 3] += draw.uniform(1, 3)
    return noisy


def phases(draw: np.random.Generator, loss: np.ndarray) -> np.ndarray:
    """Swaps of the recipe: 12 % up, 12 % up, 10 % down."""
    changed = loss.copy()
    for index, factor in ((300, 1.12), (800, 1.12), (1400, 0.9)):
        changed[index:] *= factor
    return changed + draw.normal(0, 0.1, loss.shape)


def restarts(draw: np.random.Generator, loss: np.ndarray) -> np.ndarray:
    """Three times a higher rate: half a nat up within 20 steps, and back over some hundred."""
    changed = loss.copy()
    for start in (400, 1000, 1500):
        after = np.arange(STEPS - start)
        rise = np.minimum(after / 20, 1) * np.exp(-np.maximum(after - 20, 0) / 100)
        changed[start:] += 0.5 * rise
    return changed + draw.normal(0, 0.1, loss.shape)


def cooldown(draw: np.random.Generator, loss: np.ndarray) -> np.ndarray:
    """A rate that falls at the end, and the loss with it."""
    changed = loss.copy()
    changed[1600:] -= 0.4 * (1 - np.exp(-np.arange(STEPS - 1600) / 40))
    return changed + draw.normal(0, 0.1, loss.shape)


def late(draw: np.random.Generator, loss: np.ndarray) -> np.ndarray:
    """A rate that warms up for 300 steps, in which little is learned."""
    delayed = np.concatenate([np.full(300, loss[0]), loss[:-300]])
    return delayed + draw.normal(0, 0.2, loss.shape)


def memorised(draw: np.random.Generator, loss: np.ndarray) -> np.ndarray:
    """Text that is known by heart in the end: a loss of some hundredths, by batch."""
    memory = loss * np.exp(-np.arange(STEPS) / 200)
    return memory + draw.exponential(0.02, loss.shape)


FALLING: dict[str, Curves] = {
    "a tenth of a nat": lambda draw, loss: loss + draw.normal(0, 0.1, loss.shape),
    "half a nat": lambda draw, loss: loss + draw.normal(0, 0.5, loss.shape),
    "a tenth of the loss": lambda draw, loss: loss * np.exp(draw.normal(0, 0.1, loss.shape)),
    "skewed": lambda draw, loss: loss + draw.exponential(0.3, loss.shape),
    "Student's t of three": lambda draw, loss: loss + 0.2 * draw.standard_t(3, loss.shape),
    "heavy tails upwards": lambda draw, loss: loss + 0.1 * np.abs(draw.standard_cauchy(loss.shape)),
    "spikes in one of ten batches": spikes,
    "bursts of three batches": bursts,
    "changes of phase": phases,
    "higher rates": restarts,
    "a cooldown": cooldown,
    "answers of few tokens": lambda draw, loss: loss * np.exp(draw.normal(0, 0.15, loss.shape)),
    "a long warm-up": late,
    "text known by heart": memorised,
}
"""Noise, spikes, changes of phase and of rate on a curve that falls from 5.5 to 1.5 nats."""


def seen_at(losses: Iterable[float]) -> int | None:
    """The first step whose loss tells that a run diverged."""
    divergence = Divergence(uniform=UNIFORM)
    for step, loss in enumerate(losses):
        divergence.add(step, loss)
        if divergence.seen:
            return step
    return None


def false_alarms(kind: str, runs: int, fall: float) -> int:
    draw = np.random.default_rng(0)
    curve = 1.5 + 4 * np.exp(-np.arange(STEPS) / fall)
    curves = (FALLING[kind](draw, curve).tolist() for _ in range(runs))
    return sum(seen_at(losses) is not None for losses in curves)


def script(arguments: list[str]) -> int:
    runs = int(arguments[0]) if arguments else 500
    print("| losses | false alarms |\n|---|---|")
    for kind in FALLING:
        print(f"| {kind} | {false_alarms(kind, runs, 200)} of {runs} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(script(sys.argv[1:]))
