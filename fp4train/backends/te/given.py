"""x and dy that norms and gates quantise where they are made, as TE's tensors.

TE's norms take a quantiser themselves, as its LayerNormLinear gives them one. But most write BF16
first, and quantise that (2.20: csrc/extensions/normalization.cpp rmsnorm_fwd, `Impl::UNFUSED` and
`FUSED_…_AMAX`):

    recipe                      norm
    NVFP4 with a transform      BF16, read twice
    NVFP4 without, FP8 current  BF16 and its amax
    FP8 in blocks               BF16
    MXFP8                       BF16; codes alone by cuDNN if NVTE_NORM_FWD_USE_CUDNN=1
    FP8 delayed                 codes alone

TE's kernels of silu(gate) ⊙ up take gate and up as one matrix, which they are not where two layers
write them.

Where the norm of TE writes codes alone, that kernel runs. Else NVFP4's and MXFP8's codes come from
fp4train's kernels, which write no BF16 (`quantize/produced.py`). They are TE's own codes (the
formula of `QuantSpec`), but for the random bits of dy, which are fp4train's, and lie as TE's
products take them, scales in the order of the tiles of 128×4 that its kernels write for the GEMM
(`with_gemm_swizzled_scales`; cast/mxfp8/swizzle.cuh):

    NVFP4   both forms packed in pairs, the column-wise one transposed; an amax of each (tensor/nvfp4_tensor.py)
    MXFP8   both forms [M, K] (tensor/mxfp8_tensor.py)

Delayed scaling enters the amax of x into the history of each layer that reads it, and its kernels
know one history.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends.protocol import CodePair
from fp4train.backends.table import Table
from fp4train.backends.te.quantizers import family, forms, quantizer
from fp4train.backends.te.translate import dequantises, shares_codes
from fp4train.backends.te.weights import in_tiles
from fp4train.quantize import QuantSpec

CUDNN = "NVTE_NORM_FWD_USE_CUDNN"
"""TE's environment variable that has cuDNN compute norms; without it TE's norm of MXFP8 writes
BF16.
"""


class TESources:
    """See `Sources`."""

    tokens = 32

    def why_not_given(self, table: Table, *, here: bool = True) -> str | None:
        quantizer_kinds = kinds(table)
        if quantizer_kinds in ({"nvfp4"}, {"mxfp8"}):
            return _why_no_codes(table, here)
        return "Transformer Engine takes codes of other kernels in NVFP4 and MXFP8 only"

    def turned(self, table: Table) -> bool:
        return kinds(table) == {"mxfp8"}

    def given(self, forms: CodePair, shape: Sequence[int]) -> Tensor:
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
        from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor

        row, column = forms
        if column.spec.format.packed:
            kind = NVFP4Tensor
        else:
            kind = MXFP8Tensor
        options = {"device": row.codes.device, "quantizer": _quantizer(column.spec)}
        options |= in_tiles(row, column=False) | in_tiles(column, column=True)
        te_tensor: Tensor = kind(shape=row.shape, dtype=torch.bfloat16, **options)
        if tuple(shape) == row.shape:
            return te_tensor
        return te_tensor.view(tuple(shape))

    def close(self, codes: Sequence[Any]) -> None:
        drop_rows(codes)

    def why_no_norm(self, table: Table, *, here: bool = True) -> str | None:
        quantizer_kinds = kinds(table)
        if quantizer_kinds == {"fp8_delayed"}:
            return "Transformer Engine's kernels enter an amax into the history of one layer"
        if quantizer_kinds != {"mxfp8"}:
            return (
                "Transformer Engine's kernel of a norm writes BF16, then quantises "
                f"({', '.join(sorted(quantizer_kinds))})"
            )
        if os.environ.get(CUDNN) != "1":
            return (
                "Transformer Engine's norm writes MXFP8 without BF16 only by cuDNN, which "
                f"{CUDNN}=1 asks for"
            )
        return _why_no_codes(table, here)

    def norm(
        self, h_MK: Tensor, weight_K: Tensor, eps: float, table: Table
    ) -> tuple[Tensor, Tensor]:
        from transformer_engine.pytorch.constants import TE_DType

        weight_K = weight_K.to(h_MK.dtype)
        dtype = TE_DType[h_MK.dtype]
        options = (eps, None, _quantizer(forms(table)["input"][1]), dtype, 0, False)
        x, _, rstd_M = _extension().rmsnorm_fwd(h_MK, weight_K, *options)
        return x, rstd_M

    def norm_backward(
        self, dy_MK: Tensor, h_MK: Tensor, weight_K: Tensor, rstd_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight_K = weight_K.to(h_MK.dtype)
        dh_MK, dweight_K = _extension().rmsnorm_bwd(dy_MK, h_MK, rstd_M, weight_K, 0, False)
        return dh_MK, dweight_K


def _extension() -> Any:
    """TE's kernels: its modules of norms and activations call these functions, too (ops/basic)."""
    return importlib.import_module("transformer_engine_torch")


def kinds(table: Table) -> set[str]:
    """TE's families of x and of dy."""
    return {
        family(spec)
        for slot in ("input", "grad_output")
        for spec in forms(table)[slot]
        if spec is not None
    }


def _why_no_codes(table: Table, here: bool) -> str | None:
    if dequantises(table):
        return "backward takes the values of fprop's codes, and codes made elsewhere keep wgrad's alone"
    if shares_codes(table, here=here):
        return None
    return "Transformer Engine takes no codes before 2.19, nor in a recipe of single quantisers"


@cache
def _quantizer(spec: QuantSpec | None) -> Any:
    """The quantizer of a tensor for autograd, with both forms; spec: of the column-wise form, with
    the transform.
    """
    our_quantizer = quantizer(spec, "bfloat16")
    our_quantizer.internal = False
    our_quantizer.optimize_for_gemm = True
    return our_quantizer


def drop_rows(tensors: Sequence[Any]) -> None:
    """Drop the row-wise forms of TE's tensors."""
    for codes in tensors:
        codes.update_usage(rowwise_usage=False, columnwise_usage=True)


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
            drop_rows(self.given)
