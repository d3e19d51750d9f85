"""Quantising on NVIDIA GPUs with fp4train's Triton kernels: which spec goes to which kernel.

| spec | kernel |
|---|---|
| (1, N) blocks, columns contiguous | rows: 16 bytes per thread and load |
| (1, 16) or (1, 32) along a strided axis (x.T), or with a Hadamard transform | columns: no transposed copy |
| (N, N) blocks | squares |
| one scale per tensor or row | whole |
| codes of x in (1, N) blocks, and of x.T in (1, 16) or (1, 32) | both: one read of x |

Other strides are copied once. `triton_launch` plans the launches: variants, tiles, sizes, results.
Equal to `quantize.reference` to the bit. Triton is imported on first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import version
from typing import Any, Final

import torch
from torch import Tensor

from fp4train.quantize import triton_launch
from fp4train.quantize.quantized import Decoded, Quantized, operand_width
from fp4train.quantize.quantizer import Quantizer, check_input, own_memory
from fp4train.quantize.random import RandomKey
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard

ROW_BLOCKS: Final = (16, 32, 64, 128)
SCALE_DTYPES: Final = {"e4m3": torch.uint8, "e8m0": torch.uint8, "fp32": torch.float32, "pow2": torch.float32}
LARGEST_EXTENT: Final = 2**31 - 2**12
MOST_KINDS: Final = 512
"""Kinds of tensors that one spec remembers; a run has some dozens, unless its shapes change from step to step."""

Kind = tuple[object, ...]
"""Properties of a tensor on which a launch depends: dtype, shape, strides and device, and the results asked for."""

_HERE: Final = nullcontext()

_KNOWN: Final[dict[str, tuple[object, ...]]] = {
    "element": tuple(triton_launch.NAN_ABOVE),
    "scale": tuple(SCALE_DTYPES),
    "scale_rounding": (None, "rceil", "floor", "even", "ceil"),
    "formula": ("te2.14", "te2.13"),
    "rounding": ("nearest", "stochastic"),
    "requantises": (None,),
    "global_scale": (None, "tensor", "row"),
    "four_over_six": (None,),
}
"""Field of a spec → its values that the kernels know; any other has no kernel."""


def why_not(spec: QuantSpec, device_type: str) -> str | None:
    """Why these kernels cannot quantise by spec there, in words; None if they can."""
    return why_not_here(device_type) or why_not_spec(spec)


def why_not_here(device_type: str) -> str | None:
    """Why no Triton kernel runs on this device type; None if they do."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'fp4train[triton]')"
    if device_type != "cuda" and not triton_launch.interpreted():
        return f"x is on {device_type}, Triton kernels run on CUDA devices"
    if device_type == "cuda" and torch.version.hip is not None:
        return "the Triton kernels are for NVIDIA GPUs"
    if triton_launch.interpreted() and (reason := why_not_interpreted(version("triton"), version("numpy"))):
        return reason
    return None


def why_not_interpreted(triton: str, numpy: str) -> str | None:
    """Why these versions cannot interpret the kernels; None if they can. Compiled kernels do not depend on numpy."""
    if _numbers(triton) < (3, 7) and _numbers(numpy) >= (2, 4):
        return (
            f"the interpreter of Triton {triton} fails with numpy {numpy}: pip install 'triton>=3.9' or 'numpy<2.4' "
            "(kernels on a GPU are compiled and need neither)"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """(3, 6) of "3.6.0+git1"."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def why_not_spec(spec: QuantSpec) -> str | None:
    """Why there is no kernel for the spec, whatever the device; None if there is one."""
    for field, known in _KNOWN.items():
        if (value := getattr(spec, field)) not in known:
            return f"{field}={value!r} has no Triton kernel (known: {', '.join(map(str, known))})"
    rows, cols = spec.block
    if cols is None:
        if spec.scale not in ("fp32", "pow2") or spec.hadamard is not None or spec.element == "e2m1":
            what = f"scale={spec.scale!r}, element={spec.element!r}, hadamard={spec.hadamard!r}"
            return f"block={spec.block!r} with {what} has no Triton kernel"
        return None
    if cols not in ROW_BLOCKS or rows not in (1, cols):
        return f"block={spec.block!r}: the kernels take 1xN and NxN, N = 16, 32, 64 or 128"
    if spec.hadamard is not None and not isinstance(spec.hadamard, Hadamard):
        return f"hadamard={spec.hadamard!r} has no Triton kernel"
    if spec.hadamard is not None and spec.hadamard.signs == "step":
        return "hadamard.signs='step' has no Triton kernel"
    by_columns = rows == 1 and cols in triton_launch.COLUMN_BLOCKS
    if spec.hadamard is not None and (not by_columns or spec.hadamard.size > cols):
        size = spec.hadamard.size
        return f"hadamard size {size} with block={spec.block!r}: the kernels take sizes up to a 1x16 or 1x32 block"
    return None


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


def pair(row: Quantizer, column: Quantizer, *, codes: bool) -> tuple[TritonQuantizer, TritonQuantizer] | None:
    """Both quantizers if one kernel makes both forms of a tensor, else None.

    codes: whether both are wanted as codes.
    """
    if not codes or not isinstance(row, TritonQuantizer) or not isinstance(column, TritonQuantizer):
        return None
    return (row, column) if has_pair_kernel(row.spec, column.spec) else None


def has_pair_kernel(row: QuantSpec, column: QuantSpec) -> bool:
    """Whether one kernel makes the codes of x by `row` and those of x.T by `column`; each has a kernel of its own."""
    widths, scales = (row.block[1], column.block[1]), (row.global_scale, column.global_scale)
    if row.block[0] != 1 or column.block[0] != 1 or row.hadamard is not None or "row" in scales:
        return False
    return all(width in triton_launch.COLUMN_BLOCKS for width in widths)


def make(spec: QuantSpec) -> TritonQuantizer:
    """The quantizer of a spec that `why_not` has nothing against."""
    return TritonQuantizer(spec)


class TritonQuantizer(Quantizer):
    """See `Quantizer`. What the kernels cannot read, an empty tensor above all, is left to the reference."""

    kernel = "triton"

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self._whole = spec.block[1] is None
        self._row_amax = spec.block[0] == 1 if self._whole else spec.global_scale == "row"
        self._scale_dtype = SCALE_DTYPES[spec.scale]
        self._plans: dict[Kind, Any] = {}

    def codes(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Quantized:
        """Codes and scales of x."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        if why_not_tensor(x_RC) is not None:
            return super().codes(x_RC, key, amax)
        with _on(x_RC):
            codes, scales, amax, factor = self._quantize(x_RC, key, amax, values=False)
        factor = None if self._whole else factor
        return Quantized(self.spec, (x_RC.shape[0], x_RC.shape[1]), codes, scales, amax, factor)

    def values(self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None) -> Decoded:
        """`codes(...).decoded()` to the bit, fused: 2 bytes per element read, 2 written (BF16)."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        if why_not_tensor(x_RC) is not None:
            return super().values(x_RC, key, amax)
        with _on(x_RC):
            values, _, _, scale = self._quantize(x_RC, key, amax, values=True)
        return Decoded(values, scale)

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit: in one kernel for (1, N) and (N, N) blocks, else by torch."""
        spec = self.spec
        if quantized.spec is not spec:
            self._check_spec(quantized)
        if self._whole or 0 in quantized.shape:
            return quantized.decoded()
        (rows, _), groups = quantized.codes.shape, quantized.scales.shape[1]
        codes = quantized.codes.view(torch.int32) if spec.element == "e2m1" else quantized.codes
        width, dtype = operand_width(spec, quantized.shape[1]), triton_launch.values_dtype(spec)
        out = torch.empty(rows, width, dtype=dtype, device=codes.device)
        sizes = (rows, groups, width, codes.stride(0))
        launch: triton_launch.Launch = self._planned(("decode", *sizes), triton_launch.plan_decode, *sizes)
        with _on(codes):
            launch(codes, quantized.scales, out)
        return Decoded(out, quantized.global_decode())

    def amax(
        self, x_RC: Tensor, key: RandomKey | None = None, *, per_row: bool = False, into: Tensor | None = None
    ) -> Tensor:
        """See `Quantizer.amax`: one kernel, which reads x once."""
        x_RC = own_memory(x_RC)
        if why_not_tensor(x_RC) is not None:
            return super().amax(x_RC, key, per_row=per_row)
        with _on(x_RC):
            return self._amax(x_RC, per_row, into)

    def with_columns(
        self,
        column: TritonQuantizer,
        x_MK: Tensor,
        row_key: RandomKey | None,
        row_amax: Tensor | None,
        column_key: RandomKey | None,
        column_amax: Tensor | None,
        row_codes: bool,
        column_codes: bool,
    ) -> tuple[Decoded | Quantized, Decoded | Quantized] | None:
        """Codes of x and `column`'s codes of x.T from one read (two if an amax must be measured); None if x or the
        arguments do not allow it."""
        x_MK = check_input(x_MK, self.spec, row_key, row_amax)
        check_input(x_MK.T, column.spec, column_key, column_amax)
        if why_not_tensor(x_MK) is not None or x_MK.stride(1) != 1:
            return None
        words = triton_launch.words_of_both(row_key, column_key)
        kind = ("both", column.spec, x_MK.dtype, x_MK.shape, x_MK.stride(), x_MK.device)
        plan: triton_launch.BothPlan = self._planned(kind, triton_launch.plan_both, column.spec, x_MK)
        wanted = [amax for amax, needed in zip((row_amax, column_amax), plan.needs, strict=True) if needed]
        given = [amax for amax in wanted if amax is not None]
        # The kernel reads one amax where no transform lies between the forms.
        if words is None or len(given) not in (0, len(wanted)) or (plan.amax is None and len(given) > 1):
            return None
        with _on(x_MK):
            amaxes = self._both_amaxes(x_MK, plan, given) if wanted else None
            made = [
                torch.empty(shape, dtype=dtype, device=x_MK.device)
                for i, scale in enumerate((self._scale_dtype, column._scale_dtype))
                for shape, dtype in ((plan.codes[i], torch.uint8), (plan.scales[i], scale))
            ]
            row, row_scales, turned, turned_scales = made
            stored = (row.view(plan.words[0]), row_scales, turned.view(plan.words[1]), turned_scales)
            plan.launch(x_MK, row_scales if amaxes is None else amaxes, *stored, words=words)
        rows, columns = x_MK.shape
        first, second = (
            (amaxes[i], amaxes[2 + i]) if amaxes is not None and plan.needs[i] else (None,) for i in (0, 1)
        )
        return (
            Quantized(self.spec, (rows, columns), row, row_scales, *first),
            Quantized(column.spec, (columns, rows), turned, turned_scales, *second),
        )

    def _both_amaxes(self, x_MK: Tensor, plan: triton_launch.BothPlan, given: list[Tensor]) -> Tensor:
        """The amaxes of both forms, or twice the one of x, and room for S_dec of both: float32 [4]."""
        out = torch.zeros(4, dtype=torch.float32, device=x_MK.device)
        if given:
            out[:2] = torch.stack([amax.reshape(()) for amax in (given[0], given[-1])])
        elif plan.amax is not None:
            plan.amax(x_MK, out.view(torch.int32))
        else:
            out[:2] = self._amax(x_MK, False)
        return out

    def _amax(self, x_RC: Tensor, per_row: bool, into: Tensor | None = None) -> Tensor:
        kind = ("amax", per_row, x_RC.dtype, x_RC.shape, x_RC.stride(), x_RC.device)
        plan: triton_launch.AmaxPlan = self._planned(kind, triton_launch.plan_amax, x_RC, per_row)
        out = torch.zeros(plan.results, dtype=torch.float32, device=x_RC.device) if into is None else into
        if plan.turned:
            x_RC = x_RC.T
        plan.launch(x_RC.contiguous() if plan.contiguous else x_RC, out.view(torch.int32))
        return out

    def _quantize(
        self, x_RC: Tensor, key: RandomKey | None, amax: Tensor | None, *, values: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(codes or values, stored scales, amax, the scale that is applied to the product)."""
        given = self._whole and amax is not None
        kind = (values, given, x_RC.dtype, x_RC.shape, x_RC.stride(), x_RC.device)
        plan: triton_launch.QuantizePlan = self._planned(kind, triton_launch.plan_quantize, x_RC, values, given)
        if not self._whole and self.spec.global_scale is None:
            amax = None
        elif amax is None:
            amax = self._amax(x_RC, self._row_amax)
        elif self._row_amax or amax.dim() or amax.dtype != torch.float32:
            amax = amax.to(torch.float32).reshape((-1, 1) if self._row_amax else ()).contiguous()
        if plan.contiguous:
            x_RC = x_RC.contiguous()
        out = torch.empty(plan.shape, dtype=plan.dtype, device=x_RC.device)
        if plan.transposed:
            out = out.T
        scales = torch.empty(plan.scales, dtype=self._scale_dtype, device=x_RC.device)
        outer = scales if self._whole else None if amax is None else torch.empty_like(amax)
        stored = out if plan.words is None else out.view(plan.words)
        unused = scales  # where a kernel reads no amax or writes no S_dec
        pointers = (x_RC, unused if amax is None else amax, stored, scales, unused if outer is None else outer)
        plan.launch(*pointers, words=triton_launch.random_words(key))
        return out, scales, amax, outer

    def _planned(self, kind: Kind, plan: Callable[..., Any], *arguments: Any) -> Any:
        """Plan of a launch, which `plan` makes of the spec and the arguments once for each `kind` of tensor."""
        found = self._plans.get(kind)
        if found is None:
            if len(self._plans) >= MOST_KINDS:
                self._plans.clear()
            found = self._plans[kind] = plan(self.spec, *arguments)
        return found


def _on(x: Tensor) -> AbstractContextManager[object]:
    """x's GPU as the current one, which costs some microseconds where it is not."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return _HERE
