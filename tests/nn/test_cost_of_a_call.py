"""What one call of a layer costs besides arithmetic: Python calls, files, hops to the kernel, kept
tensors.
"""

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fp4train as f4
from fp4train.config import RECIPES
from fp4train.kernels import cpu
from fp4train.nn import Linear
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Delayed,
    QuartetII,
    Recipe,
    TetraJetV2,
)

PACKAGE = Path(f4.__file__).parent


def _is_kernel(function: Any) -> bool:
    """Whether it is of the C extension, or torch's product, which is all that high precision
    runs.
    """
    return "_cpu" in str(getattr(function, "__module__", "")) or function is F.linear


class Trace:
    """Calls of the package's own functions during forward and backward of a layer, and the way to
    its first kernel.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.to_kernel: list[str] = []

    def watch(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # Each value that a generator expression gives is a "call" of it.
        called = event == "call" and code.co_name != "<genexpr>"
        if called and Path(code.co_filename).is_relative_to(PACKAGE):
            self.calls[f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"] += 1
        if event == "c_call" and not self.to_kernel and _is_kernel(argument):
            at: FrameType | None = frame
            while at is not None:
                if Path(at.f_code.co_filename).is_relative_to(PACKAGE):
                    self.to_kernel.insert(
                        0, f"{Path(at.f_code.co_filename).relative_to(PACKAGE)}:{at.f_code.co_name}"
                    )
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


NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
MOST = 66
"""Python calls of forward and backward together, of the three products of a layer."""
JOINED = 40
"""Python calls that make the joined operands of one product, of two terms each."""
CHUNKED = 16
"""Python calls that make one operand whose chunks have outer scales of their own."""


# tests/house/test_skips.py fails in CI, and where they could be built
needs_kernels = pytest.mark.skipif(
    cpu.unavailable() is not None, reason=f"counts calls of the C kernels: {cpu.unavailable()}"
)


def traced_alone(recipe: Recipe) -> Trace:
    return traced(
        Linear(128, 128, bias=False), recipe, torch.randn(128, 128).bfloat16().requires_grad_()
    )


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias, rows in batches"])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_makes_few_python_calls(name: str, bias: bool, recipes: dict[str, Recipe]) -> None:
    x = torch.randn(*(2, 64) if bias else (128,), 128).bfloat16().requires_grad_()
    trace = traced(Linear(128, 128, bias=bias), recipes[name], x)
    most = 15
    if recipes[name].quantised:  # a second term, or rows with a scale of their own, multiply again
        most = MOST * max(3, trace.calls["backends/emulate.py:matmul"]) // 3
        most += JOINED * trace.calls["nn/executors/joined.py:joined"]
        most += CHUNKED * trace.calls["quantize/quantizer.py:ChunkQuantizer.codes"]
    assert 0 < sum(trace.calls.values()) <= most, trace.calls.most_common()


@needs_kernels
@pytest.mark.parametrize(
    "recipe", [NVFP4(two_d_weights=False), QuartetII(), TetraJetV2()], ids=lambda r: r.name
)
def test_what_backward_requantises_is_quantised_once_in_forward(recipe: Recipe) -> None:
    """One job for each of the six operands, whether or not backward takes what forward rounded."""
    assert traced_alone(recipe).calls["quantize/cpu.py:CpuQuantizer.job"] == 6


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_a_layers_forward_reaches_the_kernel_in_six_hops(
    name: str, recipes: dict[str, Recipe]
) -> None:
    trace = traced_alone(recipes[name])
    start = trace.to_kernel.index("nn/linear.py:forward")
    hops = trace.to_kernel[start + 1 :]
    two_terms = recipes[name].centred or recipes[name].residual
    chunked = trace.calls["quantize/quantizer.py:ChunkQuantizer.codes"] > 0
    assert 0 < len(hops) <= (8 if two_terms or chunked else 6), hops


DIVIDING = ("nn/ranks.py", "nn/executors/cut.py", "shards.py", "parallel/")
"""Files that an undivided model has no use for, or the beginnings of their names."""


@pytest.mark.parametrize(
    "recipe", [NVFP4(), MXFP8(), FP8Delayed(), BF16()], ids=lambda v: str(v)[:6]
)
def test_an_undivided_layer_makes_no_call_into_what_divides_layers(recipe: Recipe) -> None:
    trace = traced(Linear(128, 128), recipe, torch.randn(128, 128).bfloat16().requires_grad_())
    assert trace.files and not [name for name in trace.files if name.startswith(DIVIDING)]
