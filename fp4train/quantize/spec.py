"""QuantSpec: how ONE operand is quantised. Specs select all behaviour; no later function takes a
flag.

Scheme                     element  block       scale  global_scale
NVFP4 1x16 / 16x16         e2m1     (1, 16)     e4m3   tensor (or row)
NVFP4 double-block         e2m1     (1, 16)     e4m3   block       (or (128, 128), a tile)
MXFP8 / MXFP6 / MXFP4      any      (1, 32)     e8m0   None        (or macro)
FP8 current, per row       e4m3     (None,None) fp32   None       ((1, None) per row)
FP8 blocks                 e4m3     (1, 128)    fp32   None       (or pow2; (128, 128) for weights)
FP4 without a global scale e2m1     (1, 16)     ue5m3  None        (or tensor, row, block)
CTA-local NVFP4            e2m1     (1, 16)     e4m3   (256, None) (in chunks of (128, 128))

Blocks run along the last axis of a 2-D tensor [R, C]; the column-wise form is the transposed tensor
quantised row-wise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from fp4train.formats import (
    E2M1,
    SCALE_FORMATS,
    AdaptiveScale,
    ElementFormat,
    ScaleFormat,
    get_format,
    get_scale_format,
)
from fp4train.formats.scale import E4M3_SCALE
from fp4train.quantize.outer import (
    Extent,
    GlobalScale,
    check_extent,
    extent_of,
    read_global_scale,
)
from fp4train.quantize.rotation import Transform, check_transform
from fp4train.quantize.rounding import ROUNDINGS, Rounding
from fp4train.quantize.transform import Hadamard
from fp4train.text import check_choice

FORMULAS = ("te2.14", "te2.13", "encode_centric")
ERROR_METRICS = (None, "mae", "mse")
DELAYED_ALGORITHMS = ("max", "most_recent")
_LATER = ("held", "chunks")
"""Fields that a spec's text has only where they are set."""
LONGEST_HISTORY = 1 << 20
"""Steps; each operand of each layer keeps 4 bytes per step."""


@dataclass(frozen=True, kw_only=True)
class Delayed:
    """FP8 with the amax of earlier steps (TE's DelayedScaling): scale = (max / amax) / 2^margin.

    `history`: number of steps in the history; `algorithm`: its maximum, or its most recent entry.
    """

    history: int = 1024
    algorithm: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.history, int) or not 1 <= self.history <= LONGEST_HISTORY:
            raise ValueError(
                f"history={self.history!r}: delayed scaling allows integers from 1 to "
                f"{LONGEST_HISTORY:,}"
            )
        check_choice("algorithm", self.algorithm, DELAYED_ALGORITHMS)
        if not isinstance(self.margin, int) or not -64 <= self.margin <= 64:
            raise ValueError(
                f"margin={self.margin!r}: delayed scaling allows integers from -64 to 64"
            )


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """How one operand is quantised.

    element: the name of an element format (`fp4train formats` lists them and those of plugins). The
        spec holds the format itself, so that specs of formats that share a name differ.
    block: (rows, cols) that share a scale; None is the whole extent: (1, None) per row, (None,
        None) per tensor.
    scale: e4m3 and if4 (need a global scale), hif4, e8m0, ue5m3 (largest 114688) or ue5m3_ieee
        (largest 61440), fp32, pow2 (a float32 power of two), or one of a plugin.
    scale_rounding: how the E8M0 exponent is rounded; None for other scales. rceil (the default)
        never clips.
    global_scale: the second, float32 level above block scales of E4M3 or UE5M3, for the tensor,
        each row, "block" (128 columns of a row) or a tile (rows, columns); "macro": the mantissa
        above E8M0 block scales. See `outer.py`.
    global_bound: the largest block scale in use, any up to the largest of its format. 256 leaves
        room for four-over-six.
    formula: te2.14 amax_b*(S_enc*(1/6)) or te2.13 (amax_b/6)*S_enc, with the block scale then
        rounded to E4M3; encode_centric: the factor of the elements, m = 6/(amax_b*S_enc), is
        rounded, then its inverse, the block scale.
    rounding: nearest; nearest_away (ties away from zero); stochastic, or stochastic_1 to
        stochastic_15 with so many random bits; stochastic_8_midpoint; or eden: elements to nearest
        after a Hadamard transform with signs="step", with corrected block scales rounded
        stochastically (see `rounding.py`); or one of a plugin.
        Those that draw random bits need a RandomKey when quantising.
    hadamard: transform along the blocked axis before the amax; another orthogonal one (a Rotation,
        or a Transform of a plugin) can replace it.
    four_over_six: scale each block to 6 and to 4 and keep the smaller error, mae or mse (arXiv
        2512.02010). Its block scale is (amax_b / 6) * S_enc under either formula, as in TE.
    guard: the part of the element range that is used, as a share of the largest value. E4M3 rounds
        a normal block scale down by at most 16/17, so 16/17 keeps |t| <= max and makes stochastic
        rounding unbiased (Quartet II, arXiv 2601.22813); scales below 2^-6 can still clip. 1 is TE.
        Under E8M0 scales that are rounded down or to even, which say nothing of the share, scaled
        elements are multiplied by it and the product by its inverse: 3/4 keeps |t| <= max of E2M1
        (arXiv 2502.20586).
        With rounding="eden", which corrects what clips, up to 17/16.
    requantises: x is first rounded along its other axis: x.T is quantised by this spec and its
        values are taken in BF16, so that backward uses the rounded tensor that the forward pass
        multiplied. Where a phase has fprop in high precision, x is rounded in the same way.
    delayed: take the amax of a tensor-scaled FP8 operand from its history.
    held: steps for which the amax of the tensor is held after it was measured (arXiv 2609.02846);
        None: it is measured in each step. Larger values saturate.
    chunks: (rows, columns) of tiles: elements and block scales are those under one float32 scale
        per tile; the block scales, in units of the scale of `global_scale`, are rounded again (CTA-
        local NVFP4, arXiv 2610.00053).
    """

    element: str = "e2m1"
    block: tuple[int | None, int | None] = (1, 16)
    scale: str = "e4m3"
    scale_rounding: str | None = None
    global_scale: GlobalScale = "tensor"
    global_bound: float = 448.0
    formula: str = "te2.14"
    rounding: str = "nearest"
    hadamard: Hadamard | Transform | None = None
    four_over_six: str | None = None
    guard: float = 1.0
    delayed: Delayed | None = None
    requantises: QuantSpec | None = None
    held: int | None = None
    chunks: tuple[int, int] | None = None
    format: ElementFormat = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", get_format(self.element))
        object.__setattr__(self, "block", tuple(self.block))
        self._check_block()
        check_choice("scale", self.scale, SCALE_FORMATS.names)
        check_choice("formula", self.formula, FORMULAS)
        check_choice("rounding", self.rounding, ROUNDINGS.names)
        check_choice("four_over_six", self.four_over_six, ERROR_METRICS)
        object.__setattr__(self, "global_scale", read_global_scale(self.global_scale))
        if roundings := self.scale_format.roundings:
            if self.scale_rounding is None:
                object.__setattr__(self, "scale_rounding", roundings[0])
            check_choice("scale_rounding", self.scale_rounding, roundings)
        elif self.scale_rounding is not None:
            having = _scales(lambda fmt: bool(fmt.roundings))
            raise ValueError(
                f"scale_rounding={self.scale_rounding!r}: only {having} has one; use None"
            )
        self._check_scale()
        self._check_options()
        self._check_eden()
        self._check_held()
        self._check_chunks()
        if isinstance(self.hadamard, Transform):
            check_transform(self.hadamard)

    def _check_block(self) -> None:
        if len(self.block) != 2:
            raise ValueError(f"block={self.block!r}: allowed is a pair (rows, cols)")
        for extent in self.block:
            if extent is not None and (
                not isinstance(extent, int) or isinstance(extent, bool) or extent < 1
            ):
                raise ValueError(
                    f"block={self.block!r}: rows and cols must be integers >= 1, or None for "
                    "the whole extent"
                )
        rows, cols = self.block
        if rows is None and cols is not None:
            raise ValueError(
                f"block={self.block!r}: blocks run along the last axis; (None, None) is the "
                "whole tensor, "
                "for one scale per column, transpose the tensor and use block=(1, None)"
            )
        if cols is None and rows not in (1, None):
            raise ValueError(
                f"block={self.block!r}: whole rows are (1, None), the whole tensor is (None, None)"
            )
        if cols is not None and self.format.packed and cols % 2:
            raise ValueError(
                f"block={self.block!r}: {self.element} packs two codes per byte; cols must be even"
            )

    def _check_scale(self) -> None:
        fmt = self.scale_format
        if self.global_scale is None and fmt.needs_global:
            binades = round(math.log2(fmt.max / fmt.smallest))
            levels = "'tensor' or 'row'"
            if not isinstance(fmt, AdaptiveScale):
                levels = "'tensor', 'row', 'block' or a tile, (rows, columns)"
            raise ValueError(
                f"global_scale=None: scale={fmt.name!r} covers {binades} binades only and "
                f"needs {levels}"
            )
        if self.global_scale == "macro":
            if not fmt.roundings or self.guard != 1.0:
                having = _scales(lambda fmt: bool(fmt.roundings))
                raise ValueError(
                    f"global_scale='macro': scale={fmt.name!r} with guard={self.guard!r}: a "
                    f"mantissa lies above powers of two, {having}, with guard=1.0"
                )
            if self.global_bound != 448.0:
                raise ValueError(
                    f"global_bound={self.global_bound!r}: the mantissas of global_scale='macro' "
                    "bound no block scales; leave 448"
                )
        elif fmt.takes_global and self.global_scale is not None:
            self._check_bound(fmt)
        elif self.global_scale is not None:
            raise ValueError(
                f"global_scale={self.global_scale!r}: scale={self.scale!r} spans the whole "
                "range; use None"
            )
        elif self.global_bound != 448.0:
            having = _scales(lambda fmt: fmt.takes_global)
            raise ValueError(
                f"global_bound={self.global_bound!r}: only {having} under a global_scale has one; "
                "leave 448"
            )
        if fmt.takes_global and None in self.block:
            raise ValueError(
                f"block={self.block!r}: scale={fmt.name!r} is a block scale; use integers, or "
                "scale='fp32'"
            )
        check_extent(self.global_scale, self.block)

    def _check_bound(self, fmt: ScaleFormat) -> None:
        if not isinstance(self.global_bound, int | float) or not 1 <= self.global_bound <= fmt.max:
            raise ValueError(
                f"global_bound={self.global_bound!r}: the largest block scale of "
                f"scale={fmt.name!r} in use; allowed are numbers from 1 to {fmt.max:g}"
            )

    def _check_options(self) -> None:
        if (reason := self.scale_format.why_not(self)) is not None:
            raise ValueError(f"scale={self.scale!r}: {reason}")
        if self.four_over_six is not None:
            if not self.scale_format.needs_global or self.format != E2M1:
                having = _scales(
                    lambda fmt: fmt.needs_global and not isinstance(fmt, AdaptiveScale)
                )
                raise ValueError(
                    f"four_over_six={self.four_over_six!r}: needs element='e2m1' and {having}"
                )
            if self.rounding != "nearest":
                raise ValueError(
                    f"four_over_six={self.four_over_six!r}: choosing by error biases "
                    f"rounding={self.rounding!r}; "
                    "use 'nearest'"
                )
            if self.global_scale not in ("tensor", "row"):
                raise ValueError(
                    "four_over_six: its error is that under one scale per tensor or row, not "
                    f"per {self.global_scale}"
                )
            if self.guard != 1.0:
                raise ValueError(f"guard={self.guard!r}: four_over_six sets its own range; use 1.0")
        largest = 17 / 16 if self.rounding == "eden" else 1.0
        if not isinstance(self.guard, int | float) or not 0.5 < self.guard <= largest:
            raise ValueError(f"guard={self.guard!r}: allowed are numbers above 0.5 up to {largest}")
        if self.guard != 1.0 and not self._can_clip:
            if self.scale_format.roundings:
                raise ValueError(
                    f"guard={self.guard!r}: scale_rounding={self.scale_rounding!r} never clips; "
                    "use 1.0, or scale_rounding='floor' or 'even'"
                )
            having = _scales(lambda fmt: fmt.takes_global)
            raise ValueError(
                f"guard={self.guard!r}: only {having} rounds scales down far "
                "enough to need it; use 1.0"
            )
        if self.delayed is not None and (self.block != (None, None) or self.scale_format.is_byte):
            having = _scales(lambda fmt: not fmt.is_byte)
            raise ValueError(f"delayed={self.delayed!r}: needs block=(None, None) and {having}")
        if self.delayed is not None and (self.hadamard is not None or self.requantises is not None):
            raise ValueError(
                f"delayed={self.delayed!r}: the amaxes of a history are those of the tensor as it "
                "is, not of what a transform or a rounding before gives; use delayed=None, or "
                "hadamard=None and requantises=None"
            )

    def _check_eden(self) -> None:
        transform = self.hadamard
        if self.rounding == "eden":
            taken = self.format == E2M1 and self.scale_format == E4M3_SCALE
            if not taken or self.block[0] != 1 or self.block[1] is None:
                raise ValueError(
                    "rounding='eden': needs element='e2m1', scale='e4m3' and block=(1, cols)"
                )
            if self.global_scale not in ("tensor", "row"):
                raise ValueError(
                    "rounding='eden': its correction is for one scale per tensor or row, not "
                    f"per {self.global_scale}"
                )
            if not isinstance(transform, Hadamard) or transform.size % self.block[1]:
                raise ValueError(
                    f"rounding='eden': hadamard={transform} must be a Hadamard whose size is "
                    "a multiple of the block"
                )
            if transform.signs != "step":
                raise ValueError(
                    f"rounding='eden': hadamard.signs={transform.signs!r}: its error averages to "
                    "zero over transforms, and these signs are the same in every step; use 'step'"
                )
        if isinstance(transform, Hadamard) and transform.signs == "step" and not self.random:
            raise ValueError(
                "hadamard.signs='step': rounding='nearest' has no RandomKey to draw signs "
                "from; use signs='random'"
            )
        if self.requantises is not None:
            if not isinstance(self.requantises, QuantSpec):
                raise ValueError(
                    f"requantises={self.requantises!r}: allowed is a QuantSpec, or None"
                )
            inner = self.requantises
            if inner.random or inner.earlier_amax or inner.requantises:
                raise ValueError(
                    "requantises: allowed is rounding='nearest' without delayed scaling or a held "
                    "amax, once"
                )

    def _check_held(self) -> None:
        if self.held is None:
            return
        if not isinstance(self.held, int) or isinstance(self.held, bool) or self.held < 1:
            raise ValueError(f"held={self.held!r}: allowed are integers ≥ 1 (steps), or None")
        if self.delayed is not None:
            raise ValueError(
                f"held={self.held!r} with delayed={self.delayed!r}: the amax is held, or that of a "
                "history; use delayed=None or held=None"
            )
        outer = self.block == (None, None) and self.has_outer_scale
        if self.global_scale != "tensor" and not outer:
            raise ValueError(
                f"held={self.held!r}: needs one amax per tensor, global_scale='tensor' or "
                "block=(None, None) with a float32 scale; use None"
            )
        if self.hadamard is not None or self.requantises is not None:
            raise ValueError(
                f"held={self.held!r}: the amax that is held is that of the tensor as it is, not of "
                "what a transform or a rounding before gives; use held=None, or hadamard=None and "
                "requantises=None"
            )

    def _check_chunks(self) -> None:
        if self.chunks is None:
            return
        object.__setattr__(self, "chunks", read_global_scale(self.chunks))
        rows = self.scaled_rows or 0
        of_tensor = self.global_scale == "tensor" or rows
        if self.of_chunks.outer is None or not of_tensor or rows % self.of_chunks.outer[0]:
            raise ValueError(
                f"chunks={self.chunks!r}: allowed are tiles, (rows, columns), under "
                "global_scale='tensor' or (a multiple of their rows, None), or None"
            )

    def __repr__(self) -> str:
        """The fields; those of `_LATER` where they are set."""
        shown = (
            item.name
            for item in fields(self)
            if item.repr and (item.name not in _LATER or getattr(self, item.name) != item.default)
        )
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"QuantSpec({values})"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: every call looks something up by its spec."""
        return hash(tuple([getattr(self, field.name) for field in fields(self)]))

    def __getstate__(self) -> dict[str, object]:
        """The fields without cached properties: hashes differ between processes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def scale_format(self) -> ScaleFormat:
        return get_scale_format(self.scale)

    @cached_property
    def rounder(self) -> Rounding:
        """What rounds the elements."""
        return ROUNDINGS.get(self.rounding)

    @property
    def has_outer_scale(self) -> bool:
        """Whether a scale of whole rows or of the tensor is applied to the product instead of the
        elements.
        """
        return None in self.block and not self.scale_format.is_byte

    @property
    def exact_in_bf16(self) -> bool:
        """Whether decoded elements, without the scale that is applied to the product, are exact in
        BF16.
        """
        return self.has_outer_scale or (
            self.outer is None and self.scale_format.exact_in_bf16(self.format)
        )

    @property
    def _can_clip(self) -> bool:
        """Whether scales can be so small that elements clip."""
        return self.scale_format.takes_global or self.scale_rounding in ("floor", "even")

    @property
    def product_factor(self) -> float | None:
        """What undoes the guard in the product, under scales that are powers of two; None for
        1.
        """
        if self.guard == 1.0 or not self.scale_format.roundings:
            return None
        return 1.0 / self.guard

    @cached_property
    def extent(self) -> Extent | None:
        """The rows and columns that share a scale above block scales; None: that of the tensor, or
        none.
        """
        return extent_of(self.global_scale, self.block)

    @cached_property
    def outer(self) -> tuple[int, int] | None:
        """The extent of a scale that multiplies the elements; None: there is none."""
        if self.extent is None or self.extent[1] is None:
            return None
        return self.extent[0], self.extent[1]

    @cached_property
    def scaled_rows(self) -> int | None:
        """The rows that share a scale which is applied to the product; None: there is none."""
        if self.extent is None or self.extent[1] is not None:
            return None
        return self.extent[0]

    @cached_property
    def of_chunks(self) -> QuantSpec:
        """How elements and the first block scales are made where there are `chunks`."""
        return replace(self, global_scale=self.chunks, chunks=None)

    @cached_property
    def random(self) -> bool:
        """Whether quantising draws random bits, and so needs a RandomKey."""
        return self.rounder.random

    @property
    def earlier_amax(self) -> bool:
        """Whether the amax is given by a state of the layer, from earlier steps: that of a history,
        or a held one.
        """
        return self.delayed is not None or self.held is not None

    @property
    def decodes_to_values(self) -> bool:
        """Whether what is decoded is the tensor as it was rounded, and not the transform of it."""
        return self.hadamard is None

    @property
    def transposable(self) -> bool:
        """Whether quantising commutes with transposition: square blocks, rounded to nearest."""
        square = self.block[0] == self.block[1] and (
            self.extent is None or self.extent[0] == self.extent[1]
        )
        exact = not self.random and self.hadamard is None and self.requantises is None
        return square and exact and (self.chunks is None or self.of_chunks.transposable)


def _scales(having: Callable[[ScaleFormat], bool]) -> str:
    """The scale formats that have a property, for messages."""
    return "scale=" + " or ".join(repr(fmt.name) for fmt in SCALE_FORMATS if having(fmt))
