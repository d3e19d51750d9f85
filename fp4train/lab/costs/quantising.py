"""The passes over memory that quantise a tensor, by the kernels of Transformer Engine and of
fp4train.

A tensor is needed in up to two forms: row-wise and column-wise. A pass reads the tensor once and
measures its amax, or writes one form or both:

    Transformer Engine   one amax pass; one pass for both forms of one family, elements, transform
    fp4train, codes      one amax pass and one pass for both forms where a kernel makes both at once
                         (narrow blocks of x and dy; one scale for the tensor), else one for each
    fp4train, values     emulation multiplies decoded values; of square blocks one form serves both

A norm or gate that quantises its own result (`quantize/produced.py`) reads its sources in the place
of the tensor. The arithmetic of rounding and of the Hadamard transform overlaps with the passes.
"""

from typing import Final, NamedTuple

from fp4train.backends.te.quantizers import family
from fp4train.hardware import Gpu
from fp4train.lab.costs.roofline import COPY, move_seconds
from fp4train.quantize import QuantSpec
from fp4train.quantize.produced import READ, SourceTensors
from fp4train.quantize.triton import has_pair_kernel

_HOPPER_SHARE: Final = 0.84
_BLACKWELL_SHARE: Final = 0.50
_OWN_SHARE: Final = 0.68


class Passes(NamedTuple):
    """Bytes per element of the tensor that each pass reads and writes.

    Args:
        measuring: bytes of each pass that measures an amax, at the speed of a copy.
        writing: bytes of each pass that writes forms.
    """

    measuring: list[float]
    writing: list[float]


def quantise_share(gpu: Gpu) -> float:
    """Share of the bandwidth that Transformer Engine's quantising kernels reach.

    From the difference of its GEMM benchmark with and without quantising: on H200 NVL 0.84 (FP8
    current), on B300 0.50 (MXFP8 and NVFP4, fprop, dgrad and wgrad shapes). Ampere, which has no
    such formats, uses the value of Hopper.
    """
    if gpu.capability < (10, 0):
        return _HOPPER_SHARE
    return _BLACKWELL_SHARE


def needs_amax(spec: QuantSpec) -> bool:
    """Whether the scale depends on the amax of a row or tensor: one more read before quantising."""
    return spec.delayed is None and (spec.global_scale in ("tensor", "row") or None in spec.block)


def code_bytes(spec: QuantSpec, count: int) -> float:
    """Bytes of a code with its share of a block scale, in a tensor of `count` elements."""
    return spec.format.bits / 8 + 1 / (spec.block[1] or count)


def decoded_bytes(spec: QuantSpec) -> int:
    """Bytes of a decoded element: BF16, or float32 under float32 block scales, whose products are
    not exact in BF16."""
    if spec.scale == "fp32" and None not in spec.block:
        return 4
    return 2


def te_passes(
    row: QuantSpec | None,
    column: QuantSpec | None,
    count: int,
    *,
    read: float = 2,
) -> Passes:
    """Passes of Transformer Engine over a tensor of `count` elements of `read` bytes.

    NVFP4's Hadamard transform of the column-wise form is a separate kernel with its own read.
    """
    specs = [spec for spec in (row, column) if spec is not None]
    measuring = [read] if any(map(needs_amax, specs)) else []
    written = [code_bytes(spec, count) for spec in specs]
    if len(specs) == 2 and _te_reads_once(specs[0], specs[1]):
        return Passes(measuring, [read + sum(written)])
    return Passes(measuring, [read + size for size in written])


def _te_reads_once(row: QuantSpec, column: QuantSpec) -> bool:
    try:
        same_family = family(row) == family(column)
    except ValueError:
        return False
    return same_family and row.element == column.element and row.hadamard == column.hadamard


def own_passes(
    row: QuantSpec | None,
    column: QuantSpec | None,
    count: int,
    *,
    codes: bool,
    source: str | None = None,
    weight: int | None = None,
    kept: bool = False,
) -> Passes:
    """Passes of fp4train's kernels over a tensor of `count` elements.

    Args:
        codes: whether codes and scales are written, for native products; else decoded values.
        source: kind of the `SourceTensors` that are read in the place of the tensor, which has
            codes of both forms; of "gradients" bytes are per element of each of two tensors.
        weight: bytes per element that are read of a weight; None: it is x or dy, in BF16.
        kept: whether the column-wise form is written as codes for emulation, too, for backward.
    """
    specs = [spec for spec in (row, column) if spec is not None]
    as_codes = [codes] * len(specs)
    if kept and column is not None:
        as_codes[-1] = True
    if not any(as_codes) and _values_serve_both(specs, is_weight=weight is not None):
        specs = specs[:1]
    written = [
        code_bytes(spec, count) if is_code else decoded_bytes(spec)
        for spec, is_code in zip(specs, as_codes, strict=False)
    ]
    measured = sum(map(needs_amax, specs))
    read = weight or 2
    results = 1
    if source is not None:
        read = READ[source]
        results = SourceTensors(source, ()).results
    at_once = len(specs) == 2 and has_pair_kernel(specs[0], specs[1], (as_codes[0], as_codes[1]))
    if at_once and (weight is None or specs[0].block == (None, None)):
        measured = min(measured, 1)
        written = [results * sum(written)]
    return Passes([read] * measured, [read + size for size in written])


def _values_serve_both(specs: list[QuantSpec], *, is_weight: bool) -> bool:
    """Whether the decoded values of one form are those of the other, too."""
    if len(specs) != 2 or specs[0] != specs[1]:
        return False
    if specs[0].transposable:
        return True
    one_scale = is_weight is False and specs[0].block == (None, None)
    return one_scale and has_pair_kernel(specs[0], specs[1], (False, False))


def te_seconds(
    gpu: Gpu,
    count: int,
    row: QuantSpec | None,
    column: QuantSpec | None,
    *,
    read: float = 2,
) -> float:
    """Time of quantising a tensor by Transformer Engine; None: the form is not needed."""
    return _seconds(gpu, count, te_passes(row, column, count, read=read), quantise_share(gpu))


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
    """Time of quantising a tensor by fp4train's kernels; see `own_passes`.

    They are assumed to reach three quarters of the bandwidth of a copy, and no more than
    Transformer Engine's where they do the same.
    """
    passes = own_passes(row, column, count, codes=codes, source=source, weight=weight, kept=kept)
    if codes:
        share = min(_OWN_SHARE, quantise_share(gpu))
    else:
        share = _OWN_SHARE
    return _seconds(gpu, count, passes, share)


def _seconds(gpu: Gpu, count: int, passes: Passes, share: float) -> float:
    measuring = sum(move_seconds(gpu, size * count, COPY) for size in passes.measuring)
    return measuring + sum(move_seconds(gpu, size * count, share) for size in passes.writing)


def decode_seconds(gpu: Gpu, count: int, spec: QuantSpec) -> float:
    """Time of decoding the codes of x that emulation keeps for backward."""
    return move_seconds(gpu, (code_bytes(spec, count) + decoded_bytes(spec)) * count, _OWN_SHARE)
