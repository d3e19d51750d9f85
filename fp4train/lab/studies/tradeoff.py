"""The choice of layers and GEMMs to keep in high precision: a Pareto curve of damage and cost, and
a policy on it.

A unit is a layer, or where single cells are measured a GEMM of a layer. Its damage is the nMSE that
it causes alone, above the floor; its cost is its share of the multiply-adds of the blocks, or the
time that it would take longer in high precision on a named GPU. What is left when some units are
kept is predicted as

    nMSE(kept) = floor + (whole − floor) · (1 − Σ damage of the kept / Σ damage of all)

which is exact for nothing and everything kept, and between them if the parts do not interact. Units
are kept in the order of damage per cost; a unit whose damage is not told apart from 0 is never
kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from fp4train.backends.table import GEMMS
from fp4train.errors import UserError
from fp4train.hardware import Device, Gpu
from fp4train.lab.costs import estimate as estimate_costs
from fp4train.lab.studies.findings import Sensitivity
from fp4train.lab.studies.parts import CELL, EVERY_LAYER, LAYER, RecipeParts
from fp4train.precision import LayerPolicy, Timeline
from fp4train.precision.plan import make_plan
from fp4train.precision.policy import matches


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A layer, or GEMMs of one, that a policy can keep.

    Args:
        layer, gemms: "blocks.0.mlp.up" and the GEMMs of it.
        damage: nMSE that it causes alone, above the floor.
        clear: True: the damage is told apart from 0, or without intervals, is above 0.
        macs: share of the multiply-adds of the layers that the recipe quantises.
        seconds: seconds per step that it takes longer in high precision than in the recipe; None
            without a GPU.
    """

    layer: str
    gemms: tuple[str, ...]
    damage: float
    clear: bool
    macs: float
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """A set of units that are kept.

    Args:
        kept: units that are kept.
        macs: share of the multiply-adds that they have.
        nmse: nMSE that is predicted.
        time: time of the linear layers of the blocks relative to BF16; None without a GPU.
    """

    kept: tuple[Unit, ...] = field(repr=False)
    macs: float
    nmse: float
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """The curve from nothing kept to everything that is clearly worth it, and the point that was
    asked for.
    """

    curve: Sequence[Point]
    chosen: Point
    policy: LayerPolicy
    gpu: Gpu | None


def trade_off(
    study: Sensitivity, *, keep: float | None, cost: float | None, gpu: Gpu | None
) -> Tradeoff:
    """The Pareto curve and its point for a cost.

    Args:
        keep: the largest share of multiply-adds to keep.
        cost: the longest time of the layers, relative to BF16 on `gpu`.
        gpu: GPU whose times are estimated; None gives none.

    Raises:
        UserError: `cost` is below the shortest time.
    """
    parts = study.parts
    seconds: dict[tuple[str, str], float] = {}
    base = 0.0
    bf16 = 0.0
    if gpu is not None:
        seconds, base, bf16 = _seconds(parts, gpu)
    units = _units(study, seconds)
    if cost is not None:
        price = [unit.seconds or 0.0 for unit in units]
    else:
        price = [unit.macs for unit in units]
    order = sorted(range(len(units)), key=lambda i: (-units[i].damage / max(price[i], 1e-30), i))
    order = [i for i in order if units[i].clear]

    def point(chosen: Sequence[int]) -> Point:
        kept = tuple(units[i] for i in sorted(chosen))
        total = math.fsum(unit.damage for unit in units)
        if total > 0:
            left = 1 - math.fsum(unit.damage for unit in kept) / total
        else:
            left = 1.0
        if gpu is None:
            time = None
        else:
            time = (base + math.fsum(unit.seconds or 0.0 for unit in kept)) / bf16
        macs = math.fsum(unit.macs for unit in kept)
        return Point(
            kept=kept,
            macs=macs,
            nmse=study.floor + (study.whole.nmse.mean - study.floor) * left,
            time=time,
        )

    limit = keep if cost is None else cost * bf16 - base
    assert limit is not None
    chosen = _within(limit, order, price)
    spent = math.fsum(price[i] for i in chosen)
    if spent > limit * (1 + 1e-12) + 1e-15:
        raise UserError(
            f"cost={cost:g}: on {gpu} the layers take at least {(base + spent) / bf16:.3f} of "
            "their time in BF16; give that or more"
        )
    curve = [point(order[:count]) for count in range(len(order) + 1)]
    picked = point(chosen)
    return Tradeoff(curve=curve, chosen=picked, policy=as_policy(parts, picked.kept), gpu=gpu)


def _within(limit: float, order: Sequence[int], price: Sequence[float]) -> list[int]:
    """The units in this order that can be paid for; one that costs nothing always can."""
    chosen: list[int] = []
    spent = 0.0
    for i in order:
        if price[i] <= 0 or spent + price[i] <= limit * (1 + 1e-12):
            chosen.append(i)
            spent += price[i]
    return chosen


def as_policy(parts: RecipeParts, kept: Sequence[Unit]) -> LayerPolicy:
    """The policy that keeps exactly these units; a block of which every layer is kept is named
    once.
    """
    gemms: dict[str, set[str]] = {}
    for unit in kept:
        gemms.setdefault(unit.layer, set()).update(unit.gemms)
    quantised = {
        name: {g.name for g in plan.gemms if g.operands.quantised}
        for name, plan in parts.layers.items()
    }
    full = {name for name, mine in gemms.items() if mine >= quantised[name]}
    patterns: list[str] = []
    for block in sorted(
        {plan.layer.block for plan in parts.layers.values() if plan.layer.block is not None}
    ):
        mine = [name for name, plan in parts.layers.items() if plan.layer.block == block]
        prefix = common_prefix(mine)
        if (
            len(mine) > 1
            and prefix
            and set(mine) <= full
            and mine == [n for n in parts.layers if matches(prefix, n)]
        ):
            patterns.append(prefix)
            continue
        for name in (name for name in mine if name in gemms):
            if name in full:
                patterns.append(name)
            else:
                patterns.append(f"{name}:{'+'.join(g for g in GEMMS if g in gemms[name])}")
    return LayerPolicy(first=0, last=0, keep=patterns)


def common_prefix(names: Sequence[str]) -> str:
    """The components that all names begin with: "blocks.0"."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns))


def _units(study: Sensitivity, seconds: dict[tuple[str, str], float]) -> list[Unit]:
    parts = study.parts
    sizes = {name: plan.layer.active for name, plan in parts.layers.items()}
    total = 3 * sum(sizes.values())

    def unit(layer: str, gemms: tuple[str, ...], damage: float, clear: bool) -> Unit:
        if seconds:
            longer = math.fsum(seconds[layer, gemm] for gemm in gemms)
        else:
            longer = None
        macs = sizes[layer] * len(gemms) / total
        return Unit(
            layer=layer,
            gemms=gemms,
            damage=max(damage, 0.0),
            clear=clear,
            macs=macs,
            seconds=longer,
        )

    if not study.has_cells:
        units = []
        for finding in study.of_kind(LAYER):
            low = finding.nmse.interval()
            clear = (finding.nmse.mean if low is None else low[0]) > study.floor
            gemms = tuple(g.name for g in parts.layers[finding.what].gemms if g.operands.quantised)
            units.append(unit(finding.what, gemms, finding.nmse.mean - study.floor, clear))
        return units
    cells = []
    for layer in parts.layers:
        for gemm in parts.gemms:
            mine = [operand for operand in parts.operands if operand.startswith(gemm)]
            damage = math.fsum(study.cell(layer, operand) or 0.0 for operand in mine)
            cells.append(
                unit(layer, (gemm,), damage, any(_clear(study, layer, operand) for operand in mine))
            )
    return cells


def _clear(study: Sensitivity, layer: str, operand: str) -> bool:
    """Whether the damage of a cell is told apart from 0; without an interval, whether it is above
    0.
    """
    cell = study.findings.get(f"{CELL}/{layer}/{operand}")
    low = None if cell is None else cell.nmse.interval()
    if low is None:
        return (study.cell(layer, operand) or 0.0) > 0
    return low[0] > study.floor


def _seconds(parts: RecipeParts, gpu: Gpu) -> tuple[dict[tuple[str, str], float], float, float]:
    """(longer in high precision by layer and GEMM, all in the recipe, all in BF16), seconds per
    step on `gpu`.
    """
    config = parts.subject.run.config.train
    plan = make_plan(
        [layer_plan.layer for layer_plan in parts.layers.values()],
        Timeline(recipe=parts.recipe, steps=1),
        EVERY_LAYER,
        tokens=config.rows(1) * config.seq_len,
        device=Device.elsewhere(gpu),
    )
    costs = estimate_costs(plan, gpu, microbatches=config.microbatches).stretches[0]
    longer = {(row.layer, row.gemm_name): row.bf16 - row.total for row in costs.rows}
    return longer, costs.total, costs.bf16
