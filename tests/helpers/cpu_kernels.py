"""Specs, tensors and comparisons for tests of the CPU kernels against the readable reference.

Modules of tests that import this are skipped where the kernels are not built.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp4train.kernels import cpu as kernels
from fp4train.kernels.cpu import Machine
from fp4train.quantize import Decoded, Hadamard, Quantized, QuantSpec, RandomKey, cpu, reference

if (missing := kernels.unavailable()) is not None:
    # tests/house/test_skips.py fails if this must not be skipped
    pytest.skip(missing, allow_module_level=True)

KEY = RandomKey(seed=0x123456789ABCDEF, step=7, layer=99, operand=3, row_offset=5, col_offset=24)
NVFP4 = QuantSpec()
TOKENS = QuantSpec(hadamard=Hadamard())
MXFP8 = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None)
FP8 = QuantSpec(element="e4m3", block=(None, None), scale="fp32", global_scale=None)
UE5M3 = QuantSpec(scale="ue5m3", global_scale=None)
OUTER = QuantSpec(global_scale="block")
TILES = QuantSpec(global_scale=(128, 128))
WHOLE_ROWS = QuantSpec(global_scale=(64, None))
MACRO = QuantSpec(block=(1, 32), scale="e8m0", global_scale="macro")
STEP = Hadamard(signs="step")
BLOCKWISE = (OUTER, replace(OUTER, hadamard=Hadamard()), UE5M3, replace(UE5M3, hadamard=Hadamard()))
"""Without a pass for the amax."""
TURNED = replace(OUTER, rounding="stochastic", hadamard=STEP)
AGAIN = replace(TURNED, requantises=OUTER)
CHOSEN = QuantSpec(four_over_six="mse", global_bound=256)
EDEN = QuantSpec(
    rounding="eden", global_bound=256, guard=1.01, hadamard=Hadamard(size=128, signs="step")
)
GROUPS = (CHOSEN, replace(CHOSEN, block=(16, 16)), EDEN, replace(EDEN, requantises=CHOSEN))
"""With scales that are chosen or corrected by what the elements become."""


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


def assert_equals_reference(
    x: Tensor, spec: QuantSpec, *machines: Machine, amax: Tensor | None = None
) -> None:
    """The kernels of every machine; the reference, which takes most of the time, computes once."""
    assert cpu.why_not(spec, "cpu") is None
    expected = reference.quantize(x, spec, key=KEY, amax=amax)
    values = reference.quantize_dequantize(x, spec, key=KEY, amax=amax)
    decoded = expected.decoded()
    for machine in machines:
        quantizer = cpu.make(spec, machine)
        assert_same_codes(quantizer.codes(x, KEY, amax), expected)
        assert_same_values(quantizer.values(x, KEY, amax), values)
        assert_same_values(quantizer.decode(expected), decoded)


def every_machine(threads: int = 1) -> list[Machine]:
    return [Machine(instruction_set=isa, threads=threads) for isa in kernels.instruction_sets()]


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
                x
                * (torch.rand(rows, 1, generator=generator) < 0.5)
                * (torch.rand(1, cols, generator=generator) < 0.5)
            )
        # halves and quarters of the E2M1 grid: ties to even, and thresholds of stochastic rounding
        case "ties":
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
