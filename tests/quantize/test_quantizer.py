"""The choice of the kernel: made once, from explicit tables, with a reason; and the Python overhead
of a call.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fp4train import formats
from fp4train.formats import ScaleFormat, get_scale_format
from fp4train.kernels import cpu as kernels
from fp4train.quantize import (
    Hadamard,
    QuantSpec,
    RandomKey,
    Rotation,
    cpu as cpu_module,
    quantize,
    quantize_dequantize,
    quantizer,
    register,
    to_torch,
    triton as triton_module,
)

KEY = RandomKey(seed=1, step=2, layer=3, operand=4)
UE5M3 = QuantSpec(scale="ue5m3", global_scale=None)
needs_extension = pytest.mark.skipif(
    kernels.unavailable() is not None, reason=str(kernels.unavailable())
)


@needs_extension
def test_a_kernel_is_chosen_once_for_a_spec_and_device_type() -> None:
    assert quantizer(QuantSpec(), "cpu") is quantizer(QuantSpec(), "cpu")
    assert (
        quantizer(QuantSpec(), "cpu").kernel == "cpu" and quantizer(QuantSpec(), "cpu").why is None
    )
    assert quantizer(QuantSpec(), "cpu", "reference").kernel == "reference"


@needs_extension
@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (
            QuantSpec(hadamard=Hadamard(size=8)),
            "hadamard.size=8: the kernels transform 16, 32, 64, 128",
        ),
        (QuantSpec(hadamard=Rotation()), "hadamard=Rotation("),
    ],
)
def test_without_a_kernel_the_reference_says_why_and_an_order_is_refused(
    spec: QuantSpec, why: str
) -> None:
    chosen = quantizer(spec, "cpu")
    assert chosen.kernel == "reference" and why in str(chosen.why)
    with pytest.raises(ValueError, match="kernel='cpu' cannot quantise this: "):
        quantizer(spec, "cpu", "cpu")


def test_devices_without_kernels_have_the_reference() -> None:
    assert "x is on mps" in str(quantizer(QuantSpec(), "mps").why) or kernels.unavailable()
    with pytest.raises(ValueError, match="kernel='gpu' is not one of auto, reference, cpu, triton"):
        quantizer(QuantSpec(), "cpu", "gpu")


UNKNOWN: dict[str, object] = {
    "element": "e9m9",
    "scale": "ue9m9",
    "scale_rounding": "down",
    "formula": "te9",
    "rounding": "dithered",
    "global_scale": "column",
    "four_over_six": "max",
}


@pytest.mark.parametrize(("field", "value"), UNKNOWN.items())
def test_no_kernel_takes_what_it_does_not_know_for_something_else(
    field: str, value: object
) -> None:
    """Each field by itself, in an otherwise minimal spec."""
    spec = replace(QuantSpec())
    object.__setattr__(spec, field, value)
    if field == "element":  # another format, which has infinities
        object.__setattr__(spec, "format", replace(formats.E2M1, name="e9m9", has_inf=True))
    reasons = [triton_module.why_not_spec(spec)]
    if kernels.unavailable() is None:
        reasons.append(cpu_module.why_not(spec, "cpu"))
    assert all(f"{field}={value!r} has no" in str(reason) for reason in reasons)


@pytest.fixture
def injected() -> Iterator[ScaleFormat]:
    """A scale format without a kernel: the arithmetic of FP32 under another name."""
    fmt = replace(get_scale_format("fp32"), name="fp32x")
    register(fmt)
    yield fmt
    formats.SCALE_FORMATS.remove(fmt.name)


@pytest.mark.parametrize("block", [(1, 16), (1, None), (None, None)])
def test_a_new_scale_format_runs_by_the_reference_and_by_no_kernel(
    injected: ScaleFormat, block: tuple[int | None, int | None]
) -> None:
    spec = QuantSpec(element="e4m3", block=block, scale=injected.name, global_scale=None)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    q = quantize(x, spec)
    fp32 = quantize(x, replace(spec, scale="fp32"), kernel="reference")
    assert torch.equal(q.codes, fp32.codes) and torch.equal(q.scales, fp32.scales)
    assert torch.equal(quantize_dequantize(x, spec).values, q.decoded().values)
    assert "scale='fp32x' has no" in str(triton_module.why_not_spec(spec))
    assert quantizer(spec, "cpu").kernel == "reference"
    with pytest.raises(
        ValueError, match="scale='fp32x' has no torch dtype; allowed: e4m3, e8m0, fp32, pow2"
    ):
        to_torch(q)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_ue5m3_quantises_as_e4m3_does_without_a_global_scale(rounding: str, scale: float) -> None:
    """Both scales have three mantissa bits, so the errors are similar as long as no UE5M3 scale is
    subnormal.
    """
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * scale
    spec = replace(UE5M3, rounding=rounding)
    q = quantize(x, spec, key=KEY)
    assert q.amax is None and q.scales.dtype == torch.uint8 and q.global_decode() is None
    decoded = quantize_dequantize(x, spec, key=KEY)
    assert decoded.values.dtype == torch.bfloat16 and decoded.scale is None
    assert torch.equal(decoded.values.float(), q.dequantize())
    error = (q.dequantize() - x).norm()
    e4m3 = (quantize(x, QuantSpec(rounding=rounding), key=KEY).dequantize() - x).norm()
    assert 0.97 < error / e4m3 < 1.03


def test_ue5m3_decodes_by_its_formula() -> None:
    """E2M1(x / s) * s with s = UE5M3(amax / 6), by hand for one block."""
    x = torch.tensor([[0.9, -0.31, 0.0, 12.6] * 4])
    q = quantize(x, UE5M3)
    assert q.block_scales().item() == 2.0  # 2.1 lies between 2 and 2.25
    assert q.dequantize()[0, :4].tolist() == [1.0, -0.0, 0.0, 12.0]


def test_a_guard_keeps_ue5m3_scales_from_clipping() -> None:
    """Rounding to nearest takes a normal scale down by 16/17 at most."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for guard, clips in ((1.0, True), (16 / 17, False)):
        scales = quantize(x, replace(UE5M3, guard=guard)).block_scales()
        largest = (x.reshape(64, 16, 16).abs().amax(-1) / scales).max()
        assert (largest > 6.0) == clips


def test_ue5m3_never_hides_what_is_not_finite() -> None:
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2, 32)
        x[0, 20] = bad
        assert quantize(x, UE5M3).scales[0, 1] == 255
        values = quantize_dequantize(x, UE5M3).values
        assert (
            values[0, 16:].isnan().all()
            and values[0, :16].isfinite().all()
            and values[1].isfinite().all()
        )


@needs_extension
def test_a_quantizer_decodes_only_what_its_own_spec_made() -> None:
    q = quantize(torch.randn(16, 32), QuantSpec())
    with pytest.raises(ValueError, match="this quantizer decodes"):
        quantizer(QuantSpec(block=(16, 16)), "cpu").decode(q)
