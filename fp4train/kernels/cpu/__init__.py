"""The CPU kernels: torch tensors in and out of the C extension `_cpu` (sources in `csrc/`).

x is the tensor whose last axis is blocked, [R, C]. With strides (1, R) it is the column-wise form x.T, whose result is
written transposed without a copy of x. Blocks are 16, 32, 64 or 128 wide; an incomplete block is padded with zeros. If
x has a NaN or an infinity, the extension returns True and the caller must use the reference.

A call packs one struct and calls the extension once. The part that is the same for every call of a scheme is packed
once. `LAYOUT` and the sizes of the structs detect an extension built from other sources. `Machine` holds the
instruction set and the number of threads; the results are the same bits for all of them. The extension is optional and
built with the package: `unavailable()` says why it is missing.
"""

import importlib
from dataclasses import dataclass
from functools import cache
from struct import Struct
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

INSTRUCTION_SETS: Final = ("plain", "avx2", "avx512")
"""Instruction sets, slowest first."""

# The supported names: others have no kernel. The numbers are those of csrc/job.h.
INPUTS: Final = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
ELEMENTS: Final = {"e2m1": 0, "e2m3": 1, "e3m2": 2, "e4m3": 3, "e5m2": 4}
SCALES: Final = {"e4m3": 0, "e8m0": 1, "fp32": 2, "pow2": 3, "ue5m3": 4}
SCALE_ROUNDINGS: Final = {None: 0, "floor": 0, "rceil": 1, "even": 2, "ceil": 3}
FORMULAS: Final = {"te2.14": 0, "te2.13": 1}
ROUNDINGS: Final = {"nearest": 0, "stochastic": 1}
EXTENTS: Final = {None: 0, "tensor": 1, "row": 2, "block": 3}

ROW_BLOCKS: Final = (16, 32, 64, 128)
"""Widths of blocks along contiguous memory."""
COLUMN_BLOCKS: Final = (16, 32)
"""Widths of blocks along the strided axis of x.T."""
OUTER_COLUMNS: Final = 128
"""Columns of a row that share a float32 scale of extent "block"."""
PAIR_ROWS: Final = 128
"""Rows per work item when both forms of a tensor are made; a multiple of block_rows."""
STREAM_BYTES: Final = 1 << 24
"""Larger outputs bypass the caches, which could not hold them."""

LAYOUT: Final = 2
_SCHEME: Final = Struct("=4i2i2i2iI2i3fq")
"""element, scale, scale rounding, formula; block; whole, extent of the amax; stochastic, Hadamard size; signs; whether
they are drawn instead, whether values are float32; largest, bound, margin; stream bytes."""
_JOB: Final = Struct(f"={_SCHEME.size}s24s6Q4q2i")
"""scheme; random words; addresses of x, values, codes, scales, amax, decode; rows, cols, strides; input, measure."""
_DECODE: Final = Struct(f"={_SCHEME.size}s5Q6q")
"""scheme; addresses of codes, scales, values, amax, decode; rows, cols, code bytes per row, strides, amaxes."""
_pack_job: Final = _JOB.pack
_pack_decode: Final = _DECODE.pack

_new_float32: Final = torch.empty(0, dtype=torch.float32, device="cpu").new_empty
_new_bfloat16: Final = torch.empty(0, dtype=torch.bfloat16, device="cpu").new_empty
_new_uint8: Final = torch.empty(0, dtype=torch.uint8, device="cpu").new_empty
_number: Final = torch.empty((), dtype=torch.float32, device="cpu")
_empty_like: Final = torch.empty_like
"""The fastest way to allocate a tensor: two thirds of the time of `torch.empty` with a shape and a dtype."""

NO_RANDOM: Final = bytes(24)
"""The words of a `RandomKey` for nearest rounding."""


@cache
def _extension() -> ModuleType | str:
    name = "fp4train.kernels.cpu._cpu"
    try:
        extension = importlib.import_module(name)
    except ImportError as error:
        return f"the C extension {name} is not built ({error}); install a C compiler and reinstall"
    return _stale(extension) or extension


def _stale(extension: ModuleType) -> str | None:
    """Why an extension cannot be used: it was built from other sources than these. None if it can."""
    built, wanted = getattr(extension, "layout", None), (LAYOUT, _JOB.size, _DECODE.size)
    if built == wanted:
        return None
    return (
        f"the C extension {extension.__name__} was built from other sources (layout {built}, not {wanted}); "
        "rebuild it: pip install -e . or python setup.py build_ext --inplace"
    )


def unavailable() -> str | None:
    """Why no kernel of this module can run, or None."""
    extension = _extension()
    return extension if isinstance(extension, str) else None


def _loaded() -> ModuleType:
    extension = _extension()
    if isinstance(extension, str):
        raise RuntimeError(extension)
    return extension


@cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets of this CPU, fastest last."""
    return tuple(name for i, name in enumerate(INSTRUCTION_SETS) if _loaded().has_isa(i))


def thread_pool() -> str:
    """The threads that run the kernels: `openmp` (the pool torch uses) or `pthreads` (started per call)."""
    return str(_loaded().thread_pool())


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Instruction set and threads. None: the fastest instruction set of this CPU; torch's number of threads."""

    instruction_set: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.instruction_set is not None and self.instruction_set not in instruction_sets():
            raise ValueError(f"instruction_set={self.instruction_set!r}: this CPU has {', '.join(instruction_sets())}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads!r}: allowed are integers >= 1")


HERE: Final = Machine()
"""The fastest instruction set of this CPU, with torch's number of threads."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A quantisation in primitive terms.

    whole: "tensor" or "row" if one float scale applies to all of it; blocks are then only a unit of work. None: one
        scale per block.
    amax: extent of the amax that scales need besides those of blocks: "tensor" or "row", which must be known before the
        blocks; "block", an outer block of OUTER_COLUMNS of a row, whose scale multiplies the elements; or None.
    measures: whether the amax is computed from x if it is not given.
    float32: whether values are written as float32 instead of BF16, to which the kernels round.
    largest: the magnitude that a block's amax is scaled to; bound: that of the tensor, S_enc = bound / amax.
    margin: divisor of `whole` scales.
    signs: a Hadamard transform of sixteen columns, where bit i negates column i; "step" if the random words draw them;
        None for no transform.
    """

    element: str
    scale: str
    scale_rounding: str | None
    formula: str
    block: tuple[int, int]
    whole: str | None
    amax: str | None
    measures: bool
    float32: bool
    largest: float
    bound: float
    margin: float
    stochastic: bool
    signs: int | str | None

    def packed(self) -> bytes:
        """The struct for the extension. KeyError for an unsupported name."""
        return _SCHEME.pack(
            ELEMENTS[self.element],
            SCALES[self.scale],
            SCALE_ROUNDINGS[self.scale_rounding],
            FORMULAS[self.formula],
            *self.block,
            EXTENTS[self.whole],
            EXTENTS[self.amax],
            self.stochastic,
            0 if self.signs is None else 16,
            self.signs if isinstance(self.signs, int) else 0,
            self.signs == "step",
            self.float32,
            self.largest,
            self.bound,
            self.margin,
            STREAM_BYTES,
        )


class Kernels:
    """The kernels of one scheme on one machine: `job` and `decode` make jobs, which `run` and `run_decode` execute."""

    def __init__(self, scheme: Scheme, machine: Machine = HERE) -> None:
        extension, name = _loaded(), machine.instruction_set or instruction_sets()[-1]
        self.run = extension.quantize
        self.run_decode = extension.decode
        self.isa = INSTRUCTION_SETS.index(name)
        threads = machine.threads
        self.threads = torch.get_num_threads if threads is None else lambda: threads
        self._scheme = scheme.packed()
        self._block_rows, self._block_cols = scheme.block
        self._whole = scheme.whole is not None
        self._row_amax = scheme.amax == "row"
        self._amax = scheme.amax in ("tensor", "row")
        self._outer = scheme.amax == "block"
        self._measures = scheme.measures
        self._packed = scheme.element == "e2m1"
        self._width = 1 if scheme.signs is None else 16
        self._no_random = None if scheme.stochastic or scheme.signs == "step" else NO_RANDOM
        self._new_values = _new_float32 if scheme.float32 else _new_bfloat16
        self._new_scales = _new_uint8 if scheme.scale in ("e4m3", "e8m0", "ue5m3") else _new_float32
        self.reads_columns = scheme.block[0] == 1 and scheme.block[1] in COLUMN_BLOCKS
        """Whether a kernel supports the strided axis of x.T: only for narrow blocks of one row."""

    def job(
        self, x_RC: Tensor, random: bytes | None, amax: Tensor | None, as_codes: bool
    ) -> tuple[bytes, tuple[Any, ...], Tensor] | None:
        """A job, the tensors that it fills, and x as it is read, which must stay alive until the job is done.

        The tensors are, as values: BF16 or float32 [R, C], with a transform C rounded up to whole groups, since it
        fills the padding; and their factor (float32, 0-d or [R, 1]) or None. As codes: uint8 [R, Cp] or, packed, [R,
        Cp/2]; the scales, uint8 or float32, one per block, row or tensor; and the amax (float32, 0-d, [R, 1], or one
        per outer block) or None.

        None for calls that the extension does not support: not two dimensions, another dtype, no elements, no random
        words where some are drawn, an amax of the wrong size, or none where it must be given.
        """
        shape, dtype = x_RC.shape, INPUTS.get(x_RC.dtype)
        if len(shape) != 2 or dtype is None:
            return None
        rows, cols = shape
        random = random or self._no_random
        if not rows or not cols or random is None:
            return None
        down, across = x_RC.stride()
        if across != 1 and (down != 1 or not self.reads_columns):
            x_RC = x_RC.detach().contiguous()
            down, across = cols, 1  # a single column counts as contiguous whatever its strides are
        measures = self._amax and amax is None
        if amax is not None:
            amax = self._given(amax, rows)
            if amax is None:
                return None
        elif not self._measures:
            return None
        width = self._width
        wide = -(-cols // width) * width
        values_address = codes_address = scale_address = factor_address = 0
        made: tuple[Tensor | None, ...]
        if as_codes:
            if measures:
                amax = _new_float32(rows, 1) if self._row_amax else _empty_like(_number)
            elif self._outer:
                amax = _new_float32(rows, -(-cols // OUTER_COLUMNS))
            if self._whole:
                coded = cols + cols % 2 if self._packed else cols
                scales = _new_float32(rows if self._row_amax else 1, 1)
            else:
                blocks = -(-wide // self._block_cols)
                coded = blocks * self._block_cols
                scales = self._new_scales(-(-rows // self._block_rows), blocks)
            codes = _new_uint8(rows, coded // 2 if self._packed else coded)
            codes_address, scale_address = codes.data_ptr(), scales.data_ptr()
            made = codes, scales, amax
        else:
            values, factor = self._new_values(rows, wide), None
            values_address = values.data_ptr()
            if self._amax:
                factor = _new_float32(rows, 1) if self._row_amax else _empty_like(_number)
                if self._whole:
                    scale_address = factor.data_ptr()
                else:
                    factor_address = factor.data_ptr()
            made = values, factor
        job = _pack_job(
            self._scheme,
            random,
            x_RC.data_ptr(),
            values_address,
            codes_address,
            scale_address,
            0 if amax is None else amax.data_ptr(),
            factor_address,
            rows,
            cols,
            down,
            across,
            dtype,
            measures,
        )
        return job, made, x_RC

    def decode(
        self, codes: Tensor, scales: Tensor, amax: Tensor | None, cols: int
    ) -> tuple[bytes, Tensor, Tensor | None]:
        """A job for `run_decode`, the values [R, C] of a tensor of `cols` columns and their factor, both as in `job`.

        codes, scales and amax: as `job` gives them, with contiguous rows.
        """
        rows, code_bytes = codes.shape
        width = self._width
        wide = -(-cols // width) * width
        values = self._new_values(rows, wide)
        factor, address, factor_address, amaxes = None, 0, 0, 0
        if self._whole:
            factor = scales if self._row_amax else scales.view(())
        elif self._outer and amax is not None:
            address = amax.data_ptr()
        elif amax is not None:
            factor = _empty_like(amax)
            address, factor_address, amaxes = amax.data_ptr(), factor.data_ptr(), amax.numel()
        job = _pack_decode(
            self._scheme,
            codes.data_ptr(),
            scales.data_ptr(),
            values.data_ptr(),
            address,
            factor_address,
            rows,
            wide,
            code_bytes,
            codes.stride(0),
            scales.stride(0),
            amaxes,
        )
        return job, values, factor

    def _given(self, amax: Tensor, rows: int) -> Tensor | None:
        """A given amax in the shape that `job` returns; None if its size does not fit the scheme."""
        if not self._amax or amax.numel() != (rows if self._row_amax else 1):
            return None
        amax = amax.detach().to("cpu", torch.float32)
        return amax.reshape((-1, 1) if self._row_amax else ()).contiguous()
