"""Orthogonal transforms other than Hadamard's, for comparison: the discrete cosine transform and a
random rotation.

Both spread an outlier as a Hadamard transform does, and both cancel in a product. They cost n
multiplications per element, the butterfly log2(n) additions; the comparison shows whether that cost
pays. Numerics as for Hadamard: x rounded to BF16, the product with the float32 matrix, rounded to
BF16.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

KINDS: Final = ("dct", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Transform of groups of `size` neighbours by an orthogonal matrix. `kind`: dct, or orthogonal
    (random, from `seed`).
    """

    kind: str = "dct"
    size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: a rotation allows {', '.join(KINDS)}")
        if not isinstance(self.size, int) or not 2 <= self.size <= 1024:
            raise ValueError(f"size={self.size!r}: a rotation allows integers from 2 to 1024")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed!r}: a rotation allows integers 0 <= seed < 2**63")

    @property
    def signs(self) -> str:
        """The kind, in place of the signs of a Hadamard transform."""
        return self.kind


@cache
def rotation_matrix(rotation: Rotation) -> Tensor:
    """Q, float32 [n, n] on the CPU, computed in float64; a group x becomes x Q."""
    n = rotation.size
    if rotation.kind == "orthogonal":
        generator = torch.Generator().manual_seed(rotation.seed)
        q, r = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
        haar: Tensor = q * r.diagonal().sign()  # the signs make the distribution uniform
        return haar.to(torch.float32)
    index = torch.arange(n, dtype=torch.float64)
    cosines = torch.cos(math.pi / n * torch.outer(index + 0.5, index)) * math.sqrt(2.0 / n)
    cosines[:, 0] *= math.sqrt(0.5)
    return cosines.to(torch.float32)
