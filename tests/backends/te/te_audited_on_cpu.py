"""Audits of layers on TE's real Python: a program, started by test_te_audited.py, that prints JSON.

Besides what te_codes_on_cpu.py fakes: what is quantised are TE's own tensors, with the codes that
fp4train's reference gives them, laid out as TE's kernels do (get_scale_shape of
tensor/*_tensor.py), and dy is rounded stochastically, by random bits that no key gives. The GEMM
decodes them by that file's own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import te_codes_on_cpu as coded
import te_products_on_cpu as products
import torch
import torch.nn.functional as F
import transformer_engine_torch as tex
from te_on_cpu import no_gpu
from te_products_on_cpu import CPU
from torch import Tensor, nn
from transformer_engine.pytorch import tensor as te_tensor

import fp4train as f4
from fp4train.audits.loop import AuditReport
from fp4train.formats import pack_fp4
from fp4train.nn import convert
from fp4train.precision import MXFP8, NVFP4, FP8Current, Recipe
from fp4train.quantize import Quantized, QuantSpec, RandomKey, reference

K, N = 128, 64
draws: list[int] = []
"""One entry per tensor that was rounded stochastically."""
changes: list[Callable[[Quantized], Quantized]] = []
"""A fault of kernels: changes codes that are rounded stochastically."""


def codes_of(x_MK: Tensor, spec: QuantSpec, column: bool, quantiser: Any) -> Quantized:
    """A form of x as TE's kernels would make it."""
    x = (x_MK.T if column else x_MK).contiguous()
    if not getattr(quantiser, "stochastic_rounding", False):
        return reference.quantize(x, spec, key=None)
    draws.append(1)
    key = RandomKey(seed=99, step=len(draws), layer=0, operand=0)
    codes = reference.quantize(x, replace(spec, rounding="stochastic"), key=key)
    for change in changes:
        codes = change(codes)
    return codes


def block_form(form: Quantized, column: bool) -> dict[str, Any]:
    """Codes and scales of a form of NVFP4 or MXFP8, under TE's names; TE fills scales up with
    zeros.
    """
    way = "columnwise" if column else "rowwise"
    scales = form.scales.repeat_interleave(form.spec.block[0] or 1, dim=0)[: form.shape[0]]
    rows, columns = scales.shape
    scales = F.pad(scales, (0, -columns % 4, 0, -rows % 128))
    data = form.codes
    if column and not form.spec.format.packed:
        data = data.T.contiguous()
        scales = scales.T.contiguous()
    return {f"{way}_data": data, f"{way}_scale_inv": scales}


def quantise(x: Tensor, quantiser: Any, *_: Any) -> Any:
    """TE's tensor of x, of the forms that the quantiser is to make."""
    if coded.spec_of(quantiser, column=False) is None:
        return coded.quantise(x, quantiser)
    with no_gpu():
        return te_tensor_of(x, quantiser)


def te_tensor_of(x: Tensor, quantiser: Any) -> Any:
    x_MK = x.detach().reshape(-1, x.shape[-1])
    forms = {}
    for column, usage in ((False, quantiser.rowwise_usage), (True, quantiser.columnwise_usage)):
        if usage:
            spec = coded.spec_of(quantiser, column)
            assert spec is not None
            forms[column] = codes_of(x_MK, spec, column, quantiser)
    internal = quantiser.internal
    options: dict[str, Any] = {"quantizer": quantiser}
    if not internal:
        options |= {"shape": x.shape, "dtype": torch.bfloat16, "device": CPU}
    if isinstance(quantiser, te_tensor.Float8CurrentScalingQuantizer):
        scale = next(iter(forms.values())).scales.reshape(1)
        data = forms[False].codes.reshape(x.shape) if False in forms else None
        transpose = forms[True].codes.contiguous() if True in forms else None
        options |= {"data": data, "data_transpose": transpose, "fp8_dtype": quantiser.dtype}
        kind = te_tensor.Float8TensorStorage if internal else te_tensor.Float8Tensor
        return kind(fp8_scale_inv=scale, **options)
    for way in ("rowwise", "columnwise"):
        options |= {f"{way}_data": None, f"{way}_scale_inv": None}
    for column, form in forms.items():
        options |= block_form(form, column)
    options["with_gemm_swizzled_scales"] = False
    if isinstance(quantiser, te_tensor.MXFP8Quantizer):
        kind = te_tensor.MXFP8TensorStorage if internal else te_tensor.MXFP8Tensor
        return kind(fp8_dtype=quantiser.dtype, **options)
    for column, way in ((False, "rowwise"), (True, "columnwise")):
        options[f"amax_{way}"] = forms[column].amax.reshape(1) if column in forms else None  # type: ignore[union-attr]
    options |= {"fp4_dtype": quantiser.dtype, "nvfp4_e4m3_max": quantiser.nvfp4_e4m3_max}
    options["nvfp4_use_4over6"] = quantiser.nvfp4_use_4over6
    kind = te_tensor.NVFP4TensorStorage if internal else te_tensor.NVFP4Tensor
    return kind(**options)


def gemm(*arguments: Any, **options: Any) -> Any:
    with no_gpu():
        return coded.gemm(*arguments, **options)


tex.quantize = quantise
tex.generic_gemm = gemm


def audited(layers: nn.Module, x: Tensor, run: Callable[[Tensor], None]) -> dict[str, Any]:
    """The report of an audit of `run`, and whether gradients are those of a run without."""
    gradients = []
    report = AuditReport()
    for audits in (False, True):
        layers.zero_grad()
        leaf = x.clone().requires_grad_()
        draws.clear()
        if audits:
            with f4.audit(layers) as report:
                run(leaf)
        else:
            run(leaf)
        gradients.append([leaf.grad, *(layer.grad for layer in layers.parameters())])
    same = [
        plain is seen or torch.equal(plain, seen)  # type: ignore[arg-type]
        for plain, seen in zip(*gradients, strict=True)
    ]
    return {
        "gemms": {audit.layer: list(audit.gemms) for audit in report.audits},
        "faults": [str(fault) for fault in report.faults],
        "partly": {audit.layer: list(audit.uncovered) for audit in report.audits},
        "uncovered": report.uncovered,
        "same": all(same) and tex.generic_gemm is gemm,
    }


def converted(recipe: Recipe) -> dict[str, Any]:
    """fp4train's layers on backend te, of two microbatches with tokens that are padded."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(K, N, bias=False), nn.GELU(), nn.Linear(N, K, bias=False))
    layers = convert(layers, backend="te")
    for layer in (layers[0], layers[2]):
        layer.sum_gradients(True)
        products.apply(layer, recipe)

    def run(x: Tensor) -> None:
        with products.step_context(recipe):
            for _ in range(2):
                y = layers(x)
                dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
                y.backward(dy.bfloat16())

    return audited(layers, torch.randn(88, K).bfloat16(), run)


def rounded_toward_zero(codes: Quantized) -> Quantized:
    """Every code, but zeros, is the next smaller one."""
    unpacked = codes.element_codes
    smaller = torch.where(unpacked & 7 > 0, unpacked - 1, unpacked)
    return codes._replace(codes=pack_fp4(smaller))


def larger(codes: Quantized) -> Quantized:
    """Every code up to 4 is the one after the next."""
    unpacked = codes.element_codes
    return codes._replace(codes=pack_fp4(torch.where(unpacked & 7 < 5, unpacked + 2, unpacked)))


def results() -> dict[str, Any]:
    answers = {
        "nvfp4": converted(NVFP4()),
        "mxfp8": converted(MXFP8()),
        "fp8_current": converted(FP8Current()),
    }
    for change in (rounded_toward_zero, larger):
        changes[:] = [change]
        answers[change.__name__] = converted(NVFP4())
    return answers


if __name__ == "__main__":
    print(json.dumps(results()))
