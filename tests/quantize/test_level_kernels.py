"""The C kernels of HiF4, IF4 and ties away from zero against the readable reference, bit for bit."""

from dataclasses import replace

import pytest
import torch
from cpu_kernels import (
    STEP,
    VALUES,
    assert_equals_reference,
    draw_layout,
    draw_values,
    every_machine,
)
from lengths import long_but

from fp4train.kernels.cpu import Machine
from fp4train.quantize import Hadamard, QuantSpec

HIF4 = QuantSpec(
    element="e1m2", block=(1, 64), scale="hif4", global_scale=None, rounding="nearest_away"
)
IF4 = QuantSpec(scale="if4", formula="te2.13")
SPECS = (
    HIF4,
    replace(HIF4, hadamard=Hadamard()),
    replace(HIF4, hadamard=Hadamard(size=128)),
    replace(HIF4, rounding="stochastic", hadamard=STEP),
    replace(HIF4, rounding="stochastic_8"),
    replace(HIF4, rounding="nearest"),
    IF4,
    replace(IF4, block=(16, 16)),
    replace(IF4, block=(1, 32), formula="te2.14", global_bound=256),
    replace(IF4, global_scale="row"),
    replace(IF4, hadamard=Hadamard()),
    replace(IF4, rounding="stochastic", guard=16 / 17),
    replace(IF4, rounding="stochastic_8", hadamard=STEP, guard=16 / 17),
    replace(IF4, rounding="nearest_away"),
    QuantSpec(rounding="nearest_away"),
    QuantSpec(rounding="nearest_away", hadamard=Hadamard(size=32)),
    QuantSpec(
        element="e4m3", block=(1, 32), scale="e8m0", global_scale=None, rounding="nearest_away"
    ),
)


@pytest.mark.parametrize("spec", long_but(SPECS[::4], SPECS), ids=str)
def test_kernels_equal_the_reference(spec: QuantSpec) -> None:
    """All kinds of values in both orders in memory, of a tile and more; and odd sizes."""
    for number, kind in enumerate(VALUES):
        dtype = (torch.bfloat16, torch.float32, torch.float16)[number % 3]
        x = draw_values(kind, 40, 300, number).to(dtype)
        assert_equals_reference(x, spec, Machine(threads=2))
        assert_equals_reference(x.T.contiguous().T, spec, Machine(threads=1))
    for rows, cols in ((1, 1), (17, 33), (5, 130)):
        x = draw_values("ties", rows, cols, 3).bfloat16()
        assert_equals_reference(draw_layout("strided", x), spec, *every_machine())
    x = draw_values("outliers", 140, 530, 1)
    assert_equals_reference(x, spec, *every_machine(threads=2))
