"""The cost of a plan on a named GPU: the time of every GEMM in BF16 and in its recipe, and of quantising its operands.

In a step a layer runs three GEMMs and quantises three tensors, each in the forms that its GEMMs need:

    x   row-wise for fprop, column-wise for wgrad         once per microbatch
    w   row-wise for fprop, column-wise for dgrad         once per step, from float32
    dy  row-wise for dgrad, column-wise for wgrad         once per microbatch

The time of a tensor is divided equally among its GEMMs, so a row is the full cost of a GEMM. `roofline.py` computes the
seconds; the plan determines which GEMMs run on the GPU's low-precision tensor cores.

Where a norm or gate quantises its result (`nn/produced.py`), x or dy is not read: the kernels of fp4train compute it
from its sources, once for all layers that take it, and a gate's gradients once for both. Transformer Engine's own
kernels, where they write codes alone, move the same bytes.

One product of layers that read one x is one launch of the size of all, in which each layer's share is that of its out
features. So is quantising their dy, unless it draws random bits for each.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from fp4train.backends import LAYER_BACKENDS
from fp4train.backends.table import FORMS, GEMMS, Operands
from fp4train.hardware import Device, Gpu
from fp4train.lab.costs import roofline
from fp4train.lab.costs.elementwise import NOTHING_MADE, Made, MadeFrom
from fp4train.lab.costs.roofline import LAUNCH, gemm_seconds, needs_amax
from fp4train.precision.layer_plan import Gemm, LayerPlan
from fp4train.precision.plan import Plan
from fp4train.quantize import QuantSpec
from fp4train.text import ranges, screen, tabulate

EMULATING = ("emulate", "reference")
"""Backends that use no low-precision tensor cores."""
LARGEST = 1 << 16
"""n of the largest product n×n×n that is tried for a break-even point."""


@dataclass(frozen=True, kw_only=True)
class GemmCost:
    """One GEMM of one layer, in seconds per step.

    Args:
        size: (rows, columns, contraction) of the product.
        bf16: the product in BF16.
        gemm: the product in the recipe.
        quantise: this GEMM's part of quantising its operands; 0 in high precision.
        emulated: why the GPU's low-precision tensor cores do not run it; None if they do, or nothing is quantised.
    """

    layer: str
    gemm_name: str
    size: tuple[int, int, int]
    elements: str
    bf16: float
    gemm: float
    quantise: float
    emulated: str | None = None

    @property
    def total(self) -> float:
        return self.gemm + self.quantise

    @property
    def note(self) -> str:
        if self.emulated is not None:
            return "emulated"
        return "does not pay" if self.loses else ""

    @property
    def loses(self) -> bool:
        """Whether quantising for the tensor cores costs more than they save; False for emulation."""
        return self.quantise > 0 and self.emulated is None and self.total > self.bf16


@dataclass(frozen=True, kw_only=True)
class StretchCost:
    """The linear layers in one stretch of a run."""

    title: str
    steps: int
    rows: tuple[GemmCost, ...]

    @property
    def bf16(self) -> float:
        """Seconds per step in BF16."""
        return sum(row.bf16 for row in self.rows)

    @property
    def total(self) -> float:
        """Seconds per step in the recipe, quantising included."""
        return sum(row.total for row in self.rows)

    @property
    def quantise(self) -> float:
        return sum(row.quantise for row in self.rows)

    @property
    def losing(self) -> list[GemmCost]:
        """GEMMs that would be faster unquantised on this GPU."""
        return [row for row in self.rows if row.loses]

    @property
    def lost(self) -> float:
        """Seconds per step that they take longer."""
        return sum(row.total - row.bf16 for row in self.losing)


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """A plan's linear layers on one GPU."""

    gpu: Gpu
    stretches: tuple[StretchCost, ...]
    break_even: Mapping[str, int | None]

    @property
    def bf16(self) -> float:
        """Seconds of the linear layers over the whole run in BF16."""
        return sum(s.steps * s.bf16 for s in self.stretches)

    @property
    def total(self) -> float:
        """Seconds of the linear layers over the whole run as planned."""
        return sum(s.steps * s.total for s in self.stretches)

    @property
    def emulates(self) -> bool:
        """Whether some GEMM is emulated on the GPU."""
        return any(row.emulated is not None for each in self.stretches for row in each.rows)

    def render(self) -> str:
        """The estimate as text: one table per stretch, totals, and GEMMs that do not pay.

        Equal blocks are folded into one line ("blocks.0–11.mlp.up"), with the times of one block.
        """
        return screen(__package__, "estimate.txt", {"time": time_text}, found=self, table=_table)


def estimate(
    plan: Plan, gpu: Gpu, *, microbatches: int = 1, made: Iterable[Made] = (), sharing: bool = True
) -> CostEstimate:
    """Estimate the time of every GEMM of `plan` on `gpu`.

    Args:
        plan: made for `gpu` (`Device.elsewhere(gpu)`), with the tokens of one microbatch.
        microbatches: forward passes per step.
        made: what norms and gates quantise in each stretch; none: nothing.
        sharing: whether layers that read one x quantise it once (`shares_x`); not under train.compile.

    Raises:
        ValueError: `microbatches` is not positive.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches} must be at least 1")
    stretches = []
    points: dict[str, int | None] = {}
    for stretch, own in zip(plan.stretches, list(made) or [NOTHING_MADE] * len(plan.stretches), strict=True):
        costs: list[GemmCost] = []
        for layer in stretch.layers.values():
            options: Any = {"others": stretch.layers, "made": own, "sharing": sharing}
            costs += layer_costs(layer, gpu, plan.tokens, microbatches, **options)
            for gemm, _ in layer.products:
                if gemm.operands.quantised and _why_emulated(gemm) is None and gemm.elements not in points:
                    points[gemm.elements] = break_even(gemm.operands, gpu, backend=gemm.backend)
        stretches.append(StretchCost(title=stretch.title, steps=stretch.stop - stretch.start, rows=tuple(costs)))
    return CostEstimate(gpu=gpu, stretches=tuple(stretches), break_even=points)


def _why_emulated(gemm: Gemm) -> str | None:
    """Why the GPU's low-precision tensor cores do not run it; None if they do, or nothing is quantised."""
    return gemm.why if gemm.backend in EMULATING else None


def layer_costs(
    plan: LayerPlan,
    gpu: Gpu,
    tokens: int,
    microbatches: int,
    *,
    weight_passes: float = 1,
    weight_bytes: int = 4,
    others: Mapping[str, LayerPlan] = MappingProxyType({}),
    made: Made = NOTHING_MADE,
    sharing: bool = True,
) -> list[GemmCost]:
    """The GEMMs of one layer in one stretch; of channels that are multiplied apart as rows of their own.

    Args:
        weight_passes: how often a step quantises the whole weight; below 1 if ranks each quantise a shard of it.
        weight_bytes: of an element of it where it is quantised: float32, or BF16 as it was gathered.
        others: by name, the plans of the layers that may share its x.
        made, sharing: see `estimate`.
    """
    if len(parts := plan.channel_parts) > 1:
        options: Any = {"weight_passes": weight_passes, "weight_bytes": weight_bytes}
        found = (layer_costs(part, gpu, tokens, microbatches, **options) for part in parts)
        return [row for rows in found for row in rows]
    layer, gemms = plan.layer, {gemm.name: gemm for gemm in plan.gemms}
    quantise = dict.fromkeys(GEMMS, 0.0)
    rows = layer.rows(tokens)
    members = min(max(1, layer.experts), rows)
    """Experts that have tokens: each is quantised, and multiplied where no call does so for all, by itself."""
    calls = 1 if plan.layer_backend is not None else members
    counts = {"x": rows * layer.in_features, "w": layer.weights, "dy": rows * layer.out_features}
    for tensor, forms in FORMS.items():
        times, read = (weight_passes, weight_bytes) if tensor == "w" else (microbatches, None)
        users = [(gemms[g], spec) for g, which in forms if (spec := getattr(gemms[g].operands, which)) is not None]
        forms_of_one = [(spec, gemm.backend) for gemm, spec in users]
        source = made.get((layer.name, tensor))
        if source is not None:
            seconds = _made(gpu, counts[tensor], [spec for spec, _ in forms_of_one], source)
        else:
            seconds = calls * _tensor(gpu, counts[tensor] // calls, forms_of_one, read, kept=tensor == "x")
            if tensor == "x" and sharing and shares_x(plan):
                seconds /= max(1, sum(name in others for name in plan.readers))
        for gemm, spec in users:
            quantise[gemm.name] += times * seconds / len(users)
            if tensor == "x" and gemm.name == "wgrad" and gemm.backend in EMULATING:
                decoding = roofline.decode_seconds(gpu, counts[tensor] // calls, spec)
                quantise[gemm.name] += times * calls * decoding
    costs = []
    for gemm in plan.gemms:
        m, n, k = size = plan.size(gemm.name, tokens)
        reason = _why_emulated(gemm)
        alone = (m, n, k / members) if gemm.name == "wgrad" else (m / members, n, k)
        multiplied = gemm.elements if reason is None else _multiplied(gemm.operands)
        products = members if gemm.grouped or plan.layer_backend is not None else 1
        seconds = members / products * gemm_seconds(gpu, multiplied, *alone, products=products)
        epilogue = 0.0
        if reason is not None:
            epilogue = members * _epilogue(gemm.operands, seconds / members)
        costs.append(
            GemmCost(
                layer=layer.name,
                gemm_name=gemm.name,
                size=size,
                elements=gemm.elements,
                bf16=microbatches * members * gemm_seconds(gpu, "BF16·BF16", *alone),
                gemm=microbatches * seconds,
                quantise=quantise[gemm.name] + microbatches * epilogue,
                emulated=reason,
            )
        )
    return costs


def shares_x(plan: LayerPlan) -> bool:
    """Whether this layer and others that read its x quantise it once for all, on a GPU of another machine."""
    if plan.layer_backend is not None:
        return LAYER_BACKENDS[plan.layer_backend].shares_input(plan.table, Device(type="cuda", here=False))
    specs = (plan.fprop.operands.first, plan.wgrad.operands.second)
    return not plan.layer.experts and not any(s is not None and (s.random or s.delayed is not None) for s in specs)


def _tensor(
    gpu: Gpu, count: int, forms: list[tuple[QuantSpec, str]], weight: int | None = None, *, kept: bool = False
) -> float:
    """Seconds to quantise a tensor of `count` elements into at most two forms, each (spec, backend).

    weight: see `own_bytes`. kept: whether its second form is kept as codes.
    """
    seconds = 0.0
    for backend in dict.fromkeys(backend for _, backend in forms):
        first, second = (*(spec for spec, each in forms if each == backend), None)[:2]
        if backend in LAYER_BACKENDS:
            seconds += roofline.quantise_seconds(gpu, count, first, second, read=weight or 2)
        else:
            codes = backend == "native"
            seconds += roofline.own_seconds(gpu, count, first, second, codes=codes, weight=weight, kept=kept)
    return seconds


def _made(gpu: Gpu, count: int, specs: list[QuantSpec], source: MadeFrom) -> float:
    """Seconds of one of the layers that take x or dy, of `count` elements, from a source."""
    row, column = specs
    return roofline.own_seconds(gpu, count, row, column, codes=True, source=source.kind) / source.layers


def _multiplied(operands: Operands) -> str:
    """The dtype that emulation multiplies: BF16, or float32 if a decoded operand needs it."""
    wide = any(spec is not None and roofline.decoded_width(spec) == 4 for spec in (operands.first, operands.second))
    return "FP32·FP32" if wide else "BF16·BF16"


def _epilogue(operands: Operands, product: float) -> float:
    """Seconds by which scales of whole tensors or rows make an emulated product longer than `product`."""
    specs = [spec for spec in (operands.first, operands.second) if spec is not None]
    if any(spec.global_scale == "row" or spec.block == (1, None) for spec in specs):
        return product * (1 / roofline.TRITON_SHARE - 1)
    return roofline.SCALED_LAUNCHES * LAUNCH if any(needs_amax(spec) or spec.delayed for spec in specs) else 0.0


def break_even(operands: Operands, gpu: Gpu, *, backend: str = "te") -> int | None:
    """The smallest n, in steps of 16, from which a product n×n×n with both operands quantised for it alone beats BF16.

    backend: whose kernels quantise.

    None if it never does, up to `LARGEST`. In training the two forms of a tensor share reads, which changes this size;
    the rows of an estimate include that.
    """

    def gain(n: int) -> float:
        specs = [spec for spec in (operands.first, operands.second) if spec is not None]
        quantised = sum(_tensor(gpu, n * n, [(spec, backend)]) for spec in specs)
        low_precision = gemm_seconds(gpu, operands.elements("bfloat16"), n, n, n)
        return gemm_seconds(gpu, "BF16", n, n, n) - low_precision - quantised

    low, high = 1, LARGEST // 16
    if gain(16 * high) <= 0:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(16 * middle) > 0 else (middle + 1, high)
    return 16 * low


def _table(rows: Iterable[GemmCost]) -> list[str]:
    header = ("layer", "GEMM", "size", "elements", "BF16", "in recipe", "quantise", "speed-up", "note")
    return tabulate([header, *_fold(_merge(rows))])


def _merge(rows: Iterable[GemmCost]) -> list[GemmCost]:
    """The rows, with the three GEMMs of a layer that quantises nothing merged into one."""
    merged = []
    for mine in (list(group) for _, group in groupby(rows, attrgetter("layer"))):
        if any(row.quantise for row in mine) or len({row.elements for row in mine}) > 1:
            merged += mine
            continue
        sums = {name: sum(getattr(row, name) for row in mine) for name in ("bf16", "gemm")}
        merged.append(replace(mine[0], gemm_name="all three", **sums))
    return merged


def time_text(seconds: float) -> str:
    """ "12.3 µs", "4.56 ms", "7.89 s", "1.2 h": three digits."""
    for unit, length in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _cells(row: GemmCost) -> tuple[str, ...]:
    size, times = "×".join(map(str, row.size)), map(time_text, (row.bf16, row.gemm))
    quantise = time_text(row.quantise) if row.quantise else "-"
    return row.gemm_name, size, row.elements, *times, quantise, f"{row.bf16 / row.total:.2f}×", row.note


def _fold(rows: Iterable[GemmCost]) -> list[tuple[str, ...]]:
    """One line for the same GEMM of the same kind of layer, with the range of the blocks: "blocks.0–11.mlp.up"."""
    spans: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for row in rows:
        match = re.search(r"(?<![^.])\d+(?![^.])", row.layer)
        kind = row.layer if match is None else f"{row.layer[: match.start()]}*{row.layer[match.end() :]}"
        spans.setdefault((kind, _cells(row)), []).extend([] if match is None else [int(match[0])])
    return [(kind.replace("*", ranges(blocks, comma=","), 1), *cells) for (kind, cells), blocks in spans.items()]
