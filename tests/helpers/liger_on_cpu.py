"""The part of liger-kernel 0.8.5 that fp4train calls, on torch's operators: what each call reads,
writes and returns.

It overwrites what the real one overwrites, which is what a caller can get wrong:
    ops/rms_norm.py LigerRMSNormFunction    in_place=True: dx lies in the memory of dy; "gemma": all in float32
    ops/swiglu.py swiglu_backward           the gradients lie in the memory of gate and up, which backward saved
    ops/rope.py rope_forward, rope_backward q and k, dq and dk in their own memory, if transposed
    they are contiguous
    ops/cross_entropy.py liger_cross_entropy_kernel   logits in their own memory; of an ignored target 0, and no loss
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from pretended import Machine
from torch import Tensor

calls: list[tuple[str, tuple[int, ...]]] = []
"""Name and shape of the first tensor of each call, forward and backward."""


def noted(name: str, x: Tensor) -> None:
    calls.append((name, tuple(x.shape)))


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        eps: float,
        offset: float,
        mode: str,
        in_place: bool,
        rows: Any,
    ) -> Any:
        assert mode == "gemma", "the other modes round before the product"
        noted("norm", x)
        rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, w, rstd)
        ctx.in_place = in_place
        ctx.offset = offset
        return (x.float() * rstd * (offset + w.float())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, rstd = ctx.saved_tensors
        noted("norm backward", dy)
        m = dy.float() * (ctx.offset + w.float())
        n = x.float() * rstd
        dx = (rstd * (m - n * (m * n).mean(-1, keepdim=True))).to(x.dtype)
        dw = (dy.float() * n).flatten(0, -2).sum(0).to(w.dtype)
        return (dy.copy_(dx) if ctx.in_place else dx), dw, None, None, None, None, None


class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, gate_multiplier: float, down_multiplier: float
    ) -> Tensor:
        assert gate_multiplier == down_multiplier == 1
        noted("product", a)
        ctx.save_for_backward(a, b)
        return torch.nn.functional.silu(a.float()).to(b.dtype) * b

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> Any:
        a, b = ctx.saved_tensors
        noted("product backward", dc)
        x = a.detach().float()
        s = a.detach().float().sigmoid()
        da = dc.float() * (x * s * (1 - s) + s) * b.detach().float()
        db = dc.float() * x * s
        return a.detach().copy_(da), b.detach().copy_(db), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In the memory of x [B, heads, T, E] if its transpose is contiguous, else in that of a
    copy.
    """
    own = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    first, second = own.clone().chunk(2, -1)
    return own.copy_(torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin)


class LigerRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        ids: Any,
        unsqueeze: int,
        width: Any,
    ) -> Any:
        assert ids is None and unsqueeze == 1 and width is None
        noted("rotation", q)
        ctx.save_for_backward(cos, sin)
        return rotated(q, cos, sin), rotated(k, cos, sin)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        noted("rotation backward", dq)
        return rotated(dq, cos, -sin), rotated(dk, cos, -sin), None, None, None, None, None


class Kernel:
    """`liger_cross_entropy_kernel[grid](…)`, whose parameters are all named."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(
            *,
            X_ptr: Tensor,
            X_stride: int,
            Y_ptr: Tensor,
            Y_stride: int,
            weight_ptr: Any,
            loss_ptr: Tensor,
            z_loss_ptr: Any,
            loss_stride: int,
            token_accuracy_ptr: Any,
            token_accuracy_stride: int,
            predicted_tokens_ptr: Any,
            predicted_tokens_stride: int,
            n_cols: int,
            n_non_ignore: int,
            sum_non_ignore_weight: int,
            weight_sum: int,
            ignore_index: int,
            lse_square_scale: float,
            label_smoothing: float,
            reduction: str,
            softcap: Any,
            RETURN_Z_LOSS: bool,
            RETURN_TOKEN_ACCURACY: bool,
            RETURN_PREDICTED_TOKENS: bool,
            BLOCK_SIZE: int,
            HAS_WEIGHT: bool,
            HAS_SOFTCAPPING: bool,
            HAS_GRADIENTS: bool,
            num_warps: int,
        ) -> None:
            noted("loss", X_ptr)
            assert (
                grid == (len(X_ptr),)
                and X_stride == n_cols == X_ptr.shape[1]
                and Y_stride == loss_stride == 1
            )
            assert (
                reduction == "sum"
                and loss_ptr.dtype == torch.float32
                and min(n_cols, 32768) <= BLOCK_SIZE
            )
            assert not (
                RETURN_Z_LOSS
                or RETURN_TOKEN_ACCURACY
                or RETURN_PREDICTED_TOKENS
                or HAS_WEIGHT
                or HAS_SOFTCAPPING
            )
            assert lse_square_scale == label_smoothing == 0
            y = Y_ptr.long()
            here = Y_ptr != ignore_index
            log_p = X_ptr.float().log_softmax(-1)
            at = y.where(here, 0)[:, None]
            loss_ptr.copy_((-log_p.gather(1, at)[:, 0]).where(here, loss_ptr))
            if HAS_GRADIENTS:
                p = log_p.exp().scatter_add_(1, at, -torch.ones(len(y), 1))
                X_ptr.copy_(p)
            X_ptr.masked_fill_(~here[:, None], 0)

        return launch


def modules() -> dict[str, ModuleType]:
    """What `sys.modules` holds where liger-kernel is installed; no call is made yet."""
    package, ops, loss = (
        ModuleType(f"liger_kernel{name}") for name in ("", ".ops", ".ops.cross_entropy")
    )
    for each in (
        LigerRMSNormFunction,
        LigerSiLUMulFunction,
        LigerRopeFunction,
    ):
        setattr(ops, each.__name__, each)
    vars(loss)["liger_cross_entropy_kernel"] = Kernel()
    calls.clear()
    return {module.__name__: module for module in (package, ops, loss)}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in takes the place of the package, in the version that fp4train needs."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    Machine(monkeypatch).has_liger((0, 8, 5))
