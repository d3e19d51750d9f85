"""Products of the codes themselves, by torch's scaled_mm.

| operands | runs on |
|---|---|
| FP8, one scale per tensor or row | compute capability 8.9 and newer; CPUs |
| NVFP4, MXFP8 | compute capability 10.x (`blocks`) |
| FP8 in blocks of 1×128 and 128×128 | compute capability 9.0 (`blocks`) |

On a CPU torch computes the product slowly, so it is used there only if the backend is given by name. scaled_mm takes
sizes that are multiples of 16 (32, 128): in_features and out_features must be; tokens are padded with zero codes, whose
products are zero.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.backends.emulate import EMULATE
from fp4train.backends.native import blocks
from fp4train.backends.protocol import Prepared
from fp4train.backends.table import Operands, Shape, Table
from fp4train.hardware import Device
from fp4train.quantize import Quantized, QuantSpec

_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SCALES = {(None, None): "tensor", (1, None): "row"}
_MULTIPLE = 16


class Native:
    """torch's scaled_mm."""

    name = "native"
    takes_codes = True

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        if (reason := _why_not_operands(table[gemm])) is not None:
            return reason
        first = table[gemm].first
        if first is not None and blocks.scheme(first) is not None:
            return blocks.why_not(table[gemm], table, layer, device)
        for name, size in (("in_features", layer.in_features), ("out_features", layer.out_features)):
            if size % _MULTIPLE:
                return f"scaled_mm needs {name} divisible by {_MULTIPLE}, not {size}"
        if device.type not in ("cpu", "cuda"):
            return f"scaled_mm is not used on {device}"
        if device.type == "cuda" and (device.capability or (0, 0)) < (8, 9):
            return f"FP8 needs compute capability 8.9; {device} has {'.'.join(map(str, device.capability or ()))}"
        if first is not None and first.block == (1, None):
            if device.type == "cuda" and table.dtype != "bfloat16":
                return f"scaled_mm with one scale per row writes BF16 only, not {table.dtype}"
            if device.type == "cpu" and not cpu_multiplies_rows():
                return f"torch {torch.__version__} has no scaled_mm with one scale per row on CPUs"
        return None

    def product(self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """The product, as in `Backend`; operands without elements, which scaled_mm refuses, are emulated."""
        assert isinstance(a, Quantized) and isinstance(b, Quantized)
        if 0 in (*a.shape, *b.shape):
            return EMULATE.product(a, b, out_dtype=out_dtype, bias=bias)
        try:
            if blocks.scheme(a.spec) is not None:
                return blocks.product(a, b, out_dtype=out_dtype, bias=bias)
            return _product(a, b, out_dtype, bias)
        except RuntimeError as error:
            if "CUBLAS_STATUS" not in str(error):
                raise
            reason = next(iter(str(error).splitlines()))
            raise RuntimeError(
                f"cuBLAS does not multiply [{a.shape[0]}, {a.shape[1]}] by [{b.shape[0]}, {b.shape[1]}]ᵀ of "
                f"{a.spec.element.upper()}·{b.spec.element.upper()} into {out_dtype} ({reason}); "
                "backend=emulate computes the same product"
            ) from error

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        return spec is None or spec.block != (1, None)  # one scale per row: BF16 only


def _product(a: Quantized, b: Quantized, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The product of FP8 codes with one scale per tensor or row."""
    rows, columns = a.shape[0], b.shape[0]
    a_codes, a_scales = _padded(a)
    b_codes, b_scales = _padded(b)
    inside = bias is not None and out_dtype != torch.float32 and columns == b_codes.shape[0]
    y = torch._scaled_mm(
        a_codes.view(_CODES[a.spec.element]),
        b_codes.view(_CODES[b.spec.element]).T,
        scale_a=a_scales,
        scale_b=b_scales.T.contiguous(),
        bias=bias.to(out_dtype) if bias is not None and inside else None,
        out_dtype=out_dtype,
        # The fast accumulator keeps 14 bits; gradients need the exact one, and the result must match emulation.
        use_fast_accum=False,
    )[:rows, :columns]
    return y if bias is None or inside else y + bias.to(y.dtype)


@functools.cache
def cpu_multiplies_rows() -> bool:
    """Whether this torch's scaled_mm takes one scale per row on CPUs; 2.11 takes one per tensor only."""
    codes, scales = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.T, scale_a=scales, scale_b=scales.T, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


def _why_not_operands(operands: Operands) -> str | None:
    first, second = operands.first, operands.second
    if first is None or second is None:
        return "scaled_mm needs both operands quantised"
    for spec in (first, second):
        known = spec.element in _CODES and spec.block in _SCALES and spec.scale in ("fp32", "pow2")
        if not known and blocks.scheme(spec) is None:
            return f"scaled_mm does not take element={spec.element} block={spec.block} scale={spec.scale}"
    if _kind(first) != _kind(second):
        return "scaled_mm needs the same kind of scale for both operands"
    if first.element == second.element == "e5m2":
        return "scaled_mm cannot multiply E5M2 by E5M2"
    return None


def _kind(spec: QuantSpec) -> object:
    return blocks.scheme(spec) or spec.block


def _padded(x: Quantized) -> tuple[Tensor, Tensor]:
    """(codes, scales) with rows and columns padded to multiples of 16: zero codes, and scales of 1 for added rows."""
    rows, columns = -x.codes.shape[0] % _MULTIPLE, -x.codes.shape[1] % _MULTIPLE
    if not rows and not columns:
        return x.codes, x.scales
    scales = F.pad(x.scales, (0, 0, 0, rows), value=1.0) if x.spec.block[0] == 1 else x.scales
    return F.pad(x.codes, (0, columns, 0, rows)), scales


NATIVE = Native()
