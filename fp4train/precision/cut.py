"""Which GEMMs of a layer's shard cannot be quantised: those with an operand whose blocks the cut divides.

A shard quantised on its own blocks would round differently from the whole layer, and the loss would depend on the
number of ranks. Such a GEMM stays in high precision, and the plan names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp4train.backends import OPERANDS, Operands
from fp4train.precision.layers import Layer
from fp4train.quantize import why_not_cut


def misaligned(layer: Layer, table: Mapping[str, Operands]) -> dict[str, str]:
    """GEMM → why the cut of `layer` divides blocks of one of its operands; empty for a layer that is whole."""
    found: dict[str, str] = {}
    if layer.cut is None:
        return found
    for gemm, operands in table.items():
        for name, spec in zip(OPERANDS[gemm], (operands.first, operands.second), strict=True):
            for extent, columns in _cuts(layer, gemm, name):
                reason = None if spec is None else why_not_cut(spec, extent, columns=columns)
                if reason is not None:
                    found.setdefault(gemm, f"{_whole(layer)} over {layer.parts} ranks: {reason} ({name})")
    return found


def _whole(layer: Layer) -> str:
    size = layer.out_features if layer.cut == "out" else layer.in_features
    return f"{size * layer.parts} {layer.cut} features"


def _cuts(layer: Layer, gemm: str, name: str) -> Iterator[tuple[int, bool]]:
    """(size of a shard, whether it lies along the blocked axis) of an operand that the cut divides."""
    extent = layer.out_features if layer.cut == "out" else layer.in_features
    if name == "x" and layer.cut == "in":
        yield extent, gemm == "fprop"
    if name == "dy" and layer.cut == "out":
        yield extent, gemm == "dgrad"
    if name == "w":
        yield extent, (layer.cut == "in") == (gemm == "fprop")
