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
quantisers: list[int] = []
"""How many quantisers each had that are not the same object."""
written: list[str] = []
"""Dtype of what each grouped GEMM of wgrad writes."""


def split_quantize(x: Tensor, sizes: list[int], quantizers: list[Any], **_: Any) -> list[Any]:
    splits.append(list(sizes))
    quantisers.append(len(set(map(id, quantizers))))
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
    *rest: Any,
) -> Any:
    grad, accumulate = rest[1], rest[4]  # after what goes into GELU; then workspaces and their size
    parts = list(out[0].split(m_splits)) if single_output else out
    if transb:
        written.extend(str(each.dtype) for each in parts)
    for number, part in enumerate(parts):
        first, second = (getattr(each[number], "values", each[number]) for each in (a, b))
        product = (
            (second.T if transb else second).double() @ (first.T if transa else first).double()
        ).float()
        if not grad and bias[number].numel():
            product += bias[number].float()
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


def results(recipe: Recipe, *, sums: bool, transposed: bool = False) -> dict[str, Any]:
    """How far y and the gradients of two microbatches are from those of exact products of BF16
    operands.
    """
    torch.manual_seed(0)
    layer = Experts(len(COUNTS), K, N, bias=True, backend="te")
    if transposed:
        layer.transposed, layer.weight = (
            True,
            torch.nn.Parameter(layer.weight.detach().mT.contiguous()),
        )
    layer.sum_gradients(sums)
    plan = resolve(
        layer.layer,
        recipe,
        None,
        "te",
        Device(type="cuda", name="B200", capability=(10, 0), here=False),
    )
    layer.apply_plan(plan, recipe, None, torch.device("cpu"))
    for each in (splits, quantisers, written):
        each.clear()
    x = torch.randn(sum(COUNTS) + 4, K).bfloat16().requires_grad_()
    dy = torch.randn(len(x), N).bfloat16()
    for _ in range(2):
        with autocast(recipe, step=0):
            y = layer(x, COUNTS)
        y.backward(dy)
    used = sum(COUNTS)
    plain = [each.detach().double() for each in (layer.w_ENK.bfloat16(), layer.bias.bfloat16())]
    wanted_y = torch.zeros(len(x), N).double()
    wanted_dx = torch.zeros(len(x), K).double()
    wanted_dw = torch.zeros_like(plain[0])
    wanted_db = torch.zeros_like(plain[1])
    start = 0
    for number, count in enumerate(COUNTS):
        rows = slice(start, start + count)
        wanted_y[rows] = x[rows].detach().double() @ plain[0][number].T + plain[1][number]
        wanted_dx[rows] = 2 * dy[rows].double() @ plain[0][number]
        wanted_dw[number] = 2 * dy[rows].double().T @ x[rows].detach().double()
        wanted_db[number] = 2 * dy[rows].double().sum(0)
        start += count
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    dw = layer.weight.grad.mT if transposed else layer.weight.grad
    pairs = ((y, wanted_y), (x.grad, wanted_dx), (dw, wanted_dw), (layer.bias.grad, wanted_db))
    return {
        "distances": [
            float((found.double() - wanted).norm() / wanted.norm()) for found, wanted in pairs
        ],
        "tail": bool(y[used:].any() or x.grad[used:].any()),
        "splits": splits[0],
        "quantisers": set(quantisers) == {len(COUNTS)},
        "written": sorted(set(written)),
    }


RECIPES: dict[str, Recipe] = {"nvfp4": NVFP4(), "mxfp8": MXFP8(), "fp8_current": FP8Current()}
if __name__ == "__main__":
    found = {name: results(recipe, sums=True) for name, recipe in RECIPES.items()}
    found["not summed"] = results(MXFP8(), sums=False)
    found["transposed"] = results(MXFP8(), sums=True, transposed=True)
    print(json.dumps(found))
