"""What the host does for a layer, forward and backward, where kernels take no time: Triton's launches
and torch's scaled products are replaced by what allocates their results.

The stand-ins have the signatures of `Launch.__call__` (quantize/triton_launch.py),
`torch._scaled_mm` and `torch.nn.functional.scaled_mm` (torch/nn/functional.py), and give the dtypes
that these give.
"""

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import cycle
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp4train.backends import native
from fp4train.nn import Linear
from fp4train.precision import MXFP8, NVFP4, FP8Current, FP8Delayed, Recipe
from fp4train.precision.context import Context, use
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import cpu, quantizer, triton, triton_launch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

OPERATORS = {FP8Current(): 22, FP8Delayed(): 19, MXFP8(): 16, NVFP4(): 20}
"""Operators of torch that a call and its backward pass may run: each takes the host a
microsecond.
"""
CALLS = {FP8Current(): 63, FP8Delayed(): 66, MXFP8(): 59, NVFP4(): 69}
"""Functions of fp4train that they may call, of which one or two compare operand sources, and a
position keys random bits: each takes the host a fifth of a microsecond and more.
"""


@pytest.fixture(autouse=True)
def without_kernels() -> Iterator[None]:
    """Layers on native products and Triton run on the CPU, without their kernels."""

    def product(a: Tensor, b: Tensor, *_: Any, **options: Any) -> Tensor:
        dtype = options.get("out_dtype") or options["output_dtype"]
        return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)

    quantizer.cache_clear()
    with ExitStack() as stack:
        for place, name, instead in (
            (cpu, "why_not", lambda spec, device: triton.why_not_spec(spec)),
            (cpu, "make", triton.make),
            (triton_launch.Launch, "__call__", lambda *args, **options: None),
            (triton_launch, "interpreted", lambda: False),
            (native, "why_not_blocks", lambda *_: None),
            (torch.nn.functional, "scaled_mm", product),
            (torch, "_scaled_mm", product),
        ):
            stack.enter_context(patch.object(place, name, instead))
        yield
    quantizer.cache_clear()


def microbatches(recipe: Recipe) -> AbstractContextManager[None]:
    """The context of microbatches of fp4train's own loop: they share the codes of weights."""
    return use(Context(recipe=recipe, counts="tokens", constant=ConstantWeights()))


def passes(layer: nn.Module, size: int, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward of a layer, of two inputs in turn: the forms of one are shared within a
    context.
    """
    inputs = cycle(torch.ones(size, size, dtype=dtype, requires_grad=True) for _ in range(2))
    dy = torch.ones(size, size, dtype=dtype)

    def both() -> None:
        x = next(inputs)
        layer(x).backward(dy)
        x.grad = layer.weight.grad = None

    return both


def native_layer(recipe: Recipe) -> Callable[[], None]:
    """A layer that fills whole tiles of scales, or which has so few codes that torch's operators on
    them take no time.
    """
    size = 32 if isinstance(recipe, FP8Current | FP8Delayed) else 128
    return passes(Linear(size, size, bias=False, backend="native"), size, torch.bfloat16)


class Operators(TorchDispatchMode):
    """Counts operators, but for what autograd does to a tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not torch.ops.aten.detach.default:
            self.ran[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recipe", "most"), OPERATORS.items(), ids=[recipe.name for recipe in OPERATORS]
)
def test_a_layer_on_native_products_and_triton_runs_few_operators(
    recipe: Recipe, most: int
) -> None:
    """Scales are in tiles where they are written, weights once for all microbatches: no product lays out what
    it multiplies.
    """
    layer = native_layer(recipe)
    with microbatches(recipe):
        layer()
        layer()
        with Operators() as found:
            layer()
    assert 0 < sum(found.ran.values()) <= most, found.ran


@pytest.mark.parametrize(("recipe", "most"), CALLS.items(), ids=[recipe.name for recipe in CALLS])
def test_a_layer_on_native_products_and_triton_calls_few_functions(
    recipe: Recipe, most: int
) -> None:
    """Of this package, in Python; a busy machine changes nothing. Comparisons of equal specs are not
    counted: a spec that another test made first is another object in the caches.
    """
    layer = native_layer(recipe)
    called = Counter[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_qualname
        ours = frame.f_globals.get("__name__", "").startswith("fp4train.")
        if event == "call" and ours and not name.endswith("__eq__"):
            called[name] += 1

    with microbatches(recipe):
        layer()
        layer()
        sys.setprofile(note)
        try:
            layer()
        finally:
            sys.setprofile(None)
    assert 0 < sum(called.values()) <= most, called
