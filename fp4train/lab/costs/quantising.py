"""The time of quantising a tensor into the forms that its GEMMs multiply: passes over memory.

A scale that depends on the amax of a row or tensor takes one read of the tensor at the speed of a
copy. Then one kernel reads the tensor and writes all its forms: codes and scales, or decoded values
for emulation. In Transformer Engine a Hadamard transform is a kernel that reads for itself. The
arithmetic of rounding overlaps with the passes.
"""

from collections.abc import Collection
from typing import Final

from fp4train.backends import LAYER_BACKENDS
from fp4train.hardware import Gpu
from fp4train.lab.costs.roofline import COPY, move_seconds
from fp4train.quantize import QuantSpec

EMULATING: Final = ("emulate", "reference")
"""Backends that use no low-precision tensor cores."""

_HOPPER_SHARE: Final = 0.84
_BLACKWELL_SHARE: Final = 0.50
_OWN_SHARE: Final = 0.68


def quantise_share(gpu: Gpu, backend: str) -> float:
    """Share of the bandwidth that the quantising kernels of a backend reach.

    From the difference of Transformer Engine's GEMM benchmark with and without quantising: on H200
    NVL 0.84 (FP8 current), on B300 0.50 (MXFP8 and NVFP4, fprop, dgrad and wgrad shapes). Ampere,
    which has no such formats, uses the value of Hopper. fp4train's kernels are assumed to reach
    three quarters of the bandwidth of a copy, and where they write codes no more than Transformer
    Engine's.
    """
    if backend in EMULATING:
        return _OWN_SHARE
    if gpu.capability >= (10, 0):
        return _BLACKWELL_SHARE
    if backend in LAYER_BACKENDS:
        return _HOPPER_SHARE
    return _OWN_SHARE


def needs_amax(spec: QuantSpec) -> bool:
    """Whether the scale depends on the amax of a row or tensor: one more read before quantising."""
    return spec.delayed is None and (spec.global_scale in ("tensor", "row") or None in spec.block)


def decoded_bytes(spec: QuantSpec) -> int:
    """Bytes of a decoded element: BF16, or float32 where its values are not exact in BF16."""
    return 2 if spec.exact_in_bf16 else 4


def code_bytes(spec: QuantSpec, count: int) -> float:
    """Bytes of the codes and block scales of a tensor of `count` elements."""
    return spec.format.bits / 8 * count + count / (spec.block[1] or count)


def decode_seconds(gpu: Gpu, count: int, spec: QuantSpec) -> float:
    """Time of making the values of the codes of a tensor of `count` elements."""
    moved = code_bytes(spec, count) + decoded_bytes(spec) * count
    return move_seconds(gpu, moved, _OWN_SHARE)


def quantise_seconds(
    gpu: Gpu,
    count: int,
    specs: Collection[QuantSpec],
    backend: str,
    *,
    read: int = 2,
) -> float:
    """Time of quantising a tensor of `count` elements into one form per spec.

    Args:
        read: bytes per element of the tensor.
    """
    written = 0.0
    for spec in specs:
        if backend in EMULATING:
            written += decoded_bytes(spec) * count
        else:
            written += code_bytes(spec, count)
    reads = 1
    if backend in LAYER_BACKENDS:
        reads = len({spec.hadamard for spec in specs})
    share = quantise_share(gpu, backend)
    seconds = reads * move_seconds(gpu, read * count + written / max(1, reads), share)
    if any(needs_amax(spec) for spec in specs):
        seconds += move_seconds(gpu, read * count, COPY)
    return seconds
