"""The choice of layers to keep in high precision: a Pareto curve of damage and cost, and a policy on
it.

A unit is a layer. Its damage is the nMSE that it causes alone, above the floor; its cost is its
share of the multiply-adds of the blocks. What is left when some units are kept is predicted as

    nMSE(kept) = floor + (whole − floor) · (1 − Σ damage of the kept / Σ damage of all)

which is exact for nothing and everything kept, and between them if the parts do not interact. Units
are kept in the order of damage per cost; a unit whose damage is not told apart from 0 is never
kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from fp4train.lab.studies.findings import Finding, Sensitivity
from fp4train.lab.studies.parts import LAYER, RecipeParts
from fp4train.precision import LayerPolicy
from fp4train.precision.policy import matches


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A layer that a policy can keep.

    Args:
        layer: "blocks.0.mlp.up".
        damage: nMSE that it causes alone, above the floor.
        clear: True: the damage is told apart from 0, or without intervals, is above 0.
        macs: share of the multiply-adds of the layers that the recipe quantises.
    """

    layer: str
    damage: float
    clear: bool
    macs: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """A set of units that are kept.

    Args:
        kept: units that are kept.
        macs: share of the multiply-adds that they have.
        nmse: nMSE that is predicted.
    """

    kept: tuple[Unit, ...] = field(repr=False)
    macs: float
    nmse: float


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """The curve from nothing kept to everything that is clearly worth it, and the point that was
    asked for.
    """

    curve: Sequence[Point]
    chosen: Point
    policy: LayerPolicy


def trade_off(study: Sensitivity, keep: float) -> Tradeoff:
    """The Pareto curve, and its point for the largest share of the multiply-adds to keep."""
    units = _units(study)
    total = math.fsum(unit.damage for unit in units)
    worst_first = sorted(units, key=lambda unit: -unit.damage / max(unit.macs, 1e-30))
    order = [unit for unit in worst_first if unit.clear]

    def point(chosen: Sequence[Unit]) -> Point:
        kept = tuple(unit for unit in units if unit in chosen)
        left = 1.0
        if total > 0:
            left -= math.fsum(unit.damage for unit in kept) / total
        return Point(
            kept=kept,
            macs=math.fsum(unit.macs for unit in kept),
            nmse=study.floor + (study.whole.nmse.mean - study.floor) * left,
        )

    picked = point(_within(keep, order))
    return Tradeoff(
        curve=[point(order[:count]) for count in range(len(order) + 1)],
        chosen=picked,
        policy=as_policy(study.parts, [unit.layer for unit in picked.kept]),
    )


def _within(limit: float, order: Sequence[Unit]) -> list[Unit]:
    """The units in this order that fit into the limit."""
    chosen: list[Unit] = []
    spent = 0.0
    for unit in order:
        if spent + unit.macs <= limit * (1 + 1e-12):
            chosen.append(unit)
            spent += unit.macs
    return chosen


def as_policy(parts: RecipeParts, kept: Sequence[str]) -> LayerPolicy:
    """The policy that keeps exactly these layers; a block of which every layer is kept is named
    once.
    """
    patterns: list[str] = []
    blocks = {plan.layer.block for plan in parts.layers.values() if plan.layer.block is not None}
    for block in sorted(blocks):
        layers = [name for name, plan in parts.layers.items() if plan.layer.block == block]
        prefix = common_prefix(layers)
        whole = prefix and len(layers) > 1 and set(layers) <= set(kept)
        if whole and layers == [name for name in parts.layers if matches(prefix, name)]:
            patterns.append(prefix)
        else:
            patterns += [name for name in layers if name in kept]
    return LayerPolicy(first=0, last=0, keep=patterns)


def common_prefix(names: Sequence[str]) -> str:
    """The components that all names begin with: "blocks.0"."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns))


def _units(study: Sensitivity) -> list[Unit]:
    sizes = {name: plan.layer.active for name, plan in study.parts.layers.items()}
    quantised = {
        name: sum(gemm.operands.quantised for gemm in plan.gemms)
        for name, plan in study.parts.layers.items()
    }
    total = 3 * sum(sizes.values())

    def unit(finding: Finding) -> Unit:
        low = finding.nmse.interval()
        return Unit(
            layer=finding.what,
            damage=max(finding.nmse.mean - study.floor, 0.0),
            clear=(finding.nmse.mean if low is None else low[0]) > study.floor,
            macs=sizes[finding.what] * quantised[finding.what] / total,
        )

    return [unit(finding) for finding in study.of_kind(LAYER)]
