"""Where a layer's shard lies in the whole layer, and the collectives over the ranks that hold the rest.

Tensor parallelism (arXiv:1909.08053) cuts a layer y = x·wᵀ along its out features ("out") or in features ("in"):

| cut | x | w | y | what is summed over the ranks |
|---|---|---|---|---|
| out | whole | [N/p, K] | [M, N/p] | dx, after dgrad |
| in | [M, K/p] | [N, K/p] | whole | y, after fprop |

With `sequence` (arXiv:2205.05198) the whole activations, x of "out" and y of "in", are cut along tokens between layers:
they are gathered before a GEMM, and the sum leaves each rank its tokens. Partial sums are added in float32 and rounded
once, as a single rank rounds its product.

A tensor's amax is the maximum over all ranks that hold a part of it; the index of an element, which selects its random
bits, counts from the first element of the whole layer. Then the codes of a shard are the shard of the codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.quantize import QuantSpec, RandomKey, amax_extent, measure_amax
from fp4train.text import check_choice

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Cut = Literal["in", "out"]
AMAXES = ("tp", "data", "local")
GATHERS = ("recipe", "bf16")

_CUT_AXIS: dict[tuple[str, str | None], str] = {
    ("x", "in"): "columns",
    ("w", "in"): "columns",
    ("w", "out"): "rows",
    ("dy", "out"): "columns",
}
"""The axis of x [M, K], w [N, K] or dy [M, N] along which a cut divides it; tokens are rows of x and dy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks:
    """The ranks that hold the parts of something, and this rank's index among them. Every method but `part` is a
    collective: all ranks call the same ones in the same order. Tensors on the meta device get shapes only.

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

    def gather_rows(self, x_MD: Tensor) -> Tensor:
        """The rows of all ranks [size · M, D], in the order of the ranks."""
        whole = x_MD.new_empty(x_MD.shape[0] * self.size, *x_MD.shape[1:])
        if not x_MD.is_meta:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(whole, x_MD.contiguous(), group=self.group)
        return whole

    def part(self, x_MD: Tensor) -> Tensor:
        """This rank's rows of x."""
        self._divides(x_MD.shape[0])
        return x_MD.narrow(0, self.rank * (x_MD.shape[0] // self.size), x_MD.shape[0] // self.size)

    def _divides(self, rows: int) -> None:
        if rows % self.size:
            raise ValueError(
                f"{rows} tokens of a microbatch cannot be cut over {self.size} tensor-parallel ranks: take a batch "
                f"and sequence length whose product is a multiple of {self.size}, or parallel.sp=false"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """A layer's shard in the whole layer.

    Args:
        tensor: ranks that hold the other shards; None: the layer is not cut.
        cut: "out" or "in"; None: not cut.
        sequence: whether tokens of x ("out") or y ("in") are cut over `tensor`.
        first: index of this rank's first out feature ("out") or in feature ("in"; not cut: that of a part of them).
        data: ranks that hold the same shard and other tokens; None: there are none.
        amax: whose values the amax of a tensor covers. "tp": those of the ranks that hold its other shards; "data":
            also those of `data`; "local": this rank's alone, and the result depends on the cut. The amaxes of delayed
            scaling are joined over all ranks in any case (`nn.scaling`).
        gather: "recipe": with `sequence`, x and dy are quantised where their tokens are, and codes and scales are sent
            (`nn.token_shards`); "bf16": they are sent in the dtype of the activations.
    """

    tensor: Ranks | None = None
    cut: Cut | None = None
    sequence: bool = False
    first: int = 0
    data: Ranks | None = None
    amax: str = "tp"
    gather: str = "recipe"

    def __post_init__(self) -> None:
        if (self.tensor is None) != (self.cut is None):
            raise ValueError(f"cut={self.cut!r} with tensor={self.tensor}: a layer that is cut has ranks")
        check_choice("amax", self.amax, AMAXES)
        check_choice("gather", self.gather, GATHERS)

    @property
    def gathers(self) -> Ranks | None:
        """The ranks from which x is gathered before fprop, and over which dx is summed; None if x is not whole."""
        return self.tensor if self.cut == "out" else None

    @property
    def sums(self) -> Ranks | None:
        """The ranks over which y is summed after fprop, and from which dy is gathered; None if y is not summed."""
        return self.tensor if self.cut == "in" else None

    @property
    def sends_codes(self) -> bool:
        """Whether tokens are gathered as codes."""
        return self.tensor is not None and self.sequence and self.gather == "recipe"

    def starts(self, tensor: str) -> tuple[int, int]:
        """(row, column) of this rank's first element in the whole w, or in the whole x or dy without its tokens."""
        if tensor == "w":
            return (self.first, 0) if self.cut == "out" else (0, self.first)
        along = self.cut or "in"
        return (0, self.first) if along == ("in" if tensor == "x" else "out") else (0, 0)

    def at_feature(self, first: int) -> Place:
        """The place of a part of the in features of a layer that is not cut, whose first one is `first`."""
        assert self.cut is None
        return replace(self, first=first)

    def holders(
        self, tensor: str, spec: QuantSpec, *, transposed: bool = False, tokens: bool = False
    ) -> tuple[Ranks, ...]:
        """The ranks over which the amax of x [M, K], w [N, K] or dy [M, N] is taken, in groups.

        Args:
            transposed: whether the transposed tensor is quantised, so that an amax per row is one per column.
            tokens: whether the tensor is this rank's tokens, and `tensor` holds the others: they are gathered, so they
                share an amax even with amax="local".
        """
        extent = amax_extent(spec)
        if extent is None or (self.amax == "local" and not tokens):
            return ()
        covers = {"rows": extent == "tensor" or transposed, "columns": extent == "tensor" or not transposed}
        found = []
        if self.tensor is not None and covers.get("rows" if tokens else _CUT_AXIS.get((tensor, self.cut), "")):
            found.append(self.tensor)
        if self.amax == "data" and self.data is not None and tensor != "w" and covers["rows"]:
            found.append(self.data)
        return tuple(found)

    @property
    def tokens(self) -> int:
        """Over how many ranks the tokens of a microbatch are cut."""
        return self.tensor.size if self.tensor is not None and self.sequence else 1

    def holders_before(
        self, tensor: str, spec: QuantSpec, *, transposed: bool = False, tokens: bool = False
    ) -> tuple[Ranks, ...]:
        """The same for the amax of what `spec.requantises` rounds, along the other axis."""
        if spec.requantises is None:
            return ()
        return self.holders(tensor, spec.requantises, transposed=not transposed, tokens=tokens)

    def whole_input(self, x_MK: Tensor) -> Tensor:
        """x of all tokens, before fprop."""
        ranks = self.gathers
        return x_MK if ranks is None or not self.sequence else ranks.gather_rows(x_MK)

    def whole_output(self, y_MN: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
        """y from the float32 partial sums of an "in" cut; with `sequence`, this rank's tokens of it."""
        assert self.tensor is not None
        y_MN = self.tensor.sum_rows(y_MN) if self.sequence else self.tensor.sum(y_MN)
        return (y_MN if bias_N is None else y_MN + bias_N.to(dtype)).to(dtype)

    def whole_dy(self, dy_MN: Tensor) -> Tensor:
        """dy of all tokens, before dgrad and wgrad."""
        ranks = self.sums
        return dy_MN if ranks is None or not self.sequence else ranks.gather_rows(dy_MN)

    def whole_dx(self, dx_MK: Tensor) -> Tensor:
        """dx from the float32 partial sums of an "out" cut; with `sequence`, this rank's tokens of it."""
        ranks = self.gathers
        if ranks is None:
            return dx_MK
        return ranks.sum_rows(dx_MK) if self.sequence else ranks.sum(dx_MK)

    def shape_of(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """A product on the meta device, without collectives: shapes and gradients only."""
        tokens = self.tokens
        x_MK = x_MK.repeat(tokens, 1) if self.cut == "out" else x_MK
        y_MN = torch.nn.functional.linear(x_MK, w_NK.to(x_MK.dtype))
        return y_MN.narrow(0, 0, y_MN.shape[0] // tokens) if self.cut == "in" else y_MN


def amax_over(holders: tuple[Ranks, ...], x_RC: Tensor, spec: QuantSpec, key: RandomKey | None = None) -> Tensor:
    """The amax of a tensor of which this rank holds x: `measure_amax` on all of `holders`."""
    amax = measure_amax(x_RC, spec, key)
    for ranks in holders:
        amax = ranks.largest(amax)
    return amax


def local(parameter: Tensor) -> Tensor:
    """The shard of a DTensor; its gradient has the same placement."""
    result: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return result


class _Part(torch.autograd.Function):
    """This rank's rows in forward; in backward the gradients of all rows are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.part(x).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather_rows(dy), None


class _Whole(torch.autograd.Function):
    """The rows of all ranks in forward; in backward this rank's rows of a gradient that all ranks have whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather_rows(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.part(dy), None


class _SummedGradient(torch.autograd.Function):
    """A parameter that all ranks have whole, each using it for its own tokens: the gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return w.view_as(w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(dw.float()).to(dw.dtype), None


def part_of_rows(x_MD: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of x [M, D], which every rank has whole; differentiable."""
    result: Tensor = _Part.apply(x_MD, ranks)  # type: ignore[no-untyped-call]
    return result


def all_rows(x_MD: Tensor, ranks: Ranks) -> Tensor:
    """The rows of all ranks; differentiable, for a consumer that computes the same on every rank."""
    result: Tensor = _Whole.apply(x_MD, ranks)  # type: ignore[no-untyped-call]
    return result


def with_summed_gradient(w: Tensor, ranks: Ranks) -> Tensor:
    """w, which every rank has whole and uses for its own tokens."""
    result: Tensor = _SummedGradient.apply(w, ranks)  # type: ignore[no-untyped-call]
    return result
