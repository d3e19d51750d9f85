"""What the host does for a layer, forward and backward, where kernels take no time (`host_passes`)."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from host_passes import microbatches, native_layer, without_kernels
from torch.utils._python_dispatch import TorchDispatchMode

from fp4train.precision import MXFP8, NVFP4, FP8Current, FP8Delayed, Recipe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

OPERATORS = {FP8Current(): 22, FP8Delayed(): 19, MXFP8(): 16, NVFP4(): 20}
"""Operators of torch that a call and its backward pass may run: each takes the host a
microsecond.
"""
CALLS = {FP8Current(): 62, FP8Delayed(): 66, MXFP8(): 59, NVFP4(): 68}
"""Functions of fp4train that they may call, of which one or two compare operand sources, and a
position keys random bits: each takes the host a fifth of a microsecond and more.
"""


@pytest.fixture(autouse=True)
def kernels_take_no_time() -> Iterator[None]:
    with without_kernels():
        yield


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
