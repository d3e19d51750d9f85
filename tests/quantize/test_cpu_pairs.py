"""Both forms of a tensor, row-wise and column-wise, in one call of the CPU kernels."""

import functools
from dataclasses import replace

import pytest
from cpu_kernels import (
    BLOCKWISE,
    CHOSEN,
    EDEN,
    FP8,
    KEY,
    MACRO,
    MXFP8,
    NVFP4,
    OUTER,
    TILES,
    TOKENS,
    TURNED,
    UE5M3,
    WHOLE_ROWS,
    assert_same_codes,
    assert_same_values,
    draw_values,
)
from lengths import long_but
from limits import set_limit
from torch import Tensor

from fp4train.kernels import cpu as kernels
from fp4train.kernels.cpu import Machine
from fp4train.quantize import Decoded, Hadamard, PairQuantizer, Quantized, QuantSpec, reference
from fp4train.quantize.cpu import CpuQuantizer

ROW_SPECS = (
    OUTER,
    TILES,
    replace(TILES, block=(16, 16)),
    WHOLE_ROWS,
    MACRO,
    UE5M3,
    NVFP4,
    replace(NVFP4, rounding="stochastic"),
    MXFP8,
    FP8,
    replace(NVFP4, block=(16, 16)),
)
COLUMN_SPECS = (
    *BLOCKWISE,
    replace(TILES, rounding="stochastic"),
    WHOLE_ROWS,
    replace(MACRO, hadamard=Hadamard(size=32)),
    TURNED,
    EDEN,
    TOKENS,
    replace(TOKENS, rounding="stochastic"),
    MXFP8,
    replace(NVFP4, global_scale="row"),
    FP8,
)


KEYS = (KEY, KEY)
NO_AMAXES = (None, None)


@functools.cache
def both_forms(spec: QuantSpec, transposed: bool) -> tuple[Tensor, Decoded, Quantized]:
    """A tensor, and what the reference makes of it, or of its transpose."""
    x = draw_values("outliers", 140, 530, 3).bfloat16()
    read = x.T if transposed else x
    return (
        x,
        reference.quantize_dequantize(read, spec, key=KEY),
        reference.quantize(read, spec, key=KEY),
    )


@pytest.mark.parametrize(
    "one_read", [False, True], ids=["a read of x per form", "a read of each tile"]
)
@pytest.mark.parametrize("threads", long_but((17,), (1, 2, 17)))
@pytest.mark.parametrize("isa", kernels.instruction_sets())
def test_both_forms_of_one_call_are_those_of_two(
    isa: str, threads: int, one_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "bytes read once for both forms", 0 if one_read else 1 << 30)
    machine = Machine(instruction_set=isa, threads=threads)
    for row_spec in ROW_SPECS:
        x, row_values, row_codes = both_forms(row_spec, False)
        for column_spec in COLUMN_SPECS:
            _, column_values, column_codes = both_forms(column_spec, True)
            one_call = CpuQuantizer(row_spec, machine).with_columns
            column = CpuQuantizer(column_spec, machine)
            values, columns = one_call(column, x, KEYS, NO_AMAXES, (False, False))
            assert_same_values(values, row_values)
            assert_same_values(columns, column_values)
            ours, codes = one_call(column, x, KEYS, NO_AMAXES, (True, True))
            assert_same_codes(ours, row_codes)
            assert_same_codes(codes, column_codes)


@pytest.mark.parametrize("shape", [(64, 32), (4096, 384), (300, 512)], ids=str)
def test_both_forms_of_rows_that_the_kernels_join_or_transform_ahead_are_those_of_two(
    shape: tuple[int, int],
) -> None:
    x = draw_values("normal", *shape, 5).bfloat16()
    forms = [
        (NVFP4, TOKENS),
        (replace(NVFP4, rounding="stochastic"), replace(TOKENS, rounding="stochastic")),
    ]
    for row_spec, column_spec in [
        *forms,
        (TOKENS, NVFP4),
        (NVFP4, replace(NVFP4, block=(16, 16))),
        (CHOSEN, CHOSEN),
    ]:
        row = CpuQuantizer(row_spec)
        column = CpuQuantizer(column_spec)
        made = row.with_columns(column, x, KEYS, NO_AMAXES, (False, True))
        assert made is not None
        assert_same_values(made[0], row.values(x, KEY))
        assert_same_codes(made[1], column.codes(x.T, KEY))


def test_both_forms_of_a_tensor_that_one_call_cannot_serve() -> None:
    pair = PairQuantizer(
        CpuQuantizer(NVFP4), CpuQuantizer(TOKENS), row_codes=False, column_codes=True
    )
    x = draw_values("normal", 40, 300, 4).bfloat16()
    not_finite = x.clone()
    not_finite[0, 0] = float("nan")
    for y in (x, x.T.contiguous().T, not_finite, x[:0], x[:, :0]):
        values, codes = pair(y)
        assert_same_values(values, reference.quantize_dequantize(y, NVFP4))
        assert_same_codes(codes, reference.quantize(y.T, TOKENS))


@pytest.mark.parametrize("one_read", [False, True])
def test_both_forms_of_overlapping_rows_and_of_one_column(
    one_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose transpose is contiguous, too."""
    set_limit(monkeypatch, "bytes read once for both forms", 0 if one_read else 1 << 30)
    signal = draw_values("normal", 1, 400, 6).bfloat16()[0]
    for x in (signal.unfold(0, 64, 1), signal[:, None]):
        row = CpuQuantizer(NVFP4)
        column = CpuQuantizer(TOKENS)
        made = row.with_columns(column, x, (None, None), NO_AMAXES, (False, True))
        assert made is not None
        assert_same_values(made[0], reference.quantize_dequantize(x, NVFP4))
        assert_same_codes(made[1], reference.quantize(x.T, TOKENS))


def test_an_amax_that_is_converted_lives_as_long_as_the_call() -> None:
    x = draw_values("normal", 64, 64, 7).bfloat16()
    amax = x.abs().amax().double()
    expected = reference.quantize_dequantize(x, NVFP4, amax=amax.float())
    made = CpuQuantizer(NVFP4).job(x, None, amax, False)
    assert made is not None and made[2][1].dtype == amax.float().dtype
    for _ in range(20):
        assert_same_values(CpuQuantizer(NVFP4).values(x, None, amax), expected)
        both = CpuQuantizer(NVFP4).with_columns(
            CpuQuantizer(NVFP4), x, (None, None), (amax, amax), (False, False)
        )
        assert both is not None
        assert_same_values(both[0], expected)


def test_tiles_are_read_once_from_the_size_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw_values("normal", 40, 300, 4).bfloat16()
    for size, expected in ((x.nbytes + 1, False), (x.nbytes, True)):
        set_limit(monkeypatch, "bytes read once for both forms", size)
        for row, column, fits in (
            (NVFP4, TOKENS, True),
            (TOKENS, NVFP4, False),
            (CHOSEN, NVFP4, False),
        ):
            quantizer = CpuQuantizer(row)
            seen = []
            run = quantizer.run
            quantizer.run = lambda *words, run=run, seen=seen: seen.append(words[2]) or run(*words)
            PairQuantizer(quantizer, CpuQuantizer(column), row_codes=False, column_codes=True)(x)
            assert seen == [expected and fits], (
                "a row-wise transform, or choice of scales, has no kernel of its own"
            )
