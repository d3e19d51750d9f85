"""Four over six (arXiv 2512.02010): each block is scaled to 6 and to 4, and the smaller error wins.

E2M1 has no value between 4 and 6, so a block with large values there rounds badly. Scaled to 4 (its scale times 1.5)
the block loses range and gains a finer grid at the top. Arithmetic and order follow TE, whose warp reduction adds the
16 errors of a row in sequence and the 16 rows of a 16x16 block as a tree; ties keep 6. The base scale is (amax_b / 6) *
S_enc under either formula.
"""

import torch
from torch import Tensor

from fp4train.quantize.rounding import round_to_values
from fp4train.quantize.scaling import encode_factor, nan_if_not_finite
from fp4train.quantize.spec import QuantSpec


def choose_scales(
    x_blocks: Tensor, amax_b: Tensor, amax: Tensor, encode: Tensor, decode: Tensor, spec: QuantSpec
) -> Tensor:
    """Bytes [Rb, Cb] of the better scale per block. x_blocks is float32 [Rb, br, Cb, bc], amax 0-d or [R, 1]."""
    base = (nan_if_not_finite(amax_b) / spec.format.max) * encode
    six, four = spec.scale_format.encode(base), spec.scale_format.encode(base * 1.5)
    error_six = block_error(x_blocks, six, amax, decode, spec)
    error_four = block_error(x_blocks, four, amax, decode, spec)
    return torch.where(error_four < error_six, four, six)


def block_error(x_blocks: Tensor, scale_bytes: Tensor, amax: Tensor, decode: Tensor, spec: QuantSpec) -> Tensor:
    """Sum of |error| or error^2 per block [Rb, Cb], decoded as ((e2m1 * scale) * amax) / (6 * bound)."""
    scales = spec.scale_format.decode(scale_bytes)
    factor = encode_factor(scales * decode)[:, None, :, None]
    values = round_to_values(x_blocks * factor, spec.format)
    values.mul_(scales[:, None, :, None]).mul_(amax.reshape(-1, 1, 1, 1))
    difference = values.div_(spec.format.max * spec.global_bound).sub_(x_blocks)
    errors = difference.square_() if spec.four_over_six == "mse" else difference.abs_()
    total = errors[..., 0].clone()
    for column in range(1, errors.shape[-1]):
        total.add_(errors[..., column])
    while (rows := total.shape[1]) > 1 and rows % 2 == 0:
        total = total[:, : rows // 2] + total[:, rows // 2 :]
    return total.sum(dim=1)
