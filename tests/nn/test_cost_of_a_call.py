"""What one call of a layer costs besides arithmetic: Python calls, files, hops to the kernel, kept tensors."""

import re
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import fp4train as f4
from fp4train.kernels import cpu
from fp4train.nn import Linear
from fp4train.precision import BF16, MXFP4, MXFP6, MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed, FP8Row, Recipe
from fp4train.precision.recipes import QuartetII, TetraJetV2

PACKAGE = Path(f4.__file__).parent


class Trace:
    """Calls of the package's own functions during forward and backward of a layer, and the way to the C kernel."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.to_kernel: list[str] = []

    def watch(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            self.calls[f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_qualname}"] += 1
        if event == "c_call" and not self.to_kernel and "_cpu" in str(getattr(argument, "__module__", "")):
            at: FrameType | None = frame
            while at is not None:
                if Path(at.f_code.co_filename).is_relative_to(PACKAGE):
                    self.to_kernel.insert(0, f"{Path(at.f_code.co_filename).relative_to(PACKAGE)}:{at.f_code.co_name}")
                at = at.f_back

    @property
    def files(self) -> set[str]:
        return {call.partition(":")[0] for call in self.calls}


def traced(layer: Linear, recipe: Recipe, x: Tensor) -> Trace:
    """A step of a layer that has run before, so that what is made once is not counted."""
    trace = Trace()
    for step in range(2):
        with f4.autocast(recipe, step=step):
            y = layer(x)
        y.backward(torch.ones_like(y))
    with f4.autocast(recipe, step=2):
        sys.setprofile(trace.watch)
        try:
            y = layer(x)
        finally:
            sys.setprofile(None)
    dy = torch.ones_like(y)
    threading.setprofile(trace.watch)
    sys.setprofile(trace.watch)
    try:
        y.backward(dy)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return trace


MOST = {
    **dict.fromkeys((NVFP4(), MXFP8(), MXFP6(), MXFP4(), FP8Current(), FP8Block(), FP8Row()), 60),
    **{FP8Delayed(): 92, QuartetII(): 81, TetraJetV2(): 84},  # histories; transforms and requantised operands
    BF16(): 15,
}
"""Python calls of forward and backward together."""


@pytest.mark.parametrize(("recipe", "most"), MOST.items(), ids=[recipe.name for recipe in MOST])
def test_a_layer_makes_few_python_calls(recipe: Recipe, most: int) -> None:
    trace = traced(Linear(128, 128, bias=False), recipe, torch.randn(128, 128).bfloat16().requires_grad_())
    # A CPU without instructions for BF16 needs more calls, to multiply in float32.
    in_float32 = re.compile(r"backends/emulate\.py:(widen|_float32_product|_empty)")
    calls = {name: count for name, count in trace.calls.items() if not in_float32.match(name)}
    assert sum(calls.values()) <= most, trace.calls.most_common()


def test_a_layer_with_native_products_makes_few_python_calls_too() -> None:
    layer = Linear(128, 128, bias=False, backend="native")
    trace = traced(layer, FP8Current(), torch.randn(128, 128).bfloat16().requires_grad_())
    assert any(name.startswith("backends/native.py") for name in trace.calls)
    assert sum(trace.calls.values()) <= 60, trace.calls.most_common()


@pytest.mark.skipif(cpu.unavailable() is not None, reason="without the C extension there is no kernel to reach")
def test_a_layers_forward_reaches_the_kernel_in_six_hops() -> None:
    trace = traced(Linear(128, 128, bias=False), NVFP4(), torch.randn(128, 128).bfloat16().requires_grad_())
    start = trace.to_kernel.index("nn/linear.py:forward")
    hops = trace.to_kernel[start + 1 :]
    assert 0 < len(hops) <= 6, hops


DIVIDING = ("nn/ranks.py", "nn/executors/cut.py", "shards.py", "parallel/")
"""Files that an undivided model has no use for, or the beginnings of their names."""


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8(), FP8Delayed(), BF16()], ids=lambda v: str(v)[:6])
def test_an_undivided_layer_makes_no_call_into_what_divides_layers(recipe: Recipe) -> None:
    trace = traced(Linear(128, 128), recipe, torch.randn(128, 128).bfloat16().requires_grad_())
    assert trace.files and not [name for name in trace.files if name.startswith(DIVIDING)]
