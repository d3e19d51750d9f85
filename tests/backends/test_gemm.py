"""Products of operands: exact for representable numbers, rounded once, and on the requested
backend.
"""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from prepared import prepared
from torch import nn

from fp4train.backends import (
    BACKENDS,
    CHOICES,
    Operands,
    Request,
    Table,
    emulate,
    matmul,
    native,
)
from fp4train.hardware import Device, find_gpu
from fp4train.nn import convert
from fp4train.precision import MXFP8, FP8Current, FP8Row, Layer, autocast, resolve
from fp4train.quantize import Decoded, QuantSpec, quantize

FP8 = FP8Current().table()["fprop"].first
E5M2 = QuantSpec(element="e5m2", block=(None, None), scale="fp32", global_scale=None)
ROW = FP8Row().table()["fprop"].first
rows_on_cpu = pytest.mark.skipif(
    not native.cpu_multiplies_rows(), reason="this torch multiplies no rows on CPUs"
)


def integers(rows: int, cols: int, seed: int) -> torch.Tensor:
    """Small integers: their products and sums are exact in float32, so rounding is all that can
    differ.
    """
    return torch.randint(
        -6, 7, (rows, cols), generator=torch.Generator().manual_seed(seed)
    ).bfloat16()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scales", ["none", "one", "both", "row", "rows"])
def test_scales_and_bias_meet_the_product_before_its_only_rounding(
    scales: str, bias: bool, out_dtype: torch.dtype
) -> None:
    a = integers(7, 33, 0)
    b = integers(9, 33, 1)
    generator = torch.Generator().manual_seed(2)
    one = torch.tensor(0.1234567)
    other = torch.tensor(3.7654321e-3)
    rows = torch.rand(7, 1, generator=generator)
    columns = torch.rand(9, 1, generator=generator)
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
    exact = (
        exact
        if second is None
        else exact * (second.double().T if second.dim() else second.double())
    )
    exact = exact if added is None else exact + added.to(out_dtype).double()
    unit = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-23}[out_dtype]
    assert found.dtype == out_dtype
    # Half a unit for the rounding, and a few units of float32 for the scales.
    assert bool(
        (
            (found.double() - exact).abs() <= 2 * unit * exact.abs() + 2.0**-21 * exact.abs().max()
        ).all()
    )
    if out_dtype == torch.bfloat16 and scales in ("none", "one", "both"):
        alpha = torch.tensor(1.0) if first is None else first if second is None else first * second
        once = (a.double() @ b.double().T).float() * alpha
        once = once if added is None else once + added.to(out_dtype).float()
        assert torch.equal(found, once.bfloat16()), "no intermediate rounding"


def test_scales_whose_product_leaves_float32_are_applied_in_turn() -> None:
    a = integers(4, 16, 0)
    b = integers(4, 16, 1)
    tiny = torch.tensor(2.0**-100)
    large = torch.tensor(2.0**-60)
    found = matmul(Decoded(a, tiny), Decoded(b * 2.0**80, large), out_dtype=torch.bfloat16)
    assert torch.equal(found.double(), ((a.double() @ b.double().T) * 2.0**-80).bfloat16().double())
    assert found.any()


def test_a_nan_scale_makes_everything_nan() -> None:
    a = Decoded(integers(4, 16, 0), torch.tensor(float("nan")))
    b = Decoded(integers(4, 16, 1), torch.tensor(1.0))
    for out_dtype in (torch.bfloat16, torch.float32):
        assert matmul(a, b, out_dtype=out_dtype).isnan().all()


@pytest.mark.parametrize("library", ["oneDNN where this CPU prefers it", "torch"])
@pytest.mark.parametrize("layout", ["rows", "columns", "every second column"])
def test_scaled_rows_are_multiplied_in_float32_whatever_their_layout(
    library: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "torch":
        monkeypatch.setattr(emulate, "_ONEDNN", None)
    a = integers(7, 34, 0)
    b = integers(9, 34, 1)
    if layout == "columns":
        a = a.T.contiguous().T
        b = b.T.contiguous().T
    elif layout == "every second column":
        a = a[:, ::2]
        b = b[:, ::2]
    rows = torch.arange(1.0, 8.0)[:, None]
    columns = torch.arange(1.0, 10.0)[:, None]
    for other in (b, b.float()):
        found = matmul(Decoded(a, rows), Decoded(other, columns), out_dtype=torch.float32)
        assert torch.equal(found, (a.float() @ b.float().T) * rows * columns.T)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("cols", [0, 16])
def test_empty_operands_multiply(rows: int, cols: int) -> None:
    for name, specs in {
        "native": [FP8],
        "emulate": [None, QuantSpec(), FP8],
        "reference": [None, QuantSpec()],
    }.items():
        backend = BACKENDS[name]
        for spec in specs:
            a, b = (prepared(backend, torch.ones(r, cols), spec) for r in (rows, 5))
            found = backend.product(a, b, out_dtype=torch.bfloat16)
            assert found.shape == (rows, 5)
            assert torch.equal(found, torch.full((rows, 5), float(cols)).bfloat16()), (
                backend,
                spec,
            )


@pytest.mark.parametrize(
    "spec",
    [QuantSpec(), QuantSpec(block=(16, 16)), MXFP8().table()["fprop"].first, FP8, ROW],
    ids=str,
)
def test_codes_and_decoded_operands_give_the_same_product(spec: QuantSpec) -> None:
    """Backward keeps x as codes and decodes them for the product."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 40, generator=generator)
    w = torch.randn(24, 40, generator=generator)
    emulate = BACKENDS["emulate"]
    decoded = emulate.product(
        prepared(emulate, x, spec), prepared(emulate, w, spec), out_dtype=torch.bfloat16
    )
    stored = emulate.product(quantize(x, spec), quantize(w, spec), out_dtype=torch.bfloat16)
    assert torch.equal(decoded, stored)


@pytest.mark.parametrize("accumulator", ["auto", "fast", "exact"])
def test_native_sums_in_the_accumulator_that_the_recipe_names_for_fprop(
    monkeypatch: pytest.MonkeyPatch, accumulator: str
) -> None:
    asked: list[bool] = []
    multiply = torch._scaled_mm

    def noted(*arguments: Any, use_fast_accum: bool, **options: Any) -> Any:
        asked.append(use_fast_accum)
        return multiply(*arguments, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    layer = convert(nn.Sequential(nn.Linear(32, 16)), backend="native")
    with autocast(FP8Current(accumulator=accumulator)):
        y = layer(torch.randn(32, 32).bfloat16().requires_grad_())
    y.sum().backward()
    assert asked == [accumulator == "fast", False, False]


@pytest.mark.parametrize(
    ("gpu", "backend", "accumulator", "fast"),
    [
        *[
            ("H100", "te", "auto", True),
            ("H100", "te", "exact", False),
            ("H100", "native", "auto", False),
        ],
        *[
            ("H100", "native", "fast", True),
            ("H100", "emulate", "fast", False),
            ("B200", "te", "auto", False),
        ],
    ],
)
def test_the_plan_says_which_products_are_summed_in_14_bits(
    gpu: str, backend: str, accumulator: str, fast: bool
) -> None:
    device = Device.elsewhere(find_gpu(gpu))
    found = resolve(LAYER, FP8Current(accumulator=accumulator), None, backend, device)
    assert ["14 bits" in gemm.why for gemm in found.gemms] == [fast, False, False]


def test_an_accumulator_of_products_that_have_one_kind_of_sums_is_refused() -> None:
    with pytest.raises(ValueError, match="others are summed in one way: use accumulator='auto'"):
        Operands(first=QuantSpec(), second=QuantSpec(), accumulator="fast")
    with pytest.raises(ValueError, match="accumulator"):
        FP8Current(accumulator="slow")
    assert (
        FP8Current(accumulator="fast").with_high_precision("fprop").table()["fprop"].accumulator
        == "auto"
    )


CPU = Device(type="cpu")
LAYER = Layer(name="blocks.0.up", in_features=32, out_features=64, block=0, blocks=1)


def table(first: QuantSpec | None, second: QuantSpec | None) -> Table:
    return Table(fprop=Operands(first=first, second=second), name="mine")


@pytest.mark.parametrize("allowed", [True, False])
def test_emulated_products_on_cuda_are_reduced_in_float32_whatever_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """torch lets cuBLAS add parts of a long contraction in BF16; tensor cores do not."""
    settings = torch.backends.cuda.matmul
    before = (
        settings.allow_bf16_reduced_precision_reduction,
        settings.allow_fp16_reduced_precision_reduction,
    )
    settings.allow_bf16_reduced_precision_reduction = (
        settings.allow_fp16_reduced_precision_reduction
    ) = allowed
    seen: list[tuple[bool, bool]] = []

    def product(a: Decoded, b: Decoded, **options: object) -> torch.Tensor:
        seen.append(
            (
                settings.allow_bf16_reduced_precision_reduction,
                settings.allow_fp16_reduced_precision_reduction,
            )
        )
        raise RuntimeError("out of memory")

    monkeypatch.setattr("fp4train.backends.emulate.matmul", product)
    values = torch.empty(16, 16, dtype=torch.bfloat16)
    on_cuda = Mock(spec=torch.Tensor, device=torch.device("cuda"))
    for operand in (on_cuda, values):
        with pytest.raises(RuntimeError, match="out of memory"):
            BACKENDS["emulate"].product(
                Decoded(operand, None), Decoded(operand, None), out_dtype=torch.bfloat16
            )
        assert settings.allow_bf16_reduced_precision_reduction is allowed, (
            "the user's own products keep the setting"
        )
    (
        settings.allow_bf16_reduced_precision_reduction,
        settings.allow_fp16_reduced_precision_reduction,
    ) = before
    assert seen == [(False, False), (allowed, allowed)]


def test_auto_emulates_on_a_cpu_where_scaled_mm_is_slow() -> None:
    for spec in (FP8, ROW, QuantSpec()):
        chosen = Request(table(spec, spec), LAYER, "auto", CPU).choices()["fprop"]
        assert chosen.backend == "emulate"
        assert "not cpu" in chosen.why
    assert Request(table(FP8, FP8), LAYER, "native", CPU).choices()["fprop"].backend == "native"


def test_high_precision_is_torchs_whatever_the_backend() -> None:
    for backend in CHOICES:
        assert {
            c.backend for c in Request(table(None, None), LAYER, backend, CPU).choices().values()
        } == {"torch"}
    assert Request(table(FP8, FP8), LAYER, "native", CPU).choices()["dgrad"].backend == "torch"


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (FP8, None, "both operands quantised"),
        (QuantSpec(), QuantSpec(), "NVFP4 on NVIDIA GPUs only, not on cpu"),
        (QuantSpec(element="e3m2"), FP8, r"does not take element=e3m2 block=(1, 16) scale=e4m3"),
        (MXFP8().table()["fprop"].first, FP8, "the same kind of scale"),
        (FP8, ROW, "the same kind of scale"),
        (E5M2, E5M2, "E5M2 by E5M2"),
    ],
)
def test_a_named_backend_that_cannot_is_refused_with_the_reason_and_what_could(
    first: QuantSpec, second: QuantSpec | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=r"blocks\.0\.up \(32→64\) on cpu") as refused:
        Request(table(first, second), LAYER, "native", CPU).choices()
    assert reason in str(refused.value)
    assert "backend=auto would run it by emulate" in str(refused.value)
    assert Request(table(first, second), LAYER, "auto", CPU).choices()["fprop"].backend == "emulate"


def test_sizes_that_scaled_mm_does_not_take_are_refused_by_name() -> None:
    odd = Layer(name="head", in_features=32, out_features=65, block=None, blocks=1)
    with pytest.raises(ValueError, match="out_features divisible by 16, not 65"):
        Request(table(FP8, FP8), odd, "native", CPU).choices()


def test_an_unknown_backend_is_named_with_what_is_allowed() -> None:
    with pytest.raises(
        ValueError, match="backend='cuda' is not one of auto, te, native, emulate, reference"
    ):
        Request(table(None, None), LAYER, "cuda", CPU).choices()


def test_a_gpu_elsewhere_is_judged_by_its_capability() -> None:
    fp8 = FP8Current().table()
    row = FP8Row().table()
    hopper = Device.elsewhere(find_gpu("H100"))
    ampere = Device.elsewhere(find_gpu("A100"))
    assert Request(fp8, LAYER, "auto", hopper).choices()["fprop"].backend == "te"
    assert Request(row, LAYER, "auto", hopper).choices()["fprop"].backend == "native"
    for recipe in (fp8, row):
        assert Request(recipe, LAYER, "auto", ampere).choices()["fprop"].backend == "emulate"
    with pytest.raises(ValueError, match=r"FP8 needs compute capability 8\.9; A100 has 8\.0"):
        Request(row, LAYER, "native", ampere).choices()


def test_scaled_mm_is_not_used_on_other_devices() -> None:
    with pytest.raises(ValueError, match="not used on meta"):
        Request(table(FP8, FP8), LAYER, "native", Device(type="meta")).choices()


def test_a_torch_whose_cpu_products_take_one_scale_per_tensor_is_refused_for_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "cpu_multiplies_rows", lambda: False)
    with pytest.raises(
        ValueError, match=r"torch .* has no scaled_mm with one scale per row on CPUs"
    ):
        Request(FP8Row().table(), LAYER, "native", Device(type="cpu")).choices()
    assert (
        Request(FP8Current().table(), LAYER, "native", Device(type="cpu"))
        .choices()["fprop"]
        .backend
        == "native"
    )


@pytest.mark.parametrize("spec", [FP8, pytest.param(ROW, marks=rows_on_cpu)], ids=["tensor", "row"])
@pytest.mark.parametrize("tokens", [1, 7, 16, 33])
def test_tokens_are_padded_for_scaled_mm_which_changes_no_product(
    spec: QuantSpec, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 32, generator=generator)
    w = torch.randn(48, 32, generator=generator)
    scaled = BACKENDS["native"]
    exact = BACKENDS["reference"]
    for a, b in ((x, w), (w @ x.T, x.T.contiguous())):  # tokens as rows, and as the contraction
        a, b = (
            (a, b)
            if a.shape[1] == b.shape[1]
            else (a, torch.randn(16, a.shape[1], generator=generator))
        )
        found = scaled.product(
            prepared(scaled, a, spec), prepared(scaled, b, spec), out_dtype=torch.float32
        )
        wanted = exact.product(
            prepared(exact, a, spec), prepared(exact, b, spec), out_dtype=torch.float32
        )
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("first", "second"), [(FP8, FP8), (E5M2, FP8), pytest.param(ROW, ROW, marks=rows_on_cpu)]
)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_scaled_mm_multiplies_the_codes(
    first: QuantSpec, second: QuantSpec, out_dtype: torch.dtype, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 48, generator=generator)
    w = torch.randn(16, 48, generator=generator)
    added = torch.randn(16, generator=generator) if bias else None
    results = {}
    for name in ("native", "emulate", "reference"):
        gemm = BACKENDS[name]
        results[name] = gemm.product(
            prepared(gemm, x, first), prepared(gemm, w, second), out_dtype=out_dtype, bias=added
        )
    scale = results["reference"].abs().max()
    for name in ("native", "emulate"):
        error = (results[name].double() - results["reference"].double()).abs()
        unit = 2.0**-8 if out_dtype == torch.bfloat16 else 2.0**-20
        assert bool((error <= unit * results["reference"].abs() + 2.0**-20 * scale).all()), name


@pytest.mark.parametrize("size", [16, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_normal_numbers_down_to_the_smallest_are_multiplied(size: int, dtype: torch.dtype) -> None:
    """BF16 instructions of CPUs take what is smaller for zero, other products do not: either is
    what the docs say.
    """
    for exponent in (-126, -127, -133):
        value = 2.0**exponent
        x = torch.full((size, size), value, dtype=torch.bfloat16)
        y = matmul(Decoded(x, None), Decoded(torch.eye(size).bfloat16(), None), out_dtype=dtype)
        allowed = {value} if exponent >= -126 else {value, 0.0}
        assert set(y.double().unique().tolist()) <= allowed, exponent


@pytest.mark.parametrize("exponent", [-60, -100, -117, -126])
def test_emulated_products_of_normal_numbers_are_exact(exponent: int) -> None:
    """As docs/numerics.md says: elements and products from 2⁻¹²⁶ on are not lost, with the BF16
    instructions of a CPU or without them.
    """
    said = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text("utf-8")
    assert "elements and products below 2⁻¹²⁶ (without\nBF16 instructions, elements below" in said
    integer = integers(7, 32, 0)
    a = torch.ldexp(integer.double(), torch.tensor(exponent)).bfloat16()
    b = integers(9, 32, 1)
    found = matmul(Decoded(a, None), Decoded(b, None), out_dtype=torch.float32)
    assert torch.equal(found.double(), a.double() @ b.double().T) and found.any()


@pytest.mark.parametrize("exponent", [-130, -140])
def test_below_them_a_product_is_exact_or_lost(exponent: int) -> None:
    a = torch.full((4, 32), 2.0**exponent, dtype=torch.bfloat16)
    b = torch.ones(4, 32, dtype=torch.bfloat16)
    found = matmul(Decoded(a, None), Decoded(b, None), out_dtype=torch.float32)
    assert all(value in (0.0, 32 * float(a[0, 0])) for value in found.flatten().tolist())
