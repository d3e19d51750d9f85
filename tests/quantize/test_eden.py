"""MS-EDEN: what a spec allows, and its scales. That its C kernel equals the reference:
test_cpu_kernels.py.
"""

import pytest
import torch

from fp4train.backends.te.quantizers import family
from fp4train.formats import E4M3
from fp4train.precision import QuartetII
from fp4train.quantize import (
    Hadamard,
    QuantSpec,
    RandomKey,
    corrected_scales,
    quantize,
    quantize_dequantize,
    round_to_codes,
    round_to_values,
    triton,
)

SPEC = QuantSpec(rounding="eden", global_bound=256, hadamard=Hadamard(size=128, signs="step"))
KEY = RandomKey(seed=3, step=7, layer=11, operand=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounding": "eden"}, "hadamard=None must be a Hadamard"),
        ({"rounding": "eden", "hadamard": Hadamard(size=8)}, "multiple of the block"),
        ({"rounding": "eden", "hadamard": Hadamard(), "block": (16, 16)}, "block=\\(1, cols\\)"),
        (
            {"rounding": "eden", "hadamard": Hadamard(), "scale": "ue5m3", "global_scale": None},
            "scale='e4m3'",
        ),
        ({"rounding": "eden", "hadamard": Hadamard(), "guard": 1.1}, "up to 1.0625"),
        ({"rounding": "eden", "hadamard": Hadamard()}, "the same in every step; use 'step'"),
        (
            {"rounding": "eden", "hadamard": Hadamard(signs="random", seed=3)},
            "hadamard.signs='random': its error averages to zero over transforms",
        ),
        ({"rounding": "stochastic", "guard": 1.05}, "up to 1.0"),
        ({"hadamard": Hadamard(signs="step")}, "no RandomKey to draw signs from"),
        (
            {"requantises": QuantSpec(rounding="stochastic")},
            "requantises: allowed is rounding='nearest'",
        ),
        ({"requantises": "nvfp4"}, "allowed is a QuantSpec"),
    ],
)
def test_specs_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantSpec(**options)  # type: ignore[arg-type]


def test_a_corrected_group_keeps_its_projection_onto_x() -> None:
    """With exact scales <x, S q> = <x, x> for each group: what makes the estimate unbiased."""
    t = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0)).mul_(2)
    scale = torch.rand(4, 16, generator=torch.Generator().manual_seed(1)) + 0.5
    half = torch.full((4, 16), 32768, dtype=torch.int32)
    means = torch.zeros(4, 16)
    draws = torch.randint(
        0, 1 << 16, (500, 4, 16), generator=torch.Generator().manual_seed(2), dtype=torch.int32
    )
    for bits in (*draws, half):
        means += (
            corrected_scales(t, scale, SPEC.format, 128, bits).view(torch.float8_e4m3fn).float()
            / 501
        )
    values = round_to_values(t, SPEC.format)
    x = t * scale[:, None, :, None]
    energy = (x * x).reshape(4, 2, 128).sum(2)
    overlap = (x * values * means[:, None, :, None]).reshape(4, 2, 128).sum(2)
    torch.testing.assert_close(overlap, energy, rtol=3e-3, atol=0)


@pytest.mark.parametrize("x", [0.0, 2.0**-9, 1.0, 1.03, 447.0, 448.0, 1000.0])
def test_scales_are_rounded_to_one_of_their_neighbours_and_on_average_not_at_all(x: float) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    values = round_to_codes(torch.full((1 << 16,), x), E4M3, bits).view(torch.float8_e4m3fn).float()
    assert values.unique().numel() <= 2
    assert values.double().mean().item() == pytest.approx(min(x, 448.0), rel=1e-6)


def test_both_operands_of_a_product_are_turned_alike_and_each_step_differently() -> None:
    x = torch.eye(128)
    turned = [
        quantize(x, SPEC, key=RandomKey(seed=3, step=step, layer=11, operand=operand))
        .dequantize()
        .sign()
        for step, operand in ((7, 4), (7, 5), (8, 4))
    ]
    assert torch.equal(turned[0], turned[1]) and not torch.equal(turned[0], turned[2])


def test_values_equal_decoded_codes() -> None:
    for spec in (QuartetII().table()["wgrad"].first, QuartetII().table()["wgrad"].second):
        assert spec is not None
        x = torch.randn(48, 200, generator=torch.Generator().manual_seed(5))
        values = quantize_dequantize(x, spec, key=KEY)
        coded = quantize(x, spec, key=KEY).decoded()
        assert torch.equal(values.values, coded.values)
        assert (
            values.scale is not None
            and coded.scale is not None
            and torch.equal(values.scale, coded.scale)
        )


def test_requantising_rounds_what_forward_rounded() -> None:
    forward = QuartetII().table()["fprop"].second
    again = QuartetII().table()["dgrad"].second
    assert forward is not None and again is not None
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    rounded = quantize(w, forward).dequantize(torch.bfloat16)
    plain = QuartetII().table()["dgrad"].first
    assert plain is not None
    assert torch.equal(
        quantize(w.T, again, key=KEY).codes, quantize(rounded.T, plain, key=KEY).codes
    )


def test_nan_zero_and_tiny_blocks() -> None:
    x = torch.zeros(2, 256)
    assert quantize(x, SPEC, key=KEY).dequantize().abs().max() == 0
    x[0, :128] = 1.0
    x[1, :128] = 1e-9
    y = quantize(x, SPEC, key=KEY).dequantize()
    assert y.isfinite().all() and y[1].abs().max() == 0, (
        "a block below 2^-19 of the amax becomes zero"
    )
    x[0, 3] = float("nan")
    y = quantize(x, SPEC, key=KEY).dequantize()
    assert y[0, :128].isnan().all()


def test_it_has_no_triton_kernel_and_no_counterpart_in_te() -> None:
    assert "rounding='eden' has no Triton kernel" in str(triton.why_not_spec(SPEC))
    with pytest.raises(ValueError, match="eden"):
        family(SPEC)
    with pytest.raises(ValueError, match="key=None"):
        quantize(torch.zeros(1, 128), SPEC)
