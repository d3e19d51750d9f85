"""The host's time for a layer, forward and backward, where kernels take none: Triton's launches and
torch's scaled products are replaced by what allocates their results.

The stand-ins have the signatures of `Launch.__call__` (quantize/triton_launch.py),
`torch._scaled_mm` and `torch.nn.functional.scaled_mm` (torch/nn/functional.py), and give the dtypes
that these give.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fp4train.backends import native
from fp4train.nn import Linear
from fp4train.precision import FP8Current, FP8Delayed, Recipe
from fp4train.precision.context import Context, use
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import cpu, quantizer, triton, triton_launch


@contextmanager
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
