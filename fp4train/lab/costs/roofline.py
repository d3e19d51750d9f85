"""The time of a GEMM and of quantising a tensor on a named GPU: a roofline model with few parameters.

    GEMM, m×n×k      max(2·m·n·k / rate(s), bytes / (bandwidth · COPY)) + LAUNCH,  s = (m·n·k)^(1/3)
    rate(s)          peak · gemm_share · s / (s + half),  half = EXPOSED · peak · gemm_share / (bandwidth · COPY)
    quantising       (bytes read + written) / (bandwidth · quantise_share) + LAUNCH, per kernel
    amax             bytes read / (bandwidth · COPY) + LAUNCH, if the scale depends on a whole row or tensor

`half` is the size at which a GEMM reaches half of its rate. It grows with the rate: loading the first tiles, writing
the last ones and the partial last wave take a time proportional to the area of the matrices in every format, so a
faster format needs a larger product to reach its rate. Bytes of a quantising kernel that fit into the L2 cache move
L2_SPEEDUP times faster, since the previous kernel has just written them there.

Peaks and bandwidths are published (`hardware.py`); the parameters below are calibrated, each against the measurement
named with it. `docs/cost-model.md` compares the result with published measurements.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fp4train.backends.te.quantizers import family
from fp4train.formats import formats_of, product_rate
from fp4train.hardware import Gpu, stored_bytes
from fp4train.quantize import QuantSpec
from fp4train.quantize.produced import READ, SourceTensors
from fp4train.quantize.triton import has_pair_kernel

COPY: Final = 0.90
"""Share of the bandwidth that a copy reaches: 4.3 of 4.8 TB/s measured on an H200."""

LAUNCH: Final = 0.7e-6
"""Seconds from the end of one kernel to the start of the next in a queue that is never empty. From the sizes at which
quantising begins to pay on B200, which depend on it most: near 2048³ for MXFP8 and 1800³ for NVFP4."""

EXPOSED: Final = 3.0
"""Bytes per element of an output-sized matrix whose transfer no GEMM hides. From cuBLAS FP4 on B200 at 8192³ and
4096×4096×7168: 5239 and 3939 TFLOP/s (DeepGEMM, pull request 348)."""

L2_SPEEDUP: Final = 2.5
"""Bandwidth of the L2 cache divided by that of the memory."""

SCALED_LAUNCHES: Final = 2
"""Kernels beside an emulated product with scales of whole tensors, which cuBLAS reads from the GPU: the one that makes
their factor, and the one that has nothing to do where there is one (`backends/scaled.py`). The product moves the bytes
of one in BF16."""
TRITON_SHARE: Final = 0.85
"""Assumed share of cuBLAS's rate that Triton's product reaches, which emulation takes for scales of rows."""

_GEMM_SHARE: Final = 0.88
_GEMM_SHARES: Final[Mapping[tuple[int, int], Mapping[str, float]]] = MappingProxyType(
    {(10, 3): MappingProxyType({"FP4": 0.43, "FP6": 0.71, "FP8": 0.71, "FP16": 0.72, "BF16": 0.72, "TF32": 0.72})}
)
_QUANTISE_SHARE: Final = 0.84
_QUANTISE_SHARE_BLACKWELL: Final = 0.50
_OWN_SHARE: Final = 0.68


def gemm_share(gpu: Gpu, rate: str) -> float:
    """Share of the peak that a large GEMM reaches.

    0.88 (BF16 on H200 at 8192³: 790 of 989 TFLOP/s with the effect of the size; on B200 at 16384³ near 2000, 4000 and
    6000 of 2250, 4500 and 9000 in BF16, MXFP8 and NVFP4), except on Blackwell Ultra. There TE's published
    benchmark reached 0.72 of the peak in BF16 and 0.71 in MXFP8, and 0.43 of the 15 PFLOP/s of NVFP4, which is 0.72 of
    B200's 9: that benchmark does not show the increase of the FP4 peak by two thirds.
    """
    return _GEMM_SHARES.get(gpu.capability, {}).get(rate, _GEMM_SHARE)


def quantise_share(gpu: Gpu) -> float:
    """Share of the bandwidth that Transformer Engine's quantising kernels reach.

    From the difference of its GEMM benchmark with and without quantising: on H200 NVL 0.84 (FP8 current), on B300 0.50
    (MXFP8 and NVFP4, fprop, dgrad and wgrad shapes). Ampere, which has no such formats, uses the value of Hopper.
    """
    return _QUANTISE_SHARE if gpu.capability < (10, 0) else _QUANTISE_SHARE_BLACKWELL


def half_size(gpu: Gpu, rate: str) -> float:
    """The size s of a product s³ at which `gpu` reaches half of its large-GEMM rate."""
    return EXPOSED * gpu.peaks[rate] * gemm_share(gpu, rate) / (gpu.bandwidth * COPY)


def gemm_seconds(gpu: Gpu, elements: str, m: float, n: float, k: float, *, products: int = 1) -> float:
    """Time of one product [m, k]·[k, n] of `elements` ("E2M1·E2M1", "BF16"), without quantising.

    Args:
        products: how many of this size one call makes; their tiles fill the GPU together.

    Raises:
        ValueError: the GPU has no such rate.
    """
    formats = formats_of(elements)
    rate = product_rate(*formats)
    if rate is None or rate not in gpu.peaks:
        raise ValueError(f"{gpu} does not multiply {elements}: it has {', '.join(gpu.peaks)}")
    achievable = gpu.peaks[rate] * gemm_share(gpu, rate)
    size = math.cbrt(products * m * n * k)
    compute = 2 * products * m * n * k / achievable * (1 + half_size(gpu, rate) / size)
    out = 4 if rate in ("FP32", "TF32") else 2
    moved = m * k * stored_bytes(formats[0].bits) + n * k * stored_bytes(formats[-1].bits) + m * n * out
    return max(compute, products * moved / (gpu.bandwidth * COPY)) + LAUNCH


def move_seconds(gpu: Gpu, moved: float, share: float) -> float:
    """Time of one kernel that reads and writes `moved` bytes and reaches `share` of the bandwidth."""
    near = min(moved, gpu.l2)
    return (near / L2_SPEEDUP + moved - near) / (gpu.bandwidth * share) + LAUNCH


def needs_amax(spec: QuantSpec) -> bool:
    """Whether the scale depends on the current amax of a row or tensor: one more read before quantising."""
    return spec.delayed is None and (spec.global_scale in ("tensor", "row") or None in spec.block)


def reads_once(row: QuantSpec, column: QuantSpec) -> bool:
    """Whether one kernel of Transformer Engine reads a tensor once for both forms: same family, elements and transform.

    NVFP4's Hadamard transform of the column-wise form is a separate kernel with its own read.
    """
    try:
        return family(row) == family(column) and row.element == column.element and row.hadamard == column.hadamard
    except ValueError:
        return False


def quantise_seconds(gpu: Gpu, count: int, row: QuantSpec | None, column: QuantSpec | None, *, read: int = 2) -> float:
    """Time of quantising a tensor of `count` elements of `read` bytes into its row-wise and column-wise form; None: not
    needed.

    One amax pass serves both forms (the amax after the Hadamard transform included). One more read serves both forms if
    `reads_once`, else two. The arithmetic of the transform overlaps with memory traffic.
    """
    forms = [spec for spec in (row, column) if spec is not None]
    seconds = move_seconds(gpu, read * count, COPY) if any(map(needs_amax, forms)) else 0.0
    written = [count * stored_bytes(spec.format.bits, spec.block[1] or count) for spec in forms]
    if len(forms) == 2 and reads_once(forms[0], forms[1]):
        return seconds + move_seconds(gpu, read * count + sum(written), quantise_share(gpu))
    return seconds + sum(move_seconds(gpu, read * count + w, quantise_share(gpu)) for w in written)


def own_seconds(
    gpu: Gpu,
    count: int,
    row: QuantSpec | None,
    column: QuantSpec | None,
    *,
    codes: bool,
    source: str | None = None,
    weight: int | None = None,
    kept: bool = False,
) -> float:
    """Time of quantising by fp4train's own kernels (`own_bytes`); of each of two tensors of so many elements together,
    where a source is that of two.

    The kernels are assumed to reach three quarters of the bandwidth of a copy, and no more than Transformer Engine's
    where they do the same.
    """
    share = min(_OWN_SHARE, quantise_share(gpu)) if codes else _OWN_SHARE
    measured, written = own_bytes(row, column, count, codes=codes, source=source, weight=weight, kept=kept)
    passes = sum(move_seconds(gpu, each * count, share) for each in written)
    return sum(move_seconds(gpu, each * count, COPY) for each in measured) + passes


def own_bytes(
    row: QuantSpec | None,
    column: QuantSpec | None,
    count: int,
    *,
    codes: bool,
    source: str | None = None,
    weight: int | None = None,
    kept: bool = False,
) -> tuple[list[float], list[float]]:
    """Bytes per element that fp4train's own kernels move: of each that measures amaxes, and of each that writes.

    Each form is read as BF16, after an amax pass, and written by itself; both forms in codes of one scale for the
    tensor, and in narrow blocks but of weights, are written after one read and one amax pass.

    Args:
        count: elements of the tensor.
        codes: written are codes and scales, for native products; else decoded values, for emulation, where square
            blocks are quantised once for both forms, and so is one scale for x or dy.
        source: the kind of `SourceTensors` that are read in the place of the tensor, which has codes of both forms; of
            "gradients" per element of each of two tensors, that of gate and that of up.
        weight: bytes per element that are read of a weight; None: it is x or dy.
        kept: the column-wise form is written as codes for emulation, too, which backward decodes (`decode_seconds`).
    """
    forms = [spec for spec in (row, column) if spec is not None]
    coded = [codes] * len(forms)
    if kept and column is not None:
        coded[-1] = True
    if not any(coded) and len(forms) == 2 and forms[0] == forms[1]:
        whole = weight is None and forms[0].block == (None, None)
        if forms[0].transposable or (whole and has_pair_kernel(forms[0], forms[1], (False, False))):
            forms = forms[:1]
    written = [
        stored_bytes(spec.format.bits, spec.block[1] or count) if as_codes else decoded_width(spec)
        for spec, as_codes in zip(forms, coded, strict=False)
    ]
    amaxes, read, results = sum(map(needs_amax, forms)), weight or 2, 1
    if source is not None:
        read, results = READ[source], SourceTensors(source, ()).results
    at_once = len(forms) == 2 and has_pair_kernel(forms[0], forms[1], (coded[0], coded[1]))
    if at_once and (weight is None or forms[0].block == (None, None)):
        amaxes, written = min(amaxes, 1), [results * sum(written)]
    return [read] * amaxes, [read + each for each in written]


def decode_seconds(gpu: Gpu, count: int, spec: QuantSpec) -> float:
    """Time of making values of codes again, which emulation keeps of x for backward."""
    moved = stored_bytes(spec.format.bits, spec.block[1] or count) + decoded_width(spec)
    return move_seconds(gpu, moved * count, _OWN_SHARE)


def decoded_width(spec: QuantSpec) -> int:
    """Bytes of a decoded element: BF16, or float32 under float32 block scales, whose products are not exact in BF16."""
    return 4 if spec.scale == "fp32" and None not in spec.block else 2
