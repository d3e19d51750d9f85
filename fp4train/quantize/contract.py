"""What a rounding promises, asked of it on a few positions: see `Rounding.integers`."""

import math

import torch
from torch import Tensor

from fp4train.quantize.rounding import RANDOM_BITS, Rounding

SHAPE = (4, 16)
FRACTIONS = (0.0, 2.0**-16, 0.25, 0.5, 0.75, 1 - 2.0**-12)
"""Parts of a position above the grid: on it, next to it, and between."""


def check_rounding(rounding: Rounding) -> None:
    """Refuse a rounding whose integers are not what quantisers make codes and values of.

    Raises:
        ValueError: it fails, or gives another shape or dtype, a number that is neither neighbour of
            its position, or NaN for a number, or a number for NaN.
    """
    place = f"rounding {rounding.name!r}: integers(position, bits)"
    position, bits = _positions()
    try:
        integers = rounding.integers(position.clone(), bits if rounding.random else None)
    except Exception as error:
        hint = "" if rounding.random else "; bits are None unless random=True"
        raise ValueError(f"{place} raises {type(error).__name__}: {error}{hint}") from error
    if not isinstance(integers, Tensor) or integers.dtype != torch.float32:
        kind = integers.dtype if isinstance(integers, Tensor) else type(integers).__name__
        raise ValueError(f"{place} gives {kind}: float32 is needed")
    if integers.shape != position.shape:
        raise ValueError(
            f"{place} gives the shape {list(integers.shape)} for positions of "
            f"{list(position.shape)}: one integer for each is needed"
        )
    neighbour = (integers == position.floor()) | (integers == position.ceil())
    right = torch.where(position.isnan(), integers.isnan(), neighbour)
    if not right.all():
        at = tuple((~right).nonzero()[0].tolist())
        value = position[at].item()
        needed = "NaN"
        if not math.isnan(value):
            needed = " or ".join(map(str, sorted({math.floor(value), math.ceil(value)})))
        raise ValueError(
            f"{place} gives {integers[at].item():g} for the position {value:.6g}: {needed} is "
            "needed"
        )


def _positions() -> tuple[Tensor, Tensor]:
    """Positions of the whole range of formats, one of them NaN, and bits from the least to the
    most; on the CPU, whatever torch's default device is.
    """
    count = math.prod(SHAPE)
    numbers = [(at // len(FRACTIONS)) ** 2 + FRACTIONS[at % len(FRACTIONS)] for at in range(count)]
    numbers[-1] = math.nan
    most = (1 << RANDOM_BITS) - 1
    bits = [at * 37 % count * most // (count - 1) for at in range(count)]
    return (
        torch.tensor(numbers, dtype=torch.float32, device="cpu").reshape(SHAPE),
        torch.tensor(bits, dtype=torch.int32, device="cpu").reshape(SHAPE),
    )
