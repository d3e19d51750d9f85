"""The public entry: quantize a 2-D tensor by the fastest implementation that can, all equal to the bit."""

import importlib
import logging
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from fp4train.quantize import reference
from fp4train.quantize.quantized import Decoded, Form, Quantized
from fp4train.quantize.random import RandomKey
from fp4train.quantize.rotation import Rotation
from fp4train.quantize.spec import QuantSpec
from fp4train.text import check_choice

KERNELS = ("auto", "reference", "cpu", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None, kernel: str = "auto"
) -> Quantized:
    """Codes and scales of x.

    x_RC: [R, C], float32, BF16 or FP16, any strides; other shapes and dtypes raise ValueError. Blocks run along C, so
        `quantize(x.T, spec)` is the column-wise form.
    key: which random bits, for stochastic rounding.
    amax: the global (tensor or row) amax, where it is known from elsewhere: reduced over ranks, or from delayed
        scaling's history; after the Hadamard transform.
    kernel: auto, reference, cpu, triton.

    NaN or infinity in x makes every value that shares a scale with it NaN.
    """
    check_input(x_RC, spec, key, amax)
    return _implementation(x_RC, spec, kernel).quantize(x_RC.detach(), spec, key=key, amax=amax)  # type: ignore[no-any-return]


def quantize_dequantize(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None, kernel: str = "auto"
) -> Decoded:
    """`quantize(...).decoded()` to the bit, in one pass: what emulation multiplies."""
    check_input(x_RC, spec, key, amax)
    return _implementation(x_RC, spec, kernel).quantize_dequantize(x_RC.detach(), spec, key=key, amax=amax)  # type: ignore[no-any-return]


def operand(quantized: Quantized, *, kernel: str = "auto") -> Decoded:
    """`quantized.decoded()` to the bit, by the fastest implementation that can: what backward does with saved codes."""
    codes = quantized.codes
    implementation = _implementation(codes, quantized.spec, kernel)
    if implementation is reference:
        return quantized.decoded()
    return implementation.operand(quantized)  # type: ignore[no-any-return]


def both_operands(x_MK: Tensor, rowwise: Form, columnwise: Form) -> tuple[Decoded, Decoded]:
    """(`quantize_dequantize` of x, and of x.T), from one read of x where a kernel can: what backward needs of dy."""
    if (kernels := _reading_once(x_MK, rowwise, columnwise)) is not None:
        return kernels.both_operands(x_MK.detach(), rowwise, columnwise)  # type: ignore[no-any-return]
    return (
        quantize_dequantize(x_MK, rowwise.spec, key=rowwise.key, amax=rowwise.amax),
        quantize_dequantize(x_MK.T, columnwise.spec, key=columnwise.key, amax=columnwise.amax),
    )


def operand_and_codes(x_MK: Tensor, rowwise: Form, columnwise: Form) -> tuple[Decoded, Quantized]:
    """(`quantize_dequantize` of x, `quantize` of x.T), from one read of x where a kernel can: what forward multiplies,
    and what it keeps for backward."""
    if (kernels := _reading_once(x_MK, rowwise, columnwise)) is not None:
        return kernels.operand_and_codes(x_MK.detach(), rowwise, columnwise)  # type: ignore[no-any-return]
    return (
        quantize_dequantize(x_MK, rowwise.spec, key=rowwise.key, amax=rowwise.amax),
        quantize(x_MK.T, columnwise.spec, key=columnwise.key, amax=columnwise.amax),
    )


def _reading_once(x_MK: Tensor, rowwise: Form, columnwise: Form) -> ModuleType | None:
    """The module whose kernels make both forms from one read of x, or None."""
    if x_MK.device.type != "cpu":
        return None
    for x_RC, form in ((x_MK, rowwise), (x_MK.T, columnwise)):
        check_input(x_RC, form.spec, form.key, form.amax)
    kernels = _implementation(x_MK, rowwise.spec, "auto"), _implementation(x_MK.T, columnwise.spec, "auto")
    return kernels[0] if kernels[0] is kernels[1] is not reference else None


def check_input(x_RC: Tensor, spec: QuantSpec, key: RandomKey | None, amax: Tensor | None) -> None:
    """ValueError for what no implementation takes."""
    if x_RC.ndim != 2:
        fix = "x.reshape(-1, x.shape[-1])" if x_RC.ndim > 2 else "x.reshape(1, -1)"
        raise ValueError(f"x has {x_RC.ndim} dimensions {tuple(x_RC.shape)}: quantize takes [rows, cols]; use {fix}")
    if x_RC.dtype not in DTYPES:
        raise ValueError(f"x.dtype={x_RC.dtype}: quantize takes float32, bfloat16 and float16; use x.float()")
    if spec.rounding == "stochastic" and key is None:
        raise ValueError(
            "key=None: rounding='stochastic' takes its bits from a RandomKey(seed=, step=, layer=, operand=)"
        )
    if amax is not None:
        rows = x_RC.shape[0] if spec.global_scale == "row" or spec.block == (1, None) else 1
        if spec.global_scale is None and None not in spec.block:
            raise ValueError(
                f"amax: block={spec.block!r} with scale={spec.scale!r} has no global scale to take it; use None"
            )
        if amax.numel() != rows:
            raise ValueError(
                f"amax has {amax.numel()} values: this spec takes {rows} for x of shape {tuple(x_RC.shape)}"
            )
    elif spec.delayed is not None:
        raise ValueError("amax=None: delayed scaling takes it from history; see scaling.delayed_amax")


def _implementation(x_RC: Tensor, spec: QuantSpec, kernel: str) -> ModuleType:
    check_choice("kernel", kernel, KERNELS)
    if kernel == "reference":
        return reference
    chosen = kernel if kernel != "auto" else "triton" if x_RC.is_cuda else "cpu"
    module = _module(chosen)
    transform = spec.hadamard
    reason = f"{transform} is for comparison" if isinstance(transform, Rotation) else module.why_not(x_RC, spec)
    if reason is None:
        return module
    if kernel != "auto":
        raise ValueError(f"kernel={kernel!r} cannot quantise this: {reason}. Use kernel='auto' or 'reference'")
    _log_fallback(chosen, reason)
    return reference


@cache
def _module(kernel: str) -> ModuleType:
    """Imported when first needed: the reference needs neither, and Triton is not on every machine."""
    return importlib.import_module(f"fp4train.quantize.{kernel}")


@cache
def _log_fallback(kernel: str, reason: str) -> None:
    """Once for each reason: the cache is the memory."""
    logging.getLogger(__name__).info("no %s kernel, using the torch reference: %s", kernel, reason)
