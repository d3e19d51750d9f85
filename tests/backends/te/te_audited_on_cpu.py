"""Audits of layers on TE's real Python: a program, started by test_te_audited.py, that prints JSON.

Besides what te_codes_on_cpu.py fakes: what is quantised are TE's own tensors, with the codes that
fp4train's reference gives them, laid out as TE's kernels do (get_scale_shape of
tensor/*_tensor.py), and dy is rounded stochastically, by random bits that no key gives. The GEMM
decodes them by that file's own code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import te_codes_on_cpu as coded
import te_products_on_cpu as products
import torch
import torch.nn.functional as F
import transformer_engine_torch as tex
from te_on_cpu import DType, no_gpu, pretend_gpu, te
from te_products_on_cpu import CPU
from torch import Tensor, nn
from transformer_engine.common import recipe as te_recipes
from transformer_engine.pytorch import cpp_extensions, tensor as te_tensor

import fp4train as f4
from fp4train.audit import AuditReport
from fp4train.formats import pack_fp4
from fp4train.hardware import Device
from fp4train.nn import convert
from fp4train.precision import MXFP8, NVFP4, Context, FP8Block, FP8Current, Recipe, resolve, use
from fp4train.quantize import Quantized, QuantSpec, RandomKey, reference, tiled_scales

TOKENS, K, N = 96, 128, 64
draws: list[int] = []
"""One entry per tensor that was rounded stochastically."""
in_tiles: list[bool] = []
"""Not empty while block scales lie in tiles."""
spoil: list[Callable[[Tensor, QuantSpec, bool], tuple[Tensor, QuantSpec, RandomKey | None]]] = []
"""A fault: changes what is quantised, of a form."""


spoilt_codes: list[Callable[[Quantized], Quantized]] = []
"""A fault: changes codes that are rounded stochastically."""


def codes_of(x_MK: Tensor, spec: QuantSpec, column: bool, quantiser: Any) -> Quantized:
    """A form of x as TE's kernels would make it."""
    key = None
    if getattr(quantiser, "stochastic_rounding", False):
        spec = replace(spec, rounding="stochastic")
        draws.append(1)
        key = RandomKey(seed=99, step=len(draws), layer=0, operand=0)
    x = x_MK.T if column else x_MK
    for fault in spoil:
        x, spec, key = fault(x, spec, column)
    if spec.rounding == "nearest":
        key = None
    codes = reference.quantize(x.contiguous(), spec, key=key)
    for change in spoilt_codes:
        codes = change(codes) if spec.rounding == "stochastic" else codes
    return codes


def filled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales [R, C] filled up with zeros, as TE allocates them."""
    return F.pad(scales, (0, -(-columns // 4) * 4 - columns, 0, -(-rows // 128) * 128 - rows))


def scales_of_rows(form: Quantized) -> Tensor:
    height = form.spec.block[0] or 1
    return form.scales.repeat_interleave(height, dim=0)[: form.shape[0]]


def block_form(form: Quantized, column: bool) -> dict[str, Any]:
    """Codes and scales of a form of NVFP4 or MXFP8, under TE's names."""
    way = "columnwise" if column else "rowwise"
    packed = form.spec.format.packed
    if in_tiles:
        scales = tiled_scales(form).view(torch.uint8)
        scales = scales.view(-(-form.shape[0] // 128) * 128, -1)
        scales = scales.view(scales.shape[::-1]) if column and not packed else scales
    else:
        scales = scales_of_rows(form)
        scales = filled(scales, *scales.shape)
        scales = scales.T.contiguous() if column and not packed else scales
    data = form.codes.T.contiguous() if column and not packed else form.codes
    return {f"{way}_data": data, f"{way}_scale_inv": scales}


def quantise(x: Tensor, quantiser: Any, *_: Any) -> Any:
    """TE's tensor of x, of the forms that the quantiser is to make."""
    if coded.spec_of(quantiser, column=False) is None:
        return coded.quantise(x, quantiser)
    with no_gpu():
        return _quantise(x, quantiser)


def _quantise(x: Tensor, quantiser: Any) -> Any:
    x_MK = x.detach().reshape(-1, x.shape[-1])
    forms = {}
    for column, usage in ((False, quantiser.rowwise_usage), (True, quantiser.columnwise_usage)):
        if usage:
            spec = coded.spec_of(quantiser, column)
            assert spec is not None
            forms[column] = codes_of(x_MK, spec, column, quantiser)
    first = next(iter(forms.values()))
    internal = quantiser.internal
    options: dict[str, Any] = {"quantizer": quantiser}
    more = {} if internal else {"shape": x.shape, "dtype": torch.bfloat16, "device": CPU}
    if isinstance(quantiser, te_tensor.Float8CurrentScalingQuantizer):
        row = forms.get(False)
        column_form = forms.get(True)
        data = None if row is None else row.codes.reshape(x.shape)
        transpose = None if column_form is None else column_form.codes.contiguous()
        kind = te_tensor.Float8TensorStorage if internal else te_tensor.Float8Tensor
        options |= {"data": data, "data_transpose": transpose, "fp8_dtype": quantiser.dtype}
        return kind(fp8_scale_inv=first.scales.reshape(1), **options, **more)
    options |= dict.fromkeys(
        f"{way}_{part}" for way in ("rowwise", "columnwise") for part in ("data", "scale_inv")
    )
    if isinstance(quantiser, te_tensor.Float8BlockQuantizer):
        square = quantiser.block_scaling_dim == 2
        for column, form in forms.items():
            way = "columnwise" if column else "rowwise"
            scales = form.scales if square else form.scales.T
            options[f"{way}_data"] = form.codes.contiguous()
            options[f"{way}_scale_inv"] = F.pad(scales, (0, -scales.shape[1] % 4)).contiguous()
        options |= {"is_2D_scaled": square, "fp8_dtype": quantiser.dtype}
        kind = te_tensor.Float8BlockwiseQTensorStorage
        return (kind if internal else te_tensor.Float8BlockwiseQTensor)(**options, **more)
    for column, form in forms.items():
        options |= block_form(form, column)
    options["with_gemm_swizzled_scales"] = bool(in_tiles)
    if isinstance(quantiser, te_tensor.MXFP8Quantizer):
        kind = te_tensor.MXFP8TensorStorage if internal else te_tensor.MXFP8Tensor
        return kind(fp8_dtype=quantiser.dtype, **options, **more)
    for column, way in ((False, "rowwise"), (True, "columnwise")):
        form = forms.get(column)
        amax = None if form is None or form.amax is None else form.amax.reshape(1)
        options[f"amax_{way}"] = amax
    options |= {"fp4_dtype": quantiser.dtype, "nvfp4_e4m3_max": quantiser.nvfp4_e4m3_max}
    options["nvfp4_use_4over6"] = quantiser.nvfp4_use_4over6
    kind = te_tensor.NVFP4TensorStorage if internal else te_tensor.NVFP4Tensor
    return kind(**options, **more)


decoded = coded.decoded


def decoded_form(codes: Any, column: bool) -> Any:
    """As te_codes_on_cpu.py, also of NVFP4 whose scales do not lie in tiles."""
    if isinstance(codes, te_tensor.NVFP4TensorStorage) and not codes._with_gemm_swizzled_scales:
        way = "columnwise" if column else "rowwise"
        data = getattr(codes, f"_{way}_data").reshape(-1, getattr(codes, f"_{way}_data").shape[-1])
        shape = (data.shape[0], 2 * data.shape[1])
        scales = getattr(codes, f"_{way}_scale_inv")[: shape[0], : shape[1] // 16]
        spec = replace(coded.NV, global_bound=float(codes._nvfp4_e4m3_max))
        amax = getattr(codes, f"_amax_{way}").reshape(())
        values = Quantized(spec, shape, data, scales.contiguous(), amax).dequantize()
        return values.T if column else values
    if isinstance(codes, te_tensor.MXFP8TensorStorage) and not codes._with_gemm_swizzled_scales:
        way = "columnwise" if column else "rowwise"
        data = getattr(codes, f"_{way}_data").reshape(-1, getattr(codes, f"_{way}_data").shape[-1])
        scales = getattr(codes, f"_{way}_scale_inv")
        factors = coded.MX.scale_format.decode(scales)
        element = (
            torch.float8_e5m2 if codes._fp8_dtype == DType.kFloat8E5M2 else torch.float8_e4m3fn
        )
        factors = factors.repeat_interleave(32, dim=0 if column else 1)
        return data.view(element).float() * factors[: data.shape[0], : data.shape[1]]
    if isinstance(codes, te_tensor.Float8TensorStorage):
        element = (
            torch.float8_e5m2 if codes._fp8_dtype == DType.kFloat8E5M2 else torch.float8_e4m3fn
        )
        data = codes._transpose.T if column else codes._data
        return data.view(element).float() * codes._scale_inv
    return decoded(codes, column)


for module in [m for name, m in sys.modules.items() if name.startswith("transformer_engine")]:
    if hasattr(module, "is_non_tn_fp8_gemm_supported"):
        module.is_non_tn_fp8_gemm_supported = lambda: False
coded.decoded = decoded_form  # of TE's dequantised backward
for tensor_kind in (
    te_tensor.NVFP4Tensor,
    te_tensor.MXFP8Tensor,
    te_tensor.Float8Tensor,
    te_tensor.Float8BlockwiseQTensor,
):
    tensor_kind.dequantize = coded.row_wise_values
product_change: list[float] = []


def gemm(a: Any, transa: bool, b: Any, transb: bool, *rest: Any, **options: Any) -> Any:
    with no_gpu():
        operands = decoded_form(a, not transa), transa, decoded_form(b, transb), transb
        bias, grad = rest[3], rest[7]
        if bias is not None and not grad:
            wide = (*rest[:2], DType.kFloat32, *rest[3:])
            y, *others = products.gemm(*operands, *wide, **options)
            result = ((y + bias.detach()).bfloat16(), *others)
        else:
            result = products.gemm(*operands, *rest, **options)
        for factor in product_change:
            result[0].mul_(factor)
    return result


tex.quantize = quantise
tex.generic_gemm = gemm
tex.bgrad_quantize = lambda dy, quantiser: (dy.sum(0), quantise(dy, quantiser))


def told(report: AuditReport) -> dict[str, Any]:
    return {
        "gemms": {audited.layer: list(audited.gemms) for audited in report.audits},
        "faults": [str(fault) for fault in report.faults],
        "partly": {audited.layer: list(audited.uncovered) for audited in report.audits},
        "uncovered": report.uncovered,
    }


def model(*, bias: bool, backend: str = "te") -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(K, N, bias=bias), nn.GELU(), nn.Linear(N, K, bias=bias))
    return convert(layers, backend=backend)


def converted(recipe: Recipe, *, sums: bool = False, bias: bool = False) -> dict[str, Any]:
    """fp4train's layers on backend te, with and without an audit."""
    gradients = []
    report = None
    for audited in (False, True):
        layers = model(bias=bias)
        draws.clear()
        for layer in (layers[0], layers[2]):
            plan = resolve(layer.layer, recipe, None, "te", Device.of(CPU))
            layer.sum_gradients(sums)
            layer.apply_plan(plan, recipe, None, CPU)
        x = torch.randn(TOKENS - 8, K, generator=torch.Generator().manual_seed(3))
        x = x.bfloat16().requires_grad_()
        context = Context(recipe=recipe, counts="nothing", applied=True)
        if audited:
            with f4.audit(layers) as report:
                _passes(layers, x, context)
        else:
            _passes(layers, x, context)
        # the faked GEMM gives no gradient of a bias
        gradients.append([x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)])
    assert report is not None
    same = [torch.equal(plain, seen) for plain, seen in zip(*gradients, strict=True)]
    taken_back = tex.generic_gemm is gemm
    return told(report) | {"same": all(same), "taken back": taken_back}


def _passes(layers: nn.Module, x: Tensor, context: Context) -> None:
    with use(context):
        for _ in range(2):  # two microbatches: dw of the second one is added
            y = layers(x)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).bfloat16())


RECIPES: dict[str, Recipe] = {
    "nvfp4": NVFP4(),
    "nvfp4, 1D weights": NVFP4(two_d_weights=False),
    "nvfp4, four over six": NVFP4(four_over_six="weights"),
    "nvfp4, dequantised": NVFP4(backward="dequantised"),
    "mxfp8": MXFP8(),
    "mxfp8, 2D weights": MXFP8(two_d_weights=True),
    "fp8_current": FP8Current(),
    "fp8_block": FP8Block(),
}


def normed(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantiser: Any, *_: Any
) -> Any:
    """TE's kernel of a LayerNorm, which quantises its result where it is given a quantiser."""
    with no_gpu():
        deviation, mean = torch.std_mean(x.float(), dim=-1, correction=0)
        y = F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).bfloat16()
        y = y if quantiser is None else _quantise(y, quantiser)
    return y, mean, 1 / deviation


for place in (tex, cpp_extensions):
    place.layernorm_fwd = place.rmsnorm_fwd = normed
    place.layernorm_bwd = place.rmsnorm_bwd = lambda dz, x, *_: (
        torch.zeros_like(x),
        dz.sum(0),
        dz.sum(0),
    )


def foreign(te_recipe: Any, *, normed_input: bool = False) -> dict[str, Any]:
    """TE's own modules under TE's own autocast, beside an nn.Linear."""
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": "cpu"}
    kind = te.LayerNormLinear if normed_input else te.Linear
    gradients = []
    report = None
    for audited in (False, True):
        torch.manual_seed(0)
        draws.clear()
        with pretend_gpu():
            first, second = kind(K, N, **options), te.Linear(N, K, **options)
        layers = nn.Sequential(first, nn.GELU(), second, nn.Linear(K, 16, dtype=torch.bfloat16))
        for parameter in layers.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.1)
        x = torch.randn(96, K, generator=torch.Generator().manual_seed(3))
        x = x.bfloat16().requires_grad_()
        if audited:
            with f4.audit(layers) as report:
                _te_passes(layers, x, te_recipe)
        else:
            _te_passes(layers, x, te_recipe)
        gradients.append([x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)])
    assert report is not None
    same = [torch.equal(plain, seen) for plain, seen in zip(*gradients, strict=True)]
    taken_back = tex.generic_gemm is gemm
    return told(report) | {"same": all(same), "taken back": taken_back}


def _te_passes(layers: nn.Module, x: Tensor, te_recipe: Any) -> None:
    with pretend_gpu():
        with te.autocast(enabled=te_recipe is not None, recipe=te_recipe):
            y = layers(x)
        y.float().square().sum().backward()


TE_RECIPES = {
    "te nvfp4": te_recipes.NVFP4BlockScaling(),
    "te nvfp4 plain": te_recipes.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "te mxfp8": te_recipes.MXFP8BlockScaling(),
    "te fp8_current": te_recipes.Float8CurrentScaling(),
    "te fp8_block": te_recipes.Float8BlockScaling(),
    "te bf16": None,
    "te fp8_delayed": te_recipes.DelayedScaling(),
}


def switched_off() -> dict[str, Any]:
    """A module of TE that has run keeps its quantisers under another recipe of the class."""
    with pretend_gpu():
        layers = nn.Sequential(te.Linear(K, N, params_dtype=torch.bfloat16, device="cpu"))
    nn.init.normal_(layers[0].weight, std=0.1)
    x = torch.randn(64, K).bfloat16().requires_grad_()
    _te_passes(layers, x, te_recipes.NVFP4BlockScaling(disable_rht=True))
    with f4.audit(layers) as report:
        _te_passes(layers, x, te_recipes.NVFP4BlockScaling())
    return told(report)


def zeroed(x: Tensor, spec: QuantSpec, column: bool) -> Any:
    key = RandomKey(seed=99, step=len(draws), layer=0, operand=0)
    return (torch.zeros_like(x) if spec.random else x), spec, key


def rounded_down(x: Tensor, spec: QuantSpec, column: bool) -> Any:
    key = RandomKey(seed=99, step=len(draws), layer=0, operand=0)
    return (x * 0.97 if spec.random else x), spec, key


def to_nearest(x: Tensor, spec: QuantSpec, column: bool) -> Any:
    return x, replace(spec, rounding="nearest"), None


def untransformed(x: Tensor, spec: QuantSpec, column: bool) -> Any:
    key = RandomKey(seed=99, step=len(draws), layer=0, operand=0)
    return x, replace(spec, hadamard=None), key


def rounded_toward_zero(codes: Quantized) -> Quantized:
    """Every code, but zeros, is the next smaller one."""
    unpacked = codes.element_codes
    smaller = torch.where(unpacked & 7 > 0, unpacked - 1, unpacked)
    return codes._replace(codes=pack_fp4(smaller))


def larger(codes: Quantized) -> Quantized:
    """Every code up to 4 is the one after the next."""
    unpacked = codes.element_codes
    return codes._replace(codes=pack_fp4(torch.where(unpacked & 7 < 5, unpacked + 2, unpacked)))


FAULTS = {
    "zeroed stochastic rounding": zeroed,
    "biased stochastic rounding": rounded_down,
    "rounded to nearest": to_nearest,
    "no transform": untransformed,
}


CHANGES = {"rounded down": rounded_toward_zero, "beside the neighbours": larger}


def results() -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        for tiles in (False, True):
            in_tiles[:] = [True] * tiles
            layout = ", in tiles" if tiles else ""
            answers[f"{name}{layout}"] = converted(recipe, bias=tiles, sums=tiles)
    in_tiles.clear()
    for name, change in CHANGES.items():
        spoilt_codes[:] = [change]
        answers[name] = converted(NVFP4())
        spoilt_codes.clear()
    for name, fault in FAULTS.items():
        spoil[:] = [fault]
        answers[name] = converted(NVFP4())
        spoil.clear()
    product_change[:] = [2.0]
    answers["doubled products"] = converted(NVFP4())
    product_change.clear()
    for name, te_recipe in TE_RECIPES.items():
        answers[name] = foreign(te_recipe)
    answers["te normed"] = foreign(TE_RECIPES["te nvfp4"], normed_input=True)
    answers["te switched off"] = switched_off()
    return answers


if __name__ == "__main__":
    print(json.dumps(results()))
