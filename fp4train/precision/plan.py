"""The plan: policy × phases × backend resolved for a real model, before anything is trained.

For every stretch of the run, every linear layer and each of its three GEMMs it says which elements are multiplied, on
which backend, and why. The same table is printed, kept in the run directory, and sent to the tracker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fp4train.precision.layers import Layer
from fp4train.precision.phases import Timeline
from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import GEMMS, SHORT, Operands, Recipe
from fp4train.text import tabulate

__all__ = ["COLUMNS", "Explain", "Plan", "Row", "elements", "make_plan"]

Explain = Callable[[Layer, Recipe, str], tuple[str, str]]
"""(layer, its recipe, GEMM) → (backend, why that backend)."""

COLUMNS = ("steps", "layer", "GEMM", "size", "elements", "backend", "why")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One GEMM of one layer in one stretch of the run."""

    start: int
    stop: int
    layer: Layer
    gemm: str
    size: str
    elements: str
    backend: str
    why: str
    macs: int

    def cells(self) -> tuple[str, ...]:
        steps = f"{self.start}–{self.stop - 1}"
        return (steps, self.layer.name, self.gemm, self.size, self.elements, self.backend, self.why)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All rows, in the order of steps, layers and GEMMs."""

    rows: tuple[Row, ...]
    titles: Mapping[int, str]

    def shares(self, start: int) -> dict[str, float]:
        """Share of the linear layers' multiply-adds by elements, in the stretch that starts at `start`."""
        macs: dict[str, int] = {}
        for row in self.rows:
            if row.start == start:
                macs[row.elements] = macs.get(row.elements, 0) + row.macs
        total = sum(macs.values()) or 1
        return {k: v / total for k, v in sorted(macs.items(), key=lambda item: -item[1])}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Column names and one row a GEMM, unabridged."""
        return list(COLUMNS), [list(row.cells()) for row in self.rows]

    def render(self, *, full: bool = False) -> str:
        """The plan as text; unless `full`, equal rows of neighbouring blocks are folded into one."""
        parts = []
        for start, title in self.titles.items():
            rows = [row.cells()[1:] for row in self.rows if row.start == start]
            rows = rows if full else _fold(rows)
            lines = tabulate([COLUMNS[1:], *rows])
            shares = ", ".join(f"{name} {share:.1%}" for name, share in self.shares(start).items())
            parts.append("\n".join([title, *lines, f"multiply-adds of linear layers: {shares}"]))
        return "\n\n".join(parts)


def make_plan(
    layers: Iterable[Layer], timeline: Timeline, policy: LayerPolicy | None, *, tokens: int, explain: Explain
) -> Plan:
    """Resolve every GEMM of every layer over the whole run.

    Args:
        layers: of the model, in order (`find_layers(model).values()`).
        timeline: recipe, phases and swaps.
        policy: None: every layer follows the recipe.
        tokens: rows of x in one forward pass.
        explain: who multiplies, and why.

    Raises:
        ValueError: a pattern of the policy matches no layer.
    """
    layers = list(layers)
    if policy is not None:
        policy.check(layer.name for layer in layers)
    rows, titles = [], {}
    for stretch in timeline.stretches():
        titles[stretch.start] = f"steps {stretch.start}–{stretch.stop - 1}: {stretch.recipe.name} ({stretch.reason})"
        for layer in layers:
            kept = policy.why_kept(layer) if policy is not None and stretch.recipe.quantised else None
            recipe = stretch.recipe if policy is None else policy.recipe_for(layer, stretch.recipe)
            for gemm in GEMMS:
                backend, why = explain(layer, recipe, gemm)
                if not recipe.table()[gemm].quantised and stretch.recipe.quantised:
                    why = kept or (stretch.reason if gemm in stretch.recipe.high_precision else recipe.name)
                elif kept:
                    why = f"{kept}; {why}"
                rows.append(
                    Row(
                        start=stretch.start,
                        stop=stretch.stop,
                        layer=layer,
                        gemm=gemm,
                        size=_size(gemm, layer, tokens),
                        elements=elements(recipe.table()[gemm], recipe.dtype),
                        backend=backend,
                        why=why,
                        macs=tokens * layer.in_features * layer.out_features,
                    )
                )
    return Plan(rows=tuple(rows), titles=titles)


def _size(gemm: str, layer: Layer, tokens: int) -> str:
    """rows×columns×contraction of the product."""
    n, k = layer.out_features, layer.in_features
    return {"fprop": f"{tokens}×{n}×{k}", "dgrad": f"{tokens}×{k}×{n}", "wgrad": f"{n}×{k}×{tokens}"}[gemm]


def elements(operands: Operands, dtype: str) -> str:
    """What is multiplied: "E2M1·E2M1", "BF16·BF16"."""
    return "·".join(SHORT[dtype] if s is None else s.element.upper() for s in (operands.first, operands.second))


@dataclass(kw_only=True)
class _Run:
    """Rows alike in all cells, of blocks `first` to `last`; or the row of a layer whose name holds no number."""

    head: str
    first: int | None
    last: int | None
    tail: str
    cells: tuple[str, ...]

    def row(self) -> tuple[str, ...]:
        blocks = (
            "" if self.first is None else f"{self.first}" if self.first == self.last else f"{self.first}–{self.last}"
        )
        return (f"{self.head}{blocks}{self.tail}", *self.cells)


def _fold(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for the same GEMM of consecutive blocks: "blocks.0–4.mlp.up"."""
    runs: list[_Run] = []
    latest: dict[tuple[object, ...], _Run] = {}
    for name, *cells in rows:
        match = re.fullmatch(r"(.*?)(?<![^.])(\d+)(?![^.])(.*)", name)
        head, number, tail = match.groups() if match else (name, None, "")
        index = None if number is None else int(number)
        key = (head, tail, *cells)
        run = latest.get(key)
        if index is not None and run is not None and run.last == index - 1:
            run.last = index
        else:
            latest[key] = _Run(head=head, first=index, last=index, tail=tail, cells=tuple(cells))
            runs.append(latest[key])
    return [run.row() for run in runs]
