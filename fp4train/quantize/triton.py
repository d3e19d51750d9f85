"""Quantising on NVIDIA GPUs with fp4train's Triton kernels: which spec goes to which kernel.

| spec | kernel |
|---|---|
| (1, N) blocks, columns contiguous | rows: 16 bytes per thread and load |
| (1, 16) or (1, 32) along a strided axis (x.T), or with a transform | columns: no transposed copy |
| (N, N) blocks | squares |
| blocks of hif4 and if4 | columns, wherever they lie |
| one scale per tensor or row | whole |
| codes of x and of x.T by one scale, to nearest | turned: one read of x |
| codes or values of x in (1, N) blocks, and of x.T in (1, 16) or (1, 32) | both: one read of x |
| x that is quantised twice; transforms that no kernel makes | steps (`triton_steps`) |

Other strides are copied once. `triton_launch` plans the launches: variants, tiles, sizes, results.
Equal to `quantize.reference` to the bit. Triton is imported on first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any, NoReturn

import torch
from torch import Tensor

from fp4train.formats import AdaptiveScale, LevelledScale
from fp4train.quantize import triton_launch
from fp4train.quantize.layout import TILED_DTYPES, why_no_layout
from fp4train.quantize.quantized import Decoded, Quantized, operand_width
from fp4train.quantize.quantizer import Quantizer, check_arguments, check_input, own_memory
from fp4train.quantize.random import RandomKey, random_words, words_of_both
from fp4train.quantize.scaling import product_factor
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.triton_blocks import COLUMN_BLOCKS
from fp4train.quantize.triton_limits import why_not_spec as why_not_spec
from fp4train.quantize.triton_steps import StepsQuantizer, last_step, why_not_steps
from fp4train.quantize.triton_variant import draws_signs, parts

LARGEST_EXTENT = 2**31 - 2**12
MOST_KINDS = 512
"""Kinds of tensors that one spec remembers; a run has some dozens, unless its shapes change from
step to step.
"""

_UNKNOWN = object()
"""The plan of a kind of tensor that is met for the first time."""


def why_not(spec: QuantSpec, device_type: str) -> str | None:
    """Why these kernels cannot quantise by spec there, in words; None if they can."""
    return why_not_here(device_type) or why_not_steps(spec)


def why_not_here(device_type: str) -> str | None:
    """Why no Triton kernel runs on this device type; None if they do."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'fp4train[triton]')"
    if device_type != "cuda" and not triton_launch.interpreted():
        return f"x is on {device_type}, Triton kernels run on CUDA devices"
    if device_type == "cuda" and torch.version.hip is not None:
        return "the Triton kernels are for NVIDIA GPUs"
    if triton_launch.interpreted() and (
        reason := why_not_interpreted(version("triton"), version("numpy"))
    ):
        return reason
    return None


def why_not_interpreted(triton: str, numpy: str) -> str | None:
    """Why these versions cannot interpret the kernels; None if they can. Compiled kernels do not
    depend on numpy.
    """
    if _numbers(triton) < (3, 7) and _numbers(numpy) >= (2, 4):
        return (
            f"the interpreter of Triton {triton} fails with numpy {numpy}: pip install "
            "'triton>=3.9' or 'numpy<2.4' "
            "(kernels on a GPU are compiled and need neither)"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """(3, 6) of "3.6.0+git1"."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def why_not_tensor(x: Tensor) -> str | None:
    """Why the kernels cannot read x, whatever the spec; None if they can."""
    if x.numel() == 0:
        return "x is empty"
    if max(x.shape) > LARGEST_EXTENT:
        return f"x.shape={tuple(x.shape)}: rows and columns must stay below 2**31"
    if x.is_cuda and _capability(x.device) < (8, 0):
        return f"compute capability {_capability(x.device)} of {x.device} is below 8.0"
    return None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def pair(
    row: Quantizer, column: Quantizer, *, codes: tuple[bool, bool]
) -> tuple[TritonQuantizer, TritonQuantizer] | None:
    """Both quantizers if one kernel makes both forms of a tensor, else None.

    codes: whether each form is wanted as codes, else as values.
    """
    if not isinstance(row, TritonQuantizer) or not isinstance(column, TritonQuantizer):
        return None
    if has_pair_kernel(row.spec, column.spec, codes):
        return (row, column)
    return None


def has_pair_kernel(
    row: QuantSpec, column: QuantSpec, codes: tuple[bool, bool] = (True, True)
) -> bool:
    """Whether one kernel makes x by `row` and x.T by `column`, as `codes` or values; each has a
    kernel of its own.

    Values of one scale for the tensor are those of x.T, too.
    """
    if row.block == (None, None):
        alike = row == column and not row.random
        return alike and (all(codes) or (not any(codes) and row.delayed is None))
    widths = (row.block[1], column.block[1])
    extents = (row.extent, column.extent)
    if isinstance(row.scale_format, AdaptiveScale) or isinstance(
        column.scale_format, AdaptiveScale
    ):
        return False
    if parts(column) > 1:
        return False
    if row.block[0] != 1 or column.block[0] != 1 or row.hadamard is not None:
        return False
    return extents == (None, None) and all(width in COLUMN_BLOCKS for width in widths)


def make(spec: QuantSpec) -> TritonQuantizer | StepsQuantizer:
    """The quantizer of a spec that `why_not` has nothing against."""
    if why_not_spec(spec) is None:
        return TritonQuantizer(spec)
    first = None if spec.requantises is None else TritonQuantizer(spec.requantises)
    return StepsQuantizer(spec, first, TritonQuantizer(last_step(spec)))


class TritonQuantizer(Quantizer):
    """See `Quantizer`. What the kernels cannot read, an empty tensor above all, is left to the
    reference.

    tiled: whether the scales of codes are written as `in_tiles` says.
    """

    kernel = "triton"

    def __init__(self, spec: QuantSpec, tiled: bool = False) -> None:
        super().__init__(spec)
        self._tiled = tiled
        self._whole = spec.block[1] is None
        if self._whole:
            self._row_amax = spec.block[0] == 1
        else:
            self._row_amax = spec.global_scale == "row"
        self._of_extents = spec.extent is not None and not self._row_amax
        self._by_torch = isinstance(spec.scale_format, AdaptiveScale | LevelledScale)
        self._draws_signs = draws_signs(spec)
        self.writes_factors = (
            not self._whole and spec.outer is None and spec.global_scale == "tensor"
        )
        self._guarded = spec.product_factor is not None
        self._plans: dict[tuple[object, ...], Any] = {}

    @cached_property
    def in_tiles(self) -> TritonQuantizer:
        tiled = (
            why_no_layout(self.spec) is None
            and self.spec.scale in TILED_DTYPES
            and self.spec.block[0] == 1
        )
        if tiled:
            return TritonQuantizer(self.spec, tiled=True)
        return self

    def codes(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Quantized:
        """Codes and scales of x."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        if (outputs := self._quantize(x_RC, key, amax, values=False)) is None:
            return super().codes(x_RC, key, amax)
        codes, scales, amax, factor = outputs
        return Quantized(
            self.spec,
            (x_RC.shape[0], x_RC.shape[1]),
            codes,
            scales,
            amax,
            None if self._whole else factor,
        )

    def values(
        self,
        x_RC: Tensor,
        key: RandomKey | None = None,
        amax: Tensor | None = None,
        other: Tensor | None = None,
    ) -> Decoded:
        """`codes(...).decoded()` to the bit, fused: 2 bytes per element read, 2 written (BF16).

        other: where it `writes_factors`: the scale of the operand that this one is multiplied with,
            0-d.
        """
        x_RC = check_input(x_RC, self.spec, key, amax)
        outputs = self._quantize(x_RC, key, amax, values=True, other=other)
        if outputs is None:
            return super().values(x_RC, key, amax)
        factor = outputs[3]
        if other is None or factor is None:
            return self._decoded(outputs[0], factor)
        return Decoded(outputs[0], factor[0], (other, factor[1:]))

    def _decoded(self, values: Tensor, factor: Tensor | None) -> Decoded:
        """Values and the scale that is applied to the product, or what undoes a guard."""
        if self._guarded:
            factor = product_factor(self.spec, values.device)
        return Decoded(values, factor)

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit: in one kernel for (1, N) and (N, N) blocks, else by
        torch.
        """
        spec = self.spec
        if quantized.spec is not spec:
            self._check_spec(quantized)
        if self._whole or self._by_torch or quantized.tiled or 0 in quantized.shape:
            return quantized.decoded()
        codes = quantized.codes.contiguous()
        if spec.outer is None:
            scales = quantized.scales.contiguous()
        else:
            scales = quantized.block_scales()
        if spec.format.packed:
            codes = codes.view(torch.int32)
        width = operand_width(spec, quantized.shape[1])
        dtype = triton_launch.values_dtype(spec)
        out = torch.empty(codes.shape[0], width, dtype=dtype, device=codes.device)
        self._planned(triton_launch.plan_decode, codes, scales.shape[1], width)(codes, scales, out)
        return Decoded(out, quantized.global_decode())

    def amax(
        self,
        x_RC: Tensor,
        key: RandomKey | None = None,
        *,
        per_row: bool = False,
        into: Tensor | None = None,
    ) -> Tensor:
        """See `Quantizer.amax`: one kernel, which reads x once."""
        x_RC = own_memory(x_RC)
        plan: triton_launch.AmaxPlan | None = None
        if not self._draws_signs:
            plan = self._planned(triton_launch.plan_amax, x_RC, per_row)
        if plan is None:
            return super().amax(x_RC, key, per_row=per_row)
        if into is not None and (into.dim() or into.dtype != torch.float32):
            _refuse("into", into)
        out = plan.result() if into is None else into
        if plan.turned:
            x_RC = x_RC.T
        plan.launch(x_RC.contiguous() if plan.contiguous else x_RC, out)
        return out

    def with_columns(
        self,
        column: TritonQuantizer,
        x_MK: Tensor,
        keys: tuple[RandomKey | None, RandomKey | None],
        amaxes: tuple[Tensor | None, Tensor | None],
        codes: tuple[bool, bool],
        newest: Tensor | None = None,
        factor_scales: tuple[Tensor, ...] = (),
    ) -> tuple[Decoded | Quantized, Decoded | Quantized] | None:
        """x in this form and x.T in `column`'s, as codes or values, from one read (two if an amax
        must be measured); None if x or the arguments do not allow it.

        keys, amaxes, codes: see `CpuQuantizer.with_columns`.
        newest: an amax, 0-d float32, to which that of x is joined; only with one scale, whose amax
            is that of the row-wise form.
        factor_scales: see `PairQuantizer`.
        """
        row_key, column_key = keys
        row_amax, column_amax = amaxes
        row_codes, column_codes = codes
        x_MK = check_input(x_MK, self.spec, row_key, row_amax)
        if self._whole and not row_codes:
            decoded = self.values(x_MK, row_key, row_amax)
            return decoded, Decoded(decoded.values.T, decoded.scale)
        if self._whole:
            return self._with_transpose(x_MK, row_amax, newest)
        rows, columns = x_MK.shape
        check_arguments(column.spec, column_key, column_amax, columns)
        words = words_of_both(row_key, column_key)
        tiled = (self._tiled, column._tiled)
        plan: triton_launch.BothPlan | None
        plan = self._planned(
            triton_launch.plan_both, x_MK, column.spec, tiled, codes, bool(factor_scales)
        )
        if plan is None or words is None:
            return None
        row_needs, column_needs = plan.needs
        measured = None
        if row_needs or column_needs:
            measured = self._both_amaxes(x_MK, plan, amaxes)
            if measured is None:
                return None
        make_row, make_row_scales, third, fourth = plan.results
        row = make_row()
        turned = third()
        row_scales = make_row_scales() if row_codes else row
        turned_scales = fourth() if column_codes else turned
        outputs = (
            row,
            row_scales,
            turned,
            turned_scales,
            *(factor_scales or (row_scales, row_scales)),
        )
        plan.launch(x_MK, row_scales if measured is None else measured, *outputs, words=words)
        amax_of_row = other = factor = other_factor = None
        if measured is not None:
            both = measured.unbind()
            amax_of_row, factor = both[:4:2] if row_needs else (None, None)
            other, other_factor = both[1::4] if column_needs else (None, None)
            if factor_scales:
                return (
                    Decoded(row, factor, (factor_scales[0], measured[3:5])),
                    Decoded(turned.T, other_factor, (factor_scales[1], measured[6:])),
                )
        by_row: Decoded | Quantized = self._decoded(row, factor)
        if row_codes:
            by_row = Quantized(self.spec, (rows, columns), row, row_scales, amax_of_row, factor)
        if not column_codes:
            return by_row, column._decoded(turned.T, other_factor)
        return by_row, Quantized(
            column.spec, (columns, rows), turned, turned_scales, other, other_factor
        )

    def _with_transpose(
        self, x_MK: Tensor, amax: Tensor | None, newest: Tensor | None
    ) -> tuple[Quantized, Quantized] | None:
        """Codes of x and of x.T by one scale."""
        if newest is not None and (newest.dim() or newest.dtype != torch.float32):
            _refuse("newest", newest)
        plan: triton_launch.QuantizePlan | None
        plan = self._planned(triton_launch.plan_turned, x_MK, amax is not None, newest is not None)
        if plan is None or (amax is not None and not self.spec.format.has_nan):
            if newest is not None:
                torch.maximum(newest, super().amax(x_MK), out=newest)
            return None
        if amax is None:
            amax = self.amax(x_MK)
        elif amax.dim() or amax.dtype != torch.float32:
            amax = amax.to(torch.float32).reshape(())
        row, column, scale = buffers = [make() for make in plan.results]
        plan.launch(
            x_MK.contiguous() if plan.contiguous else x_MK,
            amax,
            *buffers,
            scale if newest is None else newest,
        )
        rows, columns = x_MK.shape
        return (
            Quantized(self.spec, (rows, columns), row, scale, amax),
            Quantized(self.spec, (columns, rows), column, scale, amax),
        )

    def _both_amaxes(
        self,
        x_MK: Tensor,
        plan: triton_launch.BothPlan,
        amaxes: tuple[Tensor | None, Tensor | None],
    ) -> Tensor | None:
        """The amaxes of both forms, or twice the one of x, and room for S_dec of both and the
        factors of products: float32 [8], the rest of which is 0. None: of those that came the
        kernel, which reads one where no transform lies between the forms, does not take them so.

        Args:
            amaxes: those that came with the call.
        """
        came = []
        if plan.needs[0] and amaxes[0] is not None:
            came.append(amaxes[0])
        if plan.needs[1] and amaxes[1] is not None:
            came.append(amaxes[1])
        if came and (len(came) < sum(plan.needs) or (plan.amax is None and len(came) > 1)):
            return None
        out = triton_launch.eight_zeros(x_MK.device)
        if came:
            out[:2] = torch.stack([amax.reshape(()) for amax in (came[0], came[-1])])
        elif plan.amax is not None:
            plan.amax(x_MK, out)
        else:
            out[:2] = self.amax(x_MK)
        return out

    def _quantize(
        self,
        x_RC: Tensor,
        key: RandomKey | None,
        amax: Tensor | None,
        *,
        values: bool,
        other: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
        """(codes or values, stored scales, amax, the scale that is applied to the product); None:
        left to the reference, as is a given amax of a format without NaN, in which the scale has to
        say that x is not finite. The scale is followed by the factors of the product with `other`.
        """
        if self._whole and amax is not None and not self.spec.format.has_nan:
            return None
        amax_is_given = self._whole and amax is not None
        tiled = self._tiled and not values
        plan: triton_launch.QuantizePlan | None
        plan = self._planned(
            triton_launch.plan_quantize, x_RC, values, amax_is_given, tiled, other is not None
        )
        if plan is None:
            return None
        if not self._whole and self.spec.global_scale is None:
            amax = None
        elif self._of_extents:
            amax = self._amax_of_extents(x_RC)
        elif amax is None:
            amax = self.amax(x_RC, per_row=self._row_amax)
        elif self._row_amax or amax.dim() or amax.dtype != torch.float32:
            amax = amax.to(torch.float32).reshape((-1, 1) if self._row_amax else ()).contiguous()
        if plan.contiguous:
            x_RC = x_RC.contiguous()
        out, scales = [make() for make in plan.results]
        if plan.transposed:
            out = out.T
        if self._whole:
            outer = scales
        elif amax is None or self.spec.outer is not None:
            outer = None
        elif self._of_extents:
            outer = amax.new_empty(x_RC.shape[0], 1)
        elif other is not None:
            outer = triton_launch.eight_zeros(x_RC.device)[:3]
        else:
            outer = torch.empty_like(amax)
        unused = scales  # where a kernel reads no amax or writes no S_dec
        pointers = (
            x_RC,
            unused if amax is None else amax,
            out,
            scales,
            unused if outer is None else outer,
            unused if other is None else other,
        )
        plan.launch(*pointers, words=random_words(key))
        return out, scales, amax, outer

    def _amax_of_extents(self, x_RC: Tensor) -> Tensor:
        """The amaxes of what shares a scale above block scales: see `scaling.outer_amax`."""
        plan: triton_launch.AmaxPlan = self._planned(triton_launch.plan_extents, x_RC)
        out = plan.result()
        plan.launch(x_RC, out)
        return out

    def _planned(self, plan: Callable[..., Any], x: Tensor, *arguments: object) -> Any:
        """The result of `plan` for the spec, x and the arguments, made once per kind of x; None: no
        kernel reads it.
        """
        kind = (plan, x.dtype, x.shape, x.stride(), x.device, *arguments)
        kept_plan = self._plans.get(kind, _UNKNOWN)
        if kept_plan is _UNKNOWN:
            if len(self._plans) >= MOST_KINDS:
                self._plans.clear()
            kept_plan = self._plans[kind] = (
                plan(self.spec, x, *arguments) if why_not_tensor(x) is None else None
            )
        return kept_plan


def _refuse(name: str, number: Tensor) -> NoReturn:
    """Raise the error of a tensor that a compiled kernel would take for one float32, whatever it
    is.
    """
    raise ValueError(
        f"{name}: a 0-d float32 tensor is needed, not {number.dtype} {tuple(number.shape)}"
    )
