"""The operands and results of TE's GEMMs, as TE's Python hands them to its extension.

All modules of TE multiply by `transformer_engine_torch.generic_gemm` (cpp_extensions/gemm.py
general_gemm): column by column D = op(A)·op(B), so that row by row

    fprop   y  = x·wᵀ     A = w, B = x      "TN"
    dgrad   dx = dy·w     A = w, B = dy     "NN"
    wgrad   dw = dyᵀ·x    A = x, B = dy     "NT"

A is taken in its row-wise form where it is transposed, B where it is not. `watching` puts a function
in the place of TE's that hands everything on, and shows the watcher what was multiplied: no bit
changes. Layouts of the forms: weights.py, tensor/*_tensor.py of TE.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fp4train.backends.protocol import Multiplied, NotShownError, Prepared
from fp4train.backends.table import Table
from fp4train.quantize import Decoded, Quantized, QuantSpec

_GEMM = "generic_gemm"


def why_not_shown(table: Table) -> str | None:
    """Why products of a layer that runs `table` are not shown; None: they are."""
    specs = table.specs()
    if any(spec.delayed is not None for spec in specs):
        return "Transformer Engine has the histories of delayed scaling"
    if any(spec.global_scale == "row" for spec in specs):
        return "Transformer Engine applies the global scales of rows after the product"
    return None


class Watcher:
    """Reads the products that are multiplied while it is entered.

    Args:
        report: receives each product.
        guarding: context in which a failure ends no pass.
    """

    def __init__(
        self,
        report: Callable[[Multiplied], None],
        guarding: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._report = report
        self._guarding = guarding
        self._before: Tensor | None = None

    def begin(self) -> None:
        """Show the products that follow to this watcher, and to no earlier one."""
        extension = importlib.import_module("transformer_engine_torch")
        tap = getattr(extension, _GEMM)
        if not isinstance(tap, _Tap):
            tap = _Tap(tap)
            setattr(extension, _GEMM, tap)
        tap.watchers.append(self)

    def end(self) -> None:
        """Show it no more; the last one puts TE's own function back."""
        extension = importlib.import_module("transformer_engine_torch")
        tap = getattr(extension, _GEMM)
        if not isinstance(tap, _Tap):
            return
        tap.watchers = [watcher for watcher in tap.watchers if watcher is not self]
        if not tap.watchers:
            setattr(extension, _GEMM, tap.multiply)

    def sees(self, arguments: Any) -> None:
        """Keep the sum to which the coming product is added."""

        with self._guarding():
            out, accumulate = arguments[4], arguments[14]
            self._before = out.detach().clone() if accumulate else None

    def saw(self, arguments: Any, result: Any) -> None:
        """Report the product that was multiplied."""

        with self._guarding():
            self._report(_read(arguments, result[0], self._before))


class _Tap:
    """TE's function, whose products are shown to the newest watcher."""

    def __init__(self, multiply: Callable[..., Any]) -> None:
        self.multiply = multiply
        self.watchers: list[Watcher] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        watcher = self.watchers[-1] if self.watchers else None
        if watcher is None:
            return self.multiply(*arguments, **options)
        watcher.sees(arguments)
        result = self.multiply(*arguments, **options)
        watcher.saw(arguments, result)
        return result


def _read(arguments: Any, result: Any, before: Tensor | None) -> Multiplied:
    """The product of one call.

    Raises:
        NotShownError: it is fused with something else.
    """
    a, transa, b, transb, _, out_quantizer, _, bias, _, gelu, _, grad, *_ = arguments
    if gelu or out_quantizer is not None or not isinstance(result, Tensor):
        raise NotShownError("its product is fused with an activation, or quantised")
    gemm = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}
    return Multiplied(
        gemm=gemm[bool(transa), bool(transb)],
        first=shown(b, column=bool(transb)),
        second=shown(a, column=not transa),
        result=result.detach().clone().reshape(-1, result.shape[-1]),
        bias=None if grad or bias is None or not bias.numel() else bias.detach().clone(),
        before=None if before is None else before.reshape(-1, before.shape[-1]),
    )


def shown(operand: Any, *, column: bool) -> Prepared:
    """An operand in the orientation in which it is multiplied, blocked along its last axis; of
    square blocks each row has its scales.

    Args:
        operand: TE's tensor, or one in high precision.
        column: whether the column-wise form is multiplied.

    Raises:
        NotShownError: it is of another kind.
    """
    from transformer_engine.pytorch import tensor as te_tensor

    if isinstance(operand, te_tensor.NVFP4TensorStorage):
        return _nvfp4(operand, column)
    if isinstance(operand, te_tensor.MXFP8TensorStorage):
        return _mxfp8(operand, column)
    if isinstance(operand, te_tensor.Float8BlockwiseQTensorStorage):
        return _fp8_block(operand, column)
    if isinstance(operand, te_tensor.Float8TensorStorage):
        return _fp8_tensor(operand, column)
    if type(operand) not in (Tensor, torch.nn.Parameter):
        raise NotShownError(f"its operands are of the kind {type(operand).__name__}")
    matrix = operand.detach().reshape(-1, operand.shape[-1])
    return Decoded((matrix.T if column else matrix).clone(), None)


def _form(operand: Any, column: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of one form, as they lie."""
    way = "columnwise" if column else "rowwise"
    data = getattr(operand, f"_{way}_data")
    scales = getattr(operand, f"_{way}_scale_inv")
    if data is None or scales is None:
        raise NotShownError(f"its operands have no {way} form")
    return data, scales


def _nvfp4(operand: Any, column: bool) -> Quantized:
    data, scales = _form(operand, column)
    # the column-wise form is transposed: [K, M]
    codes = data.reshape(data.shape[0], -1) if column else data.reshape(-1, data.shape[-1])
    amax = operand._amax_columnwise if column else operand._amax_rowwise
    spec = QuantSpec(block=(1, 16), global_bound=float(operand._nvfp4_e4m3_max))
    shape = (codes.shape[0], 2 * codes.shape[1])
    if operand._with_gemm_swizzled_scales:
        scales = scales.reshape(-1)
    else:
        scales = scales[: shape[0], : shape[1] // 16]
    codes = codes.view(torch.uint8).clone()
    scales = scales.view(torch.uint8).clone()
    return Quantized(spec, shape, codes, scales, amax.detach().clone().reshape(()))


def _mxfp8(operand: Any, column: bool) -> Quantized:
    data, scales = _form(operand, column)
    codes = data.reshape(-1, data.shape[-1]).view(torch.uint8)
    if column:
        codes = codes.T
    rows, columns = codes.shape
    if operand._with_gemm_swizzled_scales:
        scales = scales.reshape(-1)
    else:
        scales = (scales.T if column else scales)[:rows, : columns // 32]
    spec = QuantSpec(element=_element(operand), block=(1, 32), scale="e8m0", global_scale=None)
    scales = scales.view(torch.uint8).clone()
    return Quantized(spec, (rows, columns), codes.clone(), scales, None)


def _fp8_tensor(operand: Any, column: bool) -> Quantized:
    if column and operand._transpose is not None and not operand._transpose_invalid:
        data = operand._transpose
        codes = data.reshape(data.shape[0], -1)
    elif operand._data is None:
        raise NotShownError("its operands have no row-wise form")
    else:
        data = operand._data
        codes = data.reshape(-1, data.shape[-1])
        codes = codes.T if column else codes
    spec = QuantSpec(element=_element(operand), block=(None, None), scale="fp32", global_scale=None)
    scales = operand._scale_inv.detach().clone().reshape(1, 1)
    return Quantized(spec, tuple(codes.shape), codes.view(torch.uint8).clone(), scales, None)


def _fp8_block(operand: Any, column: bool) -> Quantized:
    data, scales = _form(operand, column)
    # the column-wise form is transposed: [K, M]
    codes = data.reshape(data.shape[0], -1) if column else data.reshape(-1, data.shape[-1])
    rows, columns = codes.shape
    if operand._is_2D_scaled:
        scales = scales[:, : -(-columns // 128)].repeat_interleave(128, dim=0)[:rows]
    else:
        scales = scales.T[:rows]
    spec = QuantSpec(element=_element(operand), block=(1, 128), scale="fp32", global_scale=None)
    return Quantized(spec, (rows, columns), codes.view(torch.uint8).clone(), scales.clone(), None)


def _element(operand: Any) -> str:
    from transformer_engine.pytorch.constants import DType

    return "e5m2" if operand._fp8_dtype == DType.kFloat8E5M2 else "e4m3"
