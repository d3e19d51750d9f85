"""What the host does for a layer on TE's real Python, forward and backward, and for TE's own; a
program that prints the calls of Python's functions as JSON.

Besides what te_calls_on_cpu.py fakes: quantising and the GEMM do nothing but allocate. Both layers
take BF16 activations and have float32 weights, whose codes are kept within a step where the recipe
allows it. TE's own is called as a loop that trains on TE calls it, within one autocast of TE and
one of torch; fp4train enters both in each layer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import te_calls_on_cpu
import torch
import transformer_engine_torch as tex
from te_calls_on_cpu import shared_input
from te_on_cpu import K, pretend_gpu, te
from torch import nn
from transformer_engine.pytorch.cpp_extensions import gemm as cpp_gemm
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, QuantizedTensorStorage

sys.path.append(str(Path(__file__).parents[2] / "helpers"))
from host_passes import passes, plain_layer

from fp4train.backends.te import region, to_te
from fp4train.hardware import Device
from fp4train.nn import convert
from fp4train.precision import Context, Recipe, resolve, use
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Current, FP8Delayed
from fp4train.precision.settings import ConstantWeights

CPU = torch.device("cpu")
BF16 = torch.bfloat16
RECIPES: tuple[Recipe, ...] = (NVFP4(), MXFP8(), FP8Current(), FP8Delayed())


def gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    _: Any,
    out_dtype: Any,
    *__: Any,
    **___: Any,
) -> Any:
    if out is not None:
        return out, None, None, None
    rows = b.shape[1] if transb else b.shape[0]
    columns = a.shape[0] if transa else a.shape[1]
    dtype = getattr(torch, te_calls_on_cpu.TE_DTYPES[out_dtype])
    return torch.empty(rows, columns, dtype=dtype), None, None, None


class SharedCodes(QuantizedTensorStorage, QuantizedTensor):
    """An x without values that several layers read: a tensor for autograd (te_products_on_cpu.py
    TensorCodes).
    """

    def __new__(cls, like: torch.Tensor) -> SharedCodes:
        return QuantizedTensor.__new__(cls, like.shape, like.dtype, device=like.device)  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        pass

    def detach(self) -> SharedCodes:
        return SharedCodes(self)

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": True, "columnwise": True}

    def update_usage(self, **_: Any) -> None:
        pass


def quantise(x: torch.Tensor, quantizer: Any, *_: Any) -> Any:
    return SharedCodes(x) if shared_input else te_calls_on_cpu.Codes(x, quantizer)


cpp_gemm._NATIVE_GEMM_INPUT_STORAGES += (SharedCodes,)
tex.generic_gemm = gemm
tex.quantize = quantise
tex.fused_amax_and_scale_update_after_reduction = lambda *_: None


class Inner(nn.Module):
    """TE's linear layer, called with its codes kept where they can be."""

    def __init__(self, module: nn.Module, first: bool | None) -> None:
        super().__init__()
        self.module = module
        self.first = first
        self.weight = module.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x, is_first_microbatch=self.first)


def ours(recipe: Recipe) -> nn.Module:
    """A layer of fp4train that runs an applied plan."""
    layer = convert(nn.Sequential(nn.Linear(K, K, bias=False)), backend="te")[0]
    layer.apply_plan(resolve(layer.layer, recipe, None, "te", Device.of(CPU)), recipe, None, CPU)
    assert isinstance(layer, nn.Module)
    return layer


def theirs(recipe: Recipe) -> nn.Module:
    with pretend_gpu():
        module = te.Linear(K, K, bias=False, params_dtype=torch.float32, device="meta")
    module.weight = nn.Parameter(torch.zeros(K, K))
    return Inner(module, None if isinstance(recipe, FP8Delayed) else False)


def calls(work: Callable[[], None]) -> int:
    """Functions of Python that `work` calls."""
    count = 0

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def counted(recipe: Recipe, tries: int = 2) -> list[tuple[int, int, int]]:
    """Calls in a layer of fp4train, in TE's and in a small nn.Linear, in each of several tries."""
    context = Context(recipe=recipe, counts="nothing", applied=True, constant=ConstantWeights())
    own = passes(ours(recipe), K, BF16)
    inner = passes(theirs(recipe), K, BF16)
    plain = plain_layer()
    counts = []
    with pretend_gpu(), region(recipe.table()):
        for number in range(tries + 1):
            with use(context):
                mine = calls(own)
            with (
                torch.autocast("cpu", dtype=BF16),
                te.autocast(enabled=True, recipe=to_te(recipe.table())),
            ):
                other = calls(inner)
            if number:  # what is made once is made by now
                counts.append((mine, other, calls(plain)))
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({recipe.name: counted(recipe) for recipe in RECIPES}, sys.stdout)
