"""Functions that torch.compile leaves out of its graphs."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def untraced(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, which runs outside of torch.compile's graphs."""

    @wraps(function)
    def call(*args: Any) -> T:
        if not torch.compiler.is_dynamo_compiling():
            return function(*args)
        from fp4train.precision import compile_context

        result: T = compile_context.call(function, *args)
        return result

    return call
