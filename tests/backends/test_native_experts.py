"""Experts on tensor cores: what one scaled_grouped_mm is given is checked, recorded and multiplied
on a CPU; what it does not take is a product per expert, and the plan says why.
"""

from dataclasses import replace

import pytest
import torch
from recorded_products import record
from torch import Tensor
from torch.nn.functional import ScalingType

from fp4train.backends import grouped, native
from fp4train.hardware import Device, find_gpu
from fp4train.nn import Experts
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Block,
    FP8Current,
    FP8Row,
    LayerPlan,
    Recipe,
    autocast,
    resolve,
)
from fp4train.quantize import quantize, to_torch

B200 = Device.elsewhere(find_gpu("B200"))
H100 = Device.elsewhere(find_gpu("H100"))
FP4 = torch.float4_e2m1fn_x2
E4M3 = torch.float8_e4m3fn
COUNTS = [5, 0, 48, 33]
K = 128
N = 160
NV = (ScalingType.BlockWise1x16, ScalingType.TensorWise)
MX = (ScalingType.BlockWise1x32,)
ROWS = (ScalingType.RowWise,)


def layer() -> Experts:
    """Four experts with weights of different magnitude, so that no two scales can change places
    unseen.
    """
    torch.manual_seed(0)
    made = Experts(len(COUNTS), K, N, bias=True)
    with torch.no_grad():
        made.weight *= torch.tensor([1.0, 2.0, 0.125, 16.0])[:, None, None]
    return made


def planned(recipe: Recipe, backend: str, device: Device) -> LayerPlan:
    return resolve(layer().layer, recipe, None, backend, device)


def run(recipe: Recipe, plan: LayerPlan) -> list[Tensor]:
    """y, dx, dw and dbias of the experts as `plan` says, on this CPU."""
    experts = layer()
    generator = torch.Generator().manual_seed(1)
    experts.apply_plan(plan, recipe, None, torch.device("cpu"))
    rows = sum(COUNTS) + 3
    x = torch.randn(rows, K, generator=generator) * torch.exp2(
        torch.randint(-4, 5, (rows, 1), generator=generator)
    )
    x = x.bfloat16().requires_grad_()
    with autocast(recipe, seed=3, step=5):
        y = experts(x, COUNTS)
    y.backward(torch.randn(rows, N, generator=generator).bfloat16())
    assert x.grad is not None and experts.weight.grad is not None and experts.bias.grad is not None
    return [y.detach(), x.grad, experts.weight.grad, experts.bias.grad]


@pytest.mark.parametrize(
    ("recipe", "device", "dtype", "scaling", "rows"),
    [
        (NVFP4(), B200, FP4, NV, (32, 64, 64)),
        (NVFP4(two_d_weights=False, hadamard=False), B200, FP4, NV, (32, 64, 64)),
        (MXFP8(), B200, E4M3, MX, (32, 64, 64)),
        (FP8Row(), H100, E4M3, ROWS, (16, 48, 48)),
        (FP8Current(element="e4m3"), H100, E4M3, ROWS, (16, 48, 48)),
    ],
    ids=["nvfp4", "nvfp4 1-D", "mxfp8", "fp8 rows", "fp8 tensor"],
)
def test_fprop_and_dgrad_of_all_experts_are_one_call_each_that_multiplies_to_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    recipe: Recipe,
    device: Device,
    dtype: torch.dtype,
    scaling: tuple[ScalingType, ...],
    rows: tuple[int, ...],
) -> None:
    if isinstance(recipe, FP8Row) and torch.__version__ < (2, 13):
        pytest.skip(
            "scaled_mm takes no scale per row on CPUs there, as wgrad of each expert has it"
        )
    single, recorder = record(monkeypatch)
    plan = planned(recipe, "native", device)
    assert [gemm.grouped for gemm in plan.gemms] == [True, True, False]
    found = run(recipe, plan)
    wanted = run(recipe, planned(recipe, "reference", device))
    for own, reference in zip(found, wanted, strict=True):
        assert own.dtype == reference.dtype
        row = reference.double().abs().amax(-1, keepdim=True)
        apart = (own.double() - reference.double()).abs()
        assert bool((apart <= 2.0**-7 * reference.double().abs() + 2.0**-8 * row).all())
    assert not found[0][sum(COUNTS) :].any() and not found[2][1].any()
    packed = 2 if dtype == FP4 else 1
    assert [call.extents for call in recorder.calls] == [(N, K // packed), (K, N // packed)]
    assert all(call.rows == rows for call in recorder.calls), (
        "an expert without tokens is not multiplied"
    )
    assert all(
        call.dtypes == (dtype, dtype) and call.scalings == (scaling, scaling)
        for call in recorder.calls
    )
    if scaling != ROWS:
        assert [call.extents[:2] for call in single.calls] == [(N, K)] * 3


@pytest.mark.parametrize(
    ("recipe", "device", "gemm", "said"),
    [
        (NVFP4(), B200, "fprop", "; all experts in one product"),
        (
            NVFP4(),
            B200,
            "wgrad",
            "a product per expert: scaled_grouped_mm writes BF16, and gradients of weights are",
        ),
        (
            replace(MXFP8(), dtype="float16"),
            B200,
            "fprop",
            "scaled_grouped_mm writes BF16, not float16",
        ),
        (
            FP8Current(),
            H100,
            "dgrad",
            "scaled_grouped_mm does not multiply E5M2 by E4M3",
        ),
        (FP8Block(), H100, "fprop", "scaled_grouped_mm has no FP8 in blocks"),
        (
            FP8Row(),
            B200,
            "dgrad",
            "scaled_grouped_mm of FP8 needs compute capability 9.0; B200 has 10.0",
        ),
        (
            NVFP4(),
            replace(B200, capability=(10, 3)),
            "fprop",
            "of NVFP4 needs compute capability 10.0; B200 has 10.3",
        ),
    ],
)
def test_the_plan_says_how_experts_are_multiplied_and_why(
    recipe: Recipe, device: Device, gemm: str, said: str
) -> None:
    wide = replace(layer().layer, in_features=256, out_features=256)
    why = getattr(resolve(wide, recipe, None, "native", device), gemm).why
    assert said in why, why


def test_row_scaled_activations_are_multiplied_expert_by_expert() -> None:
    plan = planned(NVFP4(row_scaled_activation=True), "native", B200)
    assert not plan.fprop.grouped and "takes one global scale per expert" in plan.fprop.why


def test_a_torch_without_the_kernels_is_named_where_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = MXFP8().table()
    here = replace(B200, here=True)
    for built, said in (
        ("USE_CUDA=1", "needs a torch that is built with MSLK"),
        ("USE_MSLK=1", None),
    ):
        monkeypatch.setattr(torch.__config__, "show", lambda built=built: built)
        assert said == (reason := grouped.why_not(table, "fprop", here)) or said in str(reason)


def test_other_layers_and_backends_say_nothing_of_experts() -> None:
    plain = resolve(replace(layer().layer, experts=0), NVFP4(), None, "native", B200)
    for plan in (plain, planned(NVFP4(), "emulate", B200), planned(BF16(), "auto", B200)):
        assert not any(gemm.grouped or "expert" in gemm.why for gemm in plan.gemms)


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8()], ids=["nvfp4", "mxfp8"])
def test_operands_whose_scales_lie_in_tiles_are_padded_and_multiplied_as_others(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    """Rows and width fill no block and no tile; one product per expert, and one of all."""
    record(monkeypatch)
    x, w = recipe.table()["fprop"].both
    assert x is not None and w is not None
    generator = torch.Generator().manual_seed(2)
    rows = [
        quantize(torch.randn(count, 80, generator=generator).bfloat16(), x)
        for count in (7, 48, 130)
    ]
    weights = [quantize(torch.randn(64, 80, generator=generator), w) for _ in rows]
    tiled = [to_torch(each) for each in rows]
    tiled_weights = [to_torch(each) for each in weights]
    assert all(
        map(torch.equal, grouped.multiply(rows, weights), grouped.multiply(tiled, tiled_weights))
    )
    for a, b, in_tiles, weight in zip(rows, weights, tiled, tiled_weights, strict=True):
        found = [
            native.NATIVE.product(*pair, out_dtype=torch.bfloat16)
            for pair in ((a, b), (in_tiles, weight))
        ]
        assert torch.equal(*found) and found[0].any()
