"""Faults of programs that quantise, each as the operand that such a program would multiply.

They are tried in order, and the first one that gives what was multiplied, bit for bit, names the
cause.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fp4train.audits.bits import FEW, changed_elements, difference, equal
from fp4train.audits.expected import AuditedCall, OperandSource
from fp4train.audits.fault import Hypothesis, first_fitting
from fp4train.audits.rounding import rounding_of
from fp4train.quantize import Decoded, Quantized, QuantSpec, RandomKey, reference
from fp4train.quantize.quantized import apply_block_scales, finish_operand
from fp4train.quantize.random import random_bits
from fp4train.quantize.rounding import round_to_values
from fp4train.quantize.scaling import element_range, encode_factor, global_scales
from fp4train.quantize.transform import transform

_KEYS: Final[dict[str, dict[str, int]]] = {
    "of step 0": {"step": 0},
    "of the step's first tokens": {"row_offset": 0, "col_offset": 0},
    "of operand 0 of a layer without a name and of the first tokens": {
        "operand": 0,
        "layer": 0,
        "row_offset": 0,
        "col_offset": 0,
    },
}
"""Name of the random bits of a faulty program → fields of their key."""


@dataclass(frozen=True)
class Suspect:
    """An operand that differs from the reference.

    Args:
        audited: the call that multiplied it.
        gemm, tensor: its place.
        source: its source as planned.
        values: operand that was multiplied.
    """

    audited: AuditedCall
    gemm: str
    tensor: str
    source: OperandSource
    values: Decoded

    def cause(self) -> str:
        """The name of the fault that gives these values; empty: none is known."""
        return first_fitting(self._hypotheses()) or self._place()

    def _hypotheses(self) -> Iterator[Hypothesis]:
        for name, make in self._operands():
            yield name, partial(self._is_made_by, make)

    def _is_made_by(self, make: Callable[[], Decoded]) -> bool:
        return equal(make(), self.values)

    def _operands(self) -> Iterator[tuple[str, Callable[[], Decoded]]]:
        """Name of each fault, and the operand that it would multiply."""
        if self.source.spec is not None:
            yield from self._other_fields(self.source.spec)
        yield from self._other_tensors()
        if self.source.key is not None:
            yield from self._other_bits(self.source.key)
        if self.source.spec is not None:
            yield from self._other_scales(self.source.spec)

    def _changed(self, **changes: Any) -> Callable[[], Decoded]:
        return lambda: replace(self.source, **changes).decoded()

    def _other_fields(self, spec: QuantSpec) -> Iterator[tuple[str, Callable[[], Decoded]]]:
        """Each field of the spec as it is without an option."""

        def as_default(name: str, value: Any) -> Decoded:
            return replace(self.source, spec=replace(spec, **{name: value})).decoded()

        for field in fields(spec):
            planned = getattr(spec, field.name)
            if field.init and planned != field.default:
                name = f"{field.name}={field.default}, planned {planned}"
                yield name, partial(as_default, field.name, field.default)

    def _other_tensors(self) -> Iterator[tuple[str, Callable[[], Decoded]]]:
        tensor = self.source.tensor
        yield "quantised from zeros", self._changed(tensor=torch.zeros_like(tensor))
        if tensor.dtype != torch.bfloat16:
            rounded = tensor.bfloat16().to(tensor.dtype)
            yield "rounded to BF16 before it is quantised", self._changed(tensor=rounded)
        if self._earlier is not None:
            word = "weight" if self.tensor == "w" else self.tensor
            yield f"{word} of the step before", self._changed(tensor=self._earlier.tensor)
        for parts in (2, 4, 8):
            end = len(tensor) - len(tensor) // parts
            repeated = torch.cat([tensor[:end], tensor[:1].expand(len(tensor) - end, -1)])
            name = f"the last 1/{parts} of the rows repeat the first row"
            yield name, self._changed(tensor=repeated)

    @property
    def _earlier(self) -> OperandSource | None:
        """The source of the operand in the step before; None: it was not kept."""
        earlier = self.audited.earlier
        if earlier is None:
            return None
        return earlier.source(self.gemm, self.tensor)

    def _other_bits(self, key: RandomKey) -> Iterator[tuple[str, Callable[[], Decoded]]]:
        for name, changes in _KEYS.items():
            yield f"random bits {name}", self._changed(key=key.replace(**changes))

    def _other_scales(self, spec: QuantSpec) -> Iterator[tuple[str, Callable[[], Decoded]]]:
        source = self.source
        if spec.global_scale is not None or spec.has_outer_scale:
            for name in ("x", "w", "dy"):
                tensor = self.audited.tensor(name)
                if tensor is not None and name != self.tensor:
                    yield f"amax of {name}", self._changed(amax=tensor.abs().max().float())
            if self._earlier is not None:
                yield "amax of the step before", self._changed(amax=_amax(self._earlier))
            if source.amax is not None or source.inner_amax is not None:
                yield "its own amax alone", self._changed(amax=None, inner_amax=None)
        yield "inverted global scale", partial(_inverted, source)
        if spec.scale_format.is_byte:
            yield "block scales cut off, not rounded", partial(_cut_off, source)
            yield "zero block scales taken for 1", partial(_one_for_zero, source)
        if spec.block[0] != spec.block[1]:
            yield "blocked along the other axis", partial(_along_other_axis, source)

    def _place(self) -> str:
        """What the place of the differences says, where no fault gives the bits."""
        source = self.source
        values = self.values
        expected = source.decoded()
        if values.values.shape != expected.values.shape:
            return f"the operand has shape {list(values.values.shape)}"
        if not bool(values.values.isfinite().all()):
            return "NaN or infinity"
        apart = difference(values.values, expected.values)
        same_scale = equal(Decoded(values.values, expected.scale), values)
        if apart is not None and same_scale and apart.count <= FEW:
            changed = changed_elements(expected.values, values.values, apart.where)
            return f"single values changed in memory ({changed})"
        if (row := _first_strange_row(values, source)) is not None:
            return f"all rows from {row} on are of another tensor"
        if source.spec is not None and source.spec.rounding == "stochastic" and same_scale:
            rounding = rounding_of(values, source.tensor, source.spec, source.key, source.amax)
            if rounding.unbiased:
                return "rounded without bias, by random bits that are not those of its position"
        return ""


# -- scales ----------------------------------------------------------------------------------------


def _amax(source: OperandSource) -> Tensor:
    """The amax that scales an operand: of its tensor after a transform."""
    codes = source.quantized()
    if codes is not None and codes.amax is not None:
        return codes.amax
    return source.tensor.abs().max().float()


def _inverted(source: OperandSource) -> Decoded:
    decoded = source.decoded()
    assert decoded.scale is not None
    return Decoded(decoded.values, 1 / decoded.scale)


def _along_other_axis(source: OperandSource) -> Decoded:
    assert source.spec is not None
    spec = replace(source.spec, hadamard=None)
    turned = replace(source, tensor=source.tensor.T.contiguous(), spec=spec).decoded()
    return Decoded(turned.values.T.contiguous(), turned.scale)


def _quantized(source: OperandSource) -> Quantized:
    codes = source.quantized()
    assert codes is not None
    return codes


def _one_for_zero(source: OperandSource) -> Decoded:
    codes = _quantized(source)
    table = codes.spec.scale_format.decode(torch.arange(256, dtype=torch.uint8))
    one_byte = int((table == 1).nonzero()[0])
    scales = torch.where(codes.scales == 0, one_byte, codes.scales).to(torch.uint8)
    return codes._replace(scales=scales).decoded()


def _cut_off(source: OperandSource) -> Decoded:
    """The elements rounded under the largest block scales that are not above the exact ones."""
    codes = _quantized(source)
    spec = codes.spec
    tensor = source.tensor
    if spec.hadamard is not None:
        tensor = transform(tensor, spec.hadamard, source.key)
    blocks = reference.to_blocks(tensor, spec).float()
    amax_b = blocks.abs().amax(dim=(1, 3))
    exact = amax_b / spec.format.max
    factor = codes.global_decode()
    if factor is not None:
        exact = amax_b * ((1 / factor) * torch.tensor(spec.format.max).reciprocal())
    above = spec.scale_format.decode(codes.scales) > exact.clamp(max=spec.scale_format.max)
    lower = (codes.scales.int() - 1).clamp(min=0).to(torch.uint8)
    scale = spec.scale_format.decode(torch.where(above, lower, codes.scales))
    total = scale if factor is None else scale * factor
    t = (blocks * encode_factor(total)[:, None, :, None]).add_(0.0)
    rows = t.shape[0] * t.shape[1]
    columns = t.shape[2] * t.shape[3]
    bits = None
    if spec.rounding == "stochastic" and source.key is not None:
        bits = random_bits(source.key, rows, columns, t.device).reshape(t.shape)
    values = round_to_values(t, spec.format, bits).reshape(rows, columns)[: codes.shape[0]]
    return finish_operand(apply_block_scales(values, scale, spec), factor, spec, codes.shape)


# -- where the difference lies ---------------------------------------------------------------------


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
    if row and len(rows) == len(values.values) - row:
        return row
    return None


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
