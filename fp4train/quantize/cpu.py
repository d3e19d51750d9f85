"""Quantisation by the C kernels: the same bits as `reference`, near the speed of memory.

The kernels work on finite numbers. They report a tensor with a NaN or an infinity, and the reference then quantises it:
this is rare, and the rules for such values exist only there. Transposed views are read in place; a tensor with other
strides that a kernel cannot use is copied first. A spec with `requantises` is two quantizers one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from fp4train.kernels import cpu
from fp4train.quantize.quantized import Decoded, Quantized
from fp4train.quantize.quantizer import PLAIN, Quantizer, check_input
from fp4train.quantize.random import RandomKey
from fp4train.quantize.scaling import element_range
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard, hadamard_signs

_new: Final = tuple.__new__  # makes a named tuple without the call overhead of its __new__

_KNOWN: Final[dict[str, tuple[object, ...]]] = {
    "element": tuple(cpu.ELEMENTS),
    "scale": tuple(cpu.SCALES),
    "scale_rounding": tuple(cpu.SCALE_ROUNDINGS),
    "formula": tuple(cpu.FORMULAS),
    "rounding": tuple(cpu.ROUNDINGS),
    "global_scale": tuple(cpu.EXTENTS),
    "four_over_six": (None,),
}
"""The values of each spec field that the kernels support."""


def why_not(spec: QuantSpec, device_type: str) -> str | None:
    """Why the kernels cannot quantise by `spec` on this device type, or None if they can."""
    if reason := cpu.unavailable():
        return reason
    if device_type != "cpu":
        return f"x is on {device_type}, the C kernels run on CPUs"
    for field, known in _KNOWN.items():
        if (value := getattr(spec, field)) not in known:
            return f"{field}={value!r} has no C kernel (known: {', '.join(map(str, known))})"
    cols = spec.block[1]
    if cols is None and spec.scale not in ("fp32", "pow2"):
        return f"scale={spec.scale!r} with block={spec.block!r} has no C kernel"
    if cols is not None and cols not in cpu.ROW_BLOCKS:
        return f"block={spec.block!r}: kernels have blocks of {', '.join(map(str, cpu.ROW_BLOCKS))} columns"
    if spec.hadamard is not None:
        if not isinstance(spec.hadamard, Hadamard):
            return f"hadamard={spec.hadamard!r} has no C kernel"
        if spec.hadamard.size != 16:
            return f"hadamard.size={spec.hadamard.size}: the kernel transforms 16"
        if spec.block[0] != 1 or cols not in cpu.COLUMN_BLOCKS:
            return f"hadamard with block={spec.block!r}: the kernel has (1, 16) and (1, 32)"
    return None if spec.requantises is None else _why_not_first(spec, spec.requantises, device_type)


def _why_not_first(spec: QuantSpec, first: QuantSpec, device_type: str) -> str | None:
    """Why the kernels cannot round x by `first`, which `spec` requantises, before they quantise it, or None."""
    if first.hadamard is not None:
        return f"requantises with hadamard={first.hadamard!r} has no C kernel: none undoes the transform"
    if not spec.scale_format.is_byte:
        return f"requantises with scale={spec.scale!r} has no C kernel: an infinite scale depends on the dtype of x"
    reason = why_not(first, device_type)
    return None if reason is None else f"requantises: {reason}"


def make(spec: QuantSpec, machine: cpu.Machine = cpu.HERE) -> CpuQuantizer | CpuRequantizer:
    """The quantizer of a spec for which `why_not` gives None."""
    return CpuQuantizer(spec, machine) if spec.requantises is None else CpuRequantizer(spec, machine)


def scheme_of(spec: QuantSpec) -> cpu.Scheme:
    """The spec as the scheme of a kernel."""
    whole = None if None not in spec.block else "tensor" if spec.block[0] is None else "row"
    signs: int | str | None = None
    if isinstance(spec.hadamard, Hadamard) and spec.hadamard.signs == "step":
        signs = "step"
    elif isinstance(spec.hadamard, Hadamard):
        signs = sum(1 << i for i, sign in enumerate(hadamard_signs(spec.hadamard)) if sign < 0)
    return cpu.Scheme(
        element=spec.element,
        scale=spec.scale,
        scale_rounding=spec.scale_rounding,
        formula=spec.formula,
        block=(1, 16) if whole else spec.block,  # type: ignore[arg-type]
        whole=whole,
        amax=spec.global_scale or whole,
        measures=spec.delayed is None,
        float32=not spec.exact_in_bf16,
        largest=element_range(spec),
        bound=spec.global_bound * element_range(spec),
        margin=2.0**spec.delayed.margin if spec.delayed else 1.0,
        stochastic=spec.rounding == "stochastic",
        signs=signs,
    )


class CpuQuantizer(Quantizer):
    """See `Quantizer`. Each method makes one call of the extension; what that refuses goes to the reference.

    `to_bf16`: the kernels round values to BF16 where that is not exact.
    """

    kernel = "cpu"

    def __init__(self, spec: QuantSpec, machine: cpu.Machine = cpu.HERE, *, to_bf16: bool = False) -> None:
        super().__init__(spec)
        scheme = scheme_of(spec)
        self._kernels = kernels = cpu.Kernels(replace(scheme, float32=False) if to_bf16 else scheme, machine)
        self._run, self._run_decode = kernels.run, kernels.run_decode
        self._isa, self._threads = kernels.isa, kernels.threads
        self._transposable = spec.transposable

    def codes(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Quantized:
        """Codes and scales of x."""
        if type(x_RC) in PLAIN and x_RC.is_cpu and not x_RC.is_neg():
            made = self._kernels.job(x_RC, None if key is None else key.words, amax, True)
            if made is not None and not self._run(made[0], None, self._threads(), self._isa):
                (codes, scales, amax), (rows, cols) = made[1], x_RC.shape
                return _new(Quantized, (self.spec, (rows, cols), codes, scales, amax))
        return super().codes(x_RC, key, amax)

    def values(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Decoded:
        """`codes(...).decoded()` to the bit, without the codes."""
        if type(x_RC) in PLAIN and x_RC.is_cpu and not x_RC.is_neg():
            made = self._kernels.job(x_RC, None if key is None else key.words, amax, False)
            if made is not None and not self._run(made[0], None, self._threads(), self._isa):
                values, factor = made[1]
                return _new(Decoded, (values, factor, self._transposable))
        return super().values(x_RC, key, amax)

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit, in one pass."""
        spec, (rows, cols), codes, scales, amax = quantized
        if spec is not self.spec:
            self._check_spec(quantized)
        contiguous = codes.is_contiguous() and scales.is_contiguous() and (amax is None or amax.is_contiguous())
        if rows and cols and codes.is_cpu and contiguous:
            job, values, factor = self._kernels.decode(codes, scales, amax, cols)
            self._run_decode(job, self._threads(), self._isa)
            return _new(Decoded, (values, factor, self._transposable))
        return super().decode(quantized)

    def reads_with(self, column: CpuQuantizer) -> bool:
        """Whether the kernels make this form of x and `column`'s form of x.T from one read."""
        rows = self.spec.block[0] or 1
        return self.spec.hadamard is None and column._kernels.reads_columns and cpu.PAIR_ROWS % rows == 0

    def with_columns(
        self,
        column: CpuQuantizer,
        x_MK: Tensor,
        row_key: RandomKey | None,
        row_amax: Tensor | None,
        column_key: RandomKey | None,
        column_amax: Tensor | None,
        row_codes: bool,
        column_codes: bool,
    ) -> tuple[Decoded | Quantized, Decoded | Quantized] | None:
        """This form of x and `column`'s form of x.T from one read (two if an amax must be measured); None if x or
        the arguments do not allow it."""
        if type(x_MK) not in PLAIN or not x_MK.is_cpu or x_MK.is_neg() or x_MK.ndim != 2 or x_MK.stride(1) != 1:
            return None
        forms = (self, x_MK, row_key, row_amax, row_codes), (column, x_MK.T, column_key, column_amax, column_codes)
        jobs: list[bytes] = []
        results: list[Decoded | Quantized] = []
        for one, x_RC, key, amax, wants_codes in forms:
            made = one._kernels.job(x_RC, None if key is None else key.words, amax, wants_codes)
            if made is None:
                return None
            jobs.append(made[0])
            if wants_codes:
                rows, cols = x_RC.shape
                results.append(_new(Quantized, (one.spec, (rows, cols), *made[1])))
            else:
                results.append(_new(Decoded, (*made[1], one._transposable)))
        if self._run(*jobs, self._threads(), self._isa):
            return None
        return results[0], results[1]


class CpuRequantizer(Quantizer):
    """Quantises in two steps: rounds x by `spec.requantises`, along its other axis, then quantises by the rest."""

    kernel = "cpu"

    def __init__(self, spec: QuantSpec, machine: cpu.Machine = cpu.HERE) -> None:
        super().__init__(spec)
        assert spec.requantises is not None
        self._first = CpuQuantizer(spec.requantises, machine, to_bf16=True)
        self._last = CpuQuantizer(replace(spec, requantises=None), machine)

    def codes(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Quantized:
        """Codes and scales of x."""
        rounded = self._rounded(check_input(x_RC, self.spec, key, amax))
        return self._last.codes(rounded, key, amax)._replace(spec=self.spec)

    def values(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Decoded:
        """`codes(...).decoded()` to the bit, without the codes."""
        rounded = self._rounded(check_input(x_RC, self.spec, key, amax))
        return self._last.values(rounded, key, amax)._replace(transpose_ok=self.spec.transposable)

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit, in one pass."""
        self._check_spec(quantized)
        decoded = self._last.decode(quantized._replace(spec=self._last.spec))
        return decoded._replace(transpose_ok=self.spec.transposable)

    def _rounded(self, x_RC: Tensor) -> Tensor:
        """x as `requantises` rounds it, BF16 [R, C]."""
        values, scale, _ = self._first.values(x_RC.T)
        return (values if scale is None else values * scale).to(torch.bfloat16).T


def pair(row: Quantizer, column: Quantizer) -> tuple[CpuQuantizer, CpuQuantizer] | None:
    """Both quantizers as CPU ones if one read of a tensor can give both forms, else None."""
    if isinstance(row, CpuQuantizer) and isinstance(column, CpuQuantizer) and row.reads_with(column):
        return row, column
    return None
