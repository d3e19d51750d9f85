"""`recompute`, eager or compiled."""

from collections.abc import Callable
from typing import TypeVar

import torch

from fp4train.precision.recomputation import recompute_eagerly

T = TypeVar("T")


def recompute(function: Callable[..., T], *args: object) -> T:
    """`function(*args)`, saving only `args` for backward, which recomputes the activations.

    This is `torch.utils.checkpoint` with the context of the forward pass restored. The recomputed
    activations equal the first ones in every bit, stochastic rounding and dropout included. Under
    torch.compile the region is a separate graph.
    """
    if torch.compiler.is_dynamo_compiling():
        from fp4train.precision import compile_recompute

        result: T = compile_recompute.recompute(function, *args)
        return result
    return recompute_eagerly(function, *args)
