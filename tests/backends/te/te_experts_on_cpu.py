"""A layer of experts on TE's real GroupedLinear with an extension that multiplies: a program,
started by test_te_experts.py, that prints JSON.

Besides what te_products_on_cpu.py fakes: `split_quantize` quantises each part by itself
(csrc/extensions/cast.cpp), and `te_general_grouped_gemm` is a GEMM per part, into one output or one
per part, added to where TE asks for that; of parts without rows it writes zeros, or leaves what it
adds to as it is (csrc/extensions/gemm.cpp te_general_grouped_gemm).
"""

from __future__ import annotations

import json
from typing import Any

import te_products_on_cpu as products
import torch
import transformer_engine_torch as tex
from te_on_cpu import pretend_gpu
from torch import Tensor

from fp4train.backends.te import TEExperts
from fp4train.hardware import Device
from fp4train.nn import Experts
from fp4train.precision import MXFP8, NVFP4, FP8Current, Recipe, autocast, resolve

COUNTS = [5, 0, 130, 33]
K = 96
N = 64
splits: list[list[int]] = []
"""Rows of the parts of every tensor that is split and quantised."""


def split_quantize(x: Tensor, sizes: list[int], quantizers: list[Any], **_: Any) -> list[Any]:
    splits.append(list(sizes))
    assert len(set(map(id, quantizers))) == len(COUNTS), "each expert has an amax of its own"
    return [
        products.quantise(part, quantizer)
        for part, quantizer in zip(x.split(sizes), quantizers, strict=True)
    ]


def grouped_gemm(
    a: list[Any],
    transa: bool,
    b: list[Any],
    transb: bool,
    out: list[Tensor],
    _: Any,
    m_splits: list[int],
    bias: list[Tensor],
    __: Any,
    single_output: bool,
    *options: Any,
) -> Any:
    grad = options[1]
    accumulate = options[4]  # after what goes into GELU; then workspaces and their size
    parts = list(out[0].split(m_splits)) if single_output else out
    for part, left, right, offset in zip(parts, a, b, bias, strict=True):
        left = products.values(left).double()
        right = products.values(right).double()
        product = ((right.T if transb else right) @ (left.T if transa else left)).float()
        if not grad and offset.numel():
            product += offset.float()
        part.add_(product) if accumulate else part.copy_(product)
    return bias


products.cpp_gemm.get_sm_count = lambda: 1
products.cpp_gemm.get_cublas_workspace = lambda *_: torch.empty(1, 0)
tex.split_quantize = split_quantize
tex.te_general_grouped_gemm = grouped_gemm
call = TEExperts.__call__


def on_a_gpu(*arguments: Any, **options: Any) -> Tensor:
    with pretend_gpu():
        return call(*arguments, **options)


TEExperts.__call__ = on_a_gpu  # type: ignore[method-assign]


def results(recipe: Recipe, *, transposed: bool = False) -> dict[str, Any]:
    """How far y and the gradients of two microbatches are from those of exact products of BF16
    operands.
    """
    torch.manual_seed(0)
    layer = Experts(len(COUNTS), K, N, bias=True, backend="te")
    if transposed:
        layer.transposed = True
        layer.weight = torch.nn.Parameter(layer.weight.detach().mT.contiguous())
    layer.sum_gradients(True)
    device = Device(type="cuda", name="B200", capability=(10, 0), here=False)
    plan = resolve(layer.layer, recipe, None, "te", device)
    layer.apply_plan(plan, recipe, None, torch.device("cpu"))
    splits.clear()
    rows = sum(COUNTS)
    x = torch.randn(rows + 4, K).bfloat16().requires_grad_()
    dy = torch.randn(len(x), N).bfloat16()
    for _ in range(2):
        with autocast(recipe, step=0):
            y = layer(x, COUNTS)
        y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    expert = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    routed = torch.nn.functional.one_hot(expert, len(COUNTS)).double()
    w = layer.w_ENK.detach().bfloat16().double()
    x_MK = x.detach()[:rows].double()
    dy_MN = 2 * dy[:rows].double()
    bias = layer.bias.detach().bfloat16().double()
    exact_y = torch.einsum("me,mk,enk->mn", routed, x_MK, w) + bias[expert]
    pairs = {
        "y": (y[:rows], exact_y),
        "dx": (x.grad[:rows], torch.einsum("me,mn,enk->mk", routed, dy_MN, w)),
        "dw": (layer.weight.grad, torch.einsum("me,mn,mk->enk", routed, dy_MN, x_MK)),
        "dbias": (layer.bias.grad, routed.T @ dy_MN),
    }
    if transposed:
        pairs["dw"] = (layer.weight.grad.mT, pairs["dw"][1])
    return {
        "splits": splits[0],
        "tail": bool(y[rows:].any() or x.grad[rows:].any()),
        **{
            name: float((ours.double() - exact).norm() / exact.norm())
            for name, (ours, exact) in pairs.items()
        },
    }


if __name__ == "__main__":
    report = {
        "nvfp4": results(NVFP4()),
        "mxfp8": results(MXFP8()),
        "mxfp8, transposed": results(MXFP8(), transposed=True),
        "fp8_current": results(FP8Current()),
    }
    print(json.dumps(report))
