"""Operands of two terms move bytes beside their products: counted by hand, in an emulated layer."""

from typing import Any

import pytest

from fp4train.hardware import Device, find_gpu
from fp4train.lab.costs.roofline import gemm_seconds, move_seconds
from fp4train.lab.costs.rows import GemmCost, layer_costs
from fp4train.precision import NVFP4, Layer, Residual, resolve
from fp4train.quantize import QuantSpec

H100 = find_gpu("H100")
TOKENS = 4096
IN = 1024
OUT = 2048


def costs(**options: Any) -> dict[str, GemmCost]:
    layer = Layer(name="blocks.0.up", in_features=IN, out_features=OUT, block=0, blocks=1)
    plan = resolve(layer, NVFP4(**options), None, "emulate", Device.elsewhere(H100))
    return {row.gemm_name: row for row in layer_costs(plan, H100, TOKENS)}


def added(options: dict[str, Any]) -> dict[str, float]:
    """Seconds of passes that an option adds to each GEMM."""
    plain = costs()
    return {name: row.quantise - plain[name].quantise for name, row in costs(**options).items()}


def test_means_that_are_taken_out_are_read_subtracted_and_added_again() -> None:
    """The mean reads 2 bytes, the subtraction reads and writes 2 + 2. A sum in float32 is written
    as a term (4), read and written (8), and rounded (4 + 2); two means add to the float32 gradient
    of each weight (8).
    """
    passes = added({"centred": ("x", "dy")})
    x = TOKENS * IN
    y = TOKENS * OUT
    assert passes["fprop"] == pytest.approx(move_seconds(H100, 6 * x + 18 * y))
    assert passes["dgrad"] == pytest.approx(move_seconds(H100, 6 * y + 18 * x))
    assert passes["wgrad"] == pytest.approx(move_seconds(H100, 8 * IN * OUT))
    assert added({"centred": ("x",)})["dgrad"] == 0


@pytest.mark.parametrize(("share", "features"), [(1.0, IN), (0.25, IN // 4)])
def test_a_residual_is_quantised_and_multiplied_too(share: float, features: int) -> None:
    residual = Residual(tensors=("x",), spec=QuantSpec(), share=share)
    row = costs(residual=residual)["fprop"]
    plain = costs()["fprop"]
    product = gemm_seconds(H100, "BF16", TOKENS, OUT, features)
    assert row.gemm == pytest.approx(plain.gemm + product)
    moved = 10 * TOKENS * IN + 18 * TOKENS * OUT
    passes = added({"residual": residual})
    assert passes["fprop"] == pytest.approx(move_seconds(H100, moved))
    assert passes["dgrad"] == passes["wgrad"] == 0
