"""The protocols of backends, which execute single GEMMs or whole linear layers.

    why_not(table, gemm, layer, device)   why the backend cannot run this GEMM there, or None
    takes_codes                           whether it multiplies codes and scales (`Quantized`), or values (`Decoded`)
    product(a, b)                         a·bᵀ of two such operands
    region(tables)                        context manager around a forward pass; no effect for most

A `Backend` executes single GEMMs. A `LayerBackend` has kernels for the three GEMMs of a layer together and creates one
`LayerKernels` per layer; its `why_not` is about the whole table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from fp4train.backends.table import Shape, Table
from fp4train.hardware import Device
from fp4train.quantize import Decoded, Quantized, QuantSpec

Prepared: TypeAlias = Decoded | Quantized
"""An operand ready for a product: decoded values, or codes and scales."""


class Backend(Protocol):
    """Multiplies operands that are blocked along their last axis."""

    name: str
    takes_codes: bool
    """Whether a quantised operand is prepared as codes and scales (`Quantized`); else as values (`Decoded`)."""

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        """Why it cannot run `gemm` of `table` in a layer of this shape on `device`; None if it can."""
        ...

    def product(self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """a [R, C]·b [S, C]ᵀ + bias [S] → [R, S] in `out_dtype`."""
        ...

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        """Whether products of operands with this spec can be written in float32, besides the recipe's dtype."""
        ...


class LayerState(Protocol):
    """What a layer carries from step to step, and from checkpoint to checkpoint."""

    def state(self) -> dict[str, Tensor]:
        """The tensors to save; empty where nothing has been seen yet."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`."""
        ...


class LayerKernels(LayerState, Protocol):
    """The kernels of one layer; their state is that of delayed scaling."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, table: Table, *, position: tuple[int, int] | None = None
    ) -> Tensor:
        """y [*, N] of x [*, K] in the table's dtype; gradients through autograd.

        position: (seed, step), within which the weight does not change, so that it is quantised once; None: it may
        have changed since the last call.
        """
        ...


class LayerBackend(Protocol):
    """Runs the three GEMMs of a linear layer together.

    name: value of `backend=`; title: name in messages.
    """

    name: str
    title: str

    def why_not(self, table: Table, layer: Shape, device: Device) -> str | None:
        """Why it cannot run `table` in a layer of this shape on `device`; None if it can."""
        ...

    def kernels(self, name: str) -> LayerKernels:
        """The kernels of the layer of this name; nothing is imported or allocated before the first call."""
        ...

    def region(self, tables: Iterable[Table]) -> AbstractContextManager[None]:
        """Context manager around one forward pass of a model whose layers run `tables`."""
        ...
