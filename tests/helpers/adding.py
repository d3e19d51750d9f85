"""A CPU whose products add dw to a float32 sum, as those of a GPU do, with the bits of a product
that autograd adds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp4train.backends import BACKENDS, Prepared, emulate
from fp4train.nn import engine
from fp4train.nn.executors import whole_layer
from fp4train.quantize import Decoded

added: list[tuple[int, ...]] = []
"""Shape of each sum that a product was added to."""


def add_product(total_RS: Tensor, a_RC: Tensor, b_CS: Tensor) -> None:
    added.append(tuple(total_RS.shape))
    total_RS += BACKENDS["torch"].product(
        Decoded(a_RC, None), Decoded(b_CS.T, None), out_dtype=torch.float32
    )


def add(self: emulate.Emulate, total_RS: Tensor, a: Prepared, b: Prepared) -> None:
    added.append(tuple(total_RS.shape))
    total_RS += self.product(a, b, out_dtype=torch.float32)


def begin(patch: pytest.MonkeyPatch | None = None) -> list[tuple[int, ...]]:
    """Let executors that are made from now on add so; `added`, which is empty then."""
    set_attribute: Callable[..., None] = setattr if patch is None else patch.setattr
    set_attribute(engine, "ADDING", frozenset({"cpu"}))
    set_attribute(whole_layer, "add_product", add_product)
    set_attribute(emulate.Emulate, "add", add)
    added.clear()
    return added
