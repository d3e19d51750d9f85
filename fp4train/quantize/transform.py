"""Transforms of groups of n neighbours, mainly the Hadamard transform: they spread an outlier over
its group before the blocks are scaled.

y = (x * d) H_n / sqrt(n), H_n the Sylvester matrix, d a vector of signs. It is orthogonal, so with
the same d on both operands of a product the transforms cancel: (x D H/sqrt n)(w D H/sqrt n)^T = x
w^T. NVFP4 pretraining (arXiv 2509.25149, section 4.2) applies it to both operands of wgrad only,
with n = 16 and one fixed random d.

Numerics: x is rounded to BF16 first; the butterfly runs in float32 in the order of strides 1, 2, 4,
... ((a, b) ->
    (a+b, a-b)); the product with float32(1/sqrt n) is rounded to BF16.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.quantize.random import MASK, RandomKey, philox4x32
from fp4train.quantize.rotation import Transform, transform_matrix

SIZES = (2, 4, 8, 16, 32, 64, 128)
SIGN_CHOICES = ("fixed", "none", "random", "step")
FIXED_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine's sign vector for n = 16; other sizes repeat or truncate it."""


@dataclass(frozen=True, kw_only=True)
class Hadamard:
    """Transform of groups of `size` neighbours. `signs`: fixed (TE's vector), none, random (drawn
    from `seed`), or step (drawn anew for each layer and step, the same for both operands of a
    product).
    """

    size: int = 16
    signs: str = "fixed"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(
                f"size={self.size!r}: a Hadamard transform allows {', '.join(map(str, SIZES))}"
            )
        if self.signs not in SIGN_CHOICES:
            raise ValueError(
                f"signs={self.signs!r}: a Hadamard transform allows {', '.join(SIGN_CHOICES)}"
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise ValueError(
                f"seed={self.seed!r}: a Hadamard transform allows integers 0 <= seed < 2**64"
            )
        if self.seed and self.signs != "random":
            raise ValueError(
                f"seed={self.seed}: only signs='random' draws from a seed; with "
                f"signs={self.signs!r} use 0"
            )


def drawn(spec: Hadamard | Transform, key: RandomKey | None) -> Hadamard | Transform:
    """The transform with its signs known: signs="step" becomes signs="random" with a seed from the
    key's seed, step and layer, whatever its operand and position. ValueError where that has no key.
    """
    if not isinstance(spec, Hadamard) or spec.signs != "step":
        return spec
    if key is None:
        raise ValueError(
            "key=None: hadamard.signs='step' draws signs from a RandomKey(seed=, step=, "
            "layer=, operand=)"
        )
    # the last row and column, which no element reaches
    counter = [
        torch.tensor([word], dtype=torch.int64)
        for word in (MASK, MASK, key.step * 8 & MASK, key.layer)
    ]
    words = philox4x32(
        (counter[0], counter[1], counter[2], counter[3]), (key.seed & MASK, key.seed >> 32)
    )
    return Hadamard(size=spec.size, signs="random", seed=int(words[0]) << 32 | int(words[1]))


def hadamard_signs(spec: Hadamard | Transform) -> list[int]:
    """The `size` signs d, each +1 or -1; another transform has none and raises ValueError.

    Random ones are the low bits of the first Philox words with counter (i, 0, 0, 0) and key = seed.
    """
    if not isinstance(spec, Hadamard):
        raise ValueError(
            f"{spec} is not a Hadamard transform and has no signs; use transform(x, spec)"
        )
    if spec.signs == "step":
        raise ValueError(f"{spec}: signs='step' are those of a RandomKey; see `drawn`")
    if spec.signs == "none":
        return [1] * spec.size
    if spec.signs == "fixed":
        return [FIXED_SIGNS[i % len(FIXED_SIGNS)] for i in range(spec.size)]
    index = torch.arange(spec.size, dtype=torch.int64)
    zero = torch.zeros_like(index)
    words = philox4x32((index, zero, zero, zero), (spec.seed & MASK, spec.seed >> 32))
    return [1 - 2 * (word & 1) for word in words[0].tolist()]


@lru_cache(maxsize=64)
def _signs_on(device: torch.device, spec: Hadamard) -> Tensor:
    """The signs, float32 [size]: copied to a device once, for which the host waits."""
    with torch.inference_mode(False):
        return torch.tensor(hadamard_signs(spec), dtype=torch.float32, device=device)


def pad_columns(x_RC: Tensor, multiple: int) -> Tensor:
    """x padded with zero columns to a multiple; x itself if no padding is needed."""
    missing = -x_RC.shape[-1] % multiple
    return F.pad(x_RC, (0, missing)) if missing else x_RC


def butterfly(y: Tensor) -> Tensor:
    """Unscaled Sylvester-Hadamard product of the last axis (a power of two), as a butterfly of
    strides 1, 2, 4, ...
    """
    size = y.shape[-1]
    shape = y.shape
    stride = 1
    while stride < size:
        pairs = y.reshape(*shape[:-1], size // (2 * stride), 2, stride)
        a = pairs[..., 0, :]
        b = pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2)
        stride *= 2
    return y.reshape(shape)


def apply_hadamard(x_RC: Tensor, spec: Hadamard) -> Tensor:
    """Transform along the last axis of [R, C], zero-padded to a multiple of `size` -> BF16 [R,
    C'].
    """
    x_RC = pad_columns(x_RC.to(torch.bfloat16), spec.size)
    rows, cols = x_RC.shape
    signs = _signs_on(x_RC.device, spec)
    groups = x_RC.reshape(rows, cols // spec.size, spec.size).to(torch.float32) * signs
    return butterfly(groups).mul_(1.0 / math.sqrt(spec.size)).to(torch.bfloat16).reshape(rows, cols)


def undo_hadamard(y_RC: Tensor, spec: Hadamard) -> Tensor:
    """Inverse in float32: x = (y H / sqrt n) * d. The last axis must be a multiple of `size`."""
    rows, cols = y_RC.shape
    signs = _signs_on(y_RC.device, spec)
    groups = y_RC.to(torch.float32).reshape(rows, cols // spec.size, spec.size)
    return (butterfly(groups) * (1.0 / math.sqrt(spec.size)) * signs).reshape(rows, cols)


def transform(x_RC: Tensor, spec: Hadamard | Transform, key: RandomKey | None = None) -> Tensor:
    """x in the transformed domain: BF16 [R, C'], C zero-padded to a multiple of `size`. key: see
    `drawn`.
    """
    spec = drawn(spec, key)
    if isinstance(spec, Hadamard):
        return apply_hadamard(x_RC, spec)
    x_RC = pad_columns(x_RC.to(torch.bfloat16), spec.size)
    return _rotate(x_RC, transform_matrix(spec)).to(torch.bfloat16)


def undo_transform(
    y_RC: Tensor, spec: Hadamard | Transform, key: RandomKey | None = None
) -> Tensor:
    """The inverse of `transform`, in float32; the padding stays."""
    spec = drawn(spec, key)
    if isinstance(spec, Hadamard):
        return undo_hadamard(y_RC, spec)
    return _rotate(y_RC, transform_matrix(spec).T)


def _rotate(x_RC: Tensor, matrix: Tensor) -> Tensor:
    groups = x_RC.to(torch.float32).reshape(-1, matrix.shape[0])
    return (groups @ matrix.to(x_RC.device)).reshape(x_RC.shape)
