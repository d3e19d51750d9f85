"""Every product that `native` plans is one that torch's own checks of scaled_mm let through. They
are compiled in; CUDA's `_scaled_mm_v2` asks them, in this order, before it looks at the GPU
(aten/src/ATen/native/cuda/ScaledBlas.cpp).
"""

import subprocess
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from compiled_layers import needs_inductor
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.utils import cpp_extension

from fp4train.backends import NATIVE, Operands, Table
from fp4train.hardware import Device, find_gpu
from fp4train.precision import Layer
from fp4train.quantize import QuantSpec, quantize

CHECKS = """
#include <ATen/native/ScaledBlasUtils.h>
#include <torch/library.h>
namespace scaled = at::native::scaled;
bool accepts(at::ScalarType a, at::IntArrayRef kinds_a, at::TensorList scales_a,
             at::ScalarType b, at::IntArrayRef kinds_b, at::TensorList scales_b) {
  auto ka = scaled::convert_int_to_enum<ScalingType>(kinds_a);
  auto kb = scaled::convert_int_to_enum<ScalingType>(kinds_b);
  auto sa = scales_a, sb = scales_b;
  const auto row = ScalingType::BlockWise1x128, square = ScalingType::BlockWise128x128;
  return scaled::check_tensorwise_recipe(a, ka, sa, b, kb, sb)
      || scaled::check_rowwise_recipe(a, ka, sa, b, kb, sb)
      || scaled::check_deepseek_recipe(row, square, a, ka, sa, b, kb, sb)
      || scaled::check_deepseek_recipe(square, row, a, ka, sa, b, kb, sb)
      || scaled::check_deepseek_recipe(row, row, a, ka, sa, b, kb, sb)
      || scaled::check_nvfp4_recipe(a, ka, sa, b, kb, sb)
      || scaled::check_nvfp4_recipe_single_scale(a, ka, sa, b, kb, sb)
      || scaled::check_mxfp8_recipe(a, ka, sa, b, kb, sb)
      || scaled::check_mxfp4_recipe(a, ka, sa, b, kb, sb);
}
TORCH_LIBRARY(checks, m) {
  m.def("accepts(ScalarType a, int[] kinds_a, Tensor[] scales_a,"
        " ScalarType b, int[] kinds_b, Tensor[] scales_b) -> bool", &accepts);
}
"""
LAYER = Layer(name="blocks.0.up", in_features=256, out_features=256, block=0, blocks=1)
GPUS = [Device.elsewhere(find_gpu(name)) for name in ("H100", "B200")]
FP8 = ("e4m3", "e5m2")
SPECS = (
    *(QuantSpec(block=(rows, 16), global_scale="tensor") for rows in (1, 16)),
    QuantSpec(global_scale="row"),
    *(
        QuantSpec(element=element, block=(rows, 32), scale="e8m0", global_scale=None)
        for element in ("e2m1", "e3m2", "e2m3", *FP8)
        for rows in (1, 32)
    ),
    *(
        QuantSpec(element=element, block=block, scale=scale, global_scale=None)
        for element in FP8
        for block in ((1, 128), (128, 128), (1, None), (None, None))
        for scale in ("fp32", "pow2")
    ),
)


@pytest.fixture(scope="module")
def accepts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bool]:
    folder = tmp_path_factory.mktemp("checks")
    source, library = folder / "checks.cpp", folder / "checks.so"
    source.write_text(CHECKS)
    words = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
    words += [f"-I{path}" for path in cpp_extension.include_paths()]
    words += [f"-L{path}" for path in cpp_extension.library_paths()]
    subprocess.run([*words, "-ltorch_cpu", "-lc10"], check=True)
    torch.ops.load_library(library)
    return torch.ops.checks.accepts


@needs_inductor
@pytest.mark.long
def test_torchs_checks_let_through_what_is_planned(
    accepts: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def scaled_mm(
        a: Tensor,
        b: Tensor,
        scale_a: Any,
        kinds_a: Any,
        scale_b: Any,
        kinds_b: Any,
        *_: Any,
        **given: Any,
    ) -> Tensor:
        numbers = [[kind.value for kind in kinds] for kinds in (kinds_a, kinds_b)]
        assert accepts(a.dtype, numbers[0], scale_a, b.dtype, numbers[1], scale_b), (first, second)
        asked.append((first, second))
        return a.new_zeros(a.shape[0], b.shape[1], dtype=given["output_dtype"])

    def older(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **given: Any) -> Tensor:
        kind = ScalingType.TensorWise if scale_a.numel() == 1 else ScalingType.RowWise
        return scaled_mm(
            a, b, [scale_a], [kind], [scale_b], [kind], output_dtype=given["out_dtype"]
        )

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm", older)
    x = torch.randn(256, 256)
    for first, second, gpu in product(SPECS, SPECS, GPUS):
        table = Table(fprop=Operands(first=first, second=second), name="mine")
        if NATIVE.why_not(table, "fprop", LAYER, gpu) is None:
            NATIVE.product(quantize(x, first), quantize(x, second), out_dtype=torch.bfloat16)
    assert len(asked) > 30
    assert {spec.block for pair in asked for spec in pair} == {spec.block for spec in SPECS}


@needs_inductor
@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        (ScalingType.BlockWise1x32, torch.float8_e8m0fnu),
        (ScalingType.BlockWise1x128, torch.float32),
    ],
)
def test_torchs_checks_refuse_e5m2_in_blocks(
    accepts: Callable[..., bool], kind: ScalingType, scale: torch.dtype
) -> None:
    """Where they no longer do, `native` may take it."""
    scales = [torch.ones(512).to(scale)]
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for first, second, allowed in ((e4m3, e4m3, True), (e5m2, e4m3, False), (e4m3, e5m2, False)):
        assert accepts(first, [kind.value], scales, second, [kind.value], scales) is allowed
