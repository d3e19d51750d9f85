"""Kernels that quantise otherwise than the readable reference, as an audit finds them."""

from collections.abc import Callable

import pytest

from fp4train.audits import start
from fp4train.quantize import QuantSpec

equals_reference = start.equal_codes
"""Whether the kernel of a spec on a type of device quantises as the reference does."""


def kernels_equal_reference(
    monkeypatch: pytest.MonkeyPatch, equal: Callable[[QuantSpec, str], bool]
) -> None:
    """`equal` answers instead of the comparison of a kernel with the reference."""
    monkeypatch.setattr(start, "equal_codes", equal)
