"""Where the shard of a layer that lies on several ranks lies in the whole layer.

A tensor's amax is the maximum over all ranks that hold a part of it; the index of an element, which
selects its random bits, counts from the first element of the whole layer. Then the codes of a shard
are the shard of the codes. The out features of a shard may be several runs of the whole layer's,
one in each segment of its weight.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fp4train.backends import Prepared
from fp4train.nn.ranks import Ranks, local
from fp4train.precision.context import Context
from fp4train.precision.recipe import Recipe
from fp4train.precision.recipes.high import BF16, FP16, FP32
from fp4train.quantize import (
    Operand,
    Quantizer,
    QuantSpec,
    RandomKey,
    amax_extent,
    quantised_in_runs,
)
from fp4train.quantize.source import AXES
from fp4train.shards import Runs

Cut = Literal["in", "out", "experts"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerShard:
    """A layer's shard in the whole layer.

    Args:
        tensor: ranks that hold the other shards; None: the layer is not cut.
        cut: "out" or "in", of a group of weights "experts": each rank has some of them whole; None:
            not cut.
        sequence: whether tokens of x ("out") or y ("in") are cut over `tensor`; x and dy are then
            quantised where their tokens are, and codes and scales are sent. Those of experts are
            all gathered, before they are routed.
        rounds_sums: whether partial sums, of y ("in") and dx ("out"), are sent in BF16, with
            `sequence` alone.
        first: index of this rank's first out feature ("out"), expert ("experts") or in feature
            (else).
        sources: ranks of `tensor` whose own microbatches the experts multiply, each apart.
        runs: ranges of this rank's out features in the whole layer's, (first, number) each; none:
            they follow `first`.
    """

    tensor: Ranks | None = None
    cut: Cut | None = None
    sequence: bool = False
    rounds_sums: bool = False
    first: int = 0
    sources: int = 1
    runs: Runs = ()

    def __post_init__(self) -> None:
        if (self.tensor is None) != (self.cut is None):
            raise ValueError(
                f"cut={self.cut!r} with tensor={self.tensor}: a layer that is cut has ranks"
            )

    @property
    def parts(self) -> int:
        """Number of ranks that the layer is cut over."""
        return 1 if self.tensor is None else self.tensor.size

    @property
    def default_context(self) -> Callable[[torch.dtype], Context] | None:
        """The context of the layer outside of any; None: it is nn.Linear there."""
        return None if self.tensor is None else default_context

    def local_part(self, w_NK: Tensor) -> Tensor:
        """This rank's part of a weight."""
        return w_NK if self.tensor is None else local(w_NK)

    @property
    def tokens(self) -> int:
        """Number of ranks that the tokens of a microbatch are cut over."""
        if self.tensor is not None and self.sequence:
            return self.tensor.size
        return 1

    def runs_of(self, tensor: str) -> Runs:
        """The runs of this rank's out features where they are several and rows of w or columns of
        dy.
        """
        if tensor in ("w", "dy") and len(self.runs) > 1:
            return self.runs
        return ()

    def starts(self, tensor: str) -> tuple[int, int]:
        """(row, column) of this rank's first element in the whole w, or in the whole x or dy
        without its tokens.
        """
        if tensor == "w":
            if self.cut == "out":
                return (self.first, 0)
            return (0, self.first)
        along = self.cut or "in"
        if along == ("in" if tensor == "x" else "out"):
            return (0, self.first)
        return (0, 0)

    def amax_ranks(
        self, tensor: str, spec: QuantSpec, *, transposed: bool = False, tokens: bool = False
    ) -> tuple[Ranks, ...]:
        """The ranks over which the amax of x [M, K], w [N, K] or dy [M, N] is taken, in groups.

        Args:
            transposed: whether the transposed tensor is quantised, so that an amax per row is one
                per column.
            tokens: whether the tensor is this rank's tokens, and `tensor` holds the others.
        """
        extent = amax_extent(spec)
        if extent is None or self.tensor is None:
            return ()
        rows, columns = AXES[tensor]
        covers: dict[str, bool] = {rows: extent == "tensor" or transposed}
        covers[columns] = extent == "tensor" or not transposed
        if covers.get("tokens" if tokens else str(self.cut)):
            return (self.tensor,)
        return ()

    def amax_and_rounding_ranks(
        self, operand: Operand, *, tokens: bool = False
    ) -> tuple[tuple[Ranks, ...], tuple[Ranks, ...]]:
        """`amax_ranks` of the codes of an operand, and those of what they requantise, along the
        other axis.
        """
        codes = operand.codes
        transposed = operand.transposed
        if codes is None:
            return (), ()
        ranks = self.amax_ranks(operand.tensor, codes.spec, transposed=transposed, tokens=tokens)
        if codes.of is None:
            return ranks, ()
        return ranks, self.amax_ranks(
            operand.tensor, codes.of.spec, transposed=not transposed, tokens=tokens
        )


WHOLE = LayerShard()
"""The place of a layer that is whole and alone."""


class RunsQuantizer:
    """Quantises a tensor with the random bits of features that do not follow each other.

    Args:
        plain: quantizer of its spec, which requantises nothing.
        runs: runs of the features within the whole layer's.
        columns: whether features are columns.
        codes: whether codes are made; else values.
    """

    def __init__(self, plain: Quantizer, runs: Runs, *, columns: bool, codes: bool) -> None:
        self._plain = plain
        self._runs = runs
        self._columns = columns
        self._codes = codes

    def __call__(self, x: Tensor, key: RandomKey, amax: Tensor | None) -> Prepared:
        codes = quantised_in_runs(x, self._plain.spec, key, self._runs, amax, columns=self._columns)
        return codes if self._codes else self._plain.decode(codes)


@functools.cache
def default_context(dtype: torch.dtype) -> Context:
    """The context of a cut layer outside of any: its GEMMs in the dtype of the input."""
    recipes: dict[torch.dtype, Recipe] = {torch.bfloat16: BF16(), torch.float16: FP16()}
    return Context(recipe=recipes.get(dtype, FP32()))
