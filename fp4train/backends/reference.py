"""The exact, slow product: block by block along the contraction axis, as Transformer Engine's
reference accumulates.

    y = Σ_k  (a_k · b_kᵀ) · (scale of a's block k) · (scale of b's block k)

with a_k the k-th slice of `block` columns. Element products are exact in float32; for 4-bit codes
their sum over a block of 16 is exact too. Blocks are added to a float32 accumulator one after
another.
"""

import torch
from torch import Tensor

from fp4train.backends.protocol import Backend, Prepared
from fp4train.backends.table import Shape, Table
from fp4train.hardware import Device
from fp4train.quantize import Quantized, QuantSpec


class Reference:
    """Products of decoded operands, accumulated block by block."""

    name = "reference"
    takes_codes = True
    takes_tiles = False
    adds = False
    both = None

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        """None: the reference supports every spec."""
        return None

    def product(
        self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        a_values, b_values = (x.decoded() if isinstance(x, Quantized) else x for x in (a, b))
        widths = [
            x.spec.block[1]
            for x in (a, b)
            if isinstance(x, Quantized) and x.spec.block[1] is not None
        ]
        step = min(widths, default=a_values.values.shape[1]) or 1
        y = a_values.values.new_zeros(
            (a_values.values.shape[0], b_values.values.shape[0]), dtype=torch.float32
        )
        for start in range(0, a_values.values.shape[1], step):
            block = slice(start, start + step)
            y += a_values.values[:, block].float() @ b_values.values[:, block].float().T
        for scale, dims in ((a_values.scale, None), (b_values.scale, (1, 0))):
            if scale is not None:
                y *= scale.permute(dims) if dims and scale.dim() == 2 else scale
        return (y if bias is None else y + bias.to(out_dtype)).to(out_dtype)

    def add(self, total_RS: Tensor, a: Prepared, b: Prepared) -> None:
        """The product, and its sum after it."""
        total_RS += self.product(a, b, out_dtype=total_RS.dtype)

    def summing(self, accumulator: str) -> Backend:
        return self

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        return True


REFERENCE = Reference()
