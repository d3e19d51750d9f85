"""A plan as text: a table with one row per GEMM, or the summary that a run prints at its start.

    steps 0–319: NVFP4 (recipe)
      blocks 0–4  fprop dgrad wgrad  E2M1·E2M1  80.5%  emulate  auto: Transformer Engine needs a GPU, not cpu
      block 5     fprop dgrad wgrad  BF16·BF16  16.1%  torch    policy.last=0.15 (1 of 6 blocks)
      head        fprop dgrad wgrad  BF16·BF16   3.4%  torch    outside the blocks

Percentages are shares of the multiply-adds of all linear layers.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp4train.precision.gather import WireForm, gather_mode, wire_form
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import Layer
from fp4train.text import columns, first_few, ranges, span, tabulate, wrapped

COLUMNS = ("steps", "layer", "GEMM", "size", "elements", "backend", "why")

_NAMED = 3
"""Most kinds of layers of a block that are named individually."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One GEMM of one layer in one stretch: a row of a table. `size` is (rows, columns,
    contraction).
    """

    start: int
    stop: int
    layer: Layer
    gemm: str
    size: tuple[int, int, int]
    elements: str
    backend: str
    why: str

    @property
    def macs(self) -> int:
        """Multiply-adds."""
        rows, columns, contraction = self.size
        return rows * columns * contraction


class Section(NamedTuple):
    """The rows of one stretch of a plan, in the order of its layers."""

    title: str
    rows: Sequence[Row]

    @property
    def shares(self) -> dict[str, float]:
        """Share of the linear layers' multiply-adds by elements."""
        return shares((row.elements, row.macs) for row in self.rows)


def table(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """Column names and the cells of each row, unabridged."""
    return list(COLUMNS), [list(cells(row)) for row in rows]


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    steps = span(row.start, row.stop)
    size = "×".join(map(str, row.size))
    return (steps, row.layer.label, row.gemm, size, row.elements, row.backend, row.why)


def render(sections: Iterable[Section], *, full: bool = False, width: int | None = None) -> str:
    """A table per stretch; unless `full`, equal rows of neighbouring blocks are folded into one."""
    parts = []
    for stretch in sections:
        rows = [cells(row)[1:] for row in stretch.rows]
        parts.append(section(stretch.title, rows, stretch.shares, full=full, width=width))
    return "\n\n".join(parts)


def gathers(
    layers: Iterable[LayerPlan],
    shards: int,
    gather: str,
    *,
    fully_gathered: str | None = None,
    blocks: bool = True,
) -> str:
    """A sentence: in which form ranks send each other the weights of the blocks, in how many bytes
    per weight, and why.

    Args:
        layers: the plans of this rank's parts of the layers, in every stretch of a run.
        shards: ranks that share a weight.
        gather: one of `precision.gather.GATHERS`.
        fully_gathered: the option for which blocks take plain weights; None: none.
        blocks: whether there are any.
    """
    sent = gather_mode(gather, fully_gathered=fully_gathered is not None, blocks=blocks)
    start = f"weights of the blocks are gathered from {shards} shards"
    if sent == "fp32":
        if sent == gather:
            asked = "parallel.gather=fp32 asks for it"
        else:
            asked = ""
        reason = asked or (
            f"{fully_gathered} takes plain weights" if fully_gathered else "the model has no blocks"
        )
        return f"{start} in float32 (4 B per weight), because {reason}"
    layers_by_form: dict[str, list[tuple[LayerPlan, WireForm]]] = {}
    inner = [
        plan for plan in layers if plan.layer.block is not None and plan.layer.sources < shards
    ]
    for plan in inner:
        form = wire_form(plan, shards, sent)
        layers_by_form.setdefault(_sent(form, gather), []).append((plan, form))
    parts = []
    for text, group in sorted(layers_by_form.items(), key=lambda item: -len(item[1])):
        names = _where((plan.layer for plan, _ in group), (plan.layer for plan in inner))
        parts.append(f"{names} " * (len(layers_by_form) > 1) + text.format(_bytes(group)))
    return start + (": " if len(layers_by_form) > 1 else " ") + "; ".join(parts)


def _sent(form: WireForm, gather: str) -> str:
    """How a weight travels and why, with a place for its bytes."""
    if form.coded:
        return "as codes and scales ({} B per weight), which keep the bits of one rank"
    name = {torch.float32: "float32", torch.bfloat16: "BF16", torch.float16: "FP16"}[form.dtype]
    if form.rounds:
        why = form.why or f"parallel.gather={gather} asks for it"
        equal = "one rank quantises float32, so digits differ (parallel.gather=fp32 has its bits)"
        return f"in {name} ({{}} B per weight), because {why}; {equal}"
    return f"in {name} ({{}} B per weight), " + (
        f"because {form.why}" if form.why else "in which they are multiplied"
    )


def _bytes(group: list[tuple[LayerPlan, WireForm]]) -> str:
    """The bytes per weight of the gathers for forward and backward, each number once."""
    bytes_of_form = {
        f"{form.bytes(rows, columns, backward=backward) / (rows * columns):.3g}"
        for plan, form in group
        for rows, columns in [
            (max(1, plan.layer.experts) * plan.layer.out_features, plan.layer.in_features)
        ]
        for backward in (False, True)
    }
    return " or ".join(sorted(bytes_of_form))


def shares(macs: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Share of the multiply-adds by elements, the largest first, of (elements, multiply-adds)."""
    counts: Counter[str] = Counter()
    for elements, count in macs:
        counts[elements] += count
    total = counts.total() or 1
    return {elements: count / total for elements, count in counts.most_common()}


def section(
    title: str,
    rows: list[tuple[str, ...]],
    shares: Mapping[str, float],
    *,
    full: bool,
    width: int | None = None,
) -> str:
    """One stretch: its title, the rows of `cells` without their steps, and the shares of the
    multiply-adds.
    """
    shown, notes = _footnotes(rows if full else fold_blocks(rows), width)
    lines = [*tabulate([COLUMNS[1:], *shown], width=width), *notes]
    listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return "\n".join([title, *lines, f"multiply-adds of linear layers: {listed}"])


def fold_blocks(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for the same GEMM of consecutive blocks: "blocks.0–4.mlp.up"."""
    folded: list[tuple[str, list[int], str, list[str]]] = []
    latest: dict[tuple[str, ...], list[int]] = {}
    for name, *cells in rows:
        match = re.fullmatch(r"(.*?)(?<![^.])(\d+)(?![^.])(.*)", name)
        head, number, tail = match.groups() if match else (name, "", "")
        span = latest.get((head, tail, *cells))
        if number and span and span[-1] == int(number) - 1:
            span.append(int(number))
        else:
            latest[head, tail, *cells] = span = [int(number)] if number else []
            folded.append((head, span, tail, cells))
    return [(f"{head}{ranges(span)}{tail}", *cells) for head, span, tail, cells in folded]


def summarise(sections: Iterable[Section], width: int | None = None) -> str:
    """The title of every stretch, and one line per group of equal layers with its share of the
    multiply-adds.

    Args:
        width: characters of a line, for which reasons become footnotes; None: any.
    """
    groups: list[tuple[str, ...]] = []
    titles: list[str] = []
    for title, rows in sections:
        heading = title if width is None else "\n".join(wrapped(title, width))
        total = sum(row.macs for row in rows) or 1
        for gemms, group in _alike(rows):
            share = f"{sum(row.macs for row in group) / total:6.1%}"
            where = _where([row.layer for row in group], [row.layer for row in rows])
            groups.append((where, gemms, group[0].elements, share, group[0].backend, group[0].why))
            titles.append(heading)
    shown, notes = _footnotes(groups, width, indent=2)
    lines = columns(shown, indent="  ", width=width, headings=titles)
    return "\n".join([*lines, *notes])


def _footnotes(
    rows: list[tuple[str, ...]], width: int | None, *, indent: int = 0
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Rows whose last cells, the reasons, are marks, and the reasons below them, where lines exceed
    `width`.
    """
    longest = max(map(len, columns(rows)), default=0) + indent
    if width is None or longest <= width:
        return rows, []
    reasons = list(dict.fromkeys(row[-1] for row in rows if row[-1]))
    marks = {reason: f"[{number}]" for number, reason in enumerate(reasons, 1)}
    notes: list[str] = []
    for reason, mark in marks.items():
        notes += wrapped(f"{' ' * indent}{mark} {reason}", width, " " * 4)
    return [(*row[:-1], marks.get(row[-1], "")) for row in rows], notes


def _alike(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Groups of rows that differ only in their layer, each with the GEMMs that its layers share."""
    by_layer: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_layer.setdefault((row.layer.name, row.elements, row.backend, row.why), []).append(row)
    groups: dict[tuple[object, ...], list[Row]] = {}
    for (_, *cells), layer_names in by_layer.items():
        gemms = " ".join(row.gemm for row in layer_names)
        outside = layer_names[0].layer.block is None
        groups.setdefault((gemms, outside, *cells), []).extend(layer_names)
    return [(str(key[0]), layer_names) for key, layer_names in groups.items()]


def _where(layers: Iterable[Layer], among: Iterable[Layer]) -> str:
    """The position of layers: "blocks 0–4", "mlp.down of blocks 0–4", or their names outside the
    blocks.
    """
    layers = list(dict.fromkeys(layers))
    numbers = {layer.block for layer in layers if layer.block is not None}
    if not numbers:
        return first_few([layer.label for layer in layers], _NAMED)
    text = f"block{'s' * (len(numbers) > 1)} {ranges(numbers)}"
    kinds = list(dict.fromkeys(_kind(layer) for layer in layers))
    if kinds == list(dict.fromkeys(_kind(layer) for layer in among if layer.block is not None)):
        return text
    if len(kinds) <= _NAMED:
        return f"{', '.join(kinds)} of {text}"
    return f"{len(kinds)} layers each of {text}"


def _kind(layer: Layer) -> str:
    """The layer's name within its block."""
    return layer.label.rpartition(f".{layer.block}.")[2]
