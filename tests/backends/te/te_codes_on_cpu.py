"""Exact codes for an extension of TE's real Python that multiplies, beside the emulation and with a
weight that is gathered as codes: a program, started by test_te_codes.py, that prints JSON; and for the ranks of
tests/distributed/test_te.py.

Besides what te_products_on_cpu.py fakes: what is quantised has the values that fp4train's reference
gives it by the spec that TE's quantiser stands for, from the tensor as it is (float32 of a weight),
and the GEMM multiplies those of the form that it takes: rows where `transa`, and where not `transb`
(csrc/extensions/gemm.cpp). Tensors of TE's own kinds, which fp4train makes, are decoded from their
memory: shapes and order of scales as its quantisers have them (get_scale_shape of
tensor/*_tensor.py; tiles of 128×4 where `with_gemm_swizzled_scales`, cast/mxfp8/swizzle.cuh).
Random bits are left out: dy is rounded to nearest.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import te_products_on_cpu as products
import torch
import transformer_engine_torch as tex
from te_products_on_cpu import CPU
from torch import Tensor, nn
from transformer_engine.pytorch import tensor as te_tensor, utils
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.storage import float8_tensor_storage

from fp4train.backends.te import weights
from fp4train.nn import Gathered, LayerCall, WeightForm, convert
from fp4train.parallel.gather_items import GatherItem, ReceivedWeight
from fp4train.precision import MXFP8, NVFP4, FP8Block, FP8Current, Recipe
from fp4train.precision.recipes import Mixed
from fp4train.quantize import (
    Hadamard,
    Quantized,
    QuantSpec,
    amax_extent,
    divided_tensors,
    joined,
    measure_amax,
    quantizer,
)

MX, BLOCK, CURRENT = (
    recipe.table()["fprop"].first for recipe in (MXFP8(), FP8Block(), FP8Current())
)
NV = NVFP4().table()["fprop"].first
ELEMENTS = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
both_layouts: list[bool] = []
"""Not empty where the GPU multiplies x·w as well as x·wᵀ, so that one copy of FP8 codes serves all
GEMMs (utils.py).
"""
for module in (utils, float8_tensor_storage):
    module.is_non_tn_fp8_gemm_supported = lambda: bool(both_layouts)
made_of_weights: weakref.WeakSet[Any] = weakref.WeakSet()
"""Tensors that fp4train made of the codes of weights and that are alive."""


def spec_of(quantiser: Any, column: bool) -> QuantSpec | None:
    """The spec of a form that the quantiser makes; None: its codes are not looked at."""
    if isinstance(quantiser, te_tensor.HybridQuantizer):
        return spec_of(
            quantiser.columnwise_quantizer if column else quantiser.rowwise_quantizer, column
        )
    scale = {"scale": "pow2" if getattr(quantiser, "force_pow_2_scales", True) else "fp32"}
    element = {
        "element": "e5m2" if getattr(quantiser, "dtype", None) == DType.kFloat8E5M2 else "e4m3"
    }
    if isinstance(quantiser, te_tensor.NVFP4Quantizer):
        block = (16, 16) if quantiser.with_2d_quantization else (1, 16)
        mode = quantiser.nvfp4_4over6_err_mode.lower() if quantiser.nvfp4_use_4over6 else None
        six = {
            "four_over_six": mode,
            "global_bound": float(quantiser.nvfp4_e4m3_max if mode else 448),
        }
        return replace(
            NV, block=block, hadamard=Hadamard() if column and quantiser.with_rht else None, **six
        )
    if isinstance(quantiser, te_tensor.MXFP8Quantizer):
        return replace(MX, block=(32, 32) if quantiser.with_2d_quantization else (1, 32), **element)
    if isinstance(quantiser, te_tensor.Float8BlockQuantizer):
        return replace(
            BLOCK,
            block=(128, 128) if quantiser.block_scaling_dim == 2 else (1, 128),
            **element,
            **scale,
        )
    return (
        replace(CURRENT, **element, **scale)
        if isinstance(quantiser, te_tensor.Float8CurrentScalingQuantizer)
        else None
    )


def quantise(x: Tensor, quantiser: Any, *options: Any) -> Any:
    quantised = products.quantise(x, quantiser, *options)
    quantised.exact = x.detach().reshape(-1, x.shape[-1])
    return quantised


def dequantised(x: Tensor, spec: QuantSpec | None, column: bool) -> Tensor:
    if spec is None:
        return x
    x = x.T if column else x
    values = quantizer(spec, "cpu", "reference").codes(x.contiguous()).dequantize()
    return values.T if column else values


def padded(shape: Sequence[int], block: int) -> tuple[int, int]:
    """get_scale_shape of NVFP4Quantizer and MXFP8Quantizer, of which the latter turns that of the
    columns.
    """
    return -(-shape[0] // 128) * 128, -(-shape[1] // block // 4) * 4


def of_blocks(codes: Any, form: str) -> Tensor:
    """Values of a form of NVFP4 or MXFP8, whose scales lie in tiles or row by row."""
    data = getattr(codes, f"_{form}_data")
    scales = getattr(codes, f"_{form}_scale_inv")
    assert data.dtype == scales.dtype == torch.uint8
    assert data.is_contiguous() and scales.is_contiguous()
    data = data.reshape(-1, data.shape[-1])
    amax = None
    columns_as_rows = False
    if isinstance(codes, te_tensor.MXFP8TensorStorage):
        spec = replace(MX, element="e5m2" if codes._fp8_dtype == DType.kFloat8E5M2 else "e4m3")
        columns_as_rows = form == "columnwise"
        data = data.T if columns_as_rows else data
        shape = tuple(data.shape)
    else:
        assert codes._fp4_dtype == DType.kFloat4E2M1
        bound = codes._nvfp4_e4m3_max if codes._nvfp4_use_4over6 else 448
        spec = replace(NV, global_bound=float(bound))
        shape = (data.shape[0], 2 * data.shape[1])
        amax = getattr(codes, f"_amax_{form}").reshape(())
    block = 32 if amax is None else 16
    lengths = padded(shape, block)
    assert tuple(scales.shape) == (lengths[::-1] if columns_as_rows else lengths)
    if codes._with_gemm_swizzled_scales:
        scales = scales.reshape(-1)
    else:
        scales = scales.T if columns_as_rows else scales
        scales = scales[: shape[0], : -(-shape[1] // block)].contiguous()
    values = Quantized(spec, shape, data.contiguous(), scales, amax).dequantize()
    return values.T if form == "columnwise" else values


def decoded(codes: Any, column: bool) -> Any:
    """[M, K] of what a GEMM multiplies: of NVFP4 after the transform of the column-wise form."""
    form = "columnwise" if column else "rowwise"
    if isinstance(codes, te_tensor.MXFP8TensorStorage | te_tensor.NVFP4TensorStorage):
        return of_blocks(codes, form)
    if isinstance(codes, te_tensor.Float8TensorStorage):
        # common/gemm/cublaslt_gemm.cu CanonicalizeGemmInput
        column = column and not both_layouts
        data = codes._transpose if column else codes._data
        assert not both_layouts or codes._transpose is None
        assert tuple(codes._scale_inv.shape) == (1,) and data.is_contiguous()
        values = data.view(ELEMENTS[codes._fp8_dtype]).float() * codes._scale_inv
        return values.T if column else values
    if isinstance(codes, te_tensor.Float8BlockwiseQTensorStorage):
        data = getattr(codes, f"_{form}_data")
        scales = getattr(codes, f"_{form}_scale_inv")
        rows, columns = (-(-size // 128) for size in data.shape)
        assert codes._is_2D_scaled and tuple(scales.shape) == (rows, -(-columns // 4) * 4)
        scales = scales[:, :columns].repeat_interleave(128, dim=0)
        scales = scales.repeat_interleave(128, dim=1)[: data.shape[0], : data.shape[1]]
        values = data.view(torch.float8_e4m3fn).float() * scales
        return values.T if column else values
    exact = getattr(codes, "exact", None)
    if isinstance(codes, products.TensorCodes):
        exact = codes.values
    return codes if exact is None else dequantised(exact, spec_of(codes._quantizer, column), column)


def gemm(a: Any, transa: bool, b: Any, transb: bool, *more: Any, **options: Any) -> Any:
    left = decoded(a, not transa)
    right = decoded(b, transb)
    return products.gemm(left, transa, right, transb, *more, **options)


def noted(*arguments: Any, **options: Any) -> Any:
    codes = weight_codes(*arguments, **options)
    made_of_weights.add(codes)
    return codes


weight_codes = weights.weight_codes
weights.weight_codes = noted  # type: ignore[assignment]
tex.quantize = quantise
tex.generic_gemm = gemm


def row_wise_values(codes: Any, *, dtype: torch.dtype) -> Tensor:
    """What TE's dequantised backward multiplies of codes, which must have their row-wise form."""
    if isinstance(codes, products.TensorCodes):
        assert codes.usages["rowwise"], "the row-wise form was given up"
    return decoded(codes, False).to(dtype)  # type: ignore[no-any-return]


for kind in (
    products.Codes,
    products.TensorCodes,
    te_tensor.NVFP4TensorStorage,
    te_tensor.MXFP8TensorStorage,
    te_tensor.Float8TensorStorage,
    te_tensor.Float8BlockwiseQTensorStorage,
):
    kind.dequantize = row_wise_values  # type: ignore[method-assign]


class Source:
    """A weight that two shards send as codes, for each pass the form that it multiplies
    (`WeightGather`).
    """

    rounds = False

    def __init__(self, weight: Tensor) -> None:
        self.shards = weight.detach().clone().chunk(2)
        self.asked = []

    def prepared(self, form: WeightForm, call: LayerCall) -> Any:
        return ReceivedWeight.prepared(self, form, call)  # type: ignore[arg-type]

    def codes(self, part: GatherItem, call: LayerCall) -> Quantized:
        assert part.spec is not None
        amax = torch.stack([measure_amax(shard, part.spec) for shard in self.shards]).amax()
        amax = amax if amax_extent(part.spec) == "tensor" else None
        make = quantizer(part.spec, "cpu").codes
        shards = [make(shard.T if part.column else shard, None, amax) for shard in self.shards]
        if part.spec.has_outer_scale:
            shards = [shard._replace(amax=None) for shard in shards]
        sent = zip(*(divided_tensors(shard, columns=part.column) for shard in shards), strict=True)
        self.asked.append("codes")
        rows = sum(len(shard) for shard in self.shards)
        return joined(shards[0], [torch.cat(parts) for parts in sent], rows, columns=part.column)

    def values(self, dtype: torch.dtype) -> Tensor:
        self.asked.append(str(dtype))
        return torch.cat(self.shards).to(dtype)


def passes(recipe: Recipe, backend: str = "te", *, gathered: bool = False) -> Any:
    """Outputs and gradients of two microbatches, whose backward passes follow both; the codes of
    the weight that were alive between them, how often TE quantised it, and what was asked.
    """
    torch.manual_seed(0)
    layer: Any = convert(nn.Sequential(nn.Linear(128, 256, bias=False)), backend=backend)[0]
    layer.sum_gradients(True)
    products.apply(layer, recipe)
    source = Source(layer.weight)
    if gathered:
        layer.keeps_forms = False
        layer._parameters["weight"] = nn.Parameter(Gathered(source, layer.weight.shape, CPU))  # type: ignore[arg-type]
    inputs = [torch.randn(64, 128).bfloat16().requires_grad_() for _ in range(2)]
    products.quantised_from.clear()
    with products.step_context(recipe):
        outputs = [layer(x) for x in inputs]
        gc.collect()
        kept = len(made_of_weights) + sum(
            tuple(codes.shape) == (256, 128) for codes in products.codes
        )
        for y in reversed(outputs):
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
            y.backward(dy.bfloat16())
    by_te = sum(shape == (256, 128) for shape, _ in products.quantised_from)
    tensors = [*outputs, *(x.grad for x in inputs), layer.weight.grad]
    return tensors, {"kept": kept, "by te": by_te, "asked": source.asked}


NEAREST = NVFP4(stochastic_rounding=False)
RECIPES: dict[str, Recipe] = {
    "nvfp4": NEAREST,
    "nvfp4, 1D weights": NVFP4(stochastic_rounding=False, two_d_weights=False),
    "nvfp4, four over six": NVFP4(four_over_six="all", hadamard=False, stochastic_rounding=False),
    "nvfp4, fprop high": NEAREST.with_high_precision("fprop"),
    "nvfp4, dequantised": NVFP4(backward="dequantised"),
    "nvfp4, then mxfp8": Mixed(fprop=NEAREST, dgrad=MXFP8(), wgrad=MXFP8()),
    "mxfp8": MXFP8(),
    "mxfp8, 2D weights": MXFP8(two_d_weights=True),
    "fp8_current": FP8Current(),
    "fp8_current, both layouts": FP8Current(),
    "fp8_block": FP8Block(),
}


def results() -> dict[str, Any]:
    """How far TE's results are from the emulation's, whether a gathered weight gives the bits of a
    whole one, and what is kept between the passes.
    """
    # what was imported is no garbage, and each pass collects
    gc.freeze()
    answers: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        both_layouts[:] = [True] * ("both layouts" in name)
        emulated, _ = passes(recipe, "emulate")
        of_weight, kept = passes(recipe)
        of_shards, sent = passes(recipe, gathered=True)
        distances = [
            float((ours - theirs).norm() / theirs.norm())
            for ours, theirs in zip(of_weight, emulated, strict=True)
        ]
        equal = all(map(torch.equal, of_weight, of_shards))
        answers[name] = {"distance": max(distances), "equal": equal, "whole": kept, **sent}
    return answers


if __name__ == "__main__":
    print(json.dumps(results()))
