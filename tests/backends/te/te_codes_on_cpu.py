"""Exact codes for an extension of TE's real Python that multiplies, and a layer whose weight is
gathered as codes: a program, started by test_te_codes.py, that prints JSON; and for the ranks of
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
import pathlib
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import te_calls_on_cpu
import te_products_on_cpu as products
import torch
import transformer_engine_torch as tex
from te_products_on_cpu import CPU
from torch import Tensor, nn
from transformer_engine.pytorch import tensor as te_tensor, utils
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.storage import float8_tensor_storage

from fp4train.backends import GEMMS, Operands
from fp4train.backends.te import weights
from fp4train.hardware import Device
from fp4train.nn import Gathered, LayerCall, WeightForm, convert
from fp4train.parallel.gather_items import GatherItem, ReceivedWeight
from fp4train.precision import MXFP8, NVFP4, Context, FP8Block, FP8Current, Recipe, resolve, use
from fp4train.precision.recipes import Custom, Mixed
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

MX, BLOCK, CURRENT = (each.table()["fprop"].first for each in (MXFP8(), FP8Block(), FP8Current()))
NV = NVFP4().table()["fprop"].first
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


def quantise(x: Tensor, quantiser: Any, *rest: Any) -> Any:
    made = products.quantise(x, quantiser, *rest)
    made.exact = x.detach().reshape(-1, x.shape[-1])
    return made


def dequantised(x: Tensor, spec: QuantSpec | None, column: bool) -> Tensor:
    x = x.T if column else x
    found = (
        x
        if spec is None
        else quantizer(spec, "cpu", "reference").codes(x.contiguous()).dequantize()
    )
    return found.T if column else found


def padded(shape: Sequence[int], block: int) -> tuple[int, int]:
    """get_scale_shape of NVFP4Quantizer and MXFP8Quantizer, of which the latter turns that of the
    columns.
    """
    return -(-shape[0] // 128) * 128, -(-shape[1] // block // 4) * 4


def decoded(codes: Any, column: bool) -> Any:
    """[M, K] of what a GEMM multiplies: of NVFP4 after the transform of the column-wise form."""
    form = "columnwise" if column else "rowwise"
    if isinstance(codes, te_tensor.MXFP8TensorStorage | te_tensor.NVFP4TensorStorage):
        data = getattr(codes, f"_{form}_data")
        scales = getattr(codes, f"_{form}_scale_inv")
        assert (
            data.is_contiguous()
            and scales.is_contiguous()
            and data.dtype == scales.dtype == torch.uint8
        )
        if isinstance(codes, te_tensor.MXFP8TensorStorage):
            element = "e5m2" if codes._fp8_dtype == DType.kFloat8E5M2 else "e4m3"
            spec = replace(MX, element=element)
            data = data.T if column else data
            amax = None
            shape = tuple(data.shape)
            if codes._with_gemm_swizzled_scales:
                assert tuple(scales.shape) == (
                    padded(shape, 32)[::-1] if column else padded(shape, 32)
                )
                scales = scales.reshape(-1)
            else:
                scales = (scales.T if column else scales).contiguous()
        else:
            assert codes._fp4_dtype == DType.kFloat4E2M1
            spec = replace(
                NV, global_bound=float(codes._nvfp4_e4m3_max if codes._nvfp4_use_4over6 else 448)
            )
            shape = (data.shape[0], 2 * data.shape[1])
            amax = getattr(codes, f"_amax_{form}").reshape(())
            assert codes._with_gemm_swizzled_scales and tuple(scales.shape) == padded(shape, 16)
            scales = scales.reshape(-1)
        found = Quantized(spec, shape, data.contiguous(), scales, amax).dequantize()
        return found.T if column else found
    if isinstance(codes, te_tensor.Float8TensorStorage):
        # common/gemm/cublaslt_gemm.cu CanonicalizeGemmInput
        column = column and not both_layouts
        data = codes._transpose if column else codes._data
        assert not both_layouts or codes._transpose is None
        found = data.view(torch.float8_e4m3fn).float() * codes._scale_inv
        assert (
            tuple(codes._scale_inv.shape) == (1,)
            and data.is_contiguous()
            and codes._fp8_dtype == DType.kFloat8E4M3
        )
        return found.T if column else found
    if isinstance(codes, te_tensor.Float8BlockwiseQTensorStorage):
        data = getattr(codes, f"_{form}_data")
        scales = getattr(codes, f"_{form}_scale_inv")
        rows, columns = (-(-size // 128) for size in data.shape)
        if codes._is_2D_scaled:
            assert tuple(scales.shape) == (rows, -(-columns // 4) * 4)
            scales = scales[:, :columns].repeat_interleave(128, dim=0)
        else:
            assert tuple(scales.shape) == (columns, -(-data.shape[0] // 4) * 4)
            scales = scales[:, : data.shape[0]].T
        found = (
            data.view(torch.float8_e4m3fn).float()
            * scales.repeat_interleave(128, dim=1)[: data.shape[0], : data.shape[1]]
        )
        return found.T if column else found
    exact = (
        codes.values if isinstance(codes, products.TensorCodes) else getattr(codes, "exact", None)
    )
    return codes if exact is None else dequantised(exact, spec_of(codes._quantizer, column), column)


def gemm(a: Any, transa: bool, b: Any, transb: bool, *rest: Any, **options: Any) -> Any:
    return products.gemm(
        decoded(a, not transa), transa, decoded(b, transb), transb, *rest, **options
    )


def noted(*arguments: Any, **options: Any) -> Any:
    made = weight_codes(*arguments, **options)
    made_of_weights.add(made)
    return made


weight_codes = weights.weight_codes
weights.weight_codes = noted  # type: ignore[assignment]
tex.quantize = quantise
tex.generic_gemm = gemm
tex.bgrad_quantize = lambda dy, quantiser: (dy.sum(0), quantise(dy, quantiser))


def row_wise_values(codes: Any, *, dtype: torch.dtype) -> Tensor:
    """What TE's dequantised backward multiplies of codes, which must have their row-wise form."""
    if isinstance(codes, products.TensorCodes):
        assert codes.usages["rowwise"], "the row-wise form was given up"
    return decoded(codes, False).to(dtype)  # type: ignore[no-any-return]


for kind in (
    te_calls_on_cpu.Codes,
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
        amax = torch.stack([measure_amax(each, part.spec) for each in self.shards]).amax()
        amax = amax if amax_extent(part.spec) == "tensor" else None
        make = quantizer(part.spec, "cpu").codes
        shards = [make(each.T if part.column else each, None, amax) for each in self.shards]
        if part.spec.has_outer_scale:
            shards = [each._replace(amax=None) for each in shards]
        sent = zip(*(divided_tensors(each, columns=part.column) for each in shards), strict=True)
        self.asked.append("codes")
        rows = sum(len(each) for each in self.shards)
        return joined(shards[0], [torch.cat(each) for each in sent], rows, columns=part.column)

    def values(self, dtype: torch.dtype) -> Tensor:
        self.asked.append(str(dtype))
        return torch.cat(self.shards).to(dtype)


def passes(
    recipe: Recipe, sums: bool, gathered: bool, features: int = 128
) -> tuple[list[Tensor], dict[str, Any]]:
    """Outputs and gradients of two microbatches, whose backward passes follow both; and what was
    kept and asked.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, 256, bias=False))
    convert(model, backend="te")
    layer: Any = model[0]
    layer.sum_gradients(sums)
    layer.apply_plan(resolve(layer.layer, recipe, None, "te", Device.of(CPU)), recipe, None, CPU)
    source = Source(layer.weight)
    if gathered:
        layer.keeps_forms = False
        layer._parameters["weight"] = nn.Parameter(Gathered(source, layer.weight.shape, CPU))  # type: ignore[arg-type]
    inputs = [torch.randn(64, features).bfloat16().requires_grad_() for _ in range(2)]
    products.quantised_from.clear()
    with use(Context(recipe=recipe, counts="nothing", applied=True)):
        outputs = [layer(each) for each in inputs]
        gc.collect()
        kept = len(made_of_weights) + sum(
            tuple(each.shape) == (256, features) for each in products.codes
        )
        for each in reversed(outputs):
            each.backward(
                torch.randn(each.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
            )
    with (
        torch.no_grad(),
        use(Context(recipe=recipe, counts="nothing", applied=True)),
    ):
        evaluated = layer(inputs[0])
    by_te = sum(shape == (256, features) for shape, _ in products.quantised_from)
    seen = {"kept": kept, "by te": by_te, "asked": source.asked}
    if recipe.backward == "dequantised":
        seen |= straight_through(recipe, layer, torch.cat(source.shards), inputs)
    return [*outputs, evaluated, *(each.grad for each in inputs), layer.weight.grad], seen  # type: ignore[list-item]


def straight_through(
    recipe: Recipe, layer: Any, w_NK: Tensor, inputs: list[Tensor]
) -> dict[str, Any]:
    """Whether each dx is that of a straight-through estimator in every bit, and how far dw is from
    it, relative.
    """
    of_x, of_w = recipe.table()["fprop"].both
    assert of_x is not None and of_w is not None
    reference = [quantizer(spec, "cpu", "reference") for spec in (of_x, of_w)]
    w = reference[1].codes(w_NK).dequantize(torch.bfloat16).double()
    dy = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16().double()
    xs = [reference[0].codes(x.detach()).dequantize(torch.bfloat16).double() for x in inputs]
    dw = sum(dy.T @ x for x in xs)
    dx = (dy @ w).float().bfloat16()
    return {
        "dx": [torch.equal(x.grad, dx) for x in inputs],  # type: ignore[arg-type]
        "dw": float((layer.weight.grad - dw).norm() / dw.norm()),  # type: ignore[union-attr]
    }


def results() -> dict[str, Any]:
    """Of each recipe whether a gathered weight gives the bits of a whole one, and what is kept
    between the passes.
    """
    # what was imported is no garbage, and each pass collects
    gc.freeze()
    found: dict[str, Any] = {}
    cases: dict[str, Recipe] = {
        "nvfp4": NVFP4(),
        "nvfp4, 1D weights": NVFP4(two_d_weights=False),
        "nvfp4, four over six": NVFP4(
            four_over_six="all", hadamard=False, stochastic_rounding=False
        ),
        "nvfp4, fprop high": NVFP4().with_high_precision("fprop"),
        "nvfp4, dgrad high": NVFP4().with_high_precision("dgrad"),
        "nvfp4, wgrad high": NVFP4().with_high_precision("wgrad"),
        "mxfp8": MXFP8(),
        "mxfp8, 2D weights": MXFP8(two_d_weights=True),
        "nvfp4, dequantised": NVFP4(backward="dequantised"),
        "nvfp4, 1D weights, dequantised": NVFP4(two_d_weights=False, backward="dequantised"),
        "mxfp8, dequantised": MXFP8(backward="dequantised"),
        "fp8_current, dequantised": FP8Current(backward="dequantised"),
        "fp8_current, both layouts, dequantised": FP8Current(backward="dequantised"),
        "fp8_block, dequantised": FP8Block(backward="dequantised"),
        "nvfp4, then mxfp8": Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8()),
        "fp8_current": FP8Current(),
        "fp8_current, both layouts": FP8Current(),
        "fp8_block": FP8Block(),
        "fp8_block, parts of blocks": FP8Block(),
        "fp8_block, 1D weights": Custom(
            **{gemm: Operands(first=BLOCK, second=BLOCK) for gemm in GEMMS}
        ),
    }
    for name, recipe in cases.items():
        features = 192 if "parts of blocks" in name else 128
        both_layouts[:] = [True] * ("both layouts" in name)
        for sums in (False, True):
            (whole, before), (gathered, seen) = (
                passes(recipe, sums, each, features) for each in (False, True)
            )
            equal = [torch.equal(a, b) for a, b in zip(whole, gathered, strict=True)]
            found[f"{name}, summed" if sums else name] = {"equal": equal, "whole": before, **seen}
    sys.path.append(str(pathlib.Path(__file__).parents[3] / "scripts"))
    import gpu_layers as script

    script.plan_here = lambda layer, recipe: None  # type: ignore[assignment, return-value]
    problem = script.Problem.draw(64, 128, 256, "cpu")
    names = ("nvfp4", "nvfp4, nearest", "nvfp4, plain", "nvfp4, dequantised", "mxfp8")
    names += ("mxfp8, 2D weights", "fp8 current", "fp8 delayed", "fp8 blocks")
    checked = {name: script.weights_row(script.RECIPES[name], problem) for name in names}
    return found | {"self check": checked}


if __name__ == "__main__":
    print(json.dumps(results()))
