"""Gathering tokens as codes: each rank quantises its tokens of x or dy, and codes and scales are sent.

A row-wise form [M, K] is cut along its rows, a column-wise form [K, M] along its blocked columns. Both equal the forms
of the gathered tensor in every bit: the amax is that of all tokens, the random bits are those of their indices, and the
tokens of a rank are whole blocks (`whole_blocks`; else the tensor itself is gathered). NVFP4 sends 0.5625 B per element
and form instead of 2, and keeps only a rank's own tokens of q(xᵀ) for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4train.nn.place import Ranks
from fp4train.quantize import Quantized, QuantSpec, why_not_cut


def whole_blocks(spec: QuantSpec | None, tokens: int) -> bool:
    """Whether a rank's tokens are whole blocks of the column-wise form; True if that is in high precision."""
    return spec is None or why_not_cut(spec, tokens, columns=True) is None


def gathered(part: Quantized, ranks: Ranks, *, along_tokens: bool) -> Quantized:
    """The form of all tokens, in one collective.

    Args:
        part: the form of this rank's tokens.
        along_tokens: whether tokens are columns.
    """
    spec, (rows, columns), codes, scales, amax = part
    cut = [codes]
    per_token = spec.block[1 if along_tokens else 0] is not None
    if per_token:
        cut.append(scales)
    outer = spec.global_scale == "block"
    if amax is not None and (outer or (amax.numel() > 1 and not along_tokens)):
        cut.append(amax)
    sent = [tensor.contiguous().view(torch.uint8) for tensor in cut]
    buffer = torch.cat([tensor.reshape(1, -1) for tensor in sent], dim=1)
    received = ranks.gather_rows(buffer)
    whole, start = [], 0
    for tensor, one in zip(cut, sent, strict=True):
        piece = received[:, start : start + one.numel()].reshape(ranks.size, *one.shape)
        whole.append(_joined(piece, along_tokens).view(tensor.dtype))
        start += one.numel()
    codes = whole[0]
    scales = whole[1] if per_token else scales
    if len(whole) > 1 + per_token:
        amax = whole[-1]
    shape = (rows, columns * ranks.size) if along_tokens else (rows * ranks.size, columns)
    return Quantized(spec, shape, codes, scales, amax)


def _joined(pieces: Tensor, along_tokens: bool) -> Tensor:
    """[p, R, C] → [R, p·C] along tokens, else [p·R, C]."""
    return pieces.transpose(0, 1).flatten(1).contiguous() if along_tokens else pieces.flatten(0, 1).contiguous()
