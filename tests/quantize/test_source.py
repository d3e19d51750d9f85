"""Where operands come from: their axis, the codes that serve them, what ranks send for them."""

import pytest
import torch

from fp4train.backends import sourced
from fp4train.hardware import Device
from fp4train.nn import TensorForms
from fp4train.nn.executors import Gemms
from fp4train.precision import FP8Row, Layer, QuartetII, Recipe, resolve
from fp4train.precision.recipes import MXFP8, NVFP4
from fp4train.quantize import (
    High,
    Operand,
    Own,
    QuantSpec,
    Requantised,
    ValuesOf,
    packed_bytes,
    quantize,
)

NVFP4_X = QuantSpec()
SQUARE = QuantSpec(block=(16, 16))
PER_ROW = QuantSpec(element="e4m3", block=(1, None), scale="fp32", global_scale=None)


@pytest.mark.parametrize(
    "recipe", [NVFP4(), MXFP8(), FP8Row(), QuartetII()], ids=lambda recipe: recipe.name
)
def test_an_operand_is_blocked_along_the_axis_that_its_product_contracts(recipe: Recipe) -> None:
    for (gemm, tensor), operand in sourced(recipe.table()).items():
        assert operand.tensor == tensor
        assert operand.axis == {"fprop": "in", "dgrad": "out", "wgrad": "tokens"}[gemm]
        assert operand.transposed == (gemm == "wgrad" or (gemm, tensor) == ("dgrad", "w"))


def test_operands_of_one_spec_along_two_axes_differ() -> None:
    operands = sourced(MXFP8().table())
    forward = operands["fprop", "w"]
    backward = operands["dgrad", "w"]
    assert forward.spec == backward.spec and forward.source != backward.source
    assert forward.shared != backward.shared and forward.sent != backward.sent
    assert len({operand.random_operand for operand in operands.values()}) == 6


def test_square_blocks_serve_both_axes() -> None:
    operands = sourced(NVFP4().table())
    assert operands["fprop", "w"].shared == operands["dgrad", "w"].shared == Own(SQUARE, "in")
    assert operands["dgrad", "w"].row_wise == operands["fprop", "w"]


def test_what_is_requantised_is_sent_as_the_codes_before() -> None:
    backward = sourced(QuartetII().table())["dgrad", "w"]
    assert isinstance(backward.source, Requantised)
    assert backward.source.of == backward.sent == sourced(QuartetII().table())["fprop", "w"].source


def test_values_of_codes_need_these_codes_and_are_not_quantised_again() -> None:
    codes = Own(NVFP4_X, "in")
    operand = Operand("x", ValuesOf(codes, "tokens"))
    assert operand.spec is None and operand.codes == operand.sent == codes
    assert operand.transposed and operand.why_not_cut("tokens", 3) is None
    assert "whole blocks of 16" in str(operand.why_not_cut("in", 24))


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8(), QuartetII()], ids=lambda r: r.name)
def test_values_of_codes_are_taken_of_the_form_of_fprop(recipe: Recipe) -> None:
    quantised = sourced(recipe.table())
    operands = sourced(NVFP4(backward="dequantised").table())
    assert all(operand.prepared_operand is operand for operand in quantised.values())
    assert all(operand.values is None for operand in quantised.values())
    for gemm, tensor in (("dgrad", "w"), ("wgrad", "x")):
        operand = operands[gemm, tensor]
        assert operand.prepared_operand == operands["fprop", tensor]
        assert operand.codes is not None and operand.values is not None
        codes = quantize(torch.randn(32, 32), operand.codes.spec)
        values = codes.dequantize(torch.bfloat16)
        assert torch.equal(operand.values(codes, torch.bfloat16), values)
        assert torch.equal(operand.values(codes.decoded(), torch.bfloat16), values)


@pytest.mark.parametrize(
    "values",
    [ValuesOf(Own(NVFP4_X, "tokens"), "tokens"), ValuesOf(Own(SQUARE, "in"), "tokens")],
    ids=["along another axis", "of another spec"],
)
def test_values_of_other_codes_than_those_of_fprop_are_refused(values: ValuesOf) -> None:
    of_fprop = Operand("x", Own(NVFP4_X, "in"))
    with pytest.raises(ValueError, match="x: the GEMM that contracts 'tokens' takes the values"):
        TensorForms((of_fprop, Operand("x", values)), (False, True), "cpu")


def test_values_of_a_weight_are_those_that_fprop_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = resolve(
        Layer(name="up", in_features=32, out_features=32, block=None, blocks=0),
        NVFP4(backward="dequantised"),
        None,
        "emulate",
        Device(type="cpu"),
    )
    Gemms(plan, "cpu")
    other = Operand("w", ValuesOf(Own(NVFP4_X, "out"), "out"))
    monkeypatch.setitem(plan.sources, ("dgrad", "w"), other)
    with pytest.raises(ValueError, match="w: the GEMM that contracts 'out' takes the values"):
        Gemms(plan, "cpu")


def test_bytes_are_those_of_the_codes_as_they_are_blocked() -> None:
    assert Operand("x", High("in")).bytes(32, 64, itemsize=2) == 2 * 32 * 64
    along_features = Operand("x", Own(PER_ROW, "in")).bytes(32, 64, itemsize=2)
    along_tokens = Operand("x", Own(PER_ROW, "tokens")).bytes(32, 64, itemsize=2)
    assert (along_features, along_tokens) == (32 * 64 + 4 * 32, 32 * 64 + 4 * 64)
    assert Operand("w", ValuesOf(Own(NVFP4_X, "in"), "out")).bytes(
        32, 64, itemsize=2
    ) == packed_bytes(NVFP4_X, 32, 64)
