"""How large a model will be, before it is built and while it is.

A model that says how many parameters it will have (`Counted`) is refused at once where its weights alone exceed the
main memory that they are drawn in. Whatever takes long to build says how far it is: of a model on the meta device,
which needs no memory for weights, nobody knows how many modules somebody has the patience for.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from tqdm import tqdm

from fp4train.errors import UserError

_log = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds between two messages."""
BYTES = 4
"""Of a weight: masters are float32."""


@runtime_checkable
class Counted(Protocol):
    """An architecture that knows its size."""

    def parameter_count(self, *, vocab_size: int) -> int:
        """Parameters of the model that `build` gives; tied ones once."""
        ...


def check_memory(shape: object, vocab_size: int) -> None:
    """Raises UserError where the weights of a model are larger than the main memory of this machine."""
    if not isinstance(shape, Counted):
        return
    count, memory = shape.parameter_count(vocab_size=vocab_size), _main_memory()
    if count * BYTES > memory:
        raise UserError(
            f"{type(shape).__name__} has {_short(count)} parameters, which are drawn in main memory: "
            f"{_short(count * BYTES)}B of float32, and this machine has {_short(memory)}B. Choose a smaller model, or "
            "share it between several ranks, each of which draws its part alone (docs/scale.md)"
        )


@contextmanager
def told(doing: str, shape: object, vocab_size: int) -> Iterator[None]:
    """Say every few seconds how many parameters were registered since this began, and how long the rest will take.

    Args:
        doing: "building the model".
    """
    whole = shape.parameter_count(vocab_size=vocab_size) if isinstance(shape, Counted) else None
    began = last = time.monotonic()
    done = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal done, last
        done += 0 if parameter is None else parameter.numel()
        if (now := time.monotonic()) - last < EVERY:
            return
        last, rest = now, ""
        if whole and done:
            left = (now - began) * max(0.0, whole / done - 1)
            rest = f" of {_short(whole)}, about {tqdm.format_interval(left)} left"
        _log.info("%s: %s parameters%s", doing, _short(done), rest)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _main_memory() -> int:
    """Bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _short(number: float) -> str:
    """Three digits and a prefix: "1.23 M"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or prefix == "P":
            break
        number /= 1000
    return f"{number:,.3g} {prefix}".rstrip() if number < 999.5 else f"{number:,.0f} {prefix}"
