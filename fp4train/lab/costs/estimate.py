"""The time of a plan's linear layers on a named GPU: its rows (`rows.py`), summed per step and per
run, the sizes from which formats pay, and all of it as text."""

from collections.abc import Mapping
from dataclasses import dataclass

from fp4train.backends.table import Operands
from fp4train.hardware import Gpu
from fp4train.lab.costs.roofline import gemm_seconds
from fp4train.lab.costs.rows import EMULATING, GemmCost, layer_costs, quantise_seconds
from fp4train.precision.plan import Plan
from fp4train.precision.report import fold_blocks
from fp4train.text import screen

LARGEST = 1 << 16
"""n of the largest product n×n×n that is tried for a break-even point."""


@dataclass(frozen=True, kw_only=True)
class StretchCost:
    """The linear layers in one stretch of a run."""

    title: str
    steps: int
    rows: list[GemmCost]

    @property
    def bf16(self) -> float:
        """Seconds per step in BF16."""
        return sum(row.bf16 for row in self.rows)

    @property
    def total(self) -> float:
        """Seconds per step as planned, quantising included."""
        return sum(row.total for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """A plan's linear layers on one GPU.

    Args:
        break_even: elements of a product → the n of n×n×n from which they beat BF16, if any.
    """

    gpu: Gpu
    stretches: list[StretchCost]
    break_even: Mapping[str, int | None]

    @property
    def run(self) -> StretchCost:
        """The whole run, as one step."""
        rows = [row.times(stretch.steps) for stretch in self.stretches for row in stretch.rows]
        return StretchCost(title="the linear layers of the whole run", steps=1, rows=rows)

    def render(self, width: int | None = None) -> str:
        """The estimate as text in lines of `width`: one table per stretch, totals, and GEMMs that
        do not pay.

        Equal blocks are folded into one heading ("blocks.0–11.mlp.up"), with the times of one.
        """
        return screen(__package__, "estimate.txt", cost=self, fold=fold_blocks, width=width)


def estimate(plan: Plan, gpu: Gpu, *, microbatches: int = 1) -> CostEstimate:
    """Estimate the time of every GEMM of `plan` on `gpu`.

    Args:
        plan: a plan for `gpu` (`Device.elsewhere(gpu)`), with the tokens of one microbatch.
        microbatches: forward passes per step.
    """
    stretches = []
    points: dict[str, int | None] = {}
    for stretch in plan.stretches:
        rows: list[GemmCost] = []
        for layer in stretch.layers.values():
            costs = layer_costs(layer, gpu, plan.tokens, 1 / microbatches)
            rows += [cost.times(microbatches) for cost in costs]
            for gemm, _ in layer.products:
                emulated = gemm.backend in EMULATING
                if gemm.operands.quantised and not emulated and gemm.elements not in points:
                    points[gemm.elements] = break_even(gemm.operands, gpu, backend=gemm.backend)
        steps = stretch.stop - stretch.start
        stretches.append(StretchCost(title=stretch.title, steps=steps, rows=rows))
    return CostEstimate(gpu=gpu, stretches=stretches, break_even=points)


def break_even(operands: Operands, gpu: Gpu, *, backend: str = "te") -> int | None:
    """The smallest n, in steps of 16, from which a product n×n×n with both operands quantised for
    it alone beats BF16; None if it never does, up to `LARGEST`.

    In training the two forms of a tensor share reads, which changes this size; the rows of an
    estimate include that.

    Args:
        backend: name of the backend whose kernels quantise.
    """
    specs = [spec for spec in operands.both if spec is not None]
    elements = operands.elements("bfloat16")

    def pays(n: int) -> bool:
        seconds = gemm_seconds(gpu, elements, n, n, n)
        seconds += sum(quantise_seconds(gpu, n * n, [spec], backend) for spec in specs)
        return seconds < gemm_seconds(gpu, "BF16", n, n, n)

    return next(filter(pays, range(16, LARGEST + 16, 16)), None)
