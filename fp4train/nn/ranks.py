"""The ranks that hold the parts of a tensor, and their collectives, plain and differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fp4train.quantize import QuantSpec, RandomKey, measure_amax
from fp4train.shards import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks:
    """The ranks that hold the parts of something, and this rank's index among them. Every method
    but `part` is a collective: all ranks call the same ones in the same order. Tensors on the meta
    device get shapes only.

    torch 2.13 has new names for two of its collectives and warns of the old ones.
    """

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        """The ranks of a mesh with one dimension."""
        return cls(group=mesh.get_group(), rank=mesh.get_local_rank(), size=mesh.size())

    def largest(self, amax: Tensor) -> Tensor:
        """The maximum over the ranks, elementwise."""
        if not amax.is_meta:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        return amax

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in the dtype of x."""
        x = x.contiguous()
        if not x.is_meta:
            dist.all_reduce(x, group=self.group)
        return x

    def sum_rows(self, x_MD: Tensor) -> Tensor:
        """This rank's rows [M / size, D] of the sum over the ranks."""
        self._divides(x_MD.shape[0])
        part = x_MD.new_empty(x_MD.shape[0] // self.size, *x_MD.shape[1:])
        if not x_MD.is_meta:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(part, x_MD.contiguous(), group=self.group)
        return part

    def sum_rounded_rows(self, x_MD: Tensor) -> Tensor:
        """`sum_rows` of BF16 in float32, in as many bytes as a reduce-scatter in BF16, which would
        round each partial sum: each rank sends each other one that rank's rows.
        """
        self._divides(x_MD.shape[0])
        received = torch.empty_like(x_MD, memory_format=torch.contiguous_format)
        if not x_MD.is_meta:
            dist.all_to_all_single(received, x_MD.contiguous(), group=self.group)
        return received.view(self.size, -1, *x_MD.shape[1:]).sum(0, dtype=torch.float32)

    def gather_rows(self, x_MD: Tensor) -> Tensor:
        """The rows of all ranks [size · M, D], in the order of the ranks."""
        all_rows = x_MD.new_empty(x_MD.shape[0] * self.size, *x_MD.shape[1:])
        if not x_MD.is_meta:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(all_rows, x_MD.contiguous(), group=self.group)
        return all_rows

    def exchange(self, parts: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The parts [n, …] that the ranks send this one, in their order.

        Args:
            parts: tensors for the ranks, in the order of the ranks.
            sent, received: number of parts to and from each rank.
        """
        result = parts.new_empty(sum(received), *parts.shape[1:])
        if not parts.is_meta:
            splits = (list(received), list(sent))
            dist.all_to_all_single(result, parts.contiguous(), *splits, group=self.group)
        return result

    def objects(self, value: T) -> list[T]:
        """The `value` (plain data, tensors of the host) of each rank."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def part(self, x_MD: Tensor) -> Tensor:
        """This rank's rows of x."""
        self._divides(x_MD.shape[0])
        return x_MD.narrow(0, self.rank * (x_MD.shape[0] // self.size), x_MD.shape[0] // self.size)

    def _divides(self, rows: int) -> None:
        if rows % self.size:
            raise ValueError(
                f"{rows} tokens of a microbatch cannot be cut over {self.size} "
                "tensor-parallel ranks: take a batch "
                f"and sequence length whose product is a multiple of {self.size}, or "
                "parallel.sp=false"
            )


def amax_over(
    amax_ranks: tuple[Ranks, ...], x_RC: Tensor, spec: QuantSpec, key: RandomKey | None = None
) -> Tensor:
    """The amax of a tensor of which this rank holds x: `measure_amax`, and its maximum over the
    groups of ranks.
    """
    amax = measure_amax(x_RC, spec, key)
    for ranks in amax_ranks:
        amax = ranks.largest(amax)
    return amax


def local(parameter: Tensor) -> Tensor:
    """The shard of a DTensor; its gradient has the same placement. A plain tensor is whole."""
    if not is_sharded(parameter):
        return parameter
    result: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return result


class _Whole(Function):
    """The rows of all ranks in forward; in backward this rank's rows of a gradient that all ranks
    have whole.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather_rows(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.part(dy), None


class _Sum(Function):
    """The sum over the ranks, whole or this rank's rows of it; backward gives each rank the
    gradient of all rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, rows: bool, dtype: torch.dtype) -> Tensor:
        ctx.ranks = ranks
        ctx.rows = rows
        ctx.dtype = x.dtype
        return (ranks.sum_rows(x) if rows else ranks.sum(x.clone())).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return (ctx.ranks.gather_rows(dy) if ctx.rows else dy).to(ctx.dtype), None, None, None


class _Exchanged(Function):
    """`Ranks.exchange`; backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: Ranks, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.back = ranks, received, sent
        return ranks.exchange(x, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, sent, received = ctx.back
        return ranks.exchange(dy, sent, received), None, None, None


class _SummedGradient(Function):
    """A parameter that all ranks have whole, each using it for its own tokens: the gradient is
    their sum.
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return w.view_as(w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(dw.float()).to(dw.dtype), None


def all_rows(x_MD: Tensor, ranks: Ranks) -> Tensor:
    """The rows of all ranks; differentiable, for a consumer that computes the same on every
    rank.
    """
    result: Tensor = _Whole.apply(x_MD, ranks)  # type: ignore[no-untyped-call]
    return result


def summed_over(x_MD: Tensor, ranks: Ranks, *, rows: bool, dtype: torch.dtype) -> Tensor:
    """The sum over the ranks in the dtype of x, rounded to `dtype`; differentiable.

    Args:
        rows: whether each rank takes its rows of the sum.
    """
    result: Tensor = _Sum.apply(x_MD, ranks, rows, dtype)  # type: ignore[no-untyped-call]
    return result


def exchanged(x: Tensor, ranks: Ranks, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """See `Ranks.exchange`; differentiable."""
    result: Tensor = _Exchanged.apply(x, ranks, sent, received)  # type: ignore[no-untyped-call]
    return result


def with_summed_gradient(w: Tensor, ranks: Ranks) -> Tensor:
    """w, which every rank has whole and uses for its own tokens."""
    result: Tensor = _SummedGradient.apply(w, ranks)  # type: ignore[no-untyped-call]
    return result
