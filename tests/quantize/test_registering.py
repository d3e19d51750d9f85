"""Formats, roundings and transforms of a user's own: what may be added, and that it is what
quantises.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from value_tables import value_table as values_of

from fp4train.config import plugins
from fp4train.errors import UserError
from fp4train.formats import (
    ELEMENT_FORMATS,
    ElementFormat,
    ScaleFormat,
    decode,
    encode,
)
from fp4train.quantize import (
    Nearest,
    QuantSpec,
    RandomKey,
    Rotation,
    Rounding,
    Transform,
    quantize,
    quantize_dequantize,
    register,
)

WIDE: dict[str, Any] = {
    "name": "wide",
    "exponent_bits": 4,
    "mantissa_bits": 4,
    "bias": 7,
    "needs_global": True,
}


def own(**fields: Any) -> ElementFormat:
    return ElementFormat(
        **{"name": "own", "exponent_bits": 2, "mantissa_bits": 1, "bias": 1} | fields
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (own(name="e4m3"), "name='e4m3' is taken (fp4train's own): give the new one another name"),
        (own(name="E3M0"), "name='E3M0': allowed are a letter, then letters"),
        (own(mantissa_bits=6), "allowed are codes of 2 to 8 bits, one of them the sign"),
        (own(bias=300), "takes those from 2^-64 to 2^64: choose another bias than 300"),
        (own(bias=1.5), "exponent_bits, mantissa_bits and bias are integers"),
        (own(has_nan="no"), "has_nan='no' must be true or false"),
        (own(name="bf16"), "name='bf16' is taken by a format of high precision"),
        (own(name="e8m0"), "name='e8m0' is taken by the scale format of that name"),
        (own(dtype=torch.float8_e4m3fnuz), "leave them out"),
        (own(rate="FP8"), "leave them out"),
        (own(exponent_bits=6, bias=-100), "choose another bias than -100"),
        (own(has_inf=True), "has_inf=True needs has_nan=True"),
        (own(exponent_bits=0, mantissa_bits=1, has_nan=True), "it has no value but zero"),
    ],
)
def test_a_format_that_cannot_be_multiplied_is_refused(entry: ElementFormat, message: str) -> None:
    with pytest.raises(ValueError) as error:
        register(entry)
    assert message in str(error.value)
    assert "own" not in ELEMENT_FORMATS.names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp16", "scale format name='fp16' is taken by a format of high precision"),
        ("e2m1", "scale format name='e2m1' is taken by the element format of that name"),
        ("own", "scale format name='own' is taken by the element format of that name"),
    ],
)
def test_a_scale_format_takes_no_name_of_another_kind(name: str, message: str) -> None:
    register(own(), ScaleFormat.unsigned(**{**WIDE, "name": "mine"}))
    with pytest.raises(ValueError) as error:
        register(ScaleFormat.unsigned(**{**WIDE, "name": name}))
    assert message in str(error.value)
    with pytest.raises(ValueError, match="name='mine' is taken by the scale format of that name"):
        register(own(name="mine"))


def test_a_name_stands_for_one_definition() -> None:
    register(own())
    register(own())
    with pytest.raises(ValueError, match="name='own' is taken \\(defined already: ElementFormat"):
        register(own(bias=2))
    with pytest.raises(TypeError, match="an ElementFormat, a ScaleFormat or a Rounding is needed"):
        register("e3m0")  # type: ignore[arg-type]


@pytest.mark.parametrize("has_inf", [False, True])
def test_codes_of_nan_and_infinity_decode_as_the_table_says(has_inf: bool) -> None:
    fmt = own(exponent_bits=4, mantissa_bits=2, bias=7, has_nan=True, has_inf=has_inf)
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
    torch.testing.assert_close(
        decode(codes, fmt), torch.tensor(values_of(fmt)), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("exponent_bits", range(1, 8))
def test_a_scale_format_rounds_to_the_nearest_of_its_values(exponent_bits: int) -> None:
    fmt = ScaleFormat.unsigned(
        name="own",
        exponent_bits=exponent_bits,
        mantissa_bits=8 - exponent_bits,
        bias=(1 << (exponent_bits - 1)) - 1,
        needs_global=False,
    )
    values = fmt.decode(torch.arange(255, dtype=torch.uint8))
    assert values[0] == 0 and (values.diff() > 0).all() and values[-1] == fmt.max
    assert fmt.decode(torch.tensor([255], dtype=torch.uint8)).isnan()
    assert torch.equal(fmt.encode(values), torch.arange(255, dtype=torch.uint8))
    middle = (values[:-1] + values[1:]) / 2
    assert torch.equal(fmt.encode(middle), (torch.arange(254) + 1) // 2 * 2)
    assert fmt.encode(torch.tensor([torch.nan]))[0] == 255
    assert fmt.encode(torch.tensor([torch.inf]))[0] == 254


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exponent_bits": 4, "mantissa_bits": 3}, "must be 8 bits together"),
        ({"exponent_bits": 4.0, "mantissa_bits": 4}, "exponent_bits=4.0 must be an integer"),
        ({"exponent_bits": 4, "mantissa_bits": 4, "bias": None}, "bias=None must be an integer"),
        ({"exponent_bits": 4, "mantissa_bits": 4, "ieee": 1}, "ieee=1 must be true or false"),
        ({"exponent_bits": 8, "mantissa_bits": 0}, "e8m0 has powers of two"),
        ({"exponent_bits": 7, "mantissa_bits": 1, "bias": 200}, "choose another bias than 200"),
    ],
)
def test_a_scale_format_that_is_no_byte_or_not_exact_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        ScaleFormat.unsigned(**{"name": "own", "bias": 7, "needs_global": False} | fields)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_own_formats_quantise_as_their_own_functions_say() -> None:
    """Element and scale, one after the other, for blocks that are computed here by hand."""
    register(own(exponent_bits=3, mantissa_bits=0, bias=3))
    scale = ScaleFormat.unsigned(
        name="ue4m4", exponent_bits=4, mantissa_bits=4, bias=7, needs_global=False
    )
    register(scale)
    fmt = ELEMENT_FORMATS.get("own")
    spec = QuantSpec(element="own", scale="ue4m4", global_scale=None)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    blocks = x.reshape(8, 4, 16)
    scales = scale.decode(scale.encode(blocks.abs().amax(2) / fmt.max))[..., None]
    expected = decode(encode(blocks * scales.reciprocal(), fmt), fmt) * scales
    assert torch.equal(quantize(x, spec).restore(torch.float32), expected.reshape(8, 64))
    assert torch.equal(quantize_dequantize(x, spec).values.float(), expected.reshape(8, 64))
    assert set(values_of(fmt)) == {0.0, *(s * 2.0**e for s in (1, -1) for e in range(-2, 5))}


def test_a_second_level_of_a_scale_format_of_ones_own_has_its_own_bound() -> None:
    register(
        ScaleFormat.unsigned(
            name="wide", exponent_bits=4, mantissa_bits=4, bias=7, needs_global=True
        )
    )
    with pytest.raises(ValueError, match="allowed are numbers from 1 to 480"):
        QuantSpec(scale="wide", global_bound=481.0)
    spec = QuantSpec(scale="wide", global_bound=480.0)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert quantize(x, spec).block_scales().max() == 480.0


@dataclass(frozen=True, kw_only=True)
class Upwards(Rounding):
    """Away from zero where there are random bits above the middle, else towards it."""

    random: bool = True

    def integers(self, position: Tensor, bits: Tensor | None) -> Tensor:
        assert bits is not None
        return torch.where(bits >= 1 << 15, position.ceil(), position.floor())


@dataclass(frozen=True, kw_only=True)
class Down(Nearest):
    """Another rounding on the class of the one to nearest."""

    def integers(self, position: Tensor, bits: Tensor | None) -> Tensor:
        return position.floor_()


@pytest.mark.parametrize("element", ["e2m1", "e4m3"])
def test_a_rounding_of_ones_own_rounds_elements_that_torch_casts_to_as_well(element: str) -> None:
    register(Down(name="down"))
    scheme: dict[str, Any] = {"element": element, "scale": "fp32", "global_scale": None}
    x = torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) + 1
    down = quantize(x, QuantSpec(rounding="down", **scheme)).restore(torch.float32)
    assert (down <= x * (1 + 1e-6)).all() and (down < x).float().mean() > 0.8


def test_a_changed_rounding_or_scale_format_does_not_take_a_name_in_silence() -> None:
    register(Down(name="down"))
    changed = type("Down", (Down,), {"integers": lambda self, position, bits: position.ceil_()})
    changed.__module__, changed.__qualname__ = Down.__module__, Down.__qualname__
    with pytest.raises(ValueError, match="name='down' is taken"):
        register(changed(name="down"))
    scale = replace(ScaleFormat.unsigned(**WIDE), encode=lambda x: x.to(torch.uint8))
    with pytest.raises(ValueError, match="encode and decode do not give back"):
        register(scale)
    with pytest.raises(ValueError, match=r"scales are torch\.uint8"):
        register(replace(scale, dtype=torch.int16))
    for field, value in {"mantissa_bits": 3.5, "max": "480", "smallest": 0, "decode": None}.items():
        with pytest.raises(ValueError, match=f"scale format 'wide': {field}="):
            register(replace(scale, **{field: value}))  # type: ignore[arg-type]


def test_a_rounding_of_ones_own_draws_bits_for_each_element() -> None:
    register(Upwards(name="upwards"))
    spec = QuantSpec(rounding="upwards", element="e4m3", scale="fp32", global_scale=None)
    assert spec.random
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) + 1
    with pytest.raises(ValueError, match="rounding='upwards' takes its bits from a RandomKey"):
        quantize(x, spec)
    key = RandomKey(seed=0, step=1, layer=2, operand=3)
    above = quantize(x, spec, key=key).restore(torch.float32) >= x
    assert 0.45 < above.float().mean() < 0.55  # a fair coin: five deviations of 1/128
    nearest = QuantSpec(element="e4m3", scale="fp32", global_scale=None)
    ratio = quantize(x, spec, key=key).restore(torch.float32) / quantize(x, nearest).restore(
        torch.float32
    )
    assert (ratio - 1).abs().max() <= 0.13  # one step of three bits


@dataclass(frozen=True, kw_only=True)
class Swap(Transform):
    size: int = 2
    label = "swapped"
    entry: float = 1.0

    def matrix(self) -> Tensor:
        return torch.tensor([[0.0, self.entry], [1.0, 0.0]])


def test_a_transform_of_ones_own_is_applied_before_the_blocks_and_undone() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    turned = x.reshape(4, 16, 2).flip(2).reshape(4, 32)
    spec = QuantSpec(hadamard=Swap())
    assert torch.equal(quantize(x, spec).codes, quantize(turned, QuantSpec()).codes)
    torch.testing.assert_close(
        quantize(x, spec).restore(torch.float32),
        quantize(turned, QuantSpec())
        .restore(torch.float32)
        .reshape(4, 16, 2)
        .flip(2)
        .reshape(4, 32),
    )


def test_a_transform_that_would_not_cancel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is not orthogonal .* it would not cancel in a product"):
        QuantSpec(hadamard=Swap(entry=1.1))
    with pytest.raises(ValueError, match=r"matrix\(\) is \[2, 2\]; size=3 needs \[3, 3\]"):
        QuantSpec(hadamard=Swap(size=3))
    assert QuantSpec(hadamard=Rotation(kind="orthogonal", size=8)).hadamard is not None


def test_a_plugin_that_takes_a_name_is_refused_by_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "lab_that_takes_a_name.py").write_text(
        "from fp4train.formats import ElementFormat\n"
        "from fp4train.quantize import register\n"
        "register(ElementFormat(name='e4m3', exponent_bits=2, mantissa_bits=1, bias=1))\n"
    )
    with (
        pytest.raises(UserError, match=r"is taken .*lab_that_takes_a_name\.py, line 3\)"),
        plugins.using(["lab_that_takes_a_name"], [tmp_path]),
    ):
        pass
