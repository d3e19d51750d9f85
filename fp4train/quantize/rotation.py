"""Orthogonal transforms other than Hadamard's: the discrete cosine transform, a random rotation, and
those of plugins.

They spread an outlier as a Hadamard transform does, and cancel in a product. They cost n
multiplications per element, the butterfly log2(n) additions; the comparison shows whether that cost
pays. Numerics as for Hadamard: x rounded to BF16, the product with the float32 matrix, rounded to
BF16.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

KINDS = ("dct", "orthogonal")
TOLERANCE = 1e-5
"""How far QᵀQ may be from the identity."""


class Transform(ABC):
    """An orthogonal transform of groups of `size` neighbours; a plugin's is a frozen dataclass."""

    size: int

    @property
    @abstractmethod
    def label(self) -> str:
        """What the transform is called in a plan, in a word or two."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """Q, [size, size]: a group x becomes x Q. The same for equal objects."""


@dataclass(frozen=True, kw_only=True)
class Rotation(Transform):
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
    def label(self) -> str:
        return {"dct": "DCT", "orthogonal": "random rotation"}[self.kind]

    def matrix(self) -> Tensor:
        """Computed in float64."""
        n = self.size
        if self.kind == "orthogonal":
            generator = torch.Generator().manual_seed(self.seed)
            q, r = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
            haar: Tensor = q * r.diagonal().sign()  # the signs make the distribution uniform
            return haar
        index = torch.arange(n, dtype=torch.float64)
        cosines = torch.cos(math.pi / n * torch.outer(index + 0.5, index)) * math.sqrt(2.0 / n)
        cosines[:, 0] *= math.sqrt(0.5)
        return cosines


@cache
def transform_matrix(transform: Transform) -> Tensor:
    """Q of a transform, float32 on the CPU.

    Raises:
        ValueError: it is not orthogonal or has another shape, so that it would not cancel in a
            product.
    """
    n = transform.size
    with torch.device("cpu"):  # whatever the default device of the surrounding code is
        matrix = transform.matrix().detach().to("cpu", torch.float64)
    if matrix.shape != (n, n):
        raise ValueError(
            f"{transform}: matrix() is {list(matrix.shape)}; size={n} needs [{n}, {n}]"
        )
    identity = torch.eye(n, dtype=torch.float64, device="cpu")
    error = (matrix.T @ matrix - identity).abs().max().item()
    if not error <= TOLERANCE:
        raise ValueError(
            f"{transform}: matrix() is not orthogonal (QᵀQ differs from 1 by {error:.2g}): it would "
            "not cancel in a product of two transformed operands"
        )
    return matrix.to(torch.float32)


def check_transform(transform: Transform) -> None:
    """Refuse a transform that does not cancel in a product, or that cannot be compared.

    Raises:
        ValueError: the message says which, and what to do.
    """
    try:
        hash(transform)
    except TypeError as error:
        raise ValueError(
            f"{transform}: a transform must be hashable: decorate its class with "
            "@dataclass(frozen=True, kw_only=True)"
        ) from error
    transform_matrix(transform)
