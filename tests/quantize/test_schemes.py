"""Properties of each scheme: the worked example, transposes, formulas, delayed scaling, metrics."""

import math

import pytest
import torch
from error_metrics import measure

from fp4train.formats import ELEMENT_FORMATS
from fp4train.quantize import (
    Delayed,
    Hadamard,
    QuantSpec,
    RandomKey,
    block_scales_two_level,
    delayed_amax,
    global_scales,
    initial_delayed_amax,
    quantize,
    quantize_dequantize,
)

MX = {"block": (1, 32), "scale": "e8m0", "global_scale": None}
TENSOR_FP8 = QuantSpec(element="e4m3", block=(None, None), scale="fp32", global_scale=None)


def ordinary(rows: int = 64, cols: int = 128) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


def test_the_worked_example_of_the_documentation() -> None:
    # fmt: off
    x = [0, .25, .5, .75356, 1.251245, 3.2002, 4.5032, 15.011,
         .012, -.312, -5.50055, 10.06, -1.2526, 3.025, 2.5114, 7.0162]
    y = [0, 0, 0, 1.2509, 1.2509, 3.7528, 5.0037, 15.011, 0, 0, -5.0037, 10.0073, -1.2509, 2.5018, 2.5018, 7.5055]
    # fmt: on
    q = quantize(
        torch.tensor([x]),
        QuantSpec(block=(1, 16), scale="fp32", global_scale=None),
        kernel="reference",
    )
    assert 1 / q.scales.item() == pytest.approx(0.3997, abs=5e-5)
    torch.testing.assert_close(
        q.dequantize(), torch.tensor([y], dtype=torch.float32), rtol=0, atol=6e-5
    )


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(block=(16, 16)),
        QuantSpec(**MX | {"block": (32, 32)}),
        TENSOR_FP8,
        QuantSpec(block=(16, 16), four_over_six="mse"),
    ],
)
def test_square_blocks_commute_with_transposition(spec: QuantSpec) -> None:
    x = ordinary()
    operand = quantize_dequantize(x, spec)
    transposed = quantize_dequantize(x.T, spec)
    assert spec.transposable
    # its error sums run along rows, so a tie may be decided differently
    if spec.four_over_six is None:
        assert torch.equal(operand.values.T, transposed.values)


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(),
        QuantSpec(**MX),
        QuantSpec(block=(16, 16), hadamard=Hadamard()),
        QuantSpec(block=(16, 16), rounding="stochastic"),
        QuantSpec(block=(16, 16), rounding="stochastic_8"),
    ],
)
def test_what_does_not_commute_with_transposition(spec: QuantSpec) -> None:
    x = ordinary()
    key = RandomKey(seed=0, step=0, layer=0, operand=0)
    operand = quantize_dequantize(x, spec, key=key)
    assert not spec.transposable
    assert not torch.equal(operand.values.T, quantize_dequantize(x.T, spec, key=key).values)


def test_the_two_formulas_differ_in_a_thousandth_of_the_scales_and_only_by_one_code() -> None:
    """Every BF16 block amax under every BF16 amax of one binade: BF16's short mantissas hit E4M3's
    ties.
    """
    blocks = torch.arange(0x3C00, 0x4080, dtype=torch.int16).view(torch.bfloat16).float()
    differ = []
    for amax in torch.arange(0x4080, 0x4100, dtype=torch.int16).view(torch.bfloat16).float():
        encode, _ = global_scales(amax, QuantSpec())
        new, old = (
            block_scales_two_level(blocks, encode, QuantSpec(formula=f)).int()
            for f in ("te2.14", "te2.13")
        )
        assert (new - old).abs().max() <= 1
        differ.append((new != old).float().mean().item())
    assert sum(differ) / len(differ) == pytest.approx(0.001, rel=0.1)


def test_operands_are_exact_in_bf16_except_where_the_block_scale_is_float32() -> None:
    x = ordinary() * torch.logspace(-3, 3, 128)
    for spec in (
        QuantSpec(),
        QuantSpec(global_scale="row"),
        QuantSpec(element="e4m3"),
        QuantSpec(element="e2m3"),
        QuantSpec(element="e4m3", **MX),
        QuantSpec(element="e4m3", block=(1, 128), scale="pow2", global_scale=None),
        TENSOR_FP8,
        QuantSpec(element="e5m2", block=(1, None), scale="fp32", global_scale=None),
    ):
        operand = quantize_dequantize(x, spec)
        q = quantize(x, spec)
        assert operand.values.dtype == torch.bfloat16
        product = (
            operand.values.float()
            if operand.scale is None
            else operand.values.float() * operand.scale
        )
        assert torch.equal(product, q.dequantize())
    blocks = QuantSpec(element="e4m3", block=(1, 128), scale="fp32", global_scale=None)
    assert quantize_dequantize(x, blocks).values.dtype == torch.float32


FLOATING = [
    fmt.name
    for fmt in ELEMENT_FORMATS
    if ELEMENT_FORMATS.is_own(fmt.name) and fmt.name not in ("e1m2", "int4")
]
"""Formats of several binades; on the uniform grids of the others a mantissa beyond that of the
largest value is rare.
"""


@pytest.mark.parametrize("element", FLOATING)
def test_rceil_never_clips_and_floor_does(element: str) -> None:
    x = ordinary(256, 256)
    saturation = {
        mode: measure(x, QuantSpec(element=element, **MX, scale_rounding=mode)).saturation
        for mode in ("rceil", "floor", "ceil")
    }
    assert saturation["rceil"] == saturation["ceil"] == 0.0
    assert saturation["floor"] > 0.001


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_scaling_follows_its_history(algorithm: str, margin: int) -> None:
    delayed = Delayed(history=3, algorithm=algorithm, margin=margin)
    spec = QuantSpec(
        element="e4m3", block=(None, None), scale="fp32", global_scale=None, delayed=delayed
    )
    history = torch.zeros(delayed.history)
    used = torch.tensor(initial_delayed_amax(spec))
    x = ordinary()
    assert quantize(x, spec, amax=used).scales.item() == 1.0, "before the first step the scale is 1"
    for new, largest in ((8.0, 8.0), (2.0, 8.0), (1.0, 8.0), (0.5, 2.0)):
        history = torch.cat((torch.tensor([new]), history[:-1]))
        used = delayed_amax(history, used, delayed)
        assert used.item() == (largest if algorithm == "max" else new)
        scale = quantize(x, spec, amax=used).scales.item()
        assert scale == pytest.approx(used.item() * 2.0**margin / 448.0, rel=1e-6)
    for bad in (0.0, math.inf, math.nan):
        broken = torch.tensor([bad, 0.0, 0.0])
        assert delayed_amax(broken, used, delayed) == used, (
            "a useless amax leaves the scale as it was"
        )


def test_delayed_scaling_with_the_current_amax_is_current_scaling() -> None:
    x = ordinary()
    spec = QuantSpec(
        element="e5m2", block=(None, None), scale="fp32", global_scale=None, delayed=Delayed()
    )
    current = QuantSpec(element="e5m2", block=(None, None), scale="fp32", global_scale=None)
    assert torch.equal(quantize(x, spec, amax=x.abs().max()).codes, quantize(x, current).codes)


def test_metrics_of_a_normal_tensor() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(2))
    metrics = measure(x, QuantSpec())
    assert metrics.relative_error == pytest.approx(0.095, abs=0.002)
    assert metrics.sqnr_db == pytest.approx(-20 * math.log10(metrics.relative_error))
    assert metrics.kurtosis == pytest.approx(3.0, abs=0.1)
    assert metrics.amax == x.abs().max().item()
    assert 0.05 < metrics.underflow < 0.12
    assert 0 < metrics.saturation < 0.05


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_metrics_do_not_depend_on_the_scale_of_the_tensor(scale: float) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    a = measure(x, QuantSpec(**MX))
    b = measure(x * scale, QuantSpec(**MX))
    assert b.kurtosis == pytest.approx(a.kurtosis, rel=1e-4)
    assert b.relative_error == pytest.approx(a.relative_error, rel=0.2)


@pytest.mark.parametrize(
    ("mode", "kept"), [("rceil", 0.0), ("floor", 0.5), ("even", 0.5), ("ceil", 0.5)]
)
def test_blocks_below_the_smallest_e8m0_scale_decode_as_te_and_torchao_0_18_do(
    mode: str, kept: float
) -> None:
    """To zero with rceil, else to half: elements are scaled by 1 and 2¹²⁶, where 2¹²⁷ would keep
    the value. Larger blocks keep theirs.
    """
    spec = QuantSpec(
        element="e4m3", block=(1, 32), scale="e8m0", scale_rounding=mode, global_scale=None
    )
    smallest = 448 * 2.0**-127
    q = quantize(torch.full((1, 32), smallest / 8), spec)
    assert q.scales.tolist() == [[0]] and q.dequantize()[0, 0].item() == kept * smallest / 8
    larger = quantize(torch.full((1, 32), 4 * smallest), spec)
    assert larger.scales.item() > 0 and larger.dequantize()[0, 0].item() == 4 * smallest
