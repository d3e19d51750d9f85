"""Products of operands: exact where the numbers are, rounded once, and on the backend that was asked for."""

import logging

import pytest
import torch

from fp4train.backends import BACKENDS, matmul, select
from fp4train.precision import MXFP8, FP8Current, FP8Row
from fp4train.quantize import Decoded, QuantSpec, quantize

FP8 = FP8Current().table()["fprop"].first
E5M2 = QuantSpec(element="e5m2", block=(None, None), scale="fp32", global_scale=None)
ROW = FP8Row().table()["fprop"].first


def integers(rows: int, cols: int, seed: int) -> torch.Tensor:
    """Small integers: their products and sums are exact in float32, so rounding is all that can differ."""
    return torch.randint(-6, 7, (rows, cols), generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scales", ["none", "one", "both", "row", "rows"])
def test_scales_and_bias_meet_the_product_before_its_only_rounding(
    scales: str, bias: bool, out_dtype: torch.dtype
) -> None:
    a, b = integers(7, 33, 0), integers(9, 33, 1)
    generator = torch.Generator().manual_seed(2)
    one, other = torch.tensor(0.1234567), torch.tensor(3.7654321e-3)
    rows, columns = torch.rand(7, 1, generator=generator), torch.rand(9, 1, generator=generator)
    first, second = {
        "none": (None, None),
        "one": (one, None),
        "both": (one, other),
        "row": (rows, other),
        "rows": (rows, columns),
    }[scales]
    added = torch.randn(9, generator=generator) if bias else None
    found = matmul(Decoded(a, first), Decoded(b, second), out_dtype=out_dtype, bias=added)
    exact = a.double() @ b.double().T
    exact = exact if first is None else exact * first.double()
    exact = exact if second is None else exact * (second.double().T if second.dim() else second.double())
    exact = exact if added is None else exact + added.to(out_dtype).double()
    unit = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-23}[out_dtype]
    assert found.dtype == out_dtype
    # Half a unit for the rounding, and a few of float32's for the scales.
    assert bool(((found.double() - exact).abs() <= 2 * unit * exact.abs() + 2.0**-21 * exact.abs().max()).all())
    if out_dtype == torch.bfloat16 and scales in ("none", "one", "both"):
        alpha = torch.tensor(1.0) if first is None else first if second is None else first * second
        once = (a.double() @ b.double().T).float() * alpha
        once = once if added is None else once + added.to(out_dtype).float()
        assert torch.equal(found, once.bfloat16()), "no intermediate rounding"


def test_scales_whose_product_leaves_float32_are_applied_in_turn() -> None:
    a, b = integers(4, 16, 0), integers(4, 16, 1)
    tiny, large = torch.tensor(2.0**-100), torch.tensor(2.0**-60)
    found = matmul(Decoded(a, tiny), Decoded(b * 2.0**80, large), out_dtype=torch.bfloat16)
    assert torch.equal(found.double(), ((a.double() @ b.double().T) * 2.0**-80).bfloat16().double())
    assert found.any()


def test_a_nan_scale_makes_everything_nan() -> None:
    a, b = Decoded(integers(4, 16, 0), torch.tensor(float("nan"))), Decoded(integers(4, 16, 1), torch.tensor(1.0))
    for out_dtype in (torch.bfloat16, torch.float32):
        assert matmul(a, b, out_dtype=out_dtype).isnan().all()


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("cols", [0, 16])
def test_empty_operands_multiply(rows: int, cols: int) -> None:
    for backend in BACKENDS.values():
        for spec in (None, QuantSpec(), FP8):
            a, b = (backend.prepare(torch.ones(r, cols), spec) for r in (rows, 5))
            found = backend.product(a, b, out_dtype=torch.bfloat16)
            assert found.shape == (rows, 5)
            assert torch.equal(found, torch.full((rows, 5), float(cols)).bfloat16()), (backend, spec)


@pytest.mark.parametrize(
    "spec", [QuantSpec(), QuantSpec(block=(16, 16)), MXFP8().table()["fprop"].first, FP8, ROW], ids=str
)
def test_codes_and_decoded_operands_give_the_same_product(spec: QuantSpec) -> None:
    """Backward keeps x as codes and decodes them for the product."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(20, 40, generator=generator), torch.randn(24, 40, generator=generator)
    emulate = BACKENDS["emulate"]
    decoded = emulate.product(emulate.prepare(x, spec), emulate.prepare(w, spec), out_dtype=torch.bfloat16)
    stored = emulate.product(quantize(x, spec), quantize(w, spec), out_dtype=torch.bfloat16)
    assert torch.equal(decoded, stored)


def test_auto_emulates_on_a_cpu_where_scaled_mm_is_slow() -> None:
    for spec in (FP8, ROW, QuantSpec()):
        module, why = select("auto", spec, spec, "cpu")
        assert module is BACKENDS["emulate"]
        assert "CPU" in why
    assert select("native", FP8, FP8, "cpu")[0] is BACKENDS["native"]


def test_high_precision_is_torchs_whatever_the_backend(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for backend in ("auto", *BACKENDS):
            assert select(backend, None, None, "cpu")[0] is BACKENDS["emulate"]
    assert not caplog.records, "nobody asked scaled_mm for a BF16 product"


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (FP8, None, "both operands quantised"),
        (QuantSpec(), QuantSpec(), "FP8 only, not E2M1"),
        (MXFP8().table()["fprop"].first, FP8, "one scale a tensor or a row"),
        (FP8, ROW, "scaled alike"),
        (E5M2, E5M2, "E5M2 by E5M2"),
    ],
)
def test_what_scaled_mm_cannot_do_is_emulated_and_logged_once(
    first: QuantSpec, second: QuantSpec | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    select.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            module, why = select("native", first, second, "cpu")
            assert module is BACKENDS["emulate"]
            assert reason in why
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_an_unknown_backend_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="backend='cuda' is not one of auto, emulate, native, reference"):
        select("cuda", None, None, "cpu")


def test_scaled_mm_is_not_used_on_other_devices() -> None:
    assert select("native", FP8, FP8, "meta")[0] is BACKENDS["emulate"]


@pytest.mark.parametrize(("first", "second"), [(FP8, FP8), (E5M2, FP8), (ROW, ROW)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_scaled_mm_multiplies_the_codes(
    first: QuantSpec, second: QuantSpec, out_dtype: torch.dtype, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(32, 48, generator=generator), torch.randn(16, 48, generator=generator)
    added = torch.randn(16, generator=generator) if bias else None
    results = {}
    for name in ("native", "emulate", "reference"):
        gemm = BACKENDS[name]
        results[name] = gemm.product(gemm.prepare(x, first), gemm.prepare(w, second), out_dtype=out_dtype, bias=added)
    scale = results["reference"].abs().max()
    for name in ("native", "emulate"):
        error = (results[name].double() - results["reference"].double()).abs()
        unit = 2.0**-8 if out_dtype == torch.bfloat16 else 2.0**-20
        assert bool((error <= unit * results["reference"].abs() + 2.0**-20 * scale).all()), name
