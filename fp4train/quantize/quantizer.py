"""Quantizers: `quantize` for one spec on one device type, with the kernel chosen once.

`quantizer(spec, device_type)` gives the fastest implementation that supports the whole spec: the C
kernels on a CPU, Triton on a GPU, else the readable reference, with the reason. All are
bit-identical. The methods handle what depends on the call: empty tensors, NaN, strides.
"""

import importlib
import logging
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp4train.quantize import reference
from fp4train.quantize.quantized import Decoded, Prepared, Quantized
from fp4train.quantize.random import RandomKey
from fp4train.quantize.scaling import out_of_chunks
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import transform
from fp4train.text import check_choice

KERNELS = ("auto", "reference", "cpu", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Tensor classes that hold their own memory, if their device has any."""

_log = logging.getLogger(__name__)


class Quantizer:
    """The readable reference; kernels derive from it and fall back to it for calls that they do not
    support.

    spec: how to quantise.
    kernel: "cpu", "triton" or "reference".
    why: why the reference is used instead of a kernel; None otherwise.

    x_RC is [R, C], float32, BF16 or FP16, any strides; blocks run along C. key: selects the random
    bits of stochastic rounding. amax: the global (tensor or row) amax if it is not that of x. Other
    shapes, dtypes and arguments raise ValueError; a tensor without memory of its own raises
    TypeError.
    """

    kernel = "reference"
    writes_factors = False
    """Whether kernels that make values write the factors of a product, too."""

    def __init__(self, spec: QuantSpec, why: str | None = None) -> None:
        self.spec = spec
        self.why = why

    def codes(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Quantized:
        """Codes and scales of x."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        return reference.quantize(x_RC, self.spec, key=key, amax=amax)

    def values(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Decoded:
        """Equals `codes(...).decoded()` in every bit, in one pass: the operand that emulation
        multiplies.
        """
        x_RC = check_input(x_RC, self.spec, key, amax)
        return reference.quantize_dequantize(x_RC, self.spec, key=key, amax=amax)

    def decode(self, quantized: Quantized) -> Decoded:
        """Equals `quantized.decoded()` in every bit: backward decodes the codes that forward
        saved.
        """
        self._check_spec(quantized)
        return quantized.decoded()

    def amax(
        self,
        x_RC: Tensor,
        key: RandomKey | None = None,
        *,
        per_row: bool = False,
        into: Tensor | None = None,
    ) -> Tensor:
        """The largest magnitude of x after the Hadamard transform: float32 0-d, or [R, 1]; NaN if x
        holds one.

        x has elements. key: draws the signs of a transform that has those of a step. into: an amax,
        0-d float32, which
            a kernel may make the larger of the two and return.
        """
        if self.spec.hadamard is not None:
            x_RC = transform(x_RC, self.spec.hadamard, key)
        return (x_RC.abs().amax(dim=1, keepdim=True) if per_row else x_RC.abs().amax()).float()

    @property
    def in_tiles(self) -> "Quantizer":
        """This quantizer with block scales of codes in the tiles of `Quantized.tiled`; itself where
        no kernel does.
        """
        return self

    def _check_spec(self, quantized: Quantized) -> None:
        if quantized.spec != self.spec:
            raise ValueError(f"quantized.spec={quantized.spec}: this quantizer decodes {self.spec}")


class ChunkQuantizer(Quantizer):
    """Codes by the kernel of tiles; their block scales are rounded again (`QuantSpec.chunks`)."""

    def __init__(self, spec: QuantSpec, device_type: str, kernel: str) -> None:
        self._tiles = quantizer(spec.of_chunks, device_type, kernel)
        self._decoding = quantizer(replace(spec, chunks=None, formula="te2.14"), device_type)
        super().__init__(spec, self._tiles.why)
        self.kernel = self._tiles.kernel

    def codes(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Quantized:
        """Codes and scales of x."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        tiles = self._tiles.codes(x_RC, key)
        assert tiles.amax is not None
        scales, amax = out_of_chunks(tiles.scales, tiles.amax, self.spec, amax)
        return Quantized(self.spec, tiles.shape, tiles.codes, scales, amax)

    def values(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Decoded:
        """`codes(...).decoded()` to the bit."""
        return self.decode(self.codes(x_RC, key, amax))

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit, in one pass."""
        self._check_spec(quantized)
        return self._decoding.decode(quantized._replace(spec=self._decoding.spec))


@cache
def quantizer(spec: QuantSpec, device_type: str, kernel: str = "auto") -> Quantizer:
    """The quantizer of `spec` for tensors on `device_type` (cpu, cuda, …).

    Args:
        kernel: "auto" takes the fastest that supports the spec; if that is the reference, `why` has
            the reason. A named kernel that does not support the spec raises ValueError.
    """
    if not isinstance(spec, QuantSpec):
        raise TypeError(f"spec={spec!r} must be a QuantSpec")
    check_choice("kernel", kernel, KERNELS)
    if kernel == "reference":
        return Quantizer(spec)
    if spec.chunks is not None:
        return ChunkQuantizer(spec, device_type, kernel)
    chosen = kernel
    if kernel == "auto":
        chosen = "triton" if device_type == "cuda" else "cpu"
    # Imported on first use: the reference needs neither, and Triton may not be installed.
    module = importlib.import_module(f"fp4train.quantize.{chosen}")
    reason: str | None = module.why_not(spec, device_type)
    if reason is None:
        built: Quantizer = module.make(spec)
        return built
    if kernel != "auto":
        raise ValueError(
            f"kernel={kernel!r} cannot quantise this: {reason}. Use kernel='auto' or 'reference'"
        )
    _say(chosen, reason)
    return Quantizer(spec, reason)


@cache
def _say(kernel: str, reason: str) -> None:
    """Log a reason once for all specs that have no kernel because of it."""
    _log.info("no %s kernel, using the torch reference: %s", kernel, reason)


def quantize(
    x_RC: Tensor,
    spec: QuantSpec,
    *,
    key: RandomKey | None = None,
    amax: Tensor | None = None,
    kernel: str = "auto",
) -> Quantized:
    """Codes and scales of x.

    x_RC: [R, C], float32, BF16 or FP16, any strides. Other shapes and dtypes raise ValueError;
        tensors without memory of their own (DTensor, FakeTensor, meta) raise TypeError. Blocks run
        along C, so `quantize(x.T, spec)` is the column-wise form.
    key: selects the random bits of stochastic rounding.
    amax: the global (tensor or row) amax after the Hadamard transform, if it is not that of x:
        reduced over ranks, or from the history of delayed scaling.
    kernel: auto, reference, cpu, triton.

    NaN or infinity in x makes every value that shares a scale with it NaN.
    """
    return quantizer(spec, x_RC.device.type, kernel).codes(x_RC, key, amax)


def quantize_dequantize(
    x_RC: Tensor,
    spec: QuantSpec,
    *,
    key: RandomKey | None = None,
    amax: Tensor | None = None,
    kernel: str = "auto",
) -> Decoded:
    """Equals `quantize(...).decoded()` in every bit, in one pass: the operand that emulation
    multiplies.
    """
    return quantizer(spec, x_RC.device.type, kernel).values(x_RC, key, amax)


def tensor_of(prepared: Prepared, dtype: torch.dtype) -> Tensor:
    """The tensor that an operand's codes or values stand for, in `dtype`."""
    if isinstance(prepared, Quantized):
        prepared = quantizer(prepared.spec, prepared.codes.device.type).decode(prepared)
    return prepared.tensor(dtype)


class PairQuantizer:
    """Both forms of one tensor: x [M, K] row-wise, and x.T [K, M], the column-wise form.

    On a CPU one call makes both, on a GPU one kernel codes or values of both forms of narrow
    blocks, or of one scale that both share (kernels/triton/both.py); else each form is made by
    itself. The results are the same.
    """

    def __init__(
        self, row: Quantizer, column: Quantizer, *, row_codes: bool, column_codes: bool
    ) -> None:
        """row_codes, column_codes: whether that form is prepared as codes, else as values."""
        self.row = row
        self.column = column
        self._codes = (row_codes, column_codes)
        self._row = row.codes if row_codes else row.values
        self._column = column.codes if column_codes else column.values
        self._pair: tuple[Any, Any] | None = None
        if row.kernel == column.kernel != "reference":
            module = importlib.import_module(f"fp4train.quantize.{row.kernel}")
            self._pair = module.pair(row, column, codes=self._codes)
        self.one_kernel = self._pair is not None and row.kernel == "triton"
        """Whether one kernel makes both forms, also where each is asked for after the other."""
        self.joins = self.one_kernel and row.spec.delayed is not None
        """Whether it joins the amax of x to another one on the way."""
        values = not (row_codes or column_codes)
        self.writes_factors = (
            self.one_kernel and values and row.writes_factors and column.writes_factors
        )

    def __call__(
        self,
        x_MK: Tensor,
        row_key: RandomKey | None = None,
        row_amax: Tensor | None = None,
        column_key: RandomKey | None = None,
        column_amax: Tensor | None = None,
        newest: Tensor | None = None,
        factor_scales: tuple[Tensor, ...] = (),
    ) -> tuple[Decoded | Quantized, Decoded | Quantized]:
        """(row-wise form, column-wise form).

        newest: where `joins`: an amax, 0-d float32, which becomes the larger of itself and that of
            x.
        factor_scales: where it `writes_factors`: the scales of the operands that both forms are multiplied
            with, 0-d.
        """
        if self._pair is not None:
            row, column = self._pair
            both: tuple[Decoded | Quantized, Decoded | Quantized] | None = row.with_columns(
                column,
                x_MK,
                (row_key, column_key),
                (row_amax, column_amax),
                self._codes,
                newest,
                factor_scales,
            )
            if both is not None:
                return both
        return self._row(x_MK, row_key, row_amax), self._column(x_MK.T, column_key, column_amax)


def check_input(
    x_RC: Tensor, spec: QuantSpec, key: RandomKey | None, amax: Tensor | None
) -> Tensor:
    """x as a detached plain tensor. TypeError and ValueError for inputs that no implementation
    supports.
    """
    x_RC = own_memory(x_RC)
    if x_RC.ndim != 2:
        if x_RC.ndim > 2:
            fix = "x.reshape(-1, x.shape[-1])"
        else:
            fix = "x.reshape(1, -1)"
        raise ValueError(
            f"x has {x_RC.ndim} dimensions {tuple(x_RC.shape)}: quantize takes [rows, cols]; "
            f"use {fix}"
        )
    if x_RC.dtype not in DTYPES:
        raise ValueError(
            f"x.dtype={x_RC.dtype}: quantize takes float32, bfloat16 and float16; use x.float()"
        )
    check_arguments(spec, key, amax, x_RC.shape[0])
    return x_RC


def check_arguments(spec: QuantSpec, key: RandomKey | None, amax: Tensor | None, rows: int) -> None:
    """ValueError for arguments that do not fit the spec of a tensor of so many rows."""
    if spec.random and key is None:
        raise ValueError(
            f"key=None: rounding={spec.rounding!r} takes its bits from a RandomKey(seed=, "
            "step=, layer=, operand=)"
        )
    if amax is not None:
        if spec.global_scale == "row" or spec.block == (1, None):
            needed = rows
        else:
            needed = 1
        if spec.global_scale not in ("tensor", "row") and not spec.has_outer_scale:
            raise ValueError(
                f"amax: block={spec.block!r} with scale={spec.scale!r} has no global scale to "
                "take it; use None"
            )
        if amax.numel() != needed:
            raise ValueError(
                f"amax has {amax.numel()} values: this spec takes {needed} for x of {rows} rows"
            )
    elif spec.delayed is not None:
        raise ValueError(
            "amax=None: delayed scaling needs an amax from its history; see scaling.delayed_amax"
        )


def own_memory(x: Tensor) -> Tensor:
    """x as a detached plain tensor. TypeError if it has no memory of its own; the message says what
    to pass instead.
    """
    kind = type(x)
    if not x.is_meta and (
        kind in PLAIN or kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or _address(x)
    ):
        if x.requires_grad or kind is not Tensor:
            if kind in PLAIN:
                x = x.detach()
            else:
                x = x.detach().as_subclass(Tensor)
        return x.resolve_neg() if x.is_neg() else x
    if hasattr(x, "to_local"):
        raise TypeError(
            f"x is a {kind.__name__}, which holds a local shard only: pass x.to_local(), the "
            "shard's position as "
            "row_offset and col_offset of its RandomKey, and as amax the maximum over all ranks"
        )
    if kind.__name__ == "FakeTensor":
        raise TypeError(
            "x is a FakeTensor, which has a shape and no values: quantise real tensors; "
            "inside torch.compile use "
            "fp4train.nn.Linear, whose operator is not traced; call torch.export outside of "
            "fp4train.autocast, where "
            "the layers are plain matrix products"
        )
    if x.is_meta:
        raise TypeError(
            "x is on the meta device, where tensors have no values: pass a tensor of a real "
            "device (for a model: "
            'model.to_empty(device="cpu"), then its weights)'
        )
    raise TypeError(
        f"x is a {kind.__name__}, a tensor subclass without memory of its own: pass the plain "
        "tensor that it wraps"
    )


def _address(x: Tensor) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a FakeTensor warns
        try:
            return x.data_ptr()
        except RuntimeError:
            return 0
