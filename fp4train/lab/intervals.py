"""Means with intervals, paired differences, and the correction for several comparisons.

    mean ± t(n − 1) · s/√n     Student's interval for the mean of n independent values of standard
                               deviation s
    mean ± t(u − 1) · error    the interval for values of u units (base runs) that scatter about
                               means of their own (`over_units`)
    jackknife                  the interval for any function of n samples: s² = (n − 1)/n ·
                               Σ (θ₍ᵢ₎ − θ̄)²

A single value has no interval: `Estimate.error` and its bounds are then None, and say so wherever
they are shown. The distribution function of Student's t is the regularised incomplete beta function
of mpmath, which torch brings along (with sympy); scipy would be 35 MB for this one function.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

CONFIDENCE = 0.95
"""The confidence of intervals, unless another is asked for."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and what is known of its error.

    Args:
        mean: mean of the values.
        error: standard error of the mean; None for a single value.
        count: number of values.
        freedom: degrees of freedom of the error.
    """

    mean: float
    error: float | None
    count: int
    freedom: int

    def __post_init__(self) -> None:
        if self.error is not None and not 1 <= self.freedom <= self.count < 1 << 31:
            raise ValueError(f"{self.freedom} degrees of freedom of {self.count} values")

    def half_width(self, confidence: float = CONFIDENCE) -> float | None:
        """Half the width of the interval around the mean; None where the error is not known."""
        if self.error is None:
            return None
        return quantile(confidence, self.freedom) * self.error

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """The interval that holds the true value with this confidence; None where the error is not
        known.
        """
        half = self.half_width(confidence)
        if half is None:
            return None
        return (self.mean - half, self.mean + half)

    def show(self, form: str, unknown: str = "") -> str:
        """ "+0.0032 ± 0.0012" by the format of the mean; `unknown` after it where there is no
        interval.
        """
        half = self.half_width()
        if half is None:
            return f"{self.mean:{form}}{unknown}"
        return f"{self.mean:{form}} ± {half:{form.replace('+', '')}}"

    @property
    def t(self) -> float | None:
        """mean/error; None where the error is not known, ±∞ where it is 0 and the mean is not."""
        if self.error is None:
            return None
        if self.error == 0:
            if self.mean == 0:
                return 0.0
            return math.copysign(math.inf, self.mean)
        return self.mean / self.error

    @property
    def p(self) -> float | None:
        """Two-sided probability of a mean this far from 0 if the true value is 0; None where the
        error is not known.
        """
        if self.t is None:
            return None
        return two_sided(self.t, self.freedom)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values and its standard error s/√n.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no values: nothing can be estimated")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean=mean, error=None, count=1, freedom=0)
    variance = math.fsum([(value - mean) ** 2 for value in values]) / (count - 1)
    return Estimate(mean=mean, error=math.sqrt(variance / count), count=count, freedom=count - 1)


def paired(base: Sequence[float], compared: Sequence[float]) -> Estimate:
    """The mean of compared − base, pair by pair: what both have in common does not count.

    Raises:
        ValueError: they have different lengths, or none.
    """
    return estimate([b - a for a, b in zip(base, compared, strict=True)])


def over_units(values: Sequence[float], units: Sequence[object]) -> Estimate:
    """The mean over units (base runs), each of which has a mean of its own: a random effect.

        mean     the mean of the means of the units
        error    √(s²/u), s the standard deviation of the u means of the units: the scatter between
                 the units and the scatter within them are both in it. It is never less than what
                 the scatter within them alone comes to, √(Σ s_i²/n_i)/u, so that units that agree
                 by chance make no narrow interval
        freedom  u − 1

    With two units an interval is 12.7 errors to either side, with three 4.3, with four 3.2. With
    one unit it is `estimate` of its values, which holds for that unit alone.

    Args:
        values: values that are independent within each unit. units: unit of each value.
    """
    groups = {
        unit: [v for v, u in zip(values, units, strict=True) if u == unit]
        for unit in dict.fromkeys(units)
    }
    if len(groups) < 2:
        return estimate(values)
    means = [estimate(group) for group in groups.values()]
    between = estimate([unit_mean.mean for unit_mean in means])
    within = math.sqrt(math.fsum((unit_mean.error or 0.0) ** 2 for unit_mean in means)) / len(means)
    return replace(between, error=max(between.error or 0.0, within))


def jackknife(count: int, statistic: Callable[[Sequence[int]], float]) -> Estimate:
    """`statistic` of the samples 0 … count − 1, and its standard error from leaving out one sample
    at a time.

    Args:
        statistic: function of the samples with these indices.
    """
    of_all = statistic(range(count))
    if count < 3:
        return Estimate(mean=of_all, error=None, count=count, freedom=0)
    left_out = [statistic([j for j in range(count) if j != i]) for i in range(count)]
    centre = math.fsum(left_out) / count
    variance = (count - 1) / count * math.fsum((value - centre) ** 2 for value in left_out)
    return Estimate(mean=of_all, error=math.sqrt(variance), count=count, freedom=count - 1)


def two_sided(t: float, freedom: int) -> float:
    """P(|T| ≥ |t|) of Student's distribution: I_x(f/2, 1/2) at x = f/(f + t²).

    Raises:
        ValueError: `freedom` is not positive.
    """
    if freedom < 1:
        raise ValueError(f"freedom={freedom} must be at least 1")
    from mpmath import mp  # it takes a while, and few commands need it

    if math.isinf(t):
        return 0.0
    return float(mp.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


@lru_cache(maxsize=512)
def quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| ≤ t) = confidence: by how many standard errors an interval reaches to either
    side.

    Raises:
        ValueError: `confidence` does not lie between 0 and 1, or `freedom` is not positive.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1")
    low = 0.0
    high = 1.0
    while two_sided(high, freedom) > 1 - confidence:
        low = high
        high = 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        if two_sided(middle, freedom) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def holm(probabilities: Sequence[float]) -> list[float]:
    """The probabilities of several tests, corrected so that 5 % means 5 % for the least of them all
    (Holm 1979).

    The smallest of m is multiplied by m, the next by m − 1, …; each is at least as large as the one
    before, and at most 1. No independence is assumed.
    """
    order = sorted(range(len(probabilities)), key=lambda i: probabilities[i])
    corrected = [0.0] * len(probabilities)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(probabilities) - rank) * probabilities[index]))
        corrected[index] = largest
    return corrected
