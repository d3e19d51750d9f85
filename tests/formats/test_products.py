"""What formats say of themselves: their largest values, how codes are stored, what multiplies
them.
"""

import math

import pytest
import torch
from value_tables import value_table

from fp4train.formats import (
    ELEMENT_FORMATS,
    WIDE_FORMATS,
    ElementFormat,
    formats_of,
    get_format,
    product_rate,
)
from fp4train.hardware import gpus
from fp4train.quantize import QuantSpec, register

PUBLISHED = {
    "e2m1": 6.0,
    "e1m2": 1.75,
    "int4": 7.0,
    "e2m3": 7.5,
    "e3m2": 28.0,
    "e4m3": 448.0,
    "e5m2": 57344.0,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_largest_value_follows_from_the_fields(name: str) -> None:
    fmt = get_format(name)
    assert (
        fmt.max
        == PUBLISHED[name]
        == max(value for value in value_table(fmt) if math.isfinite(value))
    )


@pytest.mark.parametrize("fmt", WIDE_FORMATS, ids=lambda fmt: fmt.name)
def test_wide_formats_are_those_of_torch(fmt: ElementFormat) -> None:
    assert fmt.dtype is not None
    assert fmt.max == torch.finfo(fmt.dtype).max
    assert fmt.smallest_normal == torch.finfo(fmt.dtype).smallest_normal
    assert fmt.bits == 8 * fmt.dtype.itemsize


@pytest.mark.parametrize(
    "fmt", [fmt for fmt in ELEMENT_FORMATS if fmt.dtype], ids=lambda fmt: fmt.name
)
def test_a_dtype_of_torch_stores_the_codes_as_they_are_packed(fmt: ElementFormat) -> None:
    assert fmt.dtype is not None
    assert fmt.dtype.itemsize == 1 and fmt.packed == (fmt.bits <= 4)


def test_a_rate_is_one_that_some_gpu_has() -> None:
    rates = {rate for gpu in gpus() for rate in gpu.peaks}
    assert {fmt.rate for fmt in (*ELEMENT_FORMATS, *WIDE_FORMATS)} <= rates | {None}


def test_the_wider_operand_sets_the_rate() -> None:
    assert product_rate(*formats_of("E2M1·BF16")) == "BF16"
    assert product_rate(*formats_of("E2M1·E4M3")) == "FP8"
    assert product_rate(*formats_of("fp32")) == "FP32"
    unknown_to_gpus = ElementFormat(name="e1m2", exponent_bits=1, mantissa_bits=2, bias=1)
    assert product_rate(unknown_to_gpus, unknown_to_gpus) is None
    for bad in ("E9M9", "E2M1·E2M1·E2M1", ""):
        with pytest.raises(ValueError, match="must be one or two of"):
            formats_of(bad)


def test_specs_of_formats_that_share_a_name_differ() -> None:
    """A name may mean another format after it was taken back: a spec of before keeps its own."""
    largest = {}
    specs = []
    for bias in (1, 0):
        register(ElementFormat(name="shared", exponent_bits=2, mantissa_bits=1, bias=bias))
        specs.append(QuantSpec(element="shared"))
        largest[bias] = specs[-1].format.max
        ELEMENT_FORMATS.remove("shared")
    assert specs[0] != specs[1] and largest == {1: 6.0, 0: 12.0}
