"""The C extension `_cpu` (sources in `csrc/`): its structs, its limits, and how it is loaded.
`quantize.cpu` calls it.

x is the tensor whose last axis is blocked, [R, C]. With strides (1, R) it is the column-wise form
x.T, whose result is written transposed without a copy of x. Blocks are 16, 32, 64 or 128 wide; an
incomplete block is padded with zeros. If x has a NaN or an infinity, the extension returns True and
the caller must use the reference.

A call packs a struct per form of the tensor and calls the extension once. The part that is the same
for every call of a spec is packed once. `LAYOUT` and the sizes of the structs detect an extension
built from other sources. `Machine` holds the instruction set and the number of threads; the results
are the same bits for all of them. The extension is optional and built with the package:
`unavailable()` says why it is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from struct import Struct
from types import ModuleType

import torch

from fp4train.formats import E2M1, E2M3, E3M2, E4M3, E5M2, ElementFormat

INSTRUCTION_SETS = ("plain", "avx2", "avx512")
"""Instruction sets, slowest first."""

# The supported formats and names: others have no kernel. The numbers are those of csrc/job.h.
INPUTS = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
ELEMENTS = {E2M1: 0, E2M3: 1, E3M2: 2, E4M3: 3, E5M2: 4}
SCALES = {
    "e4m3": 0,
    "e8m0": 1,
    "fp32": 2,
    "pow2": 3,
    "ue5m3": 4,
    "ue5m3_ieee": 5,
    "hif4": 7,
    "if4": 8,
}
SCALE_ROUNDINGS = {None: 0, "floor": 0, "rceil": 1, "even": 2, "ceil": 3}
FORMULAS = {"te2.14": 0, "te2.13": 1, "encode_centric": 2}
ROUNDINGS = {
    "nearest": 0,
    "stochastic": 1,
    "eden": 2,
    "nearest_away": 3,
    **{f"stochastic_{bits}": 1 | bits << 8 for bits in range(1, 16)},
    "stochastic_8_midpoint": 1 | 8 << 8 | 1 << 16,
}
FOUR_OVER_SIX = {None: None, "mae": 3, "mse": 4}
"""Number of the error by which a block chooses between 4 and 6; it stands in place of the
formula's.
"""
EXTENTS = {None: 0, "tensor": 1, "row": 2, "block": 3, "tile": 4}
FUSED_KINDS = (
    "norm",
    "norm_gradients",
    "gate",
    "gate_gradients",
    "rotation",
    "rotation_gradients",
)
"""By number."""

ROW_BLOCKS = (16, 32, 64, 128)
"""Widths of blocks along contiguous memory."""
COLUMN_BLOCKS = (16, 32)
"""Widths of blocks along the strided axis of x.T, and of those that a transform or four over six
needs.
"""
HADAMARD_SIZES = (16, 32, 64, 128)
REPEATED_SIGNS = 32
"""Signs that a scheme holds; those of larger transforms repeat, or the random words draw them."""
OUTER_COLUMNS = 128
"""Columns that share a scale of extent "block" or "tile"."""
TILE_MULTIPLE = 16
"""What the rows of a tile are a multiple of."""
PAIR_ROWS = 128
"""Rows per work item where a tile is read once for both forms (PAIR_TOKENS in module.c); a multiple
of block_rows.
"""
STREAM_BYTES = 1 << 24
"""Larger outputs bypass the caches, which could not hold them."""

LARGEST_BIAS = 63
"""Of a format whose number holds its fields."""

LAYOUT = 4
VERSION = 9
"""Versions of the scheme: of its fields, and of the numbers that they hold and the arguments of
functions.
"""
SCHEME = Struct("=4i2i2i2i2iI2i3fq")
"""How to quantise: numbers of element, scale, scale rounding, formula; block; whole, extent of the
amax; rows that share one, 0; rounding, Hadamard size; signs; whether they are drawn instead,
whether values are float32; largest, bound, margin; stream bytes.

whole: extent to all of which one float scale applies: blocks are then only a unit of work; none:
one scale per block. extent of the amax that scales need besides those of blocks: of the tensor or a
row, which must be known before the
    blocks; or of an outer block of OUTER_COLUMNS of a row, whose scale multiplies the elements; or
    of a tile, as many columns of several rows, whose amax must be known, too.
signs: of a Hadamard transform, where bit i % 32 negates column i; or the random words draw them.
whether values are float32: instead of BF16, to which the kernels round. largest: the magnitude that
a block's amax is scaled to; bound: that of the tensor, S_enc = bound / amax; of scales that are
powers of two, what multiplies the scaled elements. margin: divisor of
`whole` scales. stream bytes: `STREAM_BYTES`.
"""
JOB = Struct(f"={SCHEME.size}s24s6Q4q2i")
"""scheme; random words; addresses of x, values, codes, scales, amax, decode; rows, cols, strides;
input, measure.
"""
DECODE = Struct(f"={SCHEME.size}s5Q6q")
"""scheme; addresses of codes, scales, values, amax, decode; rows, cols, code bytes per row,
strides, amaxes.
"""
STEP = Struct("=4Q3q5I9f")
"""One step of AdamW with moments in BF16 (`optim.rounded`): addresses of weights, gradients and
moments; rows, columns, columns to skip; row offset, column offset / 8, the counter's word of the
step, layers of the two moments; the numbers of the step, and what stays the same over steps.
"""

FUSED = Struct("=3if3q6Q")
"""A norm, a gate, a rotation or the gradients of one (csrc/fused.h): kind, whether tensors are
float32 and not BF16, heads of a token, eps; tokens of a sequence, rows, columns; addresses, of what
is read first.
"""


def element_number(fmt: ElementFormat) -> int:
    """The number of an element format: that of `ELEMENTS`, or one that holds the fields, as
    csrc/job.h has them.

    Raises:
        ValueError: the kernels know no such format; the message says why.
    """
    if fmt in ELEMENTS:
        return ELEMENTS[fmt]
    if fmt.has_inf or fmt.bits > 8 or abs(fmt.bias) > LARGEST_BIAS:
        raise ValueError(
            f"element={fmt.name!r} has no C kernel: known are {', '.join(f.name for f in ELEMENTS)}, "
            f"and formats without infinity of 8 bits at most with a bias from -{LARGEST_BIAS} to "
            f"{LARGEST_BIAS}"
        )
    fields = fmt.mantissa_bits << 8 | fmt.bits << 12 | fmt.has_nan << 16 | (fmt.bias + 64) << 20
    return 1 << 6 | fields


NO_RANDOM = bytes(24)
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
    """Why an extension cannot be used: it was built from other sources than these. None if it
    can.
    """
    built = getattr(extension, "layout", None), getattr(extension, "version", None)
    expected = (LAYOUT, JOB.size, DECODE.size, FUSED.size), VERSION
    if built == expected:
        return None
    return (
        f"the C extension {extension.__name__} was built from other sources (layout {built}, "
        f"not {expected}); "
        "rebuild it: pip install -e . or python setup.py build_ext --inplace"
    )


def unavailable() -> str | None:
    """Why no kernel of this module can run, or None."""
    extension = _extension()
    if isinstance(extension, str):
        return extension
    return None


def loaded() -> ModuleType:
    """The extension; RuntimeError where it is missing."""
    extension = _extension()
    if isinstance(extension, str):
        raise RuntimeError(extension)
    return extension


@cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets of this CPU, fastest last."""
    return tuple(name for i, name in enumerate(INSTRUCTION_SETS) if loaded().has_isa(i))


def step_adamw(
    tensors: Sequence[torch.Tensor], integers: tuple[int, ...], numbers: tuple[float, ...]
) -> None:
    """One step of AdamW on weights, gradients and moments, contiguous and of one shape, in place;
    see `STEP`.
    """
    job = STEP.pack(*(tensor.data_ptr() for tensor in tensors), *integers, *numbers)
    loaded().adamw(job, torch.get_num_threads())


def fused(
    kind: str,
    tensors: Sequence[torch.Tensor],
    shape: Sequence[int],
    eps: float = 0.0,
    heads: int = 1,
    time: int = 1,
    machine: Machine | None = None,
) -> None:
    """Make a norm, a gate, a rotation or the gradients of one (`FUSED_KINDS`) of contiguous
    tensors, which csrc/fused.h names in turn: of a norm BF16 but for what that file calls float32,
    of others all BF16 or all float32.

    Args:
        shape: rows and columns, a multiple of 32, of heads of 64, of the matrices among them.
        eps: ε of a norm.
        heads, time: sizes of a rotation: heads of a token, tokens of a sequence.

    Raises:
        ValueError, TypeError: the extension does not take the shape; a tensor has no memory of its
            own.
    """
    machine = machine or HERE
    addresses = [tensor.data_ptr() for tensor in tensors]
    wide = tensors[0].dtype is torch.float32
    job = FUSED.pack(
        FUSED_KINDS.index(kind),
        wide,
        heads,
        eps,
        time,
        *shape,
        *addresses,
        *[0] * (6 - len(addresses)),
    )
    isa = INSTRUCTION_SETS.index(machine.instruction_set or instruction_sets()[-1])
    loaded().fused(job, machine.threads or torch.get_num_threads(), isa)


def thread_pool() -> str:
    """The threads that run the kernels: `openmp` (the pool torch uses) or `pthreads` (started per
    call).
    """
    return str(loaded().thread_pool())


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Instruction set and threads. None: the fastest instruction set of this CPU; torch's number of
    threads.
    """

    instruction_set: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.instruction_set is not None and self.instruction_set not in instruction_sets():
            raise ValueError(
                f"instruction_set={self.instruction_set!r}: this CPU has "
                f"{', '.join(instruction_sets())}"
            )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads!r}: allowed are integers >= 1")


HERE = Machine()
"""The fastest instruction set of this CPU, with torch's number of threads."""
