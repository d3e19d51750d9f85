"""Transformer Engine (TE) as a backend: the only package that knows TE's API.

    availability   is TE installed, which version, what can this GPU do: reasons, never tracebacks
    quantizers     one quant spec → the TE quantiser that computes exactly it, and the factory for TE's `CustomRecipe`
    translate      a table of six operands → a TE recipe object, or why TE cannot run it
    executor       a layer's GEMMs on TE's kernels; `fp4train.nn.Linear` holds one
    shared_input   an x that several layers read, quantised once for all of them
    weights        weights that shards gather as codes, as TE's tensors
    experts        those of a layer of experts
    observed       what TE's GEMMs multiply, shown to an audit

TE is imported when it is first needed, never by `import fp4train`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from fp4train.backends.protocol import Multiplied, ProductWatcher
from fp4train.backends.table import Operands, Shape, Table
from fp4train.backends.te.availability import why_not_device
from fp4train.backends.te.executor import TEExecutor, region
from fp4train.backends.te.experts import TEExperts
from fp4train.backends.te.observed import Watcher, why_not_shown
from fp4train.backends.te.quantizers import QuantizerFactory
from fp4train.backends.te.translate import (
    shares_codes,
    to_te,
    why_not,
    why_values,
)
from fp4train.hardware import Device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TransformerEngine:
    """The three GEMMs of a layer on TE's kernels."""

    name = "te"
    title = "Transformer Engine"

    def why_not(self, table: Table, layer: Shape, device: Device) -> str | None:
        return why_not(table, layer, device)

    def sums_fast(self, operands: Operands, gemm: str) -> bool:
        return operands.accumulator == "fast" or (
            operands.accumulator == "auto" and gemm == "fprop"
        )

    def shares_input(self, table: Table, device: Device) -> bool:
        return table.quantised and shares_codes(table, here=device.here)

    def why_values(self, table: Table, layer: Shape, device: Device) -> str | None:
        return why_values(table, layer, device)

    def why_not_shown(self, table: Table) -> str | None:
        return why_not_shown(table)

    def watcher(
        self,
        report: Callable[[Multiplied], None],
        guarding: Callable[[], AbstractContextManager[None]],
    ) -> ProductWatcher:
        return Watcher(report, guarding)

    def kernels(self, name: str) -> TEExecutor:
        return TEExecutor(name=name)

    def expert_kernels(self, name: str) -> TEExperts:
        return TEExperts(name=name)

    def region(
        self, tables: Iterable[Table], ranks: ProcessGroup | None
    ) -> AbstractContextManager[None]:
        return region(*tables, ranks=ranks)


TRANSFORMER_ENGINE = TransformerEngine()
