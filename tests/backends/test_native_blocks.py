"""Block-scaled products of tensor cores: on CPUs, what scaled_mm is given is checked, recorded and
multiplied.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pretended import Machine
from recorded_products import Recorder, record
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from fp4train.backends import BACKENDS, Operands, Request, Table
from fp4train.hardware import Device, find_gpu
from fp4train.nn import Linear
from fp4train.precision import MXFP8, NVFP4, FP8Block, Layer, Recipe, autocast
from fp4train.precision.recipes import MXFP4, FP8Row
from fp4train.quantize import QuantSpec, quantize

LAYER = Layer(name="blocks.0.up", in_features=256, out_features=384, block=0, blocks=1)
B200 = Device.elsewhere(find_gpu("B200"))
H100 = Device.elsewhere(find_gpu("H100"))
FP4 = torch.float4_e2m1fn_x2
E4M3 = torch.float8_e4m3fn
NV = (ScalingType.BlockWise1x16, ScalingType.TensorWise)
MX = (ScalingType.BlockWise1x32,)
LONG = (ScalingType.BlockWise1x128,)
SQUARE = (ScalingType.BlockWise128x128,)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return record(monkeypatch)[0]


def normal(*shape: int, seed: int) -> Tensor:
    """Rows of different magnitude, so that no two scales can change places unseen."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(*shape, generator=generator)
    return found * torch.exp2(torch.randint(-6, 7, (shape[0], 1), generator=generator))


def close(found: Tensor, wanted: Tensor, rounded_to: torch.dtype | None = None) -> bool:
    """Equal up to float32 accumulation, and one unit of the dtype that the result is rounded to."""
    unit = {torch.float32: 0.0, torch.bfloat16: 2.0**-7}[rounded_to or found.dtype]
    difference = (found.double() - wanted.double()).abs()
    row = wanted.double().abs().amax(1, keepdim=True)
    return found.dtype == wanted.dtype and bool(
        (difference <= unit * wanted.double().abs() + 2.0**-17 * row).all()
    )


def run(recipe: Recipe, backend: str, tokens: int, *, bias: bool = False) -> list[Tensor]:
    """y, dx, dw of a layer."""
    plain = nn.Linear(LAYER.in_features, LAYER.out_features, bias=bias)
    with torch.no_grad():
        plain.weight.copy_(normal(LAYER.out_features, LAYER.in_features, seed=1))
        if bias:
            plain.bias.copy_(normal(LAYER.out_features, 1, seed=4)[:, 0])
    layer = Linear.from_linear(plain, LAYER, backend)
    x = normal(tokens, LAYER.in_features, seed=2).bfloat16().requires_grad_()
    with autocast(recipe, seed=3, step=5):
        y = layer(x)
    y.backward(normal(tokens, LAYER.out_features, seed=3).bfloat16())
    assert x.grad is not None and layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize(
    ("recipe", "dtypes", "scalings", "multiple"),
    [
        (NVFP4(), [(FP4, FP4)] * 3, [(NV, NV)] * 3, 32),
        (NVFP4(two_d_weights=False, hadamard=False), [(FP4, FP4)] * 3, [(NV, NV)] * 3, 32),
        (MXFP8(), [(E4M3, E4M3)] * 3, [(MX, MX)] * 3, 32),
        (FP8Block(), [(E4M3, E4M3)] * 3, [(LONG, SQUARE), (LONG, SQUARE), (LONG, LONG)], 128),
    ],
    ids=["nvfp4", "nvfp4 1-D", "mxfp8", "fp8 blocks"],
)
@pytest.mark.parametrize("tokens", [1, 48, 200, 256])
def test_the_three_gemms_of_a_layer_are_what_tensor_cores_take_and_multiply_to_the_reference(
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    recipe: Recipe,
    dtypes: list[tuple[torch.dtype, torch.dtype]],
    scalings: list[tuple[tuple[ScalingType, ...], ...]],
    multiple: int,
    tokens: int,
) -> None:
    wanted = run(recipe, "reference", tokens)
    Machine(monkeypatch).multiplies_blocks()
    found = run(recipe, "native", tokens)
    assert all(close(a, b, torch.bfloat16) for a, b in zip(found, wanted, strict=True))
    rows = tokens + -tokens % 16
    contracted = tokens + -tokens % multiple
    k = LAYER.in_features
    n = LAYER.out_features
    assert [call.extents for call in recorder.calls] == [
        (rows, n, k),
        (rows, k, n),
        (n, k, contracted),
    ]
    assert [call.dtypes for call in recorder.calls] == dtypes
    assert [call.scalings for call in recorder.calls] == scalings
    assert {call.out_dtype for call in recorder.calls} == {torch.bfloat16}


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8(), FP8Block()], ids=lambda r: r.table().name)
def test_a_bias_is_added_before_the_only_rounding(
    recorder: Recorder, recipe: Recipe, out_dtype: torch.dtype
) -> None:
    operands = recipe.table()["fprop"]
    assert operands.first is not None and operands.second is not None
    x = normal(40, 256, seed=0)
    w = normal(128, 256, seed=1)
    bias = torch.randn(128)
    a = quantize(x, operands.first)
    b = quantize(w, operands.second)
    found, wanted = (
        BACKENDS[name].product(a, b, out_dtype=out_dtype, bias=bias)
        for name in ("native", "reference")
    )
    assert close(found, wanted)
    assert recorder.calls[0].out_dtype == out_dtype


def test_global_scales_of_rows_multiply_the_float32_product(recorder: Recorder) -> None:
    spec = QuantSpec(global_scale="row")
    a = quantize(normal(20, 64, seed=0), spec)
    b = quantize(normal(48, 64, seed=1), QuantSpec())
    for first, second in ((a, b), (b, a), (a, a)):
        found, wanted = (
            BACKENDS[n].product(first, second, out_dtype=torch.bfloat16)
            for n in ("native", "reference")
        )
        assert close(found, wanted)
    assert {call.out_dtype for call in recorder.calls} == {torch.float32}
    assert {call.scalings for call in recorder.calls} == {((ScalingType.BlockWise1x16,),) * 2}


@pytest.mark.parametrize(
    "spec", [QuantSpec(), MXFP8().table()["fprop"].first], ids=["nvfp4", "mxfp8"]
)
def test_a_nan_in_reaches_the_product(recorder: Recorder, spec: QuantSpec) -> None:
    x = normal(32, 64, seed=0)
    x[3, 5] = torch.nan
    a = quantize(x, spec)
    b = quantize(normal(32, 64, seed=1), spec)
    found = BACKENDS["native"].product(a, b, out_dtype=torch.bfloat16)
    assert found[3].isnan().all()


@pytest.mark.parametrize(
    ("recipe", "device", "reason"),
    [
        (NVFP4(), H100, r"scaled_mm of NVFP4 needs compute capability 10\.x; H100 has 9\.0"),
        (
            NVFP4(),
            Device(type="cuda", name="RTX", capability=(12, 0), here=False),
            r"10\.x; RTX has 12\.0",
        ),
        (NVFP4(), Device(type="cpu"), "multiplies NVFP4 on NVIDIA GPUs only, not on cpu"),
        (MXFP8(), H100, r"scaled_mm of MXFP8 needs compute capability 10\.x; H100 has 9\.0"),
        (FP8Block(), B200, r"FP8 in blocks needs compute capability 9\.0; B200 has 10\.0"),
        (MXFP4(), B200, r"does not take element=e2m1 block=\(1, 32\) scale=e8m0"),
        (MXFP8(element="hybrid"), B200, r"dgrad: .*element=e5m2 block=\(1, 32\) scale=e8m0"),
        (FP8Block(element="hybrid"), H100, r"dgrad: .*element=e5m2 block=\(1, 128\) scale=pow2"),
    ],
    ids=str,
)
def test_a_gpu_without_these_tensor_cores_is_refused_by_its_capability(
    recipe: Recipe, device: Device, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Request(recipe.table(), LAYER, "native", device).choices()


def test_what_scaled_mm_does_not_combine_is_refused() -> None:
    square = FP8Block().table()["fprop"].second
    nvfp4 = QuantSpec()
    mxfp8 = MXFP8().table()["fprop"].first
    row = FP8Row().table()["fprop"].second
    assert row is not None
    for first, second, device, reason in (
        (row, replace(row, element="e5m2"), H100, "needs E4M3 for the second operand"),
        (square, square, H100, "two operands in blocks of 128×128"),
        (nvfp4, mxfp8, B200, "the same kind of scale"),
        (nvfp4, None, B200, "both operands quantised"),
    ):
        with pytest.raises(ValueError, match=reason):
            Request(
                Table(fprop=Operands(first=first, second=second), name="mine"),
                LAYER,
                "native",
                device,
            ).choices()
    with pytest.raises(ValueError, match="gives bfloat16 and float32, not float16"):
        Request(replace(NVFP4().table(), dtype="float16"), LAYER, "native", B200).choices()
    odd = replace(LAYER, in_features=272)
    with pytest.raises(ValueError, match="NVFP4 needs in_features divisible by 32, not 272"):
        Request(NVFP4().table(), odd, "native", B200).choices()


def test_a_torch_for_an_older_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch).has_torch_for("12.6")
    here = Device(type="cuda", name="B200", capability=(10, 0))
    with pytest.raises(
        ValueError, match=r"NVFP4 needs CUDA 12\.8; this torch is built for CUDA 12\.6"
    ):
        Request(NVFP4().table(), LAYER, "native", here).choices()
    assert Request(NVFP4().table(), LAYER, "native", B200).choices()["fprop"].backend == "native", (
        "another machine, another torch"
    )


def test_auto_multiplies_the_codes_where_transformer_engine_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(monkeypatch).has_torch_for("13.0")
    for recipe, name, capability in (
        (NVFP4(), "B200", (10, 0)),
        (MXFP8(), "B300", (10, 3)),
        (FP8Block(), "H100", (9, 0)),
    ):
        here = Device(type="cuda", name=name, capability=capability)
        assert {
            c.backend for c in Request(recipe.table(), LAYER, "auto", here).choices().values()
        } == {"native"}, recipe


def test_what_cublas_refuses_names_the_product_and_what_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object, **options: object) -> Tensor:
        raise RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"
        )

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuse)
    a = quantize(normal(32, 64, seed=0), QuantSpec())
    b = quantize(normal(48, 64, seed=1), QuantSpec())
    with pytest.raises(
        RuntimeError,
        match=r"\[32, 64\] by \[48, 64\]ᵀ of E2M1·E2M1 .*NOT_SUPPORTED.* backend=emulate",
    ):
        BACKENDS["native"].product(a, b, out_dtype=torch.bfloat16)


def test_rows_are_refused_in_float32_as_before() -> None:
    with pytest.raises(ValueError, match="writes BF16 only, not float32"):
        Request(replace(FP8Row().table(), dtype="float32"), LAYER, "native", H100).choices()
