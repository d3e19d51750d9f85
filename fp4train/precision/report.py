"""A plan in a few lines, for the start of a run: what equal layers have in common, and their share of the arithmetic.

    steps 0–319: NVFP4 (recipe)
      blocks 0–4  fprop dgrad wgrad  E2M1·E2M1  80.5%  emulate  auto: Transformer Engine needs a GPU, not cpu
      block 5     fprop dgrad wgrad  BF16·BF16  16.1%  torch    policy.last=0.15 (1 of 6 blocks)
      head        fprop dgrad wgrad  BF16·BF16   3.4%  torch    outside the blocks

Shares are of the linear layers' multiply-adds. The plan itself has a row for each layer and GEMM.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp4train.precision.layers import Layer
from fp4train.precision.plan import Plan, Row
from fp4train.text import columns

_NAMED = 3
"""So many kinds of layers of a block are named; more are "blocks"."""


def summarise(plan: Plan) -> str:
    """Title and lines of every stretch."""
    found: list[tuple[str, ...]] = []
    titles: dict[int, str] = {}
    for start, title in plan.titles.items():
        titles[len(found)] = title
        rows = [row for row in plan.rows if row.start == start]
        total = sum(row.macs for row in rows) or 1
        for gemms, group in _alike(rows):
            share = f"{sum(row.macs for row in group) / total:6.1%}"
            where = _where([row.layer for row in group], [row.layer for row in rows])
            found.append((where, gemms, group[0].elements, share, group[0].backend, group[0].why))
    lines = []
    for index, line in enumerate(columns(found)):
        if index in titles:
            lines.append(titles[index])
        lines.append(f"  {line}")
    return "\n".join(lines)


def _alike(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that differ in nothing but their layer, and the GEMMs that all of these layers share."""
    by_layer: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_layer.setdefault((row.layer.name, row.elements, row.backend, row.why), []).append(row)
    groups: dict[tuple[object, ...], list[Row]] = {}
    for (_, *cells), found in by_layer.items():
        gemms, outside = " ".join(row.gemm for row in found), found[0].layer.block is None
        groups.setdefault((gemms, outside, *cells), []).extend(found)
    return [(str(key[0]), found) for key, found in groups.items()]


def _where(layers: Iterable[Layer], among: Iterable[Layer]) -> str:
    """Where layers stand: "blocks 0–4", "mlp.down of blocks 0–4", or their names outside of the blocks."""
    layers = list(dict.fromkeys(layers))
    spans: list[list[int]] = []
    for block in sorted({layer.block for layer in layers if layer.block is not None}):
        if spans and spans[-1][1] + 1 == block:
            spans[-1][1] = block
        else:
            spans.append([block, block])
    if not spans:
        names = [layer.name for layer in layers]
        return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    blocks = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)
    text = f"blocks {blocks}" if len(spans) > 1 or spans[0][0] != spans[0][1] else f"block {blocks}"
    kinds = list(dict.fromkeys(_kind(layer) for layer in layers))
    if kinds == list(dict.fromkeys(_kind(layer) for layer in among if layer.block is not None)):
        return text
    return f"{', '.join(kinds)} of {text}" if len(kinds) <= _NAMED else f"{len(kinds)} layers each of {text}"


def _kind(layer: Layer) -> str:
    """The layer's name within its block."""
    return layer.name.rpartition(f".{layer.block}.")[2]
