"""Quantising a shard: the codes of a shard are the shard of the codes.

Two things of an operand belong to the whole tensor: its global amax and the index of each element,
which selects the random bits. A shard takes both as arguments (`amax`, and the offsets of its
`RandomKey`). All else is local to a block, so the codes and scales of a shard equal those of the
whole tensor if the shard consists of whole blocks, and of whole groups of the Hadamard transform.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp4train.quantize.quantized import Quantized
from fp4train.quantize.quantizer import quantizer
from fp4train.quantize.random import LANES, RandomKey
from fp4train.quantize.spec import QuantSpec
from fp4train.shards import Runs


def amax_extent(spec: QuantSpec) -> str | None:
    """The extent of one global amax: "tensor", "row", or None if all scales are per block or come
    from a history.
    """
    if spec.delayed is not None:
        return None
    if spec.global_scale == "tensor" or spec.global_scale == "row":
        return spec.global_scale
    if not spec.has_outer_scale:
        return None
    return "tensor" if spec.block[0] is None else "row"


def has_tensor_amax(spec: QuantSpec) -> bool:
    """Whether it has one global amax, that of the tensor as it is: not transformed, rounded before,
    or of a history.
    """
    return amax_extent(spec) == "tensor" and spec.hadamard is None and spec.requantises is None


def measure_amax(x_RC: Tensor, spec: QuantSpec, key: RandomKey | None = None) -> Tensor:
    """The global amax of x as `quantize` measures it, after the Hadamard transform: float32, 0-d or
    [R, 1].

    `spec.requantises` is not applied: x is what it gave. key: draws the signs of a transform that
    has those of a step. A NaN or an infinity gives infinity, so that a maximum over ranks keeps it;
    every scale that depends on it is NaN.
    """
    rows = amax_extent(spec) == "row"
    x_RC = x_RC.detach()
    if x_RC.numel() == 0:
        return x_RC.new_zeros((x_RC.shape[0], 1) if rows else (), dtype=torch.float32)
    measures = quantizer(
        spec if spec.requantises is None else replace(spec, requantises=None), x_RC.device.type
    )
    return measures.amax(x_RC, key, per_row=rows).nan_to_num_(nan=torch.inf, posinf=torch.inf)


def requantised(x_RC: Tensor, spec: QuantSpec, amax: Tensor) -> Tensor:
    """The shard x as `spec.requantises` rounds it, BF16 [R, C], where `amax` is that of the whole
    tensor.

    By the rest of the spec, `replace(spec, requantises=None)`, it is quantised as `spec` quantises
    x.
    """
    assert spec.requantises is not None
    codes = quantizer(spec.requantises, x_RC.device.type).codes(x_RC.T, None, amax)
    return codes.restore(torch.bfloat16).T


def why_not_cut(spec: QuantSpec, extent: int, *, columns: bool) -> str | None:
    """Why shards of `extent` rows or columns are not whole blocks of the operand; None if they
    are.
    """
    if spec.requantises is not None:
        reason = why_not_cut(spec.requantises, extent, columns=not columns)
        if reason is not None:
            return reason
    if spec.chunks is not None and (reason := why_not_cut(spec.of_chunks, extent, columns=columns)):
        return reason
    block = spec.block[int(columns)]
    if block is not None and extent % block:
        return f"a shard of {extent} is not whole blocks of {block}"
    if isinstance(spec.global_scale, tuple) and columns and spec.outer is None:
        rows = spec.scaled_rows
        return f"a shard has part of the columns of {rows} rows that share a scale"
    if spec.extent is not None:
        outer = spec.extent[int(columns)]
        if outer is not None and extent % outer:
            return f"a shard of {extent} is not whole outer blocks of {outer}"
    if columns and spec.hadamard is not None and extent % spec.hadamard.size:
        return f"a shard of {extent} is not whole Hadamard groups of {spec.hadamard.size}"
    if columns and spec.random and extent % LANES:
        return f"a shard of {extent} is not whole draws of {LANES} random numbers"
    return None


def divided_tensors(shard: Quantized, *, columns: bool) -> tuple[Tensor, ...]:
    """The tensors of which each of the shards, of rows or of columns of a matrix, has its own part;
    their first axis is the one that is cut.
    """
    parts = [shard.codes]
    if shard.spec.block[int(columns)] is not None:
        parts.append(shard.scales)
    if (
        shard.amax is not None
        and shard.amax.ndim == 2
        and (shard.spec.outer is not None or not columns)
    ):
        parts.append(shard.amax)
    return tuple((part.T if columns else part).contiguous() for part in parts)


def quantised_in_runs(
    x_RC: Tensor,
    spec: QuantSpec,
    key: RandomKey,
    runs: Runs,
    amax: Tensor | None,
    *,
    columns: bool,
) -> Quantized:
    """x [R, C] quantised run by run along rows or columns, each with the random bits of its own
    place.

    Args:
        key: key of the first element but for its row or column, which is a run's first.
        runs: first row or column, and number of them, which are whole blocks.
        amax: amax of the whole tensor; None: that of x.
        columns: whether the runs are of columns.
    """
    if amax is None and amax_extent(spec) is not None:
        amax = measure_amax(x_RC, spec, key)
    make = quantizer(spec, x_RC.device.type).codes
    run_codes = []
    start = 0
    for begin, size in runs:
        if columns:
            at = key.replace(col_offset=begin)
        else:
            at = key.replace(row_offset=begin)
        if amax is None or amax.ndim < 2 or columns:
            run_amax = amax
        else:
            run_amax = amax[start : start + size]
        run_codes.append(make(x_RC.narrow(int(columns), start, size), at, run_amax))
        start += size
    return stacked(run_codes, columns=columns)


def stacked(parts: Sequence[Quantized], *, columns: bool) -> Quantized:
    """The matrix of these parts of its rows or columns, whole blocks each; scales are not in
    tiles.
    """
    template = parts[0]
    axis = int(columns)
    extent = sum(part.shape[axis] for part in parts)
    if columns:
        shape = (template.shape[0], extent)
    else:
        shape = (extent, template.shape[1])
    scaled = template.spec.block[axis] is not None
    per_row = (
        template.amax is not None
        and template.amax.ndim == 2
        and (template.spec.outer is not None or not columns)
    )

    def stack_field(name: str, divided: bool) -> Any:
        fields = [getattr(part, name) for part in parts]
        if fields[0] is None or not divided:
            return fields[0]
        return torch.cat(fields, dim=axis)

    codes = stack_field("codes", True)
    scales = stack_field("scales", scaled)
    amax = stack_field("amax", per_row)
    return Quantized(template.spec, shape, codes, scales, amax, stack_field("factor", per_row))


def joined(shard: Quantized, tensors: Sequence[Tensor], extent: int, *, columns: bool) -> Quantized:
    """The whole matrix.

    Args:
        shard: one of its shards; what `divided_tensors` does not give is the same in all.
        tensors: the `divided_tensors` of the shards, joined along their first axis.
        extent: rows or columns of the whole.

    Returns:
        With `columns` its tensors are transposed views of those that were joined
        (`Quantized.contiguous`).
    """
    (rows, cols), pieces = shard.shape, [tensor.T if columns else tensor for tensor in tensors]
    codes = pieces.pop(0)
    if shard.spec.block[int(columns)] is None:
        scales = shard.scales
    else:
        scales = pieces.pop(0)
    shape = (rows, extent) if columns else (extent, cols)
    return Quantized(shard.spec, shape, codes, scales, pieces.pop(0) if pieces else shard.amax)


def packed_bytes(spec: QuantSpec, rows: int, columns: int) -> float:
    """Bytes of a quantised matrix [rows, columns]: codes (two of a packed format per byte, else
    one), one scale per block, and those of outer blocks (a mantissa is a byte).
    """
    tall = spec.block[0] or rows
    wide = spec.block[1] or columns
    scales = math.ceil(rows / tall) * math.ceil(columns / wide) * spec.scale_format.block_bytes
    if spec.outer is None:
        outer = 0
    else:
        count = math.ceil(rows / spec.outer[0]) * math.ceil(columns / spec.outer[1])
        outer = count if spec.global_scale == "macro" else 4 * count
    return rows * columns * (0.5 if spec.format.packed else 1) + scales + outer
