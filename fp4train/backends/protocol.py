"""What a backend is: who multiplies the operands of a GEMM, or a whole linear layer.

    why_not(table, gemm, layer, device)   the reason why it cannot run this GEMM there, or None
    prepare(x, spec)                      an operand in the form that it multiplies
    product(a, b)                         a·bᵀ of two such operands
    region(tables)                        what must surround a forward pass; nothing for most

A `Backend` multiplies single GEMMs. A `LayerBackend` has kernels for the three GEMMs of a layer together and makes a
`LayerKernels` for each layer; it says of a table as a whole why it cannot run it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from fp4train.backends.table import Shape, Table
from fp4train.hardware import Device
from fp4train.quantize import Decoded, Quantized, QuantSpec, RandomKey

Prepared: TypeAlias = Decoded | Quantized
"""An operand as a backend multiplies it: values, or codes and scales."""


class Backend(Protocol):
    """Multiplies operands that are blocked along their last axis."""

    name: str
    takes_codes: bool
    """Whether a quantised operand is prepared as codes and scales (`Quantized`); else as values (`Decoded`)."""

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        """Why it cannot run `gemm` of `table` in a layer of this shape on `device`, or None where it can."""
        ...

    def prepare(
        self, x_RC: Tensor, spec: QuantSpec | None, *, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Prepared:
        """x [R, C] as it is multiplied: quantised by `spec`, or as it is where that is None."""
        ...

    def product(self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """a [R, C]·b [S, C]ᵀ + bias [S] → [R, S] in `out_dtype`."""
        ...


class LayerKernels(Protocol):
    """The kernels of one layer."""

    name: str

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, table: Table) -> Tensor:
        """y [*, N] of x [*, K] in the table's dtype; its gradients through autograd."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What delayed scaling has seen, for checkpoints; empty without it."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave."""
        ...


class LayerBackend(Protocol):
    """Runs the three GEMMs of a linear layer together.

    name: as `backend=` knows it; title: as people know it.
    """

    name: str
    title: str

    def why_not(self, table: Table, layer: Shape, device: Device) -> str | None:
        """Why it cannot run `table` in a layer of this shape on `device`, or None where it can."""
        ...

    def kernels(self, *, in_features: int, out_features: int, bias: bool, name: str) -> LayerKernels:
        """The kernels of one layer; nothing is imported or allocated before they run."""
        ...

    def region(self, tables: Iterable[Table]) -> AbstractContextManager[None]:
        """What must surround one forward pass of a model whose layers run `tables`."""
        ...
