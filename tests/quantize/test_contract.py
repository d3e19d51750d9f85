"""A rounding that breaks what it promises is refused when it is added, with the position."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from fp4train.quantize import ROUNDINGS, Rounding, register
from fp4train.quantize.contract import check_rounding

Integers = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class Called(Rounding):
    """A rounding by a function."""

    function: Integers = field(repr=False)

    def integers(self, position: Tensor, bits: Tensor | None) -> Tensor:
        return self.function(position, bits)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda u, bits: u.round().flatten(), r"gives the shape \[64\] for positions of \[4, 16\]"),
        (lambda u, bits: u.round().double(), r"gives torch\.float64: float32 is needed"),
        (lambda u, bits: u.nan_to_num().to(torch.int32), r"gives torch\.int32"),
        (lambda u, bits: u.round().tolist(), "gives list: float32 is needed"),
        (lambda u, bits: u, r"gives 1\.52588e-05 for the position 1\.52588e-05: 0 or 1 is needed"),
        (lambda u, bits: u.floor() + 1, "gives 1 for the position 0: 0 is needed"),
        (lambda u, bits: (u / 2).round() * 2, "gives 0 for the position 1: 1 is needed"),
        (lambda u, bits: -u.round(), "gives -1 for the position 0.75: 0 or 1 is needed"),
        (lambda u, bits: u.round() / (u != 4), "gives inf for the position 4: 4 is needed"),
        (lambda u, bits: torch.where(u > 2, u.round(), torch.nan), "gives nan for the position 0"),
        (lambda u, bits: u.round().nan_to_num(), "gives 0 for the position nan: NaN is needed"),
        (lambda u, bits: u.floor() + (bits > 9), "raises TypeError: .*unless random=True"),
    ],
)
def test_a_rounding_that_breaks_its_contract_is_refused(function: Integers, message: str) -> None:
    with pytest.raises(ValueError, match=f"rounding 'wrong': integers.* {message}"):
        register(Called(name="wrong", function=function))
    assert "wrong" not in ROUNDINGS.names


def test_a_rounding_is_asked_with_bits_of_the_whole_range_where_it_takes_them() -> None:
    def beyond_the_middle(position: Tensor, bits: Tensor | None) -> Tensor:
        assert bits is not None and bits.min() == 0 and bits.max() == 65535
        return position.floor() + 2 * (bits > 1 << 15) * (position % 1 > 0.5)

    with pytest.raises(ValueError, match="gives 2 for the position 0"):
        register(Called(name="wrong", random=True, function=beyond_the_middle))


def test_the_programs_roundings_keep_the_contract_on_any_default_device() -> None:
    with torch.device("meta"):
        for rounding in ROUNDINGS:
            check_rounding(rounding)
        register(Called(name="right", function=lambda u, bits: u.ceil_()))
    assert "right" in ROUNDINGS.names
