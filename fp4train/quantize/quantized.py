"""Results of quantisation: `Quantized`, codes and scales as hardware stores them, and `Decoded`,
the values that emulation multiplies.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fp4train.formats import AdaptiveScale, decode, pack_fp4, unpack_fp4
from fp4train.quantize.random import RandomKey
from fp4train.quantize.scaling import (
    global_scales,
    product_factor,
    spread_outer,
    unswizzle_scales,
)
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import pad_columns, undo_transform


class Decoded(NamedTuple):
    """One operand of an emulated GEMM: the tensor is `values * scale`.

    values: [R, C]; with a Hadamard transform C is rounded up to its size, since the transform fills
        the padding. BF16 if that is exact (`QuantSpec.exact_in_bf16`), otherwise float32.
    scale: the float32 factor to apply to the product, 0-d or [R, 1]; None for 1.
    factors: (scale of another operand, factors of the product with it as a kernel that quantises
        wrote them: float32 [2], see `kernels.triton.scale.product_factor`).
    """

    values: Tensor
    scale: Tensor | None
    factors: tuple[Tensor, Tensor] | None = None

    def rounded(self) -> Tensor:
        """The tensor in BF16, as a spec that `requantises` takes it on CPUs."""
        return (self.values if self.scale is None else self.values * self.scale).to(torch.bfloat16)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """The tensor in `dtype`: the float32 product of values and scale, rounded once."""
        if self.scale is None:
            return self.values.to(dtype)
        return (self.values.float() * self.scale).to(dtype)


class Quantized(NamedTuple):
    """Codes and scales of a [R, C] tensor.

    codes: uint8 [R, Cp], one code per byte; of a packed format two per byte [R, Cp/2]. Cp is C
        padded with zeros to whole blocks (and Hadamard groups).
    scales: uint8 bytes or float32 (the factor that decodes), by `spec.scale_format.dtype`,
        [ceil(R/br), Cp/bc], of hif4 four bytes per block; [R, 1] for rows, [1, 1] for the tensor.
        For `scaled_mm` flat, in tiles of 128x4, one per row and block, and codes and scales in
        torch's dtypes (layout.py).
    amax: float32 global amax, after the Hadamard transform: 0-d, [R, 1] for row-wise global scales,
        or [ceil(R/rows), ceil(C/columns)] for those of outer blocks and tiles; None if all scales
        are per block.
    factor: S_dec, where a kernel wrote it beside the codes; None: it follows from the amax.
    """

    spec: QuantSpec
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    amax: Tensor | None
    factor: Tensor | None = None

    @property
    def element_codes(self) -> Tensor:
        """uint8 [R, Cp], one code per byte for every format."""
        if self.tiled:
            codes = self.codes.view(torch.uint8)
        else:
            codes = self.codes
        if self.spec.format.packed:
            return unpack_fp4(codes)
        return codes

    def element_values(self) -> Tensor:
        """Values of the codes without scales, float32 [R, Cp]."""
        spec = self.spec
        values = decode(self.element_codes, spec.format)
        fmt = spec.scale_format
        if not isinstance(fmt, AdaptiveScale):
            return values
        integers = decode(self.element_codes, fmt.other).mul_(fmt.step)
        height, width = spec.block
        marked = fmt.marked(self.scales).repeat_interleave(height or 1, dim=0)[: len(values)]
        return torch.where(marked.repeat_interleave(width or 1, dim=1), integers, values)

    @property
    def element_width(self) -> int:
        """Cp: columns, padding included."""
        return self.codes.shape[1] * (2 if self.spec.format.packed else 1)

    @property
    def tiled(self) -> bool:
        """Whether the scales lie in tiles."""
        return self.scales.dim() == 1

    def contiguous(self) -> "Quantized":
        """Itself, with its tensors' rows one after the other in memory, as kernels read them."""
        if self.amax is None:
            amax = None
        else:
            amax = self.amax.contiguous()
        return self._replace(
            codes=self.codes.contiguous(), scales=self.scales.contiguous(), amax=amax
        )

    def block_scales(self) -> Tensor:
        """The block scales as float32 factors, row after row, without the scale of the tensor or
        row; one for each block, or for each of its parts.
        """
        scales, (height, cols) = self.scales, self.spec.block
        if self.tiled:
            scales = unswizzle_scales(
                scales.view(torch.uint8), self.shape[0], self.element_width // (cols or 1)
            )[:: height or 1]
        scales = self.spec.scale_format.factors(scales)
        if self.spec.outer is not None and self.amax is not None:
            scales = scales * spread_outer(
                global_scales(self.amax, self.spec)[1], scales.shape, self.spec
            )
        return scales

    def global_decode(self) -> Tensor | None:
        """S_dec, float32 0-d or [R, 1], or what undoes the guard of powers of two; None without
        such a factor.
        """
        if self.spec.product_factor is not None:
            return product_factor(self.spec, self.codes.device)
        if self.spec.outer is not None or self.spec.global_scale is None or self.amax is None:
            return None
        if self.factor is not None:
            return self.factor
        decode = global_scales(self.amax, self.spec)[1]
        return spread_outer(decode, torch.Size((self.shape[0], 1)), self.spec)

    def decoded(self) -> Decoded:
        """The operand of an emulated GEMM; equal to `quantize_dequantize` in every bit."""
        spec = self.spec
        values = self.element_values()
        if spec.has_outer_scale:
            if spec.block[0] is None:
                scale = self.scales.reshape(())
            else:
                scale = self.scales
            return finish_operand(values, scale, spec, self.shape)
        return finish_operand(
            apply_block_scales(values, self.block_scales(), spec),
            self.global_decode(),
            spec,
            self.shape,
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """values * scale, [R, C]; in the transformed domain (and C rounded up to its size) if the
        spec has a Hadamard transform.
        """
        spec = self.spec
        shape = self.shape
        values = apply_block_scales(self.element_values(), self.block_scales(), spec)
        if (scale := self.global_decode()) is not None:
            values = values * scale
        return values[:, : operand_width(spec, shape[1])].to(dtype)

    def restore(
        self, dtype: torch.dtype = torch.float32, *, key: RandomKey | None = None
    ) -> Tensor:
        """`dequantize` brought back to the domain of the input, [R, C]: the Hadamard transform is
        undone in float32.

        key: that of quantising, where the transform's signs were drawn from it.
        """
        values = self.dequantize()
        if self.spec.hadamard is not None:
            values = undo_transform(values, self.spec.hadamard, key)[:, : self.shape[1]]
        return values.to(dtype)


Prepared: TypeAlias = Decoded | Quantized
"""An operand ready for a product: decoded values, or codes and scales."""


def turned(q: Quantized) -> Quantized:
    """The quantised transpose, of a spec that is `transposable`."""
    rows, columns = q.shape
    codes = q.element_codes[:, :columns].T
    multiple = q.spec.block[0] or 1 + q.spec.format.packed  # two codes of a packed format per byte
    codes = pad_columns(codes, multiple).contiguous()
    packed = pack_fp4(codes) if q.spec.format.packed else codes
    if q.scales.numel() == 1:
        scales = q.scales
    else:
        scales = q.scales.T.contiguous()
    amax = q.amax
    if amax is not None and amax.ndim == 2:
        amax = amax.T.contiguous()
    return Quantized(q.spec, (columns, rows), packed, scales, amax, q.factor)


def operand_width(spec: QuantSpec, cols: int) -> int:
    """Columns of the operand of a tensor with `cols` columns."""
    size = 1 if spec.hadamard is None else spec.hadamard.size
    return -(-cols // size) * size


def apply_block_scales(values: Tensor, scales: Tensor, spec: QuantSpec) -> Tensor:
    """values [R, Cp] times the scales of their blocks, float32."""
    rows, cols = values.shape
    if spec.block[0] not in (1, None):
        scales = scales.repeat_interleave(spec.block[0] or 1, dim=0)[:rows]
    groups = scales.shape[1]
    if rows == 0 or groups == 0:
        return values
    return (values.reshape(rows, groups, cols // groups) * scales.unsqueeze(-1)).reshape(rows, cols)


def finish_operand(
    values: Tensor, scale: Tensor | None, spec: QuantSpec, shape: tuple[int, int]
) -> Decoded:
    """Remove the padding and store in BF16 if that is exact."""
    values = values[: shape[0], : operand_width(spec, shape[1])]
    if spec.exact_in_bf16:
        values = values.to(torch.bfloat16)
    return Decoded(values.contiguous(), scale)
