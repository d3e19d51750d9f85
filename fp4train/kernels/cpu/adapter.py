"""The CPU kernels: torch tensors in and out over the C extension `_cpu` (sources and their reasons in `csrc/`).

Everything here is in terms of the tensor whose last axis is blocked, [R, C]; with strides (1, R) it is the column-wise
form x.T and comes out transposed, without a copy. Blocks are 16, 32, 64 or 128 wide; C that fills no block is padded
with zeros. A NaN or an infinity in x is not handled but reported: the functions return None and the reference has to do
it.

Which instruction set and how many threads is a `Machine`; the results are the same bits for all of them. The extension
is built with the package and optional: `unavailable()` says why it is missing.
"""

import importlib
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Final, NamedTuple

import torch
from torch import Tensor

INSTRUCTION_SETS: Final = ("plain", "avx2", "avx512")
"""From the slowest to the fastest."""

INPUTS: Final = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
LARGEST: Final = {dtype: torch.finfo(dtype).max for dtype in INPUTS}
ELEMENTS: Final = {"e2m1": 0, "e2m3": 1, "e3m2": 2, "e4m3": 3, "e5m2": 4}
SCALES: Final = {"e4m3": 0, "e8m0": 1, "fp32": 2, "pow2": 3, "given": 4}
SCALE_ROUNDINGS: Final = {None: 0, "floor": 0, "rceil": 1, "even": 2, "ceil": 3}
FORMULAS: Final = {"te2.14": 0, "te2.13": 1}

ROW_BLOCKS: Final = (16, 32, 64, 128)
"""Widths of blocks along contiguous memory."""
COLUMN_BLOCKS: Final = (16, 32)
"""Widths of blocks across it (the strided axis of x.T)."""
PAIR_ROWS: Final = 128
"""Rows that both forms of a tensor are made of at a time; bands of block_rows must fill them."""
STREAM_BYTES: Final = 1 << 24
"""Larger outputs are written past the caches, which could not keep them."""


@cache
def _extension() -> ModuleType | str:
    try:
        return importlib.import_module("fp4train.kernels.cpu._cpu")
    except ImportError as error:
        return (
            f"the C extension fp4train.kernels.cpu._cpu is not built ({error}); reinstall where a C compiler is found"
        )


def unavailable() -> str | None:
    """Why no kernel of this module can run, or None."""
    extension = _extension()
    return extension if isinstance(extension, str) else None


def _cpu() -> ModuleType:
    extension = _extension()
    if isinstance(extension, str):
        raise RuntimeError(extension)
    return extension


@cache
def instruction_sets() -> tuple[str, ...]:
    """Those that this CPU has, the fastest last."""
    return tuple(name for i, name in enumerate(INSTRUCTION_SETS) if _cpu().has_isa(i))


def thread_pool() -> str:
    """Whose threads run the kernels: `openmp` (the pool torch uses) or `pthreads` (started for each call)."""
    return str(_cpu().thread_pool())


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the kernels run on. None: the fastest instruction set of this CPU; torch's number of threads."""

    instruction_set: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.instruction_set is not None and self.instruction_set not in instruction_sets():
            raise ValueError(f"instruction_set={self.instruction_set!r}: this CPU has {', '.join(instruction_sets())}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads!r}: allowed are integers >= 1")

    def resolve(self) -> tuple[int, int]:
        """(threads, instruction set) as the extension takes them."""
        name = self.instruction_set or instruction_sets()[-1]
        return self.threads or torch.get_num_threads(), INSTRUCTION_SETS.index(name)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A quantisation in primitive terms.

    scale `given`: the caller passes factors for the tensor or for rows, and blocks are only a unit of work.
    largest: the magnitude that scales aim at; bound: that of the global range, S_enc = bound / amax.
    signs: a Hadamard transform of sixteen columns, where bit i negates column i; None for no transform.
    """

    element: str
    scale: str
    scale_rounding: str | None
    formula: str
    block: tuple[int, int]
    largest: float
    bound: float
    stochastic: bool
    signs: int | None

    @cached_property
    def numbers(self) -> tuple[object, ...]:
        """As the extension takes it."""
        return (
            ELEMENTS[self.element],
            SCALES[self.scale],
            SCALE_ROUNDINGS[self.scale_rounding],
            FORMULAS[self.formula],
            *self.block,
            self.largest,
            self.bound,
            self.stochastic,
            0 if self.signs is None else 16,
            self.signs or 0,
        )

    @property
    def values_f32(self) -> bool:
        """Element times float32 block scale is not exact in BF16."""
        return self.scale == "fp32"

    def code_width(self, cols: int) -> int:
        """Columns that have codes: padded to whole transforms and blocks, or, with given scales, to whole bytes."""
        if self.scale == "given":
            return cols + cols % 2 if self.element == "e2m1" else cols
        return -(-self.value_width(cols) // self.block[1]) * self.block[1]

    def value_width(self, cols: int) -> int:
        """Columns that have values: a transform fills its padding."""
        return cols if self.signs is None else -(-cols // 16) * 16


class Output(NamedTuple):
    """values: BF16 or float32 [R, C], without the global scale. codes: uint8 [R, Cp] or, packed, [R, Cp/2]. scales:
    uint8 or float32, one a block. amax: as given, or, beside codes, as measured; global_decode: 1 / S_enc, 0-d or [R,
    1], beside values that lack it."""

    values: Tensor | None
    codes: Tensor | None
    scales: Tensor | None
    amax: Tensor | None
    global_decode: Tensor | None

    def with_rows(self, rows: int) -> "Output":
        """The same memory seen as `rows` rows."""
        parts = {
            name: tensor.view(rows, -1)
            for name in ("values", "codes", "scales")
            if (tensor := getattr(self, name)) is not None
        }
        return self._replace(**parts)


Random = tuple[int, int, int, int, int]
"""Philox: seed, row offset, column offset / 8, step * 8 + operand, layer."""
NO_RANDOM: Final[Random] = (0, 0, 0, 0, 0)


class Request(NamedTuple):
    """A form of a tensor that is wanted.

    amax: float32, one value or R, the global amax or the given scales. measure: where amax is None, which to take from
        x first: the amax of the "tensor" or of each "row".
    own_cols: a row of x is several rows of the tensor, this wide, and the random bits are those of its elements there.
    """

    scheme: Scheme
    amax: Tensor | None = None
    measure: str | None = None
    random: Random = NO_RANDOM
    own_cols: int = 0
    values: bool = True
    codes: bool = False


def is_columnwise(x_RC: Tensor, scheme: Scheme) -> bool:
    """Whether the kernel that works across memory does it: x.T of a row-major tensor, and all Hadamard transforms."""
    return scheme.signs is not None or (x_RC.stride(1) != 1 and x_RC.stride(0) == 1)


def _matrix(x_RC: Tensor) -> tuple[int, int, int, int, int, int]:
    return (x_RC.data_ptr(), INPUTS[x_RC.dtype], *x_RC.shape, *x_RC.stride())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _job(x_RC: Tensor, request: Request) -> tuple[tuple[object, ...], Output]:
    """The extension's tuple, and the tensors it will fill."""
    scheme, amax, measure, random, own_cols, wants_values, wants_codes = request
    rows, cols = x_RC.shape
    wide, coded = scheme.value_width(cols), 0
    values = codes = scales = decode = None
    amax_shape: tuple[int, ...] = (rows, 1) if measure == "row" else () if amax is None else amax.shape
    if measure == "row" or (measure is not None and wants_codes):
        amax = x_RC.new_empty(amax_shape, dtype=torch.float32)
    if wants_values:
        values = x_RC.new_empty((rows, wide), dtype=torch.float32 if scheme.values_f32 else torch.bfloat16)
        if scheme.scale == "e4m3":
            decode = x_RC.new_empty(amax_shape, dtype=torch.float32)
    if wants_codes:
        coded = scheme.code_width(cols)
        codes = x_RC.new_empty((rows, coded // 2 if scheme.element == "e2m1" else coded), dtype=torch.uint8)
        if scheme.scale != "given":
            blocks = (-(-rows // scheme.block[0]), coded // scheme.block[1])
            scales = x_RC.new_empty(blocks, dtype=torch.uint8 if scheme.scale in ("e4m3", "e8m0") else torch.float32)
    job = (
        *_matrix(x_RC),
        scheme.numbers,
        _address(amax),
        0 if amax is None or amax.numel() == 1 else 1,
        measure is not None,
        _address(decode),
        LARGEST[x_RC.dtype],
        random,
        own_cols,
        _address(values),
        scheme.values_f32,
        wide,
        _address(codes),
        0 if codes is None else codes.shape[1],
        coded,
        _address(scales),
        0 if scales is None else scales.shape[1],
        rows * cols * 2 >= STREAM_BYTES,
    )
    return job, Output(values, codes, scales, amax, decode)


def quantize(x_RC: Tensor, request: Request, machine: Machine) -> Output | None:
    """One form of x [R, C], or None where x is not finite."""
    job, output = _job(x_RC, request)
    jobs = (None, job) if is_columnwise(x_RC, request.scheme) else (job, None)
    return None if _cpu().quantize(*jobs, *machine.resolve()) else output


def quantize_both(
    x_MK: Tensor, rowwise: Request, columnwise: Request, machine: Machine
) -> tuple[Output, Output] | None:
    """The row-wise form of x [M, K] and the column-wise form of x.T [K, M], from one read of x (two with amaxes that
    are to be measured)."""
    row_job, row_output = _job(x_MK, rowwise)
    column_job, column_output = _job(x_MK.T, columnwise)
    not_finite = _cpu().quantize(row_job, column_job, *machine.resolve())
    return None if not_finite else (row_output, column_output)


def amax(x_RC: Tensor, machine: Machine, *, rowwise: bool = False) -> Tensor:
    """max|x| as float32, 0-d or [R, 1]. NaN where x has one."""
    out = torch.zeros((x_RC.shape[0], 1) if rowwise else (), dtype=torch.float32)
    job = (*_matrix(x_RC), out.data_ptr(), 1 if rowwise else 0)
    columns = x_RC.stride(1) != 1 and x_RC.stride(0) == 1
    _cpu().amax(*((None, job) if columns else (job, None)), *machine.resolve())
    return out


def global_decode(amax: Tensor, bound: float) -> Tensor:
    """1 / S_enc, the float32 factor that values of E4M3-scaled blocks lack, in amax's shape. bound: see Scheme."""
    out = torch.empty_like(amax)
    _cpu().global_decode(amax.data_ptr(), out.data_ptr(), amax.numel(), bound)
    return out


def decode(
    codes: Tensor,
    scales: Tensor | None,
    *,
    element: str,
    scale: str,
    block: tuple[int, int],
    cols: int,
    machine: Machine,
) -> Tensor:
    """Values [R, cols] without the global scale: BF16, or float32 for float32 block scales.

    codes: uint8 [R, Cp] or packed [R, Cp/2]; scales: one a block, or None with scale `given` (the codes' own values).
    """
    rows = codes.shape[0]
    values = codes.new_empty((rows, cols), dtype=torch.float32 if scale == "fp32" else torch.bfloat16)
    job = (
        ELEMENTS[element],
        SCALES[scale],
        rows,
        cols,
        *block,
        codes.data_ptr(),
        codes.stride(0),
        codes.shape[1] * (2 if element == "e2m1" else 1),
        0 if scales is None else scales.data_ptr(),
        0 if scales is None else scales.stride(0),
        values.data_ptr(),
        scale == "fp32",
        cols,
        values.nbytes >= STREAM_BYTES,
    )
    _cpu().decode(job, *machine.resolve())
    return values
