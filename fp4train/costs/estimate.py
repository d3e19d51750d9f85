"""What a plan costs on a named GPU: the time of every GEMM in BF16 and in its recipe, and of quantising its operands.

A layer's step is three GEMMs and the quantising of three tensors, each in the forms that its GEMMs ask for:

    x   row-wise for fprop, column-wise for wgrad         each microbatch
    w   row-wise for fprop, column-wise for dgrad         once a step
    dy  row-wise for dgrad, column-wise for wgrad         each microbatch

A tensor's time is charged to its GEMMs in equal parts, so that a row says what a GEMM costs with everything it needs.
The seconds are `roofline.py`'s; what runs on the GPU's low-precision tensor cores is `support.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp4train.backends.te.quantizers import SLOTS
from fp4train.costs.roofline import (
    COPY,
    LAUNCH,
    SCALE_EPILOGUE,
    decoded_width,
    emulate_seconds,
    gemm_seconds,
    move_seconds,
    needs_amax,
    quantise_seconds,
)
from fp4train.costs.support import why_emulated
from fp4train.costs.table import render
from fp4train.hardware import Gpu
from fp4train.precision.layers import Layer
from fp4train.precision.phases import Timeline
from fp4train.precision.plan import Plan, Row, elements
from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import GEMMS, Operands, Recipe
from fp4train.quantize import QuantSpec

EMULATING: tuple[str, ...] = ("emulate", "reference")
"""Backends that a user may ask for by name and that never use low-precision tensor cores."""


@dataclass(frozen=True, kw_only=True)
class GemmCost:
    """One GEMM of one layer, in seconds a step.

    Args:
        bf16: the product in BF16.
        gemm: the product as the recipe has it.
        quantise: this GEMM's part of quantising its operands; 0 in high precision.
        emulated: why the GPU's low-precision tensor cores do not run it; None where they do, or nothing is quantised.
    """

    layer: str
    gemm_name: str
    size: str
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
        """Whether quantising for the tensor cores costs more than they save; emulation is not meant to be fast."""
        return self.quantise > 0 and self.emulated is None and self.total > self.bf16


@dataclass(frozen=True, kw_only=True)
class StretchCost:
    """The linear layers in one stretch of a run."""

    title: str
    steps: int
    rows: tuple[GemmCost, ...]

    @property
    def bf16(self) -> float:
        """Seconds a step in BF16."""
        return sum(row.bf16 for row in self.rows)

    @property
    def total(self) -> float:
        """Seconds a step in the recipe, quantising included."""
        return sum(row.total for row in self.rows)

    @property
    def quantise(self) -> float:
        return sum(row.quantise for row in self.rows)

    def losing(self) -> list[GemmCost]:
        """GEMMs that would be faster unquantised on this GPU."""
        return [row for row in self.rows if row.loses]


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

    def render(self) -> str:
        """The estimate as text: a table a stretch, equal blocks folded, totals, and where quantising does not pay."""
        return render(self)


def estimate(
    plan: Plan,
    gpu: Gpu,
    *,
    timeline: Timeline,
    policy: LayerPolicy | None = None,
    microbatches: int = 1,
    backend: str = "auto",
) -> CostEstimate:
    """Price every row of `plan` on `gpu`.

    Args:
        plan: of a model, made with the tokens of one microbatch.
        timeline, policy: what the plan was made from; they hold the quant specs that a row only names.
        microbatches: forward passes a step.
        backend: "emulate" or "reference" price emulation also where the GPU has the formats.

    Raises:
        ValueError: `microbatches` is not positive.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches} must be at least 1")
    stretches = []
    priced: dict[Recipe, None] = {}
    for start, title in plan.titles.items():
        rows: dict[Layer, list[Row]] = {}
        for row in plan.rows:
            if row.start == start:
                rows.setdefault(row.layer, []).append(row)
        base = timeline.recipe_at(start)
        costs: list[GemmCost] = []
        for layer, mine in rows.items():
            recipe = base if policy is None else policy.recipe_for(layer, base)
            if any(row.backend == "torch" for row in mine if recipe.table()[row.gemm].quantised):
                # A linear layer that was not converted: torch multiplies it whatever the recipe says.
                recipe = recipe.with_high_precision(*GEMMS)
            priced[recipe] = None
            costs += _layer(mine, recipe, gpu, microbatches, backend)
        stop = next((row.stop for row in plan.rows if row.start == start), start)
        stretches.append(StretchCost(title=title, steps=stop - start, rows=tuple(costs)))
    points: dict[str, int | None] = {}
    for recipe in priced:
        points |= _break_evens(recipe, gpu, backend)
    return CostEstimate(gpu=gpu, stretches=tuple(stretches), break_even=points)


def _dimensions(row: Row) -> tuple[int, int, int]:
    """(m, n, k) of the product."""
    m, n, k = (int(part) for part in row.size.split("×"))
    return m, n, k


def _layer(rows: Sequence[Row], recipe: Recipe, gpu: Gpu, microbatches: int, backend: str) -> list[GemmCost]:
    """The GEMMs of one layer in one stretch."""
    table, layer = recipe.table(), rows[0].layer
    reasons = {gemm: _why(recipe, gemm, gpu, layer, backend) for gemm in GEMMS}
    quantise = dict.fromkeys(GEMMS, 0.0)
    weights = layer.in_features * layer.out_features
    tokens = rows[0].macs // weights
    counts = {"input": tokens * layer.in_features, "weight": weights, "grad_output": tokens * layer.out_features}
    for tensor, slots in SLOTS.items():
        times = 1 if tensor == "weight" else microbatches
        users = [(gemm, spec) for gemm, which in slots if (spec := getattr(table[gemm], which)) is not None]
        seconds = _tensor(gpu, counts[tensor], [(spec, reasons[gemm] is not None) for gemm, spec in users])
        for gemm, _ in users:
            quantise[gemm] += times * seconds / len(users)
    costs = []
    for row in rows:
        m, n, k = _dimensions(row)
        operands, reason = table[row.gemm], reasons[row.gemm]
        names = elements(operands, recipe.dtype)
        seconds = gemm_seconds(gpu, names if reason is None else _multiplied(operands), m, n, k)
        epilogue = _epilogue(gpu, operands, m * n) if reason is not None else 0.0
        costs.append(
            GemmCost(
                layer=row.layer.name,
                gemm_name=row.gemm,
                size=row.size,
                elements=names,
                bf16=microbatches * gemm_seconds(gpu, "BF16·BF16", m, n, k),
                gemm=microbatches * seconds,
                quantise=quantise[row.gemm] + microbatches * epilogue,
                emulated=reason,
            )
        )
    return costs


def _why(recipe: Recipe, gemm: str, gpu: Gpu, layer: Layer | None, backend: str) -> str | None:
    """Why a GEMM is emulated: the user asks for it, or the GPU cannot."""
    if backend in EMULATING and recipe.table()[gemm].quantised:
        return f"backend={backend}"
    return why_emulated(recipe, gemm, gpu, layer)


def _tensor(gpu: Gpu, count: int, forms: list[tuple[QuantSpec, bool]]) -> float:
    """Seconds of quantising a tensor of `count` elements into at most two forms, each (spec, emulated)."""
    seconds = 0.0
    for cost, emulated in ((quantise_seconds, False), (emulate_seconds, True)):
        specs = [spec for spec, is_emulated in forms if is_emulated == emulated]
        if specs:
            seconds += cost(gpu, count, specs[0], specs[1] if len(specs) > 1 else None)
    return seconds


def _multiplied(operands: Operands) -> str:
    """What emulation multiplies: BF16, or float32 where a decoded operand needs it."""
    wide = any(spec is not None and decoded_width(spec) == 4 for spec in (operands.first, operands.second))
    return "FP32·FP32" if wide else "BF16·BF16"


def _epilogue(gpu: Gpu, operands: Operands, outputs: int) -> float:
    """Seconds of applying the scales of whole tensors or rows to an emulated product."""
    scaled = any(s is not None and (needs_amax(s) or s.delayed) for s in (operands.first, operands.second))
    return move_seconds(gpu, SCALE_EPILOGUE * outputs, COPY) + LAUNCH if scaled else 0.0


def break_even(operands: Operands, gpu: Gpu, *, largest: int = 1 << 16) -> int | None:
    """The smallest n, in steps of 16, from which a product n×n×n with both operands quantised for it alone beats BF16.

    None where it never does, up to `largest`. In training an operand's two forms share reads, which moves the point;
    the rows of an estimate have that in.
    """

    def gain(n: int) -> float:
        quantised = sum(quantise_seconds(gpu, n * n, spec, None) for spec in (operands.first, operands.second))
        low_precision = gemm_seconds(gpu, elements(operands, "bfloat16"), n, n, n)
        return gemm_seconds(gpu, "BF16", n, n, n) - low_precision - quantised

    low, high = 1, largest // 16
    if gain(16 * high) <= 0:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(16 * middle) > 0 else (middle + 1, high)
    return 16 * low


def _break_evens(recipe: Recipe, gpu: Gpu, backend: str) -> dict[str, int | None]:
    """Elements of each GEMM that runs on low-precision tensor cores → its break-even size."""
    table = recipe.table()
    found: dict[str, int | None] = {}
    for gemm in GEMMS:
        operands = table[gemm]
        if operands.quantised and _why(recipe, gemm, gpu, None, backend) is None:
            found.setdefault(elements(operands, recipe.dtype), break_even(operands, gpu))
    return found
