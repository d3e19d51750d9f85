"""Transformer Engine (TE) as a backend: the only package that knows TE's API.

    availability   is TE installed, which version, what can this GPU do: reasons, never tracebacks
    quantizers     one quant spec → the TE quantiser that computes exactly it, and the factory for TE's `CustomRecipe`
    translate      a table of six operands → a TE recipe object, or why TE cannot run it
    executor       a layer's GEMMs on TE's kernels; `fp4train.nn.Linear` holds one

TE is imported when it is first needed, never by `import fp4train`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from fp4train.backends.table import Shape, Table
from fp4train.backends.te.availability import why_not_device
from fp4train.backends.te.executor import TEExecutor, region
from fp4train.backends.te.quantizers import QuantizerFactory
from fp4train.backends.te.translate import to_te, why_not
from fp4train.hardware import Device

__all__ = [
    "TRANSFORMER_ENGINE",
    "QuantizerFactory",
    "TEExecutor",
    "TransformerEngine",
    "region",
    "to_te",
    "why_not",
    "why_not_device",
]


class TransformerEngine:
    """The three GEMMs of a layer on TE's kernels."""

    name, title = "te", "Transformer Engine"

    def why_not(self, table: Table, layer: Shape, device: Device) -> str | None:
        return why_not(table, layer, device)

    def kernels(self, name: str) -> TEExecutor:
        return TEExecutor(name=name)

    def region(self, tables: Iterable[Table]) -> AbstractContextManager[None]:
        return region(*tables)


TRANSFORMER_ENGINE = TransformerEngine()
