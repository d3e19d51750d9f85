"""The protocols of backends, which execute single GEMMs or whole linear layers.

    why_not(table, gemm, layer, device)   why the backend cannot run this GEMM there, or None
    takes_codes                           whether it multiplies codes and scales (`Quantized`), or values (`Decoded`)
    product(a, b)                         a·bᵀ of two such operands
    region(tables, ranks)                 context manager around the passes of a step; no effect for most

A `Backend` executes single GEMMs. A `LayerBackend` has kernels for the three GEMMs of a layer
together and creates one `LayerKernels` per layer; its `why_not` is about the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fp4train.backends.table import Operands, Shape, Table
from fp4train.hardware import Device
from fp4train.quantize import QuantSpec
from fp4train.quantize.quantized import Prepared as Prepared

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Backend(Protocol):
    """Multiplies operands that are blocked along their last axis."""

    name: str
    takes_codes: bool
    """Whether a quantised operand is prepared as codes and scales (`Quantized`); else as values
    (`Decoded`).
    """

    takes_tiles: bool
    """Whether codes are prepared with block scales in tiles (`Quantized.tiled`)."""

    adds: bool
    """Whether `add` is one product on GPUs; else a product and a sum."""

    @property
    def both(self) -> Any:
        """Method that makes the two products of a backward pass on a GPU of fewer launches, or
        returns None (`Emulate.both`); None: the backend has none.
        """

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        """Why it cannot run `gemm` of `table` in a layer of this shape on `device`; None if it
        can.
        """

    def product(
        self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """a [R, C]·b [S, C]ᵀ + bias [S] → [R, S] in `out_dtype`."""

    def add(self, total_RS: Tensor, a: Prepared, b: Prepared) -> None:
        """Add a·bᵀ [R, S] to a float32 sum, in place."""

    def summing(self, accumulator: str) -> Backend:
        """This backend with the accumulator that `Operands` names; itself where it has one only."""

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        """Whether products of operands with this spec can be written in float32, besides the
        recipe's dtype.
        """


class DataRanks(Protocol):
    """The ranks that train a model: elementwise reductions, which every rank calls."""

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over all ranks."""

    def summed_over_data(self, x: Tensor) -> Tensor:
        """The sum over the ranks with other tokens."""


SavedTensor: TypeAlias = tuple[torch.dtype, int, bool]
"""The dtype and the dimensions of a saved tensor, and whether it must be finite."""


class LayerState(Protocol):
    """State of a layer that outlives a step, and is saved in checkpoints.

    Attributes:
        kind: its name among the states of a layer.
        prefixed: whether the names of its tensors in a checkpoint begin with its kind and a dot.
        tensors: name of a tensor, up to the first dot, and what it must be; others are not checked.
        joined: whether the loop joins it over the ranks (`join`); else each call does so by itself.
        common: data that the states of a model's layers have in common, by keys of their own.
    """

    kind: ClassVar[str]
    prefixed: ClassVar[bool] = True
    tensors: ClassVar[Mapping[str, SavedTensor]] = {}
    joined: bool = False
    common: Any = None

    def state(self) -> dict[str, Tensor]:
        """The tensors to save; empty where nothing has been seen yet."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`."""

    @staticmethod
    def join(states: Sequence[Any], ranks: DataRanks) -> None:
        """Join states of this kind over the ranks after the last backward of a step; nothing to do
        for most.

        Args:
            states: states of all layers; every rank gives the same ones in the same order.
        """
        return None


class Readers(NamedTuple):
    """The layers that read one x in one forward pass, in turn: queries, keys and values; gate and
    up.

    cache: of the pass, for what they share; layers: how many they are.
    """

    cache: dict[str, Any]
    layers: int


class KernelCall(NamedTuple):
    """What a call of a layer's kernels shares with other calls and layers.

    Attributes:
        constant: forms of weights that calls share (`precision.settings.ConstantWeights`); None: nothing,
            as the weight may have changed since the last call.
        into: gives, in backward, the float32 [N, K] to which dw is added, of the node of the graph
            to which autograd would give dw; None: dw is returned, in the table's dtype.
        freed: whether the memory of the weight is freed after the call and filled again before its
            backward pass, so that nothing as large as it may be kept in between.
        readers: the layers that read this x; None: only this one.
        codes: gives the weight as it was quantised elsewhere, in forward w [N, K] for fprop
            (False), in backward wᵀ [K, N] for dgrad (True); the weight has only its shape and
            gradient then. None: the kernels quantise it.
    """

    constant: dict[object, Any] | None = None
    into: Callable[[Any], Tensor] | None = None
    freed: bool = False
    readers: Readers | None = None
    codes: Callable[[bool], Prepared] | None = None


ALONE = KernelCall()
"""A call that shares nothing."""


class LayerKernels(LayerState, Protocol):
    """The kernels of one layer; their state is that of delayed scaling."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        table: Table,
        call: KernelCall = ALONE,
    ) -> Tensor:
        """y [*, N] of x [*, K] in the table's dtype; gradients through autograd."""


class ExpertKernels(LayerState, Protocol):
    """The kernels of a layer of experts."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        table: Table,
        counts: Sequence[int],
        *,
        into: Callable[[Any], Tensor] | None = None,
    ) -> Tensor:
        """y [M, N] of x [M, K], sorted by expert, in the table's dtype; gradients through autograd.

        weight: [E, N, K]; bias: [E, N] or None.
        counts: rows of each expert; those of y after their sum are zero.
        into: as in `KernelCall`, float32 [E, N, K].
        """


class NotShownError(Exception):
    """What a backend multiplied cannot be shown; the message says why."""


class Multiplied(NamedTuple):
    """One product that a backend computed: first [R, C] · second [S, C]ᵀ + bias [S].

    first, second: copies, blocked along their last axis; of square blocks each row has its scales.
    before: the sum to which it was added; None: it stands alone.
    """

    gemm: str
    first: Prepared
    second: Prepared
    result: Tensor
    bias: Tensor | None
    before: Tensor | None


class ProductWatcher(Protocol):
    """Reports the products that a backend multiplies while it watches; no bit changes."""

    def begin(self) -> None:
        """Watch the products that follow, in place of an earlier watcher."""

    def end(self) -> None:
        """Watch no more."""


class LayerBackend(Protocol):
    """Runs the three GEMMs of a linear layer together.

    name: value of `backend=`, and key in the cache of `Readers` of what it shares; title: name in
        messages.
    """

    name: str
    title: str

    def why_not(self, table: Table, layer: Shape, device: Device) -> str | None:
        """Why it cannot run `table` in a layer of this shape on `device`; None if it can."""

    def sums_fast(self, operands: Operands, gemm: str) -> bool:
        """Whether it sums this product, one that `Operands.sums_fp8`, in the fast accumulator."""

    def shares_input(self, table: Table, device: Device) -> bool:
        """Whether it quantises an x that several layers read once for all."""

    def why_values(self, table: Table, layer: Shape, device: Device) -> str | None:
        """Why its kernels of a layer on `device` that runs `table` take no codes of the weight
        (`LayerKernels`), so that they must have its values; None: they take them.
        """

    def why_not_shown(self, table: Table) -> str | None:
        """Why the products of a layer that runs `table` cannot be shown to an audit; None: they
        can.
        """

    def watcher(
        self,
        report: Callable[[Multiplied], None],
        guarding: Callable[[], AbstractContextManager[None]],
    ) -> ProductWatcher:
        """A watcher of products that gives each to `report`.

        guarding: context in which it reads them, and which lets nothing out that they raise.
        """

    def kernels(self, name: str) -> LayerKernels:
        """The kernels of the layer of this name; nothing is imported or allocated before the first
        call.
        """

    def expert_kernels(self, name: str) -> ExpertKernels:
        """The kernels of a layer of experts that has this name, as `kernels` gives those of a
        linear layer.
        """

    def region(
        self, tables: Iterable[Table], ranks: ProcessGroup | None
    ) -> AbstractContextManager[None]:
        """Context manager around the passes of a step of a model whose layers run `tables`, and
        which `ranks` share (None: all); within itself it does nothing.
        """
