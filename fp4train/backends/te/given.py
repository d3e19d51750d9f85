"""x and dy whose codes were made elsewhere, as TE's tensors: of norms and gates that quantise their results.

TE's norms and gates take a quantiser themselves, as its LayerNormLinear and LayerNormMLP give them one. But most write
BF16 first, and quantise that (2.20: csrc/extensions/normalization.cpp rmsnorm_fwd, activation.cpp activation_helper):

    recipe                    norm                       silu(gate) ⊙ up, and its gradients, of one [gate, up]
    NVFP4, transformed        BF16, two reads            BF16, two reads
    NVFP4, FP8 current        BF16 and its amax          BF16 and its amax
    FP8 in blocks             BF16                       BF16
    MXFP8                     BF16; codes by cuDNN, if   codes
                              NVTE_NORM_FWD_USE_CUDNN=1
    FP8 delayed               codes                      codes

So NVFP4's codes come from fp4train's kernels, which write none of it in BF16 (`quantize/produced.py`): packed in pairs,
the column-wise form transposed, scales in tiles of 128×4, each form with its amax, which is how TE's products take them
(tensor/nvfp4_tensor.py; `with_gemm_swizzled_scales`). They are TE's own codes (the formula of `QuantSpec`), but for the
random bits of dy, which are fp4train's. TE's column-wise MXFP8 lies along the features, as no kernel here writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends.protocol import Forms
from fp4train.backends.table import Table
from fp4train.backends.te.quantizers import family, forms, quantizer
from fp4train.backends.te.translate import shares_codes, to_te
from fp4train.quantize import Quantized, QuantSpec

_WRITTEN = {
    "mxfp8": "write MXFP8 without BF16 only where gate and up are one product",
    "fp8_delayed": "enter an amax into the history of one layer",
}
"""Habits of TE's kernels of norms and gates, where they do not write BF16 in any case."""


def why_not(table: Table) -> str | None:
    """Why layers that run `table` take no codes of x and dy; None: they do."""
    kinds = {family(spec) for slot in ("input", "grad_output") for spec in forms(table)[slot] if spec is not None}
    if kinds != {"nvfp4"}:
        kind = next(iter(sorted(kinds - {"nvfp4"})), "")
        how = _WRITTEN.get(kind, "write BF16 before they quantise it")
        return (
            f"Transformer Engine's kernels of norms and gates {how}, and its {kind} codes lie as no other writes them"
        )
    if not shares_codes(to_te(table)):
        return "Transformer Engine older than 2.19, or with a recipe of single quantisers, takes no codes"
    return None


def tensor(made: Forms, shape: Sequence[int]) -> Tensor:
    """TE's NVFP4 tensor of this shape."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor

    row, column = made
    assert row.amax is not None and column.amax is not None
    found: Tensor = NVFP4Tensor(
        shape=row.shape,
        dtype=torch.bfloat16,
        rowwise_data=row.codes.view(torch.uint8),
        rowwise_scale_inv=_scales(row),
        columnwise_data=column.codes.view(torch.uint8),
        columnwise_scale_inv=_scales(column),
        amax_rowwise=row.amax.reshape(1),
        amax_columnwise=column.amax.reshape(1),
        quantizer=(own := _quantizer(column.spec)),
        fp4_dtype=own.dtype,
        with_gemm_swizzled_scales=True,
        device=row.codes.device,
    )
    return found if tuple(shape) == row.shape else found.view(tuple(shape))


@cache
def _quantizer(spec: QuantSpec) -> Any:
    """The quantizer that the tensor names: the column-wise form carries the transform."""
    return quantizer(spec, "bfloat16")


def _scales(form: Quantized) -> Tensor:
    """uint8 [rows, blocks of a row], filled up to tiles: the order within is that of the tiles."""
    return form.scales.view(torch.uint8).view(-(-form.shape[0] // 128) * 128, -1)


class CodesFunction(torch.autograd.Function):
    """The codes of x [M, K] as a tensor whose gradient is that of x; each layer has one of its own."""

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

    TE's linear layer takes an input that is quantised already, saves it as it is, and leaves its memory alone
    (module/linear.py: `inputmat.update_usage`, `saved_tensor_aliases`, `owns_input`), so one copy is saved for the
    backward passes of all.
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
        codes: Tensor = CodesFunction.apply(x_MK, self.codes) if x_MK.requires_grad else self.codes.detach()  # type: ignore[no-untyped-call]
        self.given.append(codes)
        return codes

    def close(self) -> None:
        """Drop the row-wise form, which no backward pass needs; TE does so with codes of its own."""
        for codes in self.given if self.column else ():
            codes.update_usage(rowwise_usage=False, columnwise_usage=True)


def give(cache: dict[str, Any], x_MK: Tensor, table: Table, codes: Tensor) -> None:
    """Let the layers that run `table` and share `cache` take the codes, TE's tensor, where they are called with x."""
    cache["te"] = QuantisedInput(x_MK, x_MK._version, table, True, codes)
