"""Findings from measured gradients: how wrong each part of a recipe makes the gradient, and with
what certainty.

    nMSE = E‖g − g₀‖²/‖g₀‖² = variance (over the random bits) + squared error of the mean over them
    systematic bias² = U-statistic of ⟨ē_b, ē_b'⟩ over pairs of batches b ≠ b',
                       over that of ⟨g₀_b, g₀_b'⟩ (= |G|²)

The first says how wrong the gradient of a batch is; the second, how wrong it is in a way that does
not average out over batches, as an optimizer averages over steps. Both sides of it are unbiased:
what differs between batches, the noise of the minibatch included, cancels in the products of
different batches. Intervals are Student's over batches for means and the jackknife's over batches
for ratios.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp4train.lab.intervals import Estimate, estimate, jackknife, paired
from fp4train.lab.studies.parts import (
    BASELINE,
    CHOSEN,
    GEMM,
    LAYER,
    NOTHING,
    OF_THE_RUN,
    OPERAND,
    WHOLE,
    NamedPart,
    RecipePart,
    RecipeParts,
)
from fp4train.lab.studies.record import Reading

Gram = Sequence[Sequence[float]]
"""Inner products of the vectors of a group of batches."""


@dataclass(frozen=True, kw_only=True)
class Finding(NamedPart):
    """The measurements of one part.

    Args:
        name: name of the part; empty where what was written does not name it.
        nmse: mean of ‖g − g₀‖²/‖g₀‖² over batches.
        variance: share of it that changes with the random bits; None with a single repeat, or where
            nothing is random.
        bias2: squared systematic bias over |G|²; None where |G|² is not told from 0, as with
            one or two batches.
        cosine, loss: values that `gradients` describes.
        layers: mean share of each layer in nMSE; empty for parts of a single layer.
    """

    name: str = ""
    nmse: Estimate
    variance: Estimate | None
    bias2: Estimate | None
    cosine: Estimate
    loss: Estimate
    layers: Sequence[float] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The result of the study.

    Args:
        parts: parts that were measured, whose `layers` are the layers of the findings.
        findings: findings by name of part.
        shares: kind of part → the sum of its parts' nMSE as a share of that of the whole, both
            above the floor.
        signal: |G|² over the mean ‖g₀‖²: the share of a batch's gradient that is not noise of the
            batch; None with one.
        batches: largest number of batches that a part was measured on.
    """

    parts: RecipeParts
    findings: Mapping[str, Finding]
    shares: Mapping[str, Estimate]
    signal: Estimate | None
    batches: int

    @property
    def whole(self) -> Finding:
        return self.findings[WHOLE]

    @property
    def floor(self) -> float:
        """The nMSE of the part that quantises nothing: that of high-precision arithmetic in the
        recipe's dtype.
        """
        return self.findings[NOTHING].nmse.mean

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings.values() if finding.kind == kind]

    def blocks(self) -> dict[int, float]:
        """Block → nMSE above the floor: the sum of its layers one at a time."""
        damage: dict[int, float] = {}
        for finding in self.of_kind(LAYER):
            block = self.parts.layers[finding.what].layer.block or 0
            damage[block] = damage.get(block, 0.0) + finding.nmse.mean - self.floor
        return damage


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A policy on batches that did not choose it.

    Args:
        batches: number of them.
        chosen, everything: findings of the recipe under the policy, and with nothing kept.
        gain: nMSE that the policy saves against nothing kept, batch by batch.
        over_own: nMSE that it saves against the policy of the run, if the run has another one than
            "everything".
    """

    batches: int
    chosen: Finding
    everything: Finding
    gain: Estimate
    over_own: Estimate | None


def judgement(
    measured: Mapping[str, tuple[RecipePart, Sequence[Reading]]], reference: Sequence[Reading]
) -> Judgement:
    """Compare the chosen policy with keeping nothing and with the policy of the run, batch by
    batch.

    Args:
        measured: name of part → the part and its values on the same groups of batches as
            `reference`.
    """

    def errors(name: str) -> list[float]:
        return [error for group in measured[name][1] for error in group["error"]]

    def less_than(name: str) -> Estimate:
        return paired(errors(CHOSEN), errors(name))

    return Judgement(
        batches=sum(len(group["norm"]) for group in reference),
        chosen=finding(*measured[CHOSEN], reference),
        everything=finding(*measured[WHOLE], reference),
        gain=less_than(WHOLE),
        over_own=less_than(OF_THE_RUN) if OF_THE_RUN in measured else None,
    )


def summarise(
    parts: RecipeParts, listed: Sequence[RecipePart], measured: Mapping[str, Sequence[Reading]]
) -> Sensitivity:
    """The findings of what is measured.

    Args:
        listed: parts that are measured.
        measured: name of part → values of its groups of batches, in order; those of the reference
            cover the groups of all.
    """
    reference = measured[BASELINE]
    grams = [group["gram"] for group in reference]
    kinds = {
        kind: [part.name for part in listed if part.kind == kind] for kind in (GEMM, OPERAND, LAYER)
    }
    if any(len(gram) > 1 for gram in grams):
        signal = _ratio(grams, grams, _pairs, _singles)
    else:
        signal = None
    return Sensitivity(
        parts=parts,
        findings={part.name: finding(part, measured[part.name], reference) for part in listed},
        shares={
            kind: ratio
            for kind, names in kinds.items()
            if (ratio := share(names, measured)) is not None
        },
        signal=signal,
        batches=sum(len(gram) for gram in grams),
    )


def finding(part: RecipePart, groups: Sequence[Reading], reference: Sequence[Reading]) -> Finding:
    """The finding of one part; `reference` has the same groups of batches, and may have more."""

    def of(key: str) -> Estimate | None:
        values = [value for group in groups for value in group[key]]
        return None if None in values else estimate(values)

    shares = [layer_shares for group in groups for layer_shares in group["layers"]]
    estimates: Any = {
        name: of(key) for name, key in (("nmse", "error"), ("cosine", "cosine"), ("loss", "loss"))
    }
    return Finding(
        name=part.name,
        **estimates,
        variance=of("variance"),
        bias2=systematic(
            [group["gram"] for group in groups], [group["gram"] for group in reference]
        ),
        layers=[math.fsum(column) / len(shares) for column in zip(*shares, strict=True)],
    )


def systematic(errors: Sequence[Gram], gradients: Sequence[Gram]) -> Estimate | None:
    """The mean product of errors over that of gradients, over pairs of different batches of a
    group; None where the latter, |G|², is not told from 0: its interval is unknown or holds 0.
    """
    gradients = gradients[: len(errors)]
    size = jackknife(
        sum(len(gram) for gram in gradients), lambda chosen: _pairs(gradients, set(chosen))
    ).interval()
    if size is None or size[0] <= 0:
        return None
    return _ratio(errors, gradients, _pairs, _pairs)


def share(names: Sequence[str], measured: Mapping[str, Sequence[Reading]]) -> Estimate | None:
    """The sum of parts as a share of the whole, on the batches that all were measured on; None if
    there is no part.
    """
    if not names:
        return None
    groups = min(len(measured[name]) for name in (*names, WHOLE, NOTHING))

    def errors(name: str) -> list[float]:
        return [value for group in measured[name][:groups] for value in group["error"]]

    floor = errors(NOTHING)
    total = [
        math.fsum(part_errors) - len(names) * f
        for f, *part_errors in zip(floor, *map(errors, names), strict=True)
    ]
    of_whole = [error - f for error, f in zip(errors(WHOLE), floor, strict=True)]

    def sum_of(values: Sequence[float]) -> Callable[[Sequence[int]], float]:
        return lambda chosen: math.fsum(values[i] for i in chosen)

    return _quotient(len(floor), sum_of(total), sum_of(of_whole))


Reduce = Callable[[Sequence[Gram], set[int]], float]


def _ratio(
    above: Sequence[Gram], below: Sequence[Gram], reduce_above: Reduce, reduce_below: Reduce
) -> Estimate | None:
    """The ratio of two means over the batches, with the jackknife's error; None where a denominator
    is not above 0.
    """
    below = below[: len(above)]
    return _quotient(
        sum(len(gram) for gram in above),
        lambda chosen: reduce_above(above, set(chosen)),
        lambda chosen: max(0.0, reduce_below(below, set(chosen))),
    )


def _quotient(
    count: int, above: Callable[[Sequence[int]], float], below: Callable[[Sequence[int]], float]
) -> Estimate | None:
    """The ratio of two functions of `count` samples, with the jackknife's error; None where a
    denominator is 0.
    """
    try:
        return jackknife(count, lambda chosen: above(chosen) / below(chosen))
    except ZeroDivisionError:
        return None


def _pairs(grams: Sequence[Gram], chosen: set[int]) -> float:
    """The mean of the products of different batches of one group."""
    products = []
    offset = 0
    for gram in grams:
        inside = [i for i in range(len(gram)) if offset + i in chosen]
        products += [gram[i][j] for i in inside for j in inside if i < j]
        offset += len(gram)
    if products:
        return math.fsum(products) / len(products)
    return 0.0


def _singles(grams: Sequence[Gram], chosen: set[int]) -> float:
    """The mean of the products of batches with themselves."""
    norms = [gram[i][i] for gram in grams for i in range(len(gram))]
    return math.fsum(norms[i] for i in chosen) / len(chosen)
