"""Faults of programs that quantise, each as the operand that such a program would multiply.

A difference is explained where one of them gives the operand that was multiplied, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from fp4train.audit.bits import difference, equal
from fp4train.audit.call import ObservedCall
from fp4train.audit.expected import Expectation, OperandSource, key_of, source_of
from fp4train.audit.rounding import rounding_of
from fp4train.backends import describe
from fp4train.formats import decode
from fp4train.quantize import (
    Decoded,
    Hadamard,
    Quantized,
    QuantSpec,
    RandomKey,
    has_tensor_amax,
    reference,
)
from fp4train.quantize.quantized import apply_block_scales, finish_operand
from fp4train.quantize.random import random_bits
from fp4train.quantize.rounding import round_to_values
from fp4train.quantize.scaling import element_range, encode_factor, global_scales
from fp4train.quantize.transform import transform

Hypothesis = tuple[str, Callable[[], Decoded]]

_BLOCKS = ((1, 16), (16, 16), (1, 32), (32, 32), (1, None), (None, None))
_FEW = 4
"""Most elements that count as single ones."""
SECONDS: Final = 20.0
"""Time that one difference may take to be explained."""


@dataclass(frozen=True)
class Suspect:
    """An operand that differs from the reference.

    Args:
        source: the source of the operand as planned.
        call: the call.
        expected: its plan and position.
        gemm, tensor: its place.
        previous: call of the same layer in the step before; None: it was not kept.
    """

    source: OperandSource
    call: ObservedCall
    expected: Expectation
    gemm: str
    tensor: str
    previous: ObservedCall | None = None


def explain(values: Decoded, suspect: Suspect) -> tuple[str, ...]:
    """The names of the faults that give these values, of those that `SECONDS` allow to try."""
    ends = time.monotonic() + SECONDS
    kinds = [_other_plans, _other_tensors]
    if suspect.source.spec is not None:
        kinds += [_other_bits, _other_specs, _other_scales]
    names = []
    for kind in kinds:
        # a spec may not allow what a hypothesis changes: the next one is tried
        with suppress(Exception):
            for name, make in kind(suspect):
                if time.monotonic() > ends:
                    break
                with suppress(Exception):
                    if equal(make(), values):
                        names.append(name)
    if not names:
        names += _structural(values, suspect)
    return tuple(dict.fromkeys(names))


# -- another plan, another tensor ------------------------------------------------------------------


def _other_plans(suspect: Suspect) -> Iterator[Hypothesis]:
    source = suspect.source
    call = suspect.call
    if source.spec is not None:
        yield "not quantised", lambda: Decoded(source.tensor.to(source.dtype), None)
    operand = call.plan.sources[suspect.gemm, suspect.tensor]
    specs: dict[QuantSpec, str] = {}
    if operand.spec is not None:
        specs[operand.spec] = (
            "quantised by the plan that the executor ran, which is not this step's"
        )
    for (gemm, tensor), other in suspect.expected.plan.sources.items():
        if other.spec is not None:
            specs.setdefault(other.spec, f"quantised by the spec of {tensor} in {gemm}")
    if source.spec is None:
        kept = "where the plan keeps high precision"
        for block in _BLOCKS[:2]:
            specs.setdefault(QuantSpec(block=block), f"quantised in NVFP4 {kept}")
        mx = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None)
        specs.setdefault(mx, f"quantised in MXFP8 {kept}")
    specs.pop(source.spec, None)  # type: ignore[arg-type]
    for spec, name in specs.items():
        words = " ".join(describe(spec))
        key = source.key or key_of(call, operand, suspect.expected.position or call.position)
        changed = replace(source, spec=spec, key=key if spec.random else None)
        yield f"{name} ({words})", changed.decoded


def _other_tensors(suspect: Suspect) -> Iterator[Hypothesis]:
    source = suspect.source
    call = suspect.call
    previous = suspect.previous
    tensor = source.tensor

    def of(other: Tensor) -> Callable[[], Decoded]:
        return replace(source, tensor=other).decoded

    def zeros() -> Decoded:
        decoded = source.decoded()
        return Decoded(torch.zeros_like(decoded.values), decoded.scale)

    yield "all values are zero", zeros
    yield "quantised from zeros", of(torch.zeros_like(tensor))
    if tensor.dtype != torch.bfloat16:
        narrow = tensor.bfloat16().to(tensor.dtype)
        yield "rounded to BF16 before it is quantised", of(narrow)
        if source.spec is not None and has_tensor_amax(source.spec) and source.amax is None:
            alike = replace(source, tensor=narrow, amax=tensor.abs().max().float())
            yield "rounded to BF16 before it is quantised, and not for its amax", alike.decoded
    yield "negated", of(-tensor)
    yield "multiplied by 2", of(tensor * 2)
    if suspect.tensor == "w" and call.w is not None and suspect.expected.weight is not None:
        passed = replace(suspect, expected=replace(suspect.expected, weight=None))
        if (other := _source(passed)) is not None:
            yield "made of another weight than the optimizer holds", other.decoded
    if previous is not None:
        earlier = replace(suspect, call=previous, expected=_unplaced(suspect.expected))
        if (other := _source(earlier)) is not None:
            name = "weight" if suspect.tensor == "w" else suspect.tensor
            yield f"{name} of the step before", of(other.tensor)
    for parts in (2, 4, 8):
        padding = len(tensor) // parts
        end = len(tensor) - padding
        repeated = torch.cat([tensor[:end], tensor[:1].expand(padding, -1)])
        yield f"the last 1/{parts} of the rows repeat the first row", of(repeated)
        yield f"the last 1/{parts} of the rows are zero", of(_zero_from(tensor, end))


def _zero_from(tensor: Tensor, row: int) -> Tensor:
    padded = tensor.clone()
    padded[row:] = 0
    return padded


def _unplaced(expected: Expectation) -> Expectation:
    return replace(expected, position=None, weight=None)


def _source(suspect: Suspect) -> OperandSource | None:
    return source_of(suspect.call, suspect.expected, suspect.gemm, suspect.tensor)


# -- random bits -----------------------------------------------------------------------------------


def _other_bits(suspect: Suspect) -> Iterator[Hypothesis]:
    source = suspect.source
    key = source.key
    spec = source.spec
    assert spec is not None
    operand = suspect.expected.plan.sources[suspect.gemm, suspect.tensor]
    if not spec.random:
        key = key_of(suspect.call, operand, suspect.expected.position or suspect.call.position)
        stochastic = replace(spec, rounding="stochastic", four_over_six=None)
        if key is not None:
            changed = replace(source, spec=stochastic, key=key)
            yield "rounded stochastically, planned to nearest", changed.decoded
        return
    nearest = replace(source, spec=replace(spec, rounding="nearest"))
    yield "rounded to nearest, planned stochastically", nearest.decoded
    if key is None:
        return
    for name, other in _keys(key, suspect):
        yield f"random bits {name}", replace(source, key=other).decoded


def _keys(key: RandomKey, suspect: Suspect) -> Iterator[tuple[str, RandomKey]]:
    operand = suspect.expected.plan.sources[suspect.gemm, suspect.tensor]
    run = key_of(suspect.call, operand, suspect.call.position)
    if run is not None and run != key:
        yield f"of the position that the call was given (step {run.step})", run
    for step in dict.fromkeys((0, max(key.step - 1, 0), key.step + 1)):
        yield f"of step {step}", key.replace(step=step)
    position = suspect.expected.position or suspect.call.position
    first_features = replace(suspect.call, first_out=0, first_feature=0)
    if (alike := key_of(first_features, operand, position)) not in (None, key):
        yield "of the layer's first features", alike
    yield "of the step's first tokens", key.replace(row_offset=0, col_offset=0)
    start = key.replace(step=0, row_offset=0, col_offset=0)
    yield "of the first tokens of step 0", start
    yield "of seed 0", key.replace(seed=0)
    yield "of a layer without a name", key.replace(layer=0)
    for number in range(8):
        yield f"of operand {number}", key.replace(operand=number)
        alike = key.replace(operand=number, row_offset=0, col_offset=0, layer=0)
        yield f"of operand {number} of a layer without a name and of the first tokens", alike


# -- spec and scales -------------------------------------------------------------------------------


def _other_specs(suspect: Suspect) -> Iterator[Hypothesis]:
    source = suspect.source
    spec = source.spec
    assert spec is not None

    def by(**changes: Any) -> Callable[[], Decoded]:
        return lambda: replace(source, spec=replace(spec, **changes)).decoded()

    if spec.hadamard is not None:
        yield "no Hadamard transform on this operand", by(hadamard=None)
        if isinstance(spec.hadamard, Hadamard):
            unsigned = replace(spec.hadamard, signs="none")
            yield "a Hadamard transform without signs", by(hadamard=unsigned)
    else:
        yield "a Hadamard transform on this operand", by(hadamard=Hadamard())
    for block in _BLOCKS:
        if block != spec.block:
            yield f"blocks of {block[0]}×{block[1]}", by(block=block)
    if spec.global_scale is not None:
        for formula in ("te2.13", "te2.14"):
            yield f"block scales by the formula of {formula}", by(formula=formula)
        for bound in (256.0, 448.0):
            yield f"a global scale for the bound {bound:g}", by(global_bound=bound)
        for choice in (None, "mae", "mse"):
            yield f"four_over_six={choice}", by(four_over_six=choice)
    for rounding in spec.scale_format.roundings:
        yield f"scales rounded by {rounding}", by(scale_rounding=rounding)
    if spec.guard != 1.0:
        yield "no guard against clipping", by(guard=1.0)
    if spec.requantises is not None:
        yield "not rounded along the other axis before", by(requantises=None)
    if spec.delayed is not None:
        yield "its own amax, planned that of its history", by(delayed=None)
    if spec.block[0] != spec.block[1]:
        yield "blocked along the other axis", lambda: _along_other_axis(source)


def _along_other_axis(source: OperandSource) -> Decoded:
    assert source.spec is not None
    spec = replace(source.spec, hadamard=None)
    turned = replace(source, tensor=source.tensor.T.contiguous(), spec=spec).decoded()
    return Decoded(turned.values.T.contiguous(), turned.scale)


def _other_scales(suspect: Suspect) -> Iterator[Hypothesis]:
    source = suspect.source
    spec = source.spec
    assert spec is not None

    def largest(tensor: Tensor) -> Tensor:
        return tensor.abs().max().float()

    def with_amax(amax: Tensor) -> Callable[[], Decoded]:
        return replace(source, amax=amax).decoded

    if spec.global_scale is not None or spec.has_outer_scale:
        for (gemm, tensor), _ in suspect.expected.plan.sources.items():
            other = source_of(suspect.call, suspect.expected, gemm, tensor)
            if other is not None and tensor != suspect.tensor:
                yield f"amax of {tensor}", with_amax(largest(other.tensor))
        if suspect.previous is not None:
            earlier = replace(suspect, call=suspect.previous, expected=_unplaced(suspect.expected))
            if (other := _source(earlier)) is not None:
                amax = _transformed_amax(other)
                yield "amax of the step before", with_amax(amax)
        if any(amax is not None for amax in (source.amax, source.inner_amax)):
            yield "its own amax alone", replace(source, amax=None, inner_amax=None).decoded
        yield "amax of the rows before the transform", with_amax(largest(source.tensor))
        for rows in (2, 4):
            part = source.tensor[: max(1, len(source.tensor) // rows)]
            yield f"amax of the first 1/{rows} of the rows", with_amax(largest(part))

    def scaled(change: Callable[[Tensor], Tensor | None]) -> Callable[[], Decoded]:
        def make() -> Decoded:
            decoded = source.decoded()
            assert decoded.scale is not None
            return Decoded(decoded.values, change(decoded.scale))

        return make

    if source.decoded().scale is not None:
        yield "inverted global scale", scaled(lambda scale: 1 / scale)
        yield "global scale left out", scaled(lambda scale: None)
        yield "global scale applied twice", scaled(lambda scale: scale * scale)
    if spec.scale_format.is_byte:
        yield "block scales cut off, not rounded", lambda: _with_scales(source, _cut_off)
        yield "zero block scales taken for 1", lambda: _with_scales(source, _one_for_zero)
        yield "block scales left out", lambda: _with_scales(source, None)


def _transformed_amax(source: OperandSource) -> Tensor:
    codes = source.quantized()
    if codes is not None and codes.amax is not None:
        return codes.amax
    return source.tensor.abs().max().float()


Rescale = Callable[[OperandSource, Quantized], Tensor]


def _with_scales(source: OperandSource, change: Rescale | None) -> Decoded:
    """The operand under other block scales: its codes are rounded under them anew."""
    codes = source.quantized()
    spec = source.spec
    assert codes is not None and spec is not None
    if change is None:
        values = decode(codes.element_codes, spec.format)
        return finish_operand(values, codes.global_decode(), spec, codes.shape)
    if change is _one_for_zero:
        return codes._replace(scales=change(source, codes)).decoded()
    return _rounded_under(source, codes, change(source, codes))


def _one_for_zero(source: OperandSource, codes: Quantized) -> Tensor:
    spec = codes.spec
    table = spec.scale_format.decode(torch.arange(256, dtype=torch.uint8))
    one_byte = int((table == 1).nonzero()[0])
    return torch.where(codes.scales == 0, one_byte, codes.scales).to(torch.uint8)


def _cut_off(source: OperandSource, codes: Quantized) -> Tensor:
    """The largest scales that are not above the exact ones."""
    spec = codes.spec
    blocks = reference.to_blocks(_transformed(source), spec)
    amax_b = blocks.abs().amax(dim=(1, 3)).float()
    exact = amax_b / spec.format.max
    decode_factor = codes.global_decode()
    if decode_factor is not None:
        exact = amax_b * ((1 / decode_factor) * torch.tensor(spec.format.max).reciprocal())
    stored = codes.scales
    above = spec.scale_format.decode(stored) > exact.clamp(max=spec.scale_format.max)
    lower = (stored.int() - 1).clamp(min=0).to(torch.uint8)
    return torch.where(above, lower, stored)


def _transformed(source: OperandSource) -> Tensor:
    assert source.spec is not None
    if source.spec.hadamard is None:
        return source.tensor
    return transform(source.tensor, source.spec.hadamard, source.key)


def _rounded_under(source: OperandSource, codes: Quantized, scales: Tensor) -> Decoded:
    spec = codes.spec
    blocks = reference.to_blocks(_transformed(source), spec).float()
    scale = spec.scale_format.decode(scales)
    decode_factor = codes.global_decode()
    total = scale if decode_factor is None else scale * decode_factor
    t = (blocks * encode_factor(total)[:, None, :, None]).add_(0.0)
    rows = t.shape[0] * t.shape[1]
    columns = t.shape[2] * t.shape[3]
    bits = None
    if spec.rounding == "stochastic" and source.key is not None:
        bits = random_bits(source.key, rows, columns, t.device).reshape(t.shape)
    values = round_to_values(t, spec.format, bits)
    values = values.reshape(rows, columns)[: codes.shape[0]]
    return finish_operand(apply_block_scales(values, scale, spec), decode_factor, spec, codes.shape)


# -- where the difference lies ---------------------------------------------------------------------


def _structural(values: Decoded, suspect: Suspect) -> list[str]:
    """What the place of the differences says, where no fault of the list gives the bits."""
    source = suspect.source
    expected = source.decoded()
    if values.values.shape != expected.values.shape:
        return [f"the operand has shape {list(values.values.shape)}"]
    apart = difference(values.values, expected.values)
    same_scale = equal(Decoded(values.values, expected.scale), values)
    if apart is None:
        return ["another global scale"]
    if not bool(values.values.isfinite().all()):
        return ["NaN or infinity"]
    if same_scale and apart.count <= _FEW:
        changed = ", ".join(
            f"{_number(expected.values[at])} → {_number(values.values[at])}"
            for at in map(tuple, apart.where.nonzero().tolist())
        )
        return [f"single values changed in memory ({changed})"]
    if (row := _first_strange_row(values, source)) is not None:
        return [f"all rows from {row} on are of another tensor"]
    if source.spec is not None and source.spec.rounding == "stochastic" and same_scale:
        rounding = rounding_of(values, source.tensor, source.spec, source.key, source.amax)
        if rounding.unbiased:
            return ["rounded without bias, by random bits that are not those of its position"]
        if rounding.neighbours:
            return [f"rounded with a bias of {rounding.bias:.0f} standard deviations"]
    return []


def _first_strange_row(values: Decoded, source: OperandSource) -> int | None:
    """The row from which on all rows differ, under the scale that the operand has, while those
    before are equal; None: there is none.
    """
    expected = source.decoded()
    if not equal(Decoded(values.values, expected.scale), values):
        amax = _amax_of_scale(values.scale, source.spec)
        if amax is None:
            return None
        expected = replace(source, amax=amax).decoded()
    apart = difference(values.values, expected.values)
    if apart is None:
        return None
    rows = apart.where.any(dim=1).nonzero().flatten()
    row = int(rows[0])
    if not row or len(rows) != len(values.values) - row:
        return None
    return row


def _amax_of_scale(scale: Tensor | None, spec: QuantSpec | None) -> Tensor | None:
    """An amax whose global scale decodes by `scale`, 0-d; None: none does."""
    if scale is None or scale.dim() or spec is None or spec.global_scale is None:
        return None
    amax = scale * (spec.global_bound * element_range(spec))
    for direction in (torch.inf, -torch.inf):
        candidate = amax
        for _ in range(8):
            if bool(global_scales(candidate, spec)[1] == scale):
                return candidate
            candidate = torch.nextafter(candidate, torch.tensor(direction))
    return None


def _number(value: Tensor) -> str:
    return f"{float(value):.4g}"
