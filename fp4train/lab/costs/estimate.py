"""The time of a plan's linear layers on a named GPU: its rows (`rows.py`), summed per step and per
run, the sizes from which formats pay, and all of it as text."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter

from fp4train.backends.table import Operands
from fp4train.hardware import Gpu
from fp4train.lab.costs.quantising import EMULATING
from fp4train.lab.costs.rows import GemmCost, layer_costs, square_gain
from fp4train.precision.plan import Plan
from fp4train.precision.report import fold_blocks
from fp4train.text import screen, table_width, tabulate, three_digits

LARGEST = 1 << 16
"""n of the largest product n×n×n that is tried for a break-even point."""


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
        return sum(stretch.steps * stretch.bf16 for stretch in self.stretches)

    @property
    def total(self) -> float:
        """Seconds of the linear layers over the whole run as planned."""
        return sum(stretch.steps * stretch.total for stretch in self.stretches)

    @property
    def emulates(self) -> bool:
        """Whether some GEMM is emulated on the GPU."""
        return any(row.emulated is not None for stretch in self.stretches for row in stretch.rows)

    def render(self, width: int | None = None) -> str:
        """The estimate as text in lines of `width`: one table per stretch, totals, and GEMMs that
        do not pay.

        Equal blocks are folded into one line ("blocks.0–11.mlp.up"), with the times of one block.
        """
        filters = {"time": time_text}
        return screen(
            __package__, "estimate.txt", filters, cost=self, table=partial(_table, width=width)
        )


def estimate(plan: Plan, gpu: Gpu, *, microbatches: int = 1) -> CostEstimate:
    """Estimate the time of every GEMM of `plan` on `gpu`.

    Args:
        plan: a plan for `gpu` (`Device.elsewhere(gpu)`), with the tokens of one microbatch.
        microbatches: forward passes per step.

    Raises:
        ValueError: `microbatches` is not positive.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches} must be at least 1")
    stretches = []
    points: dict[str, int | None] = {}
    for stretch in plan.stretches:
        rows: list[GemmCost] = []
        for layer in stretch.layers.values():
            rows += layer_costs(layer, gpu, plan.tokens, microbatches)
            for gemm, _ in layer.products:
                on_tensor_cores = gemm.operands.quantised and gemm.backend not in EMULATING
                if on_tensor_cores and gemm.elements not in points:
                    points[gemm.elements] = break_even(gemm.operands, gpu, backend=gemm.backend)
        steps = stretch.stop - stretch.start
        stretches.append(StretchCost(title=stretch.title, steps=steps, rows=tuple(rows)))
    return CostEstimate(gpu=gpu, stretches=tuple(stretches), break_even=points)


def break_even(operands: Operands, gpu: Gpu, *, backend: str = "te") -> int | None:
    """The smallest n, in steps of 16, from which a product n×n×n with both operands quantised for
    it alone beats BF16; None if it never does, up to `LARGEST`.

    In training the two forms of a tensor share reads, which changes this size; the rows of an
    estimate include that.

    Args:
        backend: name of the backend whose kernels quantise.
    """
    sizes = range(16, LARGEST + 16, 16)
    smallest = bisect_left(
        sizes, True, key=lambda n: square_gain(operands, gpu, n, backend=backend) > 0
    )
    if smallest == len(sizes):
        return None
    return sizes[smallest]


def time_text(seconds: float) -> str:
    """ "12.3 µs", "4.56 ms", "7.89 s", "1.2 h": three digits."""
    for unit, length in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{three_digits(seconds / length)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"


_ALL = "all three"
_HEADER = ("layer", "GEMM", "size", "elements", "BF16", "in recipe", "quantise", "speed-up", "note")


def _table(rows: Iterable[GemmCost], width: int | None) -> list[str]:
    """The table of a stretch; where lines have no room for it, layers stand above their GEMMs, and
    notes below.
    """
    cells = [_HEADER, *fold_blocks([_cells(row) for row in _merge(rows)])]
    if width is None or table_width(cells) <= width:
        return tabulate(cells, right=range(4, 8), width=width)
    layers, *_, notes = zip(*cells[1:], strict=True)
    numbers = {
        note: f"[{number}]" for number, note in enumerate(dict.fromkeys(filter(None, notes)), 1)
    }
    shorter: list[tuple[str, ...]] = [(*_HEADER[1:-1], "")]
    for _, gemm, *values, note in cells[1:]:
        shorter.append((gemm.replace(_ALL, "all 3"), *values, numbers.get(note, "")))
    table = tabulate(shorter, right=range(3, 7), width=width, indent="  ", headings=layers)
    return [*table, *(f"{number} {note}" for note, number in numbers.items())]


def _merge(rows: Iterable[GemmCost]) -> list[GemmCost]:
    """The rows, with the three GEMMs of a layer that quantises nothing merged into one."""
    merged = []
    for _, group in groupby(rows, attrgetter("layer")):
        gemms = list(group)
        if any(row.quantise for row in gemms) or len({row.elements for row in gemms}) > 1:
            merged += gemms
            continue
        bf16 = sum(row.bf16 for row in gemms)
        product = sum(row.gemm for row in gemms)
        merged.append(replace(gemms[0], gemm_name=_ALL, bf16=bf16, gemm=product))
    return merged


def _cells(row: GemmCost) -> tuple[str, ...]:
    return (
        row.layer,
        row.gemm_name,
        "×".join(map(str, row.size)),
        row.elements,
        time_text(row.bf16),
        time_text(row.gemm),
        time_text(row.quantise) if row.quantise else "-",
        f"{row.bf16 / row.total:.2f}×",
        row.note,
    )
