"""Emulation at BF16 speed: operands are quantised and decoded to BF16, products are exact. Runs
everywhere.

A decoded element without its global scale is exact in BF16, so

    y [R, S] = (a.values · b.valuesᵀ) · a.scale · b.scale

with BF16 operands and float32 accumulation has exact products, like the tensor cores that it
emulates. Only the order of the additions differs; a CPU's library chooses it by the number of rows
too, so that a last bit of a row in BF16 may differ in a call of more or fewer rows. The global
scales multiply the float32 product before it is rounded to the output dtype: rounding the product
to BF16 first would round twice.

Two scales of whole tensors are one factor on every device, float32(a.scale · b.scale); where that
is no normal float32 number they are applied one after the other. Scales of rows are always applied
so, the scale of a first, also where rows have equal scales: no row's bits depend on other rows'
scales.

Implementation: on a CPU with BF16 instructions, `addmm` with `alpha`, which oneDNN applies to the
float32 accumulator; on other CPUs, and for operands in float32, a float32 product; on GPUs BF16
tensor cores, the scales applied to their float32 sums (`scaled.py`). A bias is rounded to the
output dtype, as in TE, and added before the product is rounded. Operands without scales (a GEMM in
high precision) are multiplied by torch.

CPUs without BF16 or FP16 instructions: torch takes 3 to 30 times as long there for a GEMM as in
float32, and 9 times for the backward pass of attention in FP16. Both formats are exact in float32,
so the float32 product has the same exact element products and float32 accumulation as the
instructions. Its one rounding, to the operands' dtype, overflows to infinity as theirs does.
"""

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.backends import scaled
from fp4train.backends.protocol import Backend, Prepared
from fp4train.backends.table import Shape, Table
from fp4train.hardware import Device
from fp4train.quantize import Decoded, Quantized, QuantSpec, quantizer

_Float32 = ctypes.c_float
_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}

# Both dtypes on CPUs other than x86: only some builds of torch use their instructions.
# torch.compile needs a constant.
WITHOUT_INSTRUCTIONS = frozenset(
    dtype
    for dtype, names in _INSTRUCTIONS.items()
    if not any(torch.cpu.get_capabilities().get(n) for n in names)
)

_SMALLEST_OF_ONEDNN = 16**3
"""Multiplications of a product that torch still does itself (`use_mkldnn_bf16_matmul`)."""

_UNREAD = {
    dtype: torch.empty((), dtype=dtype, device="cpu") for dtype in (*_INSTRUCTIONS, torch.float64)
}
"""Term of `addmm` that beta=0 leaves out."""

_ONEDNN: Any = None
"""oneDNN's product x·wᵀ in float32; None: torch's, which is MKL's. MKL uses AVX-512 on Intel's CPUs
only; on one of AMD's oneDNN takes half of its time.
"""
if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512":  # type: ignore[no-untyped-call]
    _ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


class Emulate:
    """Products of decoded operands."""

    name = "emulate"
    takes_codes = takes_tiles = False
    adds = True

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        """None: every spec can be emulated on every device."""
        return None

    def product(
        self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        # Conditions here, and no calls: a layer's host time is that of its Python calls.
        if isinstance(a, Quantized):
            a = quantizer(a.spec, a.codes.device.type).decode(a)
        if isinstance(b, Quantized):
            b = quantizer(b.spec, b.codes.device.type).decode(b)
        if a.values.device.type != "cuda":
            return matmul(a, b, out_dtype=out_dtype, bias=bias)
        if scaled.why_not(a, b, out_dtype) is None:
            added = None if bias is None else bias.to(out_dtype)
            return SCALED.product(a, b, out_dtype=out_dtype, bias=added)
        with _float32_accumulation():
            return matmul(a, b, out_dtype=out_dtype, bias=bias)

    def add(self, total_RS: Tensor, a: Prepared, b: Prepared) -> None:
        a = decoded(a) if isinstance(a, Quantized) else a
        b = decoded(b) if isinstance(b, Quantized) else b
        if a.scale is None and b.scale is None:
            add_product(total_RS, a.values, b.values.T)
        elif self._in_product(total_RS, a, b):
            SCALED.add(total_RS, a, b)
        else:
            total_RS += self.product(a, b, out_dtype=total_RS.dtype)

    def both(
        self,
        first: tuple[Prepared, Prepared],
        second: tuple[Prepared, Prepared],
        dtypes: tuple[torch.dtype, torch.dtype],
        total_RS: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Both products of a backward pass on a GPU, of fewer launches than apart; the second is
        added to `total_RS` where there is one. None: they are to be made apart.
        """
        a, b, c, d = (decoded(x) if isinstance(x, Quantized) else x for x in (*first, *second))
        if scaled.why_not(a, b, dtypes[0]) or scaled.why_not(c, d, dtypes[1]):
            return None
        if total_RS is not None and not self._in_product(total_RS, c, d):
            return None
        out = a.values.new_empty((len(a.values), len(b.values)), dtype=dtypes[0])
        other = total_RS
        if other is None:
            other = c.values.new_empty((len(c.values), len(d.values)), dtype=dtypes[1])
        if not SCALED.both((a, b), out, (c, d), other, adds=total_RS is not None):
            return None
        return out, other

    def _in_product(self, total_RS: Tensor, a: Decoded, b: Decoded) -> bool:
        return (
            total_RS.is_cuda
            and total_RS.is_contiguous()
            and scaled.why_not(a, b, total_RS.dtype) is None
        )

    def summing(self, accumulator: str) -> Backend:
        return self

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        return True


class TorchGemm(Emulate):
    """torch's GEMM, for operands that are not quantised, in their dtype."""

    name = "torch"
    both = None  # type: ignore[assignment]

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        if table[gemm].quantised:
            return "quantised operands need a backend that supports their format"
        return None

    def product(
        self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        assert not isinstance(a, Quantized) and not isinstance(b, Quantized)
        return matmul(a, b, out_dtype=out_dtype, bias=bias)


EMULATE = Emulate()
TORCH = TorchGemm()
SCALED = scaled.ScaledProducts()


def decoded(x: Quantized) -> Decoded:
    """The values of an operand."""
    return quantizer(x.spec, x.codes.device.type).decode(x)


def matmul(a: Decoded, b: Decoded, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [R, C] times bᵀ [C, S], all scales applied, plus `bias` [S], rounded once to
    `out_dtype`.

    The ways, of which the first that fits is taken:

    | operands | product |
    |---|---|
    | without scales, in the dtype of the result, not float32 | torch's linear layer |
    | with scales of tensors, in that dtype, on a CPU that multiplies it | its accumulator is scaled |
    | others | a product in float32, which is scaled and rounded |
    """
    x_RC, x_scale, _ = a
    w_SC, w_scale, _ = b
    of_tensors = (x_scale is None or not x_scale.dim()) and (w_scale is None or not w_scale.dim())
    if bias is not None:
        bias = bias.to(out_dtype)
    if x_RC.dtype is w_SC.dtype is out_dtype is not torch.float32:
        if x_scale is None and w_scale is None:
            return widened(F.linear, x_RC, w_SC, bias)
        if of_tensors and x_RC.is_cpu and out_dtype not in WITHOUT_INSTRUCTIONS:
            y_RS = _with_scaled_accumulator(a, b, bias)
            if y_RS is not None:
                return y_RS
    # Conditions, and no table of functions: a layer's host time is that of its Python calls.
    if x_RC.is_cuda and x_RC.dtype == w_SC.dtype != torch.float32:
        product = torch.mm(x_RC, w_SC.T, out_dtype=torch.float32)
    elif _ONEDNN is not None and x_RC.is_cpu and x_RC.numel() and w_SC.numel():
        product = _ONEDNN(x_RC.float(), w_SC.float(), None, "none", [], "")
    else:
        product = x_RC.float() @ w_SC.float().T
    if x_scale is not None and w_scale is not None and of_tensors:
        factors = _of_tensors(x_scale, w_scale)
    else:
        factors = [] if x_scale is None else [x_scale]
        if w_scale is not None:
            factors.append(w_scale.reshape(1, -1))
    if bias is not None:
        for factor in factors:
            product *= factor
        wide_bias = bias.to(torch.float32)
        return torch.add(product, wide_bias, out=torch.empty_like(product, dtype=out_dtype))
    if not factors:
        return product.to(out_dtype)
    for factor in factors[:-1]:
        product *= factor
    # The last factor and the rounding take one pass over the product.
    return torch.mul(product, factors[-1], out=torch.empty_like(product, dtype=out_dtype))


def _with_scaled_accumulator(a: Decoded, b: Decoded, bias: Tensor | None) -> Tensor | None:
    """The product on a CPU with instructions for its dtype: the accumulator is scaled, so that the
    result is rounded once. None: the factor is no normal float32 number, or torch's own loop
    multiplies.
    """
    x_RC, x_scale, _ = a
    w_SC, w_scale, _ = b
    x_factor = 1.0 if x_scale is None else float(x_scale)
    w_factor = 1.0 if w_scale is None else float(w_scale)
    alpha = _Float32(x_factor * w_factor).value
    if alpha < _SMALLEST_NORMAL or alpha == math.inf:
        return None
    # torch's own loop, which takes the smallest products, scales each number of an x whose columns
    # are contiguous.
    if x_RC.stride(1) != 1 and x_RC.numel() * len(w_SC) <= _SMALLEST_OF_ONEDNN:
        return None
    if bias is None:
        return torch.addmm(_UNREAD[x_RC.dtype], x_RC, w_SC.t(), beta=0, alpha=alpha)
    return torch.addmm(bias, x_RC, w_SC.t(), alpha=alpha)


def _of_tensors(x_scale: Tensor, w_scale: Tensor) -> list[Tensor]:
    """What multiplies a float32 product, in turn, for two scales of whole tensors."""
    if not x_scale.is_cpu:
        return queued_factors(x_scale, w_scale)
    product = x_scale * w_scale
    apart = product < _SMALLEST_NORMAL or product == math.inf
    return [x_scale, w_scale] if apart else [product]


def queued_factors(x_scale: Tensor, w_scale: Tensor) -> list[Tensor]:
    """The factors of `_of_tensors`, of which the host reads none."""
    product = x_scale * w_scale
    apart = (product < _SMALLEST_NORMAL) | (product == math.inf)
    return [torch.where(apart, x_scale, product), torch.where(apart, w_scale, 1.0)]


def add_product(total_RS: Tensor, a_RC: Tensor, b_CS: Tensor, *, first: bool = False) -> None:
    """Add a·b to a float32 sum, in place; on GPUs within the product, in float32.

    There it moves the 8 bytes per element of the sum that it must, 4 for the first term; a product
    of its own that is added moves 16.

    Args:
        a_RC, b_CS: the factors, of one dtype.
        first: whether a·b is the first term: the sum, which may hold anything, is written.
    """
    on_gpu = a_RC.is_cuda and a_RC.dtype != torch.float32
    if first and on_gpu:
        torch.mm(a_RC, b_CS, out_dtype=torch.float32, out=total_RS)
    elif first:
        total_RS.copy_(widened(torch.mm, a_RC, b_CS))
    elif on_gpu:
        torch.addmm(total_RS, a_RC, b_CS, out_dtype=torch.float32, out=total_RS)
    else:
        total_RS += widened(torch.mm, a_RC, b_CS)


def widens(x: Tensor) -> bool:
    """Whether products of x run in float32: x is on a CPU without instructions for its dtype."""
    return x.device.type == "cpu" and x.dtype in WITHOUT_INSTRUCTIONS


def widened(
    product: Callable[..., Tensor], x: Tensor, *more_operands: Tensor | None, **options: Any
) -> Tensor:
    """`product(x, *others, **options)`, in float32 if `widens(x)`.

    All tensors have x's dtype and device. The result and, in backward, the gradients have that
    dtype too, each rounded once; autograd keeps float32 copies of what it needs.
    """
    if not widens(x):
        return product(x, *more_operands, **options)
    wide: list[Tensor | None] = []
    for other in more_operands:
        wide.append(None if other is None else other.float())
    return product(x.float(), *wide, **options).to(x.dtype)


@contextmanager
def _float32_accumulation() -> Iterator[None]:
    """Around products on a CUDA device: partial sums stay in float32, as in the tensor cores that
    are emulated.

    cuBLAS may cut a long contraction into parts and add them up in the output's dtype. torch allows
    it for BF16 and FP16 by default
    (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`), and a user may have set
    it either way.
    """
    settings = torch.backends.cuda.matmul
    saved_setting = (
        settings.allow_bf16_reduced_precision_reduction,
        settings.allow_fp16_reduced_precision_reduction,
    )
    settings.allow_bf16_reduced_precision_reduction = (
        settings.allow_fp16_reduced_precision_reduction
    ) = False
    try:
        yield
    finally:
        (
            settings.allow_bf16_reduced_precision_reduction,
            settings.allow_fp16_reduced_precision_reduction,
        ) = saved_setting
