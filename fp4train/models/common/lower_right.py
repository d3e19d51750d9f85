"""Causal attention of the last T of S tokens: their queries are at the lower right of the scores.

On CPUs torch's kernel aligns queries to the first keys, and any other alignment takes a mask [T, S].
Here it multiplies the queries by the keys before them whole and by the last T causally. With the
logarithms l₀ and l₁ of the sums of exponentials of both parts,

    y = y₀ + (y₁ − y₀)·σ(l₁ − l₀),   l = log(exp l₀ + exp l₁)

and the gradients of each part are those of the kernel for the whole y and l (as in ring attention,
arXiv:2310.01889). Kernels of GPUs align so themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_kernels = torch.ops.aten


def attend_last(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention [B, H, T, E] of queries of the last T tokens to keys and values [B, H', S, E] of
    each one and those before it, S > T; H' divides H.
    """
    if q.device.type == "cpu":
        y: Tensor = _InParts.apply(q, keys, values)  # type: ignore[no-untyped-call]
        return y
    from torch.nn.attention.bias import causal_lower_right

    last: Any = causal_lower_right(q.shape[2], keys.shape[2])
    grouped = q.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=last, enable_gqa=grouped)


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attend = _kernels._scaled_dot_product_flash_attention_for_cpu
        sizes = _sizes(q, keys)
        k_0, k_1 = torch.split(keys, sizes, 2)
        v_0, v_1 = torch.split(values, sizes, 2)
        y_0, l_0 = attend(q, k_0, v_0)
        y_1, l_1 = attend(q, k_1, v_1, 0.0, True)
        y: Tensor = y_0.to(l_0.dtype).lerp(y_1.to(l_0.dtype), (l_1 - l_0).sigmoid()[..., None])
        y = y.to(q.dtype)
        ctx.save_for_backward(q, keys, values, y, torch.logaddexp(l_0, l_1))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, keys, values, y, logarithm = ctx.saved_tensors
        parts = zip(*(torch.split(x, _sizes(q, keys), 2) for x in (keys, values)), strict=True)
        gradients = [
            _kernels._scaled_dot_product_flash_attention_for_cpu_backward(
                dy, q, k, v, y, logarithm, 0.0, causal
            )
            for causal, (k, v) in enumerate(parts)
        ]
        (dq_0, *before), (dq_1, *last) = gradients
        dk, dv = (torch.cat(pair, 2) for pair in zip(before, last, strict=True))
        return dq_0 + dq_1, dk, dv


def _sizes(q: Tensor, keys: Tensor) -> list[int]:
    """Tokens before those of the queries, and of these."""
    return [keys.shape[2] - q.shape[2], q.shape[2]]
