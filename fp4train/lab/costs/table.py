"""A cost estimate as text: one table per stretch of the run, totals, and where quantising does not pay.

Equal blocks are folded into one line ("blocks.0–11.mlp.up"), with the times of one block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fp4train.hardware import Gpu
from fp4train.text import tabulate

if TYPE_CHECKING:
    from fp4train.lab.costs.estimate import CostEstimate, GemmCost, StretchCost


def render(cost: CostEstimate) -> str:
    """The whole estimate as text."""
    parts = [f"estimated time of the linear layers on {_describe(cost.gpu)}, each line is one layer in one step"]
    parts += [_render(stretch) for stretch in cost.stretches]
    if len(cost.stretches) > 1:
        parts.append(f"the whole run: BF16 {time_text(cost.bf16)}, as planned {time_text(cost.total)}{_faster(cost)}")
    parts += [_break_even(cost.gpu, names, size) for names, size in cost.break_even.items()]
    return "\n\n".join(parts)


def _describe(gpu: Gpu) -> str:
    peaks = ", ".join(f"{rate} {gpu.peaks[rate] / 1e12:.0f}" for rate in ("BF16", "FP8", "FP4") if rate in gpu.peaks)
    return f"{gpu} (dense peaks in TFLOP/s: {peaks}; {gpu.bandwidth / 1e12:.3g} TB/s)"


def _render(stretch: StretchCost) -> str:
    header = ("layer", "GEMM", "size", "elements", "BF16", "in recipe", "quantise", "speed-up", "note")
    lines = tabulate([header, *_fold(_merge(stretch.rows))])
    total = f"per step: BF16 {time_text(stretch.bf16)}, as planned {time_text(stretch.total)}{_faster(stretch)}"
    if stretch.quantise:
        total += f", of which quantising {time_text(stretch.quantise)} ({stretch.quantise / stretch.total:.0%})"
    notes = [f"emulated: {reason}" for reason in dict.fromkeys(row.emulated for row in stretch.rows) if reason]
    if losing := stretch.losing():
        saved = sum(row.total - row.bf16 for row in losing)
        notes.append(
            f"quantising does not pay in {len(losing)} of {len(stretch.rows)} GEMMs: in BF16 they would take "
            f"{time_text(saved)} less per step"
        )
    return "\n".join([stretch.title, *lines, total, *notes])


def _merge(rows: Iterable[GemmCost]) -> list[GemmCost]:
    """The rows, with the three GEMMs of a layer that quantises nothing merged into one."""
    layers: dict[str, list[GemmCost]] = {}
    for row in rows:
        layers.setdefault(row.layer, []).append(row)
    merged = []
    for mine in layers.values():
        if any(row.quantise for row in mine) or len({row.elements for row in mine}) > 1:
            merged += mine
            continue
        sums = {name: sum(getattr(row, name) for row in mine) for name in ("bf16", "gemm")}
        merged.append(replace(mine[0], gemm_name="all three", **sums))
    return merged


def _faster(cost: StretchCost | CostEstimate) -> str:
    return f" ({cost.bf16 / cost.total:.2f}× as fast)" if cost.total else ""


def time_text(seconds: float) -> str:
    """ "12.3 µs", "4.56 ms", "7.89 s", "1.2 h": three digits."""
    for unit, length in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _break_even(gpu: Gpu, names: str, size: int | None) -> str:
    if size is None:
        return f"{names} never beats BF16 on {gpu}: quantising costs more than the product saves"
    return f"{names} beats BF16 on {gpu} from about {size}³ on, quantising of both operands included"


def _cells(row: GemmCost) -> tuple[str, ...]:
    quantise = time_text(row.quantise) if row.quantise else "-"
    return (
        row.gemm_name,
        "×".join(map(str, row.size)),
        row.elements,
        time_text(row.bf16),
        time_text(row.gemm),
        quantise,
        f"{row.bf16 / row.total:.2f}×",
        row.note,
    )


def _fold(rows: Iterable[GemmCost]) -> list[tuple[str, ...]]:
    """One line for the same GEMM of the same kind of layer, with the range of the blocks: "blocks.0–11.mlp.up"."""
    spans: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for row in rows:
        match = re.search(r"(?<![^.])\d+(?![^.])", row.layer)
        kind = row.layer if match is None else f"{row.layer[: match.start()]}*{row.layer[match.end() :]}"
        spans.setdefault((kind, _cells(row)), []).extend([] if match is None else [int(match[0])])
    return [(kind.replace("*", _ranges(blocks), 1), *cells) for (kind, cells), blocks in spans.items()]


def _ranges(numbers: list[int]) -> str:
    """ "0–3,6" of [0, 1, 2, 3, 6]."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
