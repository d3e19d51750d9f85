"""Quantisation by the C kernels: the same bits as `reference`, near the speed of memory.

The kernels work on finite numbers. They report a tensor with a NaN or an infinity, and the
reference then quantises it: this is rare, and the rules for such values exist only there.
Transposed views are read in place; a tensor with other strides that a kernel cannot use is copied
first. A spec with `requantises` is two quantizers one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp4train.formats import AdaptiveScale, LevelledScale
from fp4train.kernels import cpu
from fp4train.quantize.cpu_limits import kernel_extent, why_not_outer, why_not_transform
from fp4train.quantize.quantized import Decoded, Quantized
from fp4train.quantize.quantizer import PLAIN, Quantizer, check_input
from fp4train.quantize.random import RandomKey
from fp4train.quantize.rotation import Transform
from fp4train.quantize.scaling import element_range, product_factor
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard, hadamard_signs

_pack_job = cpu.JOB.pack
_pack_decode = cpu.DECODE.pack

_new_float32 = torch.empty(0, dtype=torch.float32, device="cpu").new_empty
_new_bfloat16 = torch.empty(0, dtype=torch.bfloat16, device="cpu").new_empty
_new_uint8 = torch.empty(0, dtype=torch.uint8, device="cpu").new_empty
_number = torch.empty((), dtype=torch.float32, device="cpu")
_empty_like = torch.empty_like
"""The fastest way to allocate a tensor: two thirds of the time of `torch.empty` with a shape and a
dtype.
"""

PAIR_BYTES = 1 << 25
"""Size of a tensor from which on each tile is read once for both forms. Smaller tensors stay in the
cache between two reads, which are faster then, because each form works on whole rows or columns.
"""

ALL = 1 << 62
"""Rows or columns that share a scale, where all do."""

_KNOWN: dict[str, tuple[object, ...]] = {
    "scale": tuple(cpu.SCALES),
    "scale_rounding": tuple(cpu.SCALE_ROUNDINGS),
    "formula": tuple(cpu.FORMULAS),
    "rounding": tuple(cpu.ROUNDINGS),
    "four_over_six": tuple(cpu.FOUR_OVER_SIX),
    "chunks": (None,),
}
"""The values of each spec field that the kernels support, besides the element format."""


def why_not(spec: QuantSpec, device_type: str) -> str | None:
    """Why the kernels cannot quantise by `spec` on this device type, or None if they can."""
    if reason := cpu.unavailable():
        return reason
    if device_type != "cpu":
        return f"x is on {device_type}, the C kernels run on CPUs"
    try:
        cpu.element_number(spec.format)
    except ValueError as error:
        return str(error)
    for field, kernel_values in _KNOWN.items():
        if (value := getattr(spec, field)) not in kernel_values:
            return (
                f"{field}={value!r} has no C kernel (known: {', '.join(map(str, kernel_values))})"
            )
    if (reason := why_not_outer(spec)) is not None:
        return reason
    cols = spec.block[1]
    if cols is None and spec.scale_format.is_byte:
        return f"scale={spec.scale!r} with block={spec.block!r} has no C kernel"
    if cols is not None and cols not in cpu.ROW_BLOCKS:
        return (
            f"block={spec.block!r}: kernels have blocks of "
            f"{', '.join(map(str, cpu.ROW_BLOCKS))} columns"
        )
    if spec.hadamard is not None and (reason := why_not_transform(spec.hadamard)):
        return reason
    of_columns = cols in cpu.COLUMN_BLOCKS or isinstance(spec.scale_format, LevelledScale)
    if spec.hadamard is not None and (spec.block[0] != 1 or not of_columns):
        return f"hadamard with block={spec.block!r}: the kernel has (1, 16) and (1, 32)"
    chooses = spec.four_over_six is not None or isinstance(spec.scale_format, AdaptiveScale)
    if chooses and (spec.block[0] not in (1, 16) or cols not in cpu.COLUMN_BLOCKS):
        what = "four_over_six" if spec.four_over_six else f"scale={spec.scale!r}"
        return (
            f"{what} with block={spec.block!r}: the kernel has 1 or 16 rows, and 16 or 32 columns"
        )
    if spec.requantises is None:
        return None
    return _why_not_first(spec, spec.requantises, device_type)


def _why_not_first(spec: QuantSpec, requantised: QuantSpec, device_type: str) -> str | None:
    """Why the kernels cannot round x by `requantised`, which `spec` requantises, before they
    quantise it, or None.
    """
    if requantised.hadamard is not None:
        return (
            f"requantises with hadamard={requantised.hadamard!r} has no C kernel: none undoes the "
            "transform"
        )
    if not spec.scale_format.is_byte:
        return (
            f"requantises with scale={spec.scale!r} has no C kernel: an infinite scale depends "
            "on the dtype of x"
        )
    reason = why_not(requantised, device_type)
    if reason is None:
        return None
    return f"requantises: {reason}"


def make(spec: QuantSpec, machine: cpu.Machine = cpu.HERE) -> CpuQuantizer | CpuRequantizer:
    """The quantizer of a spec for which `why_not` gives None."""
    if spec.requantises is None:
        return CpuQuantizer(spec, machine)
    return CpuRequantizer(spec, machine)


def _whole_extent(spec: QuantSpec) -> str | None:
    """What the one float32 scale of a spec covers; None: it scales blocks."""
    if None not in spec.block:
        return None
    return "tensor" if spec.block[0] is None else "row"


def _sign_bits(transform: Hadamard | Transform) -> int:
    """Bit i: whether the transform negates column i, or one that its signs repeat."""
    signs = hadamard_signs(transform)[: cpu.REPEATED_SIGNS] * 2
    return sum(1 << i for i, sign in enumerate(signs[: cpu.REPEATED_SIGNS]) if sign < 0)


class CpuQuantizer(Quantizer):
    """See `Quantizer`. Each method makes one call of the extension; what that refuses goes to the
    reference.

    `to_bf16`: the kernels round values to BF16 where that is not exact.
    """

    kernel = "cpu"

    def __init__(
        self, spec: QuantSpec, machine: cpu.Machine = cpu.HERE, *, to_bf16: bool = False
    ) -> None:
        super().__init__(spec)
        extension = cpu.loaded()
        threads = machine.threads
        self.run = extension.quantize
        self._run_decode = extension.decode
        self.isa = cpu.INSTRUCTION_SETS.index(machine.instruction_set or cpu.instruction_sets()[-1])
        self.threads = torch.get_num_threads if threads is None else lambda: threads
        whole_extent = _whole_extent(spec)
        extent = kernel_extent(spec) or whole_extent
        float32 = not (to_bf16 or spec.exact_in_bf16)
        block: tuple[int, int] = (1, 16) if whole_extent else spec.block  # type: ignore[assignment]
        per_byte = 1 + spec.format.packed
        self._block_rows, self._block_cols = block
        if whole_extent is not None:  # rows that share the scale, and columns of whole bytes
            self._block_rows = 1 if whole_extent == "row" else ALL
            self._block_cols = per_byte
        self._block_bytes = self._block_cols // per_byte
        self._whole = whole_extent is not None
        self._measures = spec.delayed is None
        self._row_amax = extent == "row"
        self._tensor_amax = extent == "tensor"
        self._tiled = extent == "tile"
        self._outer = extent == "block" or self._tiled
        self._amax_columns = cpu.OUTER_COLUMNS if self._outer else ALL
        self._rows = 1 if spec.extent is None else spec.extent[0]
        self._amax = self._row_amax or self._tensor_amax
        self._width = 1 if spec.hadamard is None else spec.hadamard.size
        drawn = isinstance(spec.hadamard, Hadamard) and spec.hadamard.signs == "step"
        self._no_random = None if spec.random or drawn else cpu.NO_RANDOM
        self._factor = product_factor(spec, _number.device)
        self._new_values = _new_float32 if float32 else _new_bfloat16
        self._new_scales = _new_uint8 if spec.scale_format.is_byte else _new_float32
        self._block_scales = spec.scale_format.block_bytes // spec.scale_format.dtype.itemsize
        self._across = isinstance(spec.scale_format, LevelledScale | AdaptiveScale)
        self.reads_columns = block[0] == 1 and (self._across or block[1] in cpu.COLUMN_BLOCKS)
        """Whether a kernel supports the strided axis of x.T: only for narrow blocks of one row."""
        self.scheme = cpu.SCHEME.pack(
            cpu.element_number(spec.format),
            cpu.SCALES[spec.scale],
            cpu.SCALE_ROUNDINGS[spec.scale_rounding],
            cpu.FOUR_OVER_SIX[spec.four_over_six] or cpu.FORMULAS[spec.formula],
            *block,
            cpu.EXTENTS[whole_extent],
            cpu.EXTENTS[extent],
            self._rows,
            0,
            cpu.ROUNDINGS[spec.rounding],
            0 if spec.hadamard is None else spec.hadamard.size,
            0 if spec.hadamard is None or drawn else _sign_bits(spec.hadamard),
            drawn,
            float32,
            element_range(spec),
            spec.guard if spec.scale_format.roundings else spec.global_bound * element_range(spec),
            2.0**spec.delayed.margin if spec.delayed else 1.0,
            cpu.STREAM_BYTES,
        )

    def codes(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Quantized:
        """Codes and scales of x."""
        if type(x_RC) in PLAIN and x_RC.is_cpu and not x_RC.is_neg():
            outputs = self.job(x_RC, None if key is None else key.words, amax, True)
            if outputs is not None and not self.run(
                outputs[0], None, False, self.threads(), self.isa
            ):
                (codes, scales, amax), (rows, cols) = outputs[1], x_RC.shape
                return Quantized(self.spec, (rows, cols), codes, scales, amax)
        return super().codes(x_RC, key, amax)

    def values(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Decoded:
        """`codes(...).decoded()` to the bit, without the codes."""
        if type(x_RC) in PLAIN and x_RC.is_cpu and not x_RC.is_neg():
            outputs = self.job(x_RC, None if key is None else key.words, amax, False)
            if outputs is not None and not self.run(
                outputs[0], None, False, self.threads(), self.isa
            ):
                return Decoded(*outputs[1])
        return super().values(x_RC, key, amax)

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit, in one pass."""
        spec, (rows, cols), codes, scales, amax, _ = quantized
        if spec is not self.spec:
            self._check_spec(quantized)
        contiguous = (
            codes.is_contiguous()
            and scales.is_contiguous()
            and (amax is None or amax.is_contiguous())
        )
        if rows and cols and codes.is_cpu and contiguous:
            wide = -(-cols // self._width) * self._width
            values = self._new_values(codes.shape[0], wide)
            factor = self._factor
            address = 0
            factor_address = 0
            amaxes = 0
            if self._whole:
                factor = scales if self._row_amax else scales.view(())
            elif self._outer and amax is not None:
                address = amax.data_ptr()
            elif amax is not None:
                factor = _new_float32(rows, 1) if self._row_amax else _empty_like(amax)
                address = amax.data_ptr()
                factor_address = factor.data_ptr()
                amaxes = factor.numel()
            job = _pack_decode(
                self.scheme,
                codes.data_ptr(),
                scales.data_ptr(),
                values.data_ptr(),
                address,
                factor_address,
                codes.shape[0],
                wide,
                codes.shape[1],
                codes.stride(0),
                scales.stride(0) // self._block_scales,
                amaxes,
            )
            self._run_decode(job, self.threads(), self.isa)
            return Decoded(values, factor)
        return super().decode(quantized)

    def job(
        self,
        x: Tensor,
        random: bytes | None,
        amax: Tensor | None,
        as_codes: bool,
        *,
        turned: bool = False,
    ) -> tuple[bytes, tuple[Any, ...], tuple[Tensor | None, ...]] | None:
        """A job, the tensors that it fills, and x and amax as they are read, which must stay alive
        until it is done.

        The tensors are, as values: BF16 or float32 [R, C], with a transform C rounded up to whole
            groups, since it
        fills the padding; and their factor (float32, 0-d or [R, 1]) or None. As codes: uint8 [R,
        Cp] or, packed, [R, Cp/2]; the scales, uint8 or float32, one per block, row or tensor; and
        the amax (float32, 0-d, [R, 1], or one per outer block) or None.

        Args:
            x: [R, C]; where `turned`, [C, R], and the job is for x.T.

        None for calls that the extension does not support: not two dimensions, another dtype, no
            elements, no random
        words where some are drawn, an amax of the wrong size, or none where it must be given.
        """
        dtype = cpu.INPUTS.get(x.dtype)
        random = random or self._no_random
        if dtype is None or random is None or x.ndim != 2 or not x.numel():
            return None
        if turned:
            (cols, rows), (across, down) = x.shape, x.stride()
        else:
            (rows, cols), (down, across) = x.shape, x.stride()
        if across != 1 and (down != 1 or not self.reads_columns):
            x = (x.detach().T if turned else x.detach()).contiguous()
            down, across = cols, 1  # a single column counts as contiguous whatever its strides are
        measures = (self._amax or self._tiled) and amax is None
        if amax is not None:
            fits = (
                self._tensor_amax and not amax.dim() and amax.is_cpu and amax.dtype is torch.float32
            )
            amax = amax.detach() if fits else self._given(amax, rows)
            if amax is None:
                return None
        elif not self._measures:
            return None
        wide = -(-cols // self._width) * self._width
        factor_address = 0
        outputs: tuple[Tensor | None, ...]
        if as_codes:
            if amax is None and self._tensor_amax:
                amax = _empty_like(_number)
            elif amax is None and (self._row_amax or self._outer):
                amax = _new_float32(-(-rows // self._rows), -(-cols // self._amax_columns))
            blocks = -(-wide // self._block_cols)
            scale_columns = 1 if self._whole else blocks * self._block_scales
            scales = self._new_scales(-(-rows // self._block_rows), scale_columns)
            codes = _new_uint8(rows, blocks * self._block_bytes)
            written = (0, codes.data_ptr(), scales.data_ptr())
            outputs = codes, scales, amax
        else:
            values = self._new_values(rows, wide)
            written = (values.data_ptr(), 0, 0)
            factor = self._factor
            if self._amax:
                factor = _new_float32(rows, 1) if self._row_amax else _empty_like(_number)
                factor_address = factor.data_ptr()
            if self._whole:  # the factor is the scale
                written = (values.data_ptr(), 0, factor_address)
                factor_address = 0
            outputs = values, factor
        amax_address = 0 if amax is None else amax.data_ptr()
        addresses = (x.data_ptr(), *written, amax_address, factor_address)
        sizes = (rows, cols, down, across)
        job = _pack_job(self.scheme, random, *addresses, *sizes, dtype, measures)
        return job, outputs, (x, amax)

    def _given(self, amax: Tensor, rows: int) -> Tensor | None:
        """A given amax in the shape that `job` returns; None if its size does not fit the spec."""
        if not self._amax or self._rows > 1 or amax.numel() != (rows if self._row_amax else 1):
            return None
        amax = amax.detach().to("cpu", torch.float32)
        return amax.reshape((-1, 1) if self._row_amax else ()).contiguous()

    def _reads_with(self, column: CpuQuantizer) -> bool:
        """Whether the kernels make this form of a tile of x and `column`'s form of x.T from one
        read.
        """
        rows = self.spec.block[0] or 1
        alone = self.spec.hadamard is not None or self.spec.four_over_six is not None
        return not alone and not self._across and column.reads_columns and cpu.PAIR_ROWS % rows == 0

    def with_columns(
        self,
        column: CpuQuantizer,
        x_MK: Tensor,
        keys: tuple[RandomKey | None, RandomKey | None],
        amaxes: tuple[Tensor | None, Tensor | None],
        codes: tuple[bool, bool],
        newest: None = None,
        factor_scales: tuple[()] = (),
    ) -> tuple[Decoded | Quantized, Decoded | Quantized] | None:
        """This form of x and `column`'s form of x.T in one call, from one read of x where it is
        large; None if x or the arguments do not allow it.

        keys, amaxes: of each form. codes: whether each form is made as codes, else as values.
        """
        if (
            type(x_MK) not in PLAIN
            or not x_MK.is_cpu
            or x_MK.is_neg()
            or x_MK.ndim != 2
            or x_MK.stride(1) != 1
        ):
            return None
        row_key, column_key = keys
        row_codes, column_codes = codes
        words = None if row_key is None else row_key.words
        row = self.job(x_MK, words, amaxes[0], row_codes)
        words = None if column_key is None else column_key.words
        turned = column.job(x_MK, words, amaxes[1], column_codes, turned=True)
        if row is None or turned is None:
            return None
        at_once = x_MK.nbytes >= PAIR_BYTES and self._reads_with(column)
        if self.run(row[0], turned[0], at_once, self.threads(), self.isa):  # x is not finite
            of_row = Quantizer.codes if row_codes else Quantizer.values
            of_column = Quantizer.codes if column_codes else Quantizer.values
            return of_row(self, x_MK, row_key, amaxes[0]), of_column(
                column, x_MK.T, column_key, amaxes[1]
            )
        rows, cols = x_MK.shape
        by_row: Decoded | Quantized
        if row_codes:
            by_row = Quantized(self.spec, (rows, cols), *row[1])
        else:
            by_row = Decoded(*row[1])
        if column_codes:
            return by_row, Quantized(column.spec, (cols, rows), *turned[1])
        return by_row, Decoded(*turned[1])


class CpuRequantizer(Quantizer):
    """Quantises in two steps: rounds x by `spec.requantises`, along its other axis, then quantises
    by the rest.
    """

    kernel = "cpu"

    def __init__(self, spec: QuantSpec, machine: cpu.Machine = cpu.HERE) -> None:
        super().__init__(spec)
        assert spec.requantises is not None
        # where a factor multiplies the values, their product is what is rounded
        values_are_final = (
            spec.requantises.outer is not None or spec.requantises.global_scale is None
        )
        self._first = CpuQuantizer(spec.requantises, machine, to_bf16=values_are_final)
        self._last = CpuQuantizer(replace(spec, requantises=None), machine)

    def codes(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Quantized:
        """Codes and scales of x."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        return self._last.codes(self._first.values(x_RC.T).rounded().T, key, amax)._replace(
            spec=self.spec
        )

    def values(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Decoded:
        """`codes(...).decoded()` to the bit, without the codes."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        return self._last.values(self._first.values(x_RC.T).rounded().T, key, amax)

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit, in one pass."""
        self._check_spec(quantized)
        return self._last.decode(quantized._replace(spec=self._last.spec))


def pair(
    row: Quantizer, column: Quantizer, *, codes: tuple[bool, bool]
) -> tuple[CpuQuantizer, CpuQuantizer] | None:
    """Both quantizers as CPU ones if one call makes both forms of a tensor, as codes or not; else
    None.
    """
    if isinstance(row, CpuQuantizer) and isinstance(column, CpuQuantizer):
        return row, column
    return None
