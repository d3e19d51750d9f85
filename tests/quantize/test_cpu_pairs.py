"""Both forms of a tensor, row-wise and column-wise, from one read by the CPU kernels."""

import functools
import sys
from dataclasses import replace

import pytest
from cpu_kernels import (
    BLOCKWISE,
    CHOSEN,
    EDEN,
    FP8,
    KEY,
    MXFP8,
    NVFP4,
    OUTER,
    TOKENS,
    TURNED,
    UE5M3,
    assert_same_codes,
    assert_same_values,
    draw_values,
)
from torch import Tensor

from fp4train.kernels import cpu as kernels
from fp4train.kernels.cpu import Machine
from fp4train.quantize import Decoded, PairQuantizer, Quantized, QuantSpec, reference
from fp4train.quantize.cpu import CpuQuantizer

ROW_SPECS = (OUTER, UE5M3, NVFP4, replace(NVFP4, rounding="stochastic"), MXFP8, FP8, replace(NVFP4, block=(16, 16)))
COLUMN_SPECS = (
    *BLOCKWISE,
    TURNED,
    EDEN,
    TOKENS,
    replace(TOKENS, rounding="stochastic"),
    MXFP8,
    replace(NVFP4, global_scale="row"),
    FP8,
)


@functools.cache
def both_forms(spec: QuantSpec, transposed: bool) -> tuple[Tensor, Decoded, Quantized]:
    """A tensor, and what the reference makes of it, or of its transpose."""
    x = draw_values("outliers", 140, 530, 3).bfloat16()
    read = x.T if transposed else x
    return x, reference.quantize_dequantize(read, spec, key=KEY), reference.quantize(read, spec, key=KEY)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", kernels.instruction_sets())
def test_both_forms_from_one_read_are_those_of_two(isa: str, threads: int) -> None:
    machine = Machine(instruction_set=isa, threads=threads)
    for row_spec in ROW_SPECS:
        x, row_values, row_codes = both_forms(row_spec, False)
        for column_spec in COLUMN_SPECS:
            _, column_values, column_codes = both_forms(column_spec, True)
            one_read, column = CpuQuantizer(row_spec, machine).with_columns, CpuQuantizer(column_spec, machine)
            values, columns = one_read(column, x, KEY, None, KEY, None, False, False)
            assert_same_values(values, row_values)
            assert_same_values(columns, column_values)
            ours, codes = one_read(column, x, KEY, None, KEY, None, True, True)
            assert_same_codes(ours, row_codes)
            assert_same_codes(codes, column_codes)


def test_both_forms_of_a_tensor_that_one_read_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[PairQuantizer.__module__], "PAIR_BYTES", 0)
    pair = PairQuantizer(CpuQuantizer(NVFP4), CpuQuantizer(TOKENS), row_codes=False, column_codes=True)
    x = draw_values("normal", 40, 300, 4).bfloat16()
    not_finite = x.clone()
    not_finite[0, 0] = float("nan")
    for y in (x, x.T.contiguous().T, not_finite, x[:0], x[:, :0]):
        values, codes = pair(y)
        assert_same_values(values, reference.quantize_dequantize(y, NVFP4))
        assert_same_codes(codes, reference.quantize(y.T, TOKENS))


def test_one_read_is_taken_from_the_size_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    with_columns = CpuQuantizer.with_columns
    monkeypatch.setattr(CpuQuantizer, "with_columns", lambda self, *a: reads.append(1) or with_columns(self, *a))
    x = draw_values("normal", 40, 300, 4).bfloat16()
    for size, expected in ((x.nbytes + 1, 0), (x.nbytes, 1)):
        monkeypatch.setattr(sys.modules[PairQuantizer.__module__], "PAIR_BYTES", size)
        PairQuantizer(CpuQuantizer(NVFP4), CpuQuantizer(TOKENS), row_codes=False, column_codes=True)(x)
        for across in (TOKENS, CHOSEN):
            PairQuantizer(CpuQuantizer(across), CpuQuantizer(NVFP4), row_codes=False, column_codes=True)(x)
        assert len(reads) == expected, "a row-wise Hadamard transform, or choice of scales, has no kernel of its own"
