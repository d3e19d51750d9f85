"""The CPU kernels at their edges: numbers that are not finite, tiles, strips, empty tensors, specs
without a kernel.
"""

from dataclasses import replace

import pytest
import torch
from cpu_kernels import (
    AGAIN,
    BLOCKWISE,
    FP8,
    GROUPS,
    KEY,
    MXFP8,
    NVFP4,
    OUTER,
    TOKENS,
    TURNED,
    UE5M3,
    assert_equals_reference,
    draw_values,
    every_machine,
)
from lengths import long_but

from fp4train.formats import ElementFormat
from fp4train.kernels import cpu as kernels
from fp4train.kernels.cpu import Machine
from fp4train.quantize import Hadamard, QuantSpec, cpu, reference, register
from fp4train.quantize.cpu import CpuQuantizer


@pytest.mark.parametrize("bias", [8, 12, 40])
@pytest.mark.parametrize("exponent", [-60, 110, 122, 126])
@pytest.mark.parametrize("scale_rounding", ["rceil", "floor", "even", "ceil"])
def test_powers_of_two_saturate_for_elements_far_below_one(
    scale_rounding: str, exponent: int, bias: int
) -> None:
    """The largest scale is 2^127: finite values that need a larger one become the largest
    element.
    """
    register(ElementFormat(name="tiny", exponent_bits=2, mantissa_bits=1, bias=bias))
    spec = QuantSpec(
        element="tiny",
        block=(1, 32),
        scale="e8m0",
        scale_rounding=scale_rounding,
        global_scale=None,
    )
    x = draw_values("normal", 6, 96, 4).clamp(-1.9, 1.9) * 2.0**exponent
    for form in (spec, replace(spec, global_scale="macro")):
        assert_equals_reference(x, form, *every_machine(threads=2))
    values = reference.quantize(x, spec).dequantize()
    assert values.isfinite().all()
    assert values.abs().max() <= spec.format.max * 2.0**127


@pytest.mark.parametrize("bias", [8, 40])
@pytest.mark.parametrize("exponent", [-149, -130, 124])
@pytest.mark.parametrize("formula", ["te2.14", "te2.13"])
def test_scales_of_tensors_at_the_ends_of_float32_are_those_of_the_reference(
    formula: str, exponent: int, bias: int
) -> None:
    """The factor of the tensor is the largest number, or has no inverse; blocks of zeros lie
    beside.
    """
    register(ElementFormat(name="tiny", exponent_bits=2, mantissa_bits=1, bias=bias))
    x = (draw_values("normal", 6, 96, 4).clamp(-1.9, 1.9).double() * 2.0**exponent).float()
    x[1, :48] = 0.0
    for scale in ("e4m3", "ue5m3"):
        for level in ("tensor", "row", (128, 128)):
            spec = QuantSpec(element="tiny", scale=scale, global_scale=level, formula=formula)
            assert_equals_reference(x, spec, *every_machine(threads=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "spec",
    [
        NVFP4,
        TOKENS,
        replace(NVFP4, global_scale="row"),
        replace(NVFP4, block=(16, 16)),
        MXFP8,
        FP8,
        *BLOCKWISE,
        AGAIN,
        *GROUPS,
    ],
    ids=str,
)
def test_what_is_not_finite_is_left_to_the_reference_and_not_hidden(
    spec: QuantSpec, value: float
) -> None:
    x = draw_values("normal", 40, 300, 2).bfloat16()
    x[17, 201] = value
    assert_equals_reference(x, spec, kernels.HERE)
    assert_equals_reference(x.T, spec, kernels.HERE)
    assert not cpu.make(spec).values(x, KEY).values.isfinite().all()


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
        assert_equals_reference(
            x[:rows], replace(NVFP4, global_scale="row"), kernels.HERE, amax=torch.rand(rows, 1)
        )


@pytest.mark.long
def test_narrow_stochastic_rows_share_strips_and_keep_their_own_random_bits() -> None:
    for spec in (replace(spec, rounding="stochastic") for spec in (NVFP4, MXFP8, UE5M3, OUTER)):
        for cols in (32, 96, 128, 384, 544, 992):
            for rows in (48, 130, 7):
                x = draw_values("normal", rows, cols, cols).bfloat16()
                assert_equals_reference(x, spec, *every_machine(threads=2))


@pytest.mark.long
def test_large_outputs_that_bypass_the_caches_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "STREAM_BYTES", 0)
    for dtype in (torch.bfloat16, torch.float32):
        x = draw_values("normal", 130, 512, 5).to(dtype)
        for spec in (NVFP4, TOKENS, MXFP8, replace(FP8, block=(1, 128)), *BLOCKWISE):
            assert_equals_reference(x, spec, *every_machine(threads=2))
        for spec in (NVFP4, TOKENS, MXFP8, *BLOCKWISE, TURNED, AGAIN, *GROUPS):
            assert_equals_reference(x.T, spec, *every_machine(threads=2))


@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("shape", [(3, 140_000), (1, 400_000), (300, 8200)])
def test_tiles_cover_wide_and_long_tensors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw_values("normal", *shape, 6).to(dtype)
    for spec in (NVFP4, OUTER):
        assert_equals_reference(x, spec, *(Machine(threads=threads) for threads in (1, 2, 3)))


@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("large", [3.0, 1.5 * 2.0**-100, 1.75 * 2.0**126])
def test_every_number_beside_a_large_one(large: float, dtype: torch.dtype) -> None:
    """All finite BF16 numbers up to `large`, which is in every block and sets its scale: no
    exponent is lost.
    """
    numbers = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    )
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
        (
            QuantSpec(hadamard=Hadamard(size=8)),
            "hadamard.size=8: the kernels transform 16, 32, 64, 128",
        ),
        (QuantSpec(hadamard=Hadamard(size=64, signs="random")), "the kernels take 32 such signs"),
        (QuantSpec(hadamard=Hadamard(), block=(16, 16)), "hadamard with block"),
        (
            QuantSpec(requantises=QuantSpec(four_over_six="mse", block=(1, 64))),
            "requantises: four_over_six",
        ),
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


def test_without_the_extension_the_reason_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_extension", lambda: "the C extension is not built; reinstall")
    assert "reinstall" in str(cpu.why_not(NVFP4, "cpu"))


@pytest.mark.parametrize(
    "spec", [MXFP8, replace(MXFP8, block=(1, 64)), replace(MXFP8, block=(1, 128))], ids=str
)
def test_a_transposed_single_token_is_padded_with_zero_codes(spec: QuantSpec) -> None:
    """torch calls one column contiguous whatever its strides are."""
    x = torch.randn(1, 384, generator=torch.Generator().manual_seed(0)).T
    found = CpuQuantizer(spec).codes(x)
    wanted = reference.quantize(x, spec)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)
