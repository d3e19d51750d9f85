"""One x that several layers of Transformer Engine read, quantised once for all of them: queries, keys
and values; gate and up.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends.table import Table


class CodesFunction(torch.autograd.Function):
    """The codes of x [M, K] as a tensor whose gradient is that of x; each layer has one of its
    own.
    """

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, codes: Tensor) -> Tensor:
        return codes.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_MK: Tensor) -> tuple[Tensor, None]:
        return dx_MK, None


@dataclass
class QuantisedInput:
    """The codes of one x, for all layers that read it.

    TE's linear layer takes an input that is quantised already, saves it as it is, and leaves its
    memory alone (module/linear.py: `inputmat.update_usage`, `saved_tensor_aliases`, `owns_input`),
    so one copy is saved for the backward passes of all.
    """

    x: Tensor
    version: int
    table: Table
    column: bool
    """Whether backward passes need the column-wise form."""
    codes: Tensor
    given: list[Any] = field(default_factory=list)
    """Codes given to the layers that have read it."""

    def is_of(self, x: Tensor, table: Table, column: bool) -> bool:
        same = self.table is table and self.column is column and self.version == x._version
        return same and self.x.is_set_to(x)

    def give(self, x_MK: Tensor) -> Tensor:
        codes: Tensor
        if x_MK.requires_grad:
            codes = CodesFunction.apply(x_MK, self.codes)  # type: ignore[no-untyped-call]
        else:
            codes = self.codes.detach()
        self.given.append(codes)
        return codes

    def close(self) -> None:
        """Drop the row-wise form, which no backward pass needs; TE does so with codes of its
        own.
        """
        if self.column:
            for codes in self.given:
                codes.update_usage(rowwise_usage=False, columnwise_usage=True)
