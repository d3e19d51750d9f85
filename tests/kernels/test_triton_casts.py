"""Roundings near what decides them.

The hardware's casts to FP8, which the interpreter does not have, by what PTX's manual says of
cvt.rn.satfinite: to nearest, ties to the even code, infinities and larger values to the largest of
their sign, NaN to 0x7f. By them the kernels have the bits of the reference, too.
"""

from interpreted import interpreted
from needs_triton import needs_triton

PROGRAM = """
import numpy as np
import torch
import triton.language as tl
from gpu_cases import SPECS, cases
from gpu_kernels import check
from triton.runtime.interpreter import TensorHandle

from fp4train.formats import E4M3, E5M2
from fp4train.formats.element import encode
from fp4train.kernels.triton import rounding, scale


def positive(exponent_bits, mantissa_bits, last):
    '''Values of the codes 0 to `last` of a format.'''
    codes = np.arange(last + 1)
    exponent, mantissa = codes >> mantissa_bits, codes % (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    whole = np.where(exponent > 0, (1 << mantissa_bits) + mantissa, mantissa)
    return whole * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa_bits)


TABLES = {"e4m3": positive(4, 3, 0x7E), "e5m2": positive(5, 2, 0x7B)}


def cvt(x, table):
    '''Codes of float32 numbers.'''
    values = np.abs(x.astype(np.float64))
    middles = (table[1:] + table[:-1]) / 2
    lower = np.searchsorted(middles, values, side="left")
    upper = np.searchsorted(middles, values, side="right")
    code = np.where(lower % 2 == 0, lower, upper) + np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def dense(table):
    '''All BF16 numbers; what lies around each value and each middle; numbers between.'''
    places = np.concatenate([table, (table[1:] + table[:-1]) / 2]).astype(np.float32)
    around = [np.nextafter(places, np.float32(side)) for side in (-np.inf, np.inf)]
    near = np.concatenate([places, *around])
    every = np.arange(0, 1 << 32, 9973, dtype=np.uint32).view(np.float32)
    bf16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    return np.concatenate([near, -near, every, bf16])


for fmt in (E4M3, E5M2):
    x = dense(TABLES[fmt.name])
    ours, theirs = cvt(x, TABLES[fmt.name]), encode(torch.from_numpy(x.copy()), fmt).numpy()
    assert ((ours == theirs) | np.isnan(x)).all(), x[(ours != theirs) & ~np.isnan(x)][:5]


def tensor(data, dtype, shape):
    return tl.core.tensor(TensorHandle(data, dtype), tl.block_type(dtype, shape) if shape else dtype)


def cast(name, dtype):
    return lambda t: tensor(cvt(t.handle.data, TABLES[name]), dtype, t.shape)


def values(t):
    '''Of codes; those above the table are NaN.'''
    table = TABLES["e4m3" if t.dtype == tl.float8e4nv else "e5m2"]
    above = np.inf if t.dtype == tl.float8e5 else np.nan
    magnitudes = np.concatenate([table, [above], np.full(127 - len(table), np.nan)])
    code = t.handle.data.view(np.uint8)
    number = np.where(code >> 7, -1.0, 1.0) * magnitudes[code & 0x7F]
    return tensor(number.astype(np.float32), tl.float32, t.shape)


asked = []
rounding.cuda_capability_geq = scale.cuda_capability_geq = lambda *version: not asked.append(version)
rounding.as_e4m3 = scale.as_e4m3 = cast("e4m3", tl.float8e4nv)
rounding.as_e5m2 = cast("e5m2", tl.float8e5)
rounding.of_fp8 = scale.of_fp8 = values
kinds = ["wide", "nan", "inf", "huge"]
chosen = [case for case in cases(shapes=[(20, 40)], kinds=kinds, dtypes=[torch.bfloat16])]
chosen = [case for case in chosen if "e4m3" in str(case.spec) or "e5m2" in str(case.spec)][::2]
for case in chosen:
    assert check(case, "cpu") == {}, (case.name, check(case, "cpu"))
assert asked == [(8, 9)] * len(asked) and len(asked) > len(chosen)
print(len(chosen))
"""


@needs_triton
def test_kernels_have_the_bits_of_the_reference_by_the_casts_of_hardware() -> None:
    run = interpreted("-c", PROGRAM)
    assert run.stdout.strip().isdigit() and int(run.stdout) > 20, run.stdout + run.stderr


THRESHOLDS = """
import torch
from gpu_cases import KEY, Case, mx
from gpu_kernels import check

from fp4train.quantize.random import random_bits

rows, cols = 64, 256
spec = mx("e2m1", rounding="stochastic")
fraction = (random_bits(KEY, rows, cols).double() + 0.5) / 2**16
floors = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]).repeat(rows, cols // 7 + 1)[:, :cols]
quanta = torch.where(floors < 2, 0.5, torch.where(floors < 4, 1.0, 2.0))
x = (floors + fraction * quanta).float()
for step in (-1, 0, 1):
    near = (x.view(torch.int32) + step).view(torch.float32)
    near[:, ::32] = 6.0  # the scale is 1
    near[1::2] *= -1
    case = Case("thresholds", near, spec, KEY, None)
    assert check(case, "cpu") == {}, (step, check(case, "cpu"))
print("equal")
"""


@needs_triton
def test_stochastic_rounding_turns_at_its_threshold_to_the_last_bit() -> None:
    run = interpreted("-c", THRESHOLDS)
    assert run.stdout.strip() == "equal", run.stdout + run.stderr
