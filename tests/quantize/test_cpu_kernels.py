"""The CPU kernels against the readable reference, bit for bit, on drawn specs, shapes, strides and values."""

import functools
import sys
from dataclasses import replace

import pytest
import torch
from golden import load_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp4train.kernels import cpu as kernels
from fp4train.kernels.cpu import Machine
from fp4train.quantize import Decoded, Hadamard, PairQuantizer, Quantized, QuantSpec, RandomKey, cpu, reference
from fp4train.quantize.cpu import CpuQuantizer

if (missing := kernels.unavailable()) is not None:
    pytest.skip(missing, allow_module_level=True)  # tests/house/test_skips.py fails if this must not be skipped

KEY = RandomKey(seed=0x123456789ABCDEF, step=7, layer=99, operand=3, row_offset=5, col_offset=24)
NVFP4 = QuantSpec()
TOKENS = QuantSpec(hadamard=Hadamard())
MXFP8 = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None)
FP8 = QuantSpec(element="e4m3", block=(None, None), scale="fp32", global_scale=None)
UE5M3 = QuantSpec(scale="ue5m3", global_scale=None)
OUTER = QuantSpec(global_scale="block")
STEP = Hadamard(signs="step")
BLOCKWISE = (OUTER, replace(OUTER, hadamard=Hadamard()), UE5M3, replace(UE5M3, hadamard=Hadamard()))
"""Without a pass for the amax."""
TURNED = replace(OUTER, rounding="stochastic", hadamard=STEP)
AGAIN = replace(TURNED, requantises=OUTER)
CHOSEN = QuantSpec(four_over_six="mse", global_bound=256)
EDEN = QuantSpec(rounding="eden", global_bound=256, guard=1.01, hadamard=Hadamard(size=128, signs="step"))
GROUPS = (CHOSEN, replace(CHOSEN, block=(16, 16)), EDEN, replace(EDEN, requantises=CHOSEN))
"""With scales that are chosen or corrected by what the elements become."""
ELEMENTS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")


def same_bits(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Equal to the bit, the sign of zero included; any NaN equals any NaN."""
    if ours is None or theirs is None:
        return ours is theirs
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    nan = ours.isnan()
    bits = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    a, b = (torch.where(nan, 0.0, t).view(bits) for t in (ours, theirs))
    return torch.equal(nan, theirs.isnan()) and torch.equal(a, b)


def assert_same_codes(ours: Quantized, theirs: Quantized) -> None:
    assert ours.shape == theirs.shape
    assert same_bits(ours.amax, theirs.amax)
    assert same_bits(ours.scales, theirs.scales)
    assert same_bits(ours.codes, theirs.codes)


def assert_same_values(ours: Decoded, theirs: Decoded) -> None:
    assert same_bits(ours.scale, theirs.scale)
    assert same_bits(ours.values, theirs.values)


def assert_equals_reference(x: Tensor, spec: QuantSpec, *machines: Machine, amax: Tensor | None = None) -> None:
    """The kernels of every machine; the reference, which takes most of the time, computes once."""
    assert cpu.why_not(spec, "cpu") is None
    expected = reference.quantize(x, spec, key=KEY, amax=amax)
    values, decoded = reference.quantize_dequantize(x, spec, key=KEY, amax=amax), expected.decoded()
    for machine in machines:
        quantizer = cpu.make(spec, machine)
        assert_same_codes(quantizer.codes(x, KEY, amax), expected)
        assert_same_values(quantizer.values(x, KEY, amax), values)
        assert_same_values(quantizer.decode(expected), decoded)


def every_machine(threads: int = 1) -> list[Machine]:
    return [Machine(instruction_set=isa, threads=threads) for isa in kernels.instruction_sets()]


@st.composite
def specs(draw: st.DrawFn) -> QuantSpec:
    rounding = draw(st.sampled_from(("nearest", "stochastic")))
    families = ("nvfp4", "ue5m3", "double block", "mx", "fp8 blocks", "fp8 whole", "four over six", "eden")
    family = draw(st.sampled_from(families))
    if family == "four over six":
        block = draw(st.sampled_from(((1, 16), (16, 16), (1, 32), (16, 32))))
        return QuantSpec(
            four_over_six=draw(st.sampled_from(("mae", "mse"))),
            block=block,
            global_scale=draw(st.sampled_from(("tensor", "row"))) if block[0] == 1 else "tensor",
            global_bound=draw(st.sampled_from((448.0, 256.0))),
            hadamard=draw(hadamards("nearest")) if block[0] == 1 else None,
            requantises=draw(st.sampled_from((None, None, CHOSEN, NVFP4))),
        )
    if family == "eden":
        size = draw(st.sampled_from((32, 64, 128)))
        return QuantSpec(
            rounding="eden",
            block=draw(st.sampled_from(((1, 16), (1, 32)))),
            global_scale=draw(st.sampled_from(("tensor", "row"))),
            global_bound=draw(st.sampled_from((448.0, 256.0))),
            guard=draw(st.sampled_from((1.0, 16 / 17, 1.01))),
            hadamard=Hadamard(size=size, signs=draw(st.sampled_from(("fixed", "step")))),
            requantises=draw(st.sampled_from((None, None, CHOSEN, NVFP4))),
        )
    if family == "ue5m3":
        block = draw(st.sampled_from(((1, 16), (16, 16), (1, 32), (2, 64), (1, 128))))
        return QuantSpec(
            element=draw(st.sampled_from(("e2m1", "e2m1", "e2m1", *ELEMENTS))),
            block=block,
            scale="ue5m3",
            global_scale=None,
            guard=draw(st.sampled_from((1.0, 16 / 17))),
            rounding=rounding,
            hadamard=draw(hadamards(rounding)) if block in ((1, 16), (1, 32)) else None,
            requantises=draw(st.sampled_from((None, None, UE5M3, NVFP4, FP8))),
        )
    if family == "double block":
        block = draw(st.sampled_from(((1, 16), (1, 16), (1, 32), (1, 64), (1, 128))))
        return QuantSpec(
            element=draw(st.sampled_from(("e2m1", "e2m1", "e2m1", *ELEMENTS))),
            block=block,
            global_scale="block",
            global_bound=draw(st.sampled_from((448.0, 256.0))),
            formula=draw(st.sampled_from(("te2.14", "te2.13"))),
            guard=draw(st.sampled_from((1.0, 16 / 17))),
            rounding=rounding,
            hadamard=draw(hadamards(rounding)) if block in ((1, 16), (1, 32)) else None,
            requantises=draw(
                st.sampled_from((None, None, OUTER, replace(OUTER, block=(1, 128), element="e4m3"), MXFP8))
            ),
        )
    if family == "nvfp4":
        block = draw(st.sampled_from(((1, 16), (16, 16), (1, 32), (2, 64))))
        return QuantSpec(
            element=draw(st.sampled_from(("e2m1", "e2m1", "e2m1", "e4m3"))),
            block=block,
            global_scale=draw(st.sampled_from(("tensor", "row"))) if block[0] == 1 else "tensor",
            global_bound=draw(st.sampled_from((448.0, 256.0))),
            formula=draw(st.sampled_from(("te2.14", "te2.13"))),
            guard=draw(st.sampled_from((1.0, 16 / 17))),
            rounding=rounding,
            hadamard=draw(hadamards(rounding)) if block in ((1, 16), (1, 32)) else None,
        )
    spec = QuantSpec(element=draw(st.sampled_from(ELEMENTS)), block=(1, 32), scale="e8m0", global_scale=None)
    if family == "mx":
        block = draw(st.sampled_from(((1, 32), (32, 32), (1, 16))))
        mode = draw(st.sampled_from(("floor", "rceil", "even", "ceil")))
        hadamard = draw(hadamards(rounding)) if block[0] == 1 else None
        return replace(spec, block=block, scale_rounding=mode, rounding=rounding, hadamard=hadamard)
    blocks = ((1, 128), (128, 128)) if family == "fp8 blocks" else ((None, None), (1, None))
    scale = draw(st.sampled_from(("fp32", "pow2")))
    return replace(spec, block=draw(st.sampled_from(blocks)), scale=scale, scale_rounding=None, rounding=rounding)


def hadamards(rounding: str) -> st.SearchStrategy[Hadamard | None]:
    drawn = (STEP,) if rounding == "stochastic" else ()
    larger = Hadamard(size=32, signs="random", seed=3), Hadamard(size=64), Hadamard(size=128)
    signed = Hadamard(signs="none"), Hadamard(signs="random", seed=3)
    return st.sampled_from((None, Hadamard(), *signed, *larger, *drawn))


LAYOUTS = ("rows", "transposed", "strided", "misaligned", "reversed blocks", "expanded")
VALUES = ("normal", "outliers", "wide range", "tiny", "huge", "zeros", "ties", "negative zeros")


def draw_values(kind: str, rows: int, cols: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    match kind:
        case "outliers":
            return x * torch.where(torch.rand(rows, cols, generator=generator) < 0.01, 1e4, 1.0)
        case "wide range":
            return x * 10.0 ** torch.randint(-12, 3, (rows, cols), generator=generator)
        case "tiny":
            return x * 10.0 ** torch.randint(-45, -33, (rows, cols), generator=generator)
        case "huge":
            return x.sign() * 10.0 ** torch.randint(30, 38, (rows, cols), generator=generator)
        case "zeros":
            return (
                x * (torch.rand(rows, 1, generator=generator) < 0.5) * (torch.rand(1, cols, generator=generator) < 0.5)
            )
        case "ties":  # halves and quarters of the E2M1 grid: ties to even, and thresholds of stochastic rounding
            return torch.randint(-24, 25, (rows, cols), generator=generator) / 4.0
        case "negative zeros":
            return torch.where(x > 0.5, x, -0.0)
    return x


def draw_layout(layout: str, x: Tensor) -> Tensor:
    rows, cols = x.shape
    match layout:
        case "transposed":
            return x.T.contiguous().T
        case "strided":
            return x.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3]
        case "misaligned":
            return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(rows, cols)
        case "reversed blocks":
            return x.repeat(1, 2)[:, cols:]
        case "expanded":
            return x[:1].expand(rows, cols)
    return x


@settings(max_examples=600, derandomize=True)
@given(
    spec=specs(),
    rows=st.sampled_from((1, 2, 15, 16, 17, 40, 130)),
    cols=st.sampled_from((1, 2, 16, 31, 32, 48, 130, 256, 257, 520)),
    dtype=st.sampled_from((torch.bfloat16, torch.bfloat16, torch.float32, torch.float16)),
    values=st.sampled_from(VALUES),
    layout=st.sampled_from(LAYOUTS),
    isa=st.sampled_from(kernels.instruction_sets()),
    threads=st.sampled_from((1, 2, 3)),
    seed=st.integers(0, 99),
)
def test_kernels_equal_the_reference(
    spec: QuantSpec,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    values: str,
    layout: str,
    isa: str,
    threads: int,
    seed: int,
) -> None:
    x = draw_layout(layout, draw_values(values, rows, cols, seed).to(dtype))
    assert_equals_reference(x, spec, Machine(instruction_set=isa, threads=threads))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", [NVFP4, TOKENS, replace(NVFP4, block=(16, 16)), MXFP8, FP8, *BLOCKWISE], ids=str)
def test_every_instruction_set_has_every_path(spec: QuantSpec, dtype: torch.dtype, rounding: str) -> None:
    """Larger than a tile in both directions, so that whole strips, tails and several threads' tiles all occur."""
    spec = replace(spec, rounding=rounding)
    x = draw_values("outliers", 140, 530, 1).to(dtype)
    for layout in ("rows", "transposed"):
        assert_equals_reference(draw_layout(layout, x), spec, *every_machine(threads=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "spec",
    [
        *(NVFP4, TOKENS, replace(NVFP4, global_scale="row"), replace(NVFP4, block=(16, 16)), MXFP8, FP8),
        *(*BLOCKWISE, AGAIN, *GROUPS),
    ],
    ids=str,
)
def test_what_is_not_finite_is_left_to_the_reference_and_not_hidden(spec: QuantSpec, value: float) -> None:
    x = draw_values("normal", 40, 300, 2).bfloat16()
    x[17, 201] = value
    assert_equals_reference(x, spec, kernels.HERE)
    assert_equals_reference(x.T, spec, kernels.HERE)
    assert not cpu.make(spec).values(x, KEY).values.isfinite().all()


@pytest.mark.parametrize("name", ["nvfp4_reference", "mx_reference", "fp8_reference"])
def test_kernels_equal_the_reference_on_the_golden_inputs(name: str) -> None:
    """The reference equals every byte of the golden outputs (tests/oracles), so the kernels do."""
    tensors, _ = load_golden(name)
    inputs = [tensor for key, tensor in tensors.items() if key.endswith(".x")]
    assert inputs
    for x in inputs:
        nvfp4 = (NVFP4, TOKENS, replace(NVFP4, block=(16, 16)), replace(NVFP4, global_scale="row"))
        for spec in (*nvfp4, MXFP8, FP8, *BLOCKWISE, TURNED, AGAIN, *GROUPS):
            assert_equals_reference(x, spec, *every_machine())
            assert_equals_reference(x.T, spec, *every_machine())


def test_an_amax_from_elsewhere_does_not_hide_an_infinity() -> None:
    x = draw_values("normal", 40, 300, 2)
    x[3, 299] = float("inf")
    for spec in (NVFP4, FP8, TOKENS):
        assert_equals_reference(x, spec, kernels.HERE, amax=torch.tensor(2.0))


def test_an_amax_from_elsewhere_is_used() -> None:
    x = draw_values("normal", 40, 300, 2)
    for amax in (0.0, 0.5, 40.0):
        assert_equals_reference(x, NVFP4, kernels.HERE, amax=torch.tensor(amax))
        assert_equals_reference(x, FP8, kernels.HERE, amax=torch.tensor(amax))
    for rows in (40, 1):
        assert_equals_reference(x[:rows], replace(NVFP4, global_scale="row"), kernels.HERE, amax=torch.rand(rows, 1))


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


def test_narrow_stochastic_rows_share_strips_and_keep_their_own_random_bits() -> None:
    for spec in (replace(spec, rounding="stochastic") for spec in (NVFP4, MXFP8, UE5M3, OUTER)):
        for cols in (32, 96, 128, 384, 544, 992):
            for rows in (48, 130, 7):
                x = draw_values("normal", rows, cols, cols).bfloat16()
                assert_equals_reference(x, spec, *every_machine(threads=2))


def test_large_outputs_that_bypass_the_caches_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "STREAM_BYTES", 0)
    for dtype in (torch.bfloat16, torch.float32):
        x = draw_values("normal", 130, 512, 5).to(dtype)
        for spec in (NVFP4, TOKENS, MXFP8, replace(FP8, block=(1, 128)), *BLOCKWISE):
            assert_equals_reference(x, spec, *every_machine(threads=2))
        for spec in (NVFP4, TOKENS, MXFP8, *BLOCKWISE, TURNED, AGAIN, *GROUPS):
            assert_equals_reference(x.T, spec, *every_machine(threads=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 140_000), (1, 400_000), (300, 8200)])
def test_tiles_cover_wide_and_long_tensors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw_values("normal", *shape, 6).to(dtype)
    for spec in (NVFP4, OUTER):
        assert_equals_reference(x, spec, *(Machine(threads=threads) for threads in (1, 2, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("large", [3.0, 1.5 * 2.0**-100, 1.75 * 2.0**126])
def test_every_number_beside_a_large_one(large: float, dtype: torch.dtype) -> None:
    """All finite BF16 numbers up to `large`, which is in every block and sets its scale: no exponent is lost."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite() & (numbers.float().abs() <= large)]
    numbers = torch.cat((numbers, numbers.new_zeros(-len(numbers) % 15))).view(-1, 15)
    x = torch.cat((numbers, numbers.new_full((len(numbers), 1), large)), dim=1).to(dtype)
    machines = every_machine(threads=2)
    for spec in (NVFP4, OUTER, UE5M3):
        assert_equals_reference(x, spec, *machines)
        assert_equals_reference(x.T.contiguous().T, spec, *machines)  # read across memory


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (QuantSpec(four_over_six="mse", block=(2, 16)), "four_over_six with block"),
        (QuantSpec(block=(1, 24)), "block="),
        (QuantSpec(hadamard=Hadamard(size=8)), "hadamard.size=8: the kernels transform 16, 32, 64, 128"),
        (QuantSpec(hadamard=Hadamard(size=64, signs="random")), "the kernels take 32 such signs"),
        (QuantSpec(hadamard=Hadamard(), block=(16, 16)), "hadamard with block"),
        (QuantSpec(requantises=QuantSpec(four_over_six="mse", block=(1, 64))), "requantises: four_over_six"),
        (QuantSpec(requantises=TOKENS), "none undoes the transform"),
        (replace(FP8, requantises=NVFP4), "an infinite scale depends on the dtype of x"),
    ],
)
def test_why_not_names_what_has_no_kernel(spec: QuantSpec, reason: str) -> None:
    assert reason in str(cpu.why_not(spec, "cpu"))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)])
def test_empty_tensors_are_left_to_the_reference(shape: tuple[int, int]) -> None:
    for spec in (NVFP4, TOKENS, MXFP8, FP8, UE5M3, OUTER, AGAIN, *GROUPS):
        assert_equals_reference(torch.ones(shape), spec, kernels.HERE)


def test_without_the_extension_the_reason_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_extension", lambda: "the C extension is not built; reinstall")
    assert "reinstall" in str(cpu.why_not(NVFP4, "cpu"))


@pytest.mark.parametrize("spec", [MXFP8, replace(MXFP8, block=(1, 64)), replace(MXFP8, block=(1, 128))], ids=str)
def test_a_transposed_single_token_is_padded_with_zero_codes(spec: QuantSpec) -> None:
    """torch calls one column contiguous whatever its strides are."""
    x = torch.randn(1, 384, generator=torch.Generator().manual_seed(0)).T
    found, wanted = CpuQuantizer(spec).codes(x), reference.quantize(x, spec)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)
