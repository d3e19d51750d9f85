"""Quantising on NVIDIA GPUs with fp4train's Triton kernels: which spec goes to which kernel.

| spec | kernel |
|---|---|
| (1, N) blocks, columns contiguous | rows: 16 bytes a thread and load |
| (1, 16) or (1, 32) along a strided axis (x.T), or with a Hadamard transform | columns: no transposed copy |
| (N, N) blocks | squares |
| one scale a tensor or a row | whole |

Other strides are copied once. `triton_launch` launches the kernels, with the constants and tiles of `triton_constants`.
Equal to `quantize.reference` to the bit. Triton is imported on first use.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.metadata import version
from typing import Final

import torch
from torch import Tensor

from fp4train.quantize.quantized import Decoded, Quantized
from fp4train.quantize.quantizer import Quantizer, check_input
from fp4train.quantize.random import RandomKey
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard
from fp4train.quantize.triton_constants import NAN_ABOVE, interpreted
from fp4train.quantize.triton_launch import COLUMN_BLOCKS, SCALE_DTYPES, Launches

ROW_BLOCKS: Final = (16, 32, 64, 128)
LARGEST_EXTENT: Final = 2**31 - 2**12


_KNOWN: Final[dict[str, tuple[object, ...]]] = {
    "element": tuple(NAN_ABOVE),
    "scale": tuple(SCALE_DTYPES),
    "scale_rounding": (None, "rceil", "floor", "even", "ceil"),
    "formula": ("te2.14", "te2.13"),
    "rounding": ("nearest", "stochastic"),
    "requantises": (None,),
    "global_scale": (None, "tensor", "row"),
    "four_over_six": (None,),
}
"""What the kernels know of each field of a spec that names something; anything else has no kernel."""


def why_not(spec: QuantSpec, device_type: str) -> str | None:
    """Why these kernels cannot quantise by spec there, in words; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'fp4train[triton]')"
    if device_type != "cuda" and not interpreted():
        return f"x is on {device_type}, Triton kernels run on CUDA devices"
    if device_type == "cuda" and torch.version.hip is not None:
        return "the Triton kernels are for NVIDIA GPUs"
    if interpreted() and (reason := why_not_interpreted(version("triton"), version("numpy"))):
        return reason
    return why_not_spec(spec)


def why_not_interpreted(triton: str, numpy: str) -> str | None:
    """Why these versions cannot interpret the kernels; None if they can. Compiled kernels do not depend on numpy."""
    if _numbers(triton) < (3, 7) and _numbers(numpy) >= (2, 4):
        return (
            f"the interpreter of Triton {triton} fails with numpy {numpy}: pip install 'triton>=3.9' or 'numpy<2.4' "
            "(kernels on a GPU are compiled and need neither)"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """(3, 6) of "3.6.0+git1"."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def why_not_spec(spec: QuantSpec) -> str | None:
    """Why there is no kernel for the spec, whatever the device; None if there is one."""
    for field, known in _KNOWN.items():
        if (value := getattr(spec, field)) not in known:
            return f"{field}={value!r} has no Triton kernel (known: {', '.join(map(str, known))})"
    rows, cols = spec.block
    if cols is None:
        if spec.scale not in ("fp32", "pow2") or spec.hadamard is not None or spec.element == "e2m1":
            what = f"scale={spec.scale!r}, element={spec.element!r}, hadamard={spec.hadamard!r}"
            return f"block={spec.block!r} with {what} has no Triton kernel"
        return None
    if cols not in ROW_BLOCKS or rows not in (1, cols):
        return f"block={spec.block!r}: the kernels take 1xN and NxN, N = 16, 32, 64 or 128"
    if spec.hadamard is not None and not isinstance(spec.hadamard, Hadamard):
        return f"hadamard={spec.hadamard!r} has no Triton kernel"
    if spec.hadamard is not None and spec.hadamard.signs == "step":
        return "hadamard.signs='step' has no Triton kernel"
    if spec.hadamard is not None and (rows != 1 or cols not in COLUMN_BLOCKS or spec.hadamard.size > cols):
        size = spec.hadamard.size
        return f"hadamard size {size} with block={spec.block!r}: the kernels take sizes up to a 1x16 or 1x32 block"
    return None


def why_not_tensor(x: Tensor) -> str | None:
    """Why the kernels cannot read x, whatever the spec; None if they can."""
    if x.numel() == 0:
        return "x is empty"
    if max(x.shape) > LARGEST_EXTENT:
        return f"x.shape={tuple(x.shape)}: rows and columns must stay below 2**31"
    if x.is_cuda and _capability(x.device) < (8, 0):
        return f"compute capability {_capability(x.device)} of {x.device} is below 8.0"
    return None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def make(spec: QuantSpec) -> TritonQuantizer:
    """The quantizer of a spec that `why_not` has nothing against."""
    return TritonQuantizer(spec)


class TritonQuantizer(Quantizer):
    """See `Quantizer`. What the kernels cannot read, an empty tensor above all, is left to the reference."""

    kernel = "triton"

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self._launches = launches(spec)

    def codes(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Quantized:
        """Codes and scales of x."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        if why_not_tensor(x_RC) is not None:
            return super().codes(x_RC, key, amax)
        return self._launches.codes(x_RC, key, amax)

    def values(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Decoded:
        """`codes(...).decoded()` to the bit, fused."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        if why_not_tensor(x_RC) is not None:
            return super().values(x_RC, key, amax)
        return self._launches.values(x_RC, key, amax)

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit."""
        if quantized.spec is not self.spec:
            self._check_spec(quantized)
        return decode(quantized)


launches = cache(Launches)
"""Of a spec: what it has launched before is known to all its quantizers."""


def quantize(x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None) -> Quantized:
    """Codes and scales; see `fp4train.quantize.quantize`."""
    return launches(spec).codes(x_RC, key, amax)


def quantize_dequantize(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None
) -> Decoded:
    """`quantize(...).decoded()` to the bit, fused."""
    return launches(spec).values(x_RC, key, amax)


def decode(quantized: Quantized) -> Decoded:
    """`quantized.decoded()` to the bit: in one kernel for (1, N) and (N, N) blocks, else by torch."""
    if quantized.spec.block[1] is None or 0 in quantized.shape:
        return quantized.decoded()
    return launches(quantized.spec).decode(quantized)


def tensor_amax(x_RC: Tensor, spec: QuantSpec, *, per_row: bool = False) -> Tensor:
    """Largest magnitude of x after the spec's Hadamard transform: float32 0-d, or [R, 1]. NaN if x holds one."""
    return launches(spec).amax(x_RC, per_row=per_row)
