"""How tensor cores sum products: bit for bit what other people's models of the GPUs compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mmaemu.model.chain import chain_gemm
from mmaemu.model.plan import execute_plan, make_plan
from torch import Tensor

from fp4train.backends import (
    ADA_FP8,
    BLACKWELL_FP4,
    BLACKWELL_FP8,
    HOPPER_FP8,
    TensorCore,
    tensor_cores,
)
from fp4train.formats import E2M1, E4M3, pack_fp4
from fp4train.quantize import Quantized, QuantSpec, quantizer

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "tensor_cores.json").read_text())
PRESETS = {"hopper": HOPPER_FP8, "ada": ADA_FP8}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def one_scale(codes: Tensor, element: str, scale: float = 1.0) -> Quantized:
    spec = QuantSpec(element=element, block=(None, None), scale="fp32", global_scale=None)
    return Quantized(spec, tuple(codes.shape), codes, torch.full((1, 1), scale), None)  # type: ignore[arg-type]


def finite_codes(
    kind: str, element: str, rows: int, columns: int, generator: torch.Generator
) -> Tensor:
    """Codes of all exponents, near zero, or of sums that cancel."""
    if kind == "all exponents":
        codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
        finite = codes.view(FLOAT8[element]).float().isfinite()
        return torch.where(finite, codes, torch.zeros_like(codes))
    if kind == "subnormal":
        sign = 128 * torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.uint8)
        return torch.randint(0, 10, (rows, columns), generator=generator, dtype=torch.uint8) | sign
    x = 30 * torch.randn(rows, columns, generator=generator)
    x[:, 1::2] = -x[:, : x[:, 1::2].shape[1] * 2 : 2]
    return x.to(FLOAT8[element]).view(torch.uint8)


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "elements", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")]
)
def test_fp8_sums_of_hopper_and_ada_are_those_of_mmaemu(
    preset: str, fast: bool, elements: tuple[str, str]
) -> None:
    """Over K that end within a block and within a chain; mmaemu 0.1.0 was compared with an H100 and
    an RTX 4060.
    """
    generator = torch.Generator().manual_seed(0)
    for kind in ("all exponents", "subnormal", "cancelling"):
        for rows, columns, depth in ((5, 7, 48), (3, 9, 272), (2, 5, 1024)):
            a = finite_codes(kind, elements[0], rows, depth, generator)
            b = finite_codes(kind, elements[1], columns, depth, generator)
            options: dict[str, Any] = {"fmt_a": elements[0], "fmt_b": elements[1]}

            def chain(x: Tensor, y: Tensor, options: dict[str, Any] = options) -> Tensor:
                summed: Tensor = chain_gemm(x, y, **options, preset=preset)
                return summed

            theirs = execute_plan(
                make_plan(depth, fast=fast, preset=preset), a, b, **options, chain_fn=chain
            )
            operands = one_scale(a, elements[0]), one_scale(b, elements[1])
            assert same_bits(tensor_cores.product(*operands, PRESETS[preset], fast=fast), theirs)


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("fast", [True, False])
def test_sums_over_parts_of_k_are_those_of_mmaemu(fast: bool, splits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (finite_codes("cancelling", "e4m3", 4, 1040, generator) for _ in "ab")
    options: dict[str, Any] = {"fmt_a": "e4m3", "fmt_b": "e4m3"}
    plan = make_plan(1040, fast=fast, S=splits, scheme="contiguous", preset="hopper")
    theirs = execute_plan(
        plan, a, b, **options, chain_fn=lambda x, y: chain_gemm(x, y, **options, preset="hopper")
    )
    ours = tensor_cores.product(
        one_scale(a, "e4m3"), one_scale(b, "e4m3"), HOPPER_FP8, fast=fast, splits=splits
    )
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: "·".join(vector["elements"]))
def test_block_scaled_sums_of_blackwell_are_those_of_mma_sim(vector: dict[str, Any]) -> None:
    operands = []
    for name, element in zip("ab", vector["elements"], strict=True):
        rows = vector["rows"]
        codes, scales = (
            torch.tensor(list(bytes.fromhex(vector[key])), dtype=torch.uint8).view(rows, -1)
            for key in (name, f"{name}_scales")
        )
        if element == "e2m1":
            spec = QuantSpec()
            packed = pack_fp4(codes)
        else:
            spec = QuantSpec(element=element, block=(1, 32), scale="e8m0", global_scale=None)
            packed = codes
        operands.append(Quantized(spec, (rows, codes.shape[1]), packed, scales, None))
    unit = BLACKWELL_FP4 if vector["elements"][0] == "e2m1" else BLACKWELL_FP8
    sums = tensor_cores.product(operands[0], operands[1], unit).diagonal()
    assert sums.view(torch.int32).tolist() == vector["sums"]


def test_products_of_nvfp4_equal_the_exact_ones_in_bf16_and_fast_ones_of_hopper_do_not() -> None:
    """So a check on a Blackwell GPU may ask for equal bits of emulated products, and one on Hopper
    may not.
    """
    generator = torch.Generator().manual_seed(2)
    common = 0.5 * torch.randn(4096, generator=generator)
    x, w = ((common + torch.randn(24, 4096, generator=generator)).bfloat16() for _ in "xw")

    def differing(spec: QuantSpec, unit: TensorCore) -> int:
        a, b = (quantizer(spec, "cpu").codes(tensor) for tensor in (x, w))
        summed = tensor_cores.product(a, b, unit, fast=True).bfloat16()
        return int((summed != tensor_cores.exact_product(a, b).bfloat16()).sum())

    assert differing(QuantSpec(), BLACKWELL_FP4) == 0
    fp8 = QuantSpec(element="e4m3", block=(None, None), scale="fp32", global_scale=None)
    assert differing(fp8, HOPPER_FP8) > 24 * 24 // 2


def test_scales_of_tensors_multiply_the_sum_in_float32() -> None:
    codes = torch.tensor([[0x38, 0x3C]], dtype=torch.uint8)  # 1 and 1.5
    scaled = tensor_cores.product(
        one_scale(codes, "e4m3", 0.1), one_scale(codes, "e4m3", 3.0), HOPPER_FP8
    )
    assert scaled.item() == torch.tensor(3.25) * (torch.tensor(0.1) * torch.tensor(3.0))


@pytest.mark.parametrize("height", [1, 128])
@pytest.mark.parametrize("depth", [384, 320])
def test_hoppers_chains_of_a_block_sum_bare_codes_and_are_scaled_in_float32(
    height: int, depth: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (finite_codes("cancelling", "e4m3", rows, depth, generator) for rows in (6, 5))
    a_scales = torch.rand(6, 3, generator=generator) + 0.1
    b_scales = torch.rand(5 if height == 1 else 1, 3, generator=generator) + 0.1

    def blocks(codes: Tensor, scales: Tensor, height: int) -> Quantized:
        spec = QuantSpec(element="e4m3", block=(height, 128), scale="fp32", global_scale=None)
        return Quantized(spec, tuple(codes.shape), codes, scales, None)  # type: ignore[arg-type]

    expected = torch.zeros(6, 5)
    for number, start in enumerate(range(0, depth, 128)):
        columns = slice(start, start + 128)
        chain = tensor_cores.product(
            one_scale(a[:, columns].contiguous(), "e4m3"),
            one_scale(b[:, columns].contiguous(), "e4m3"),
            HOPPER_FP8,
        )
        scales = a_scales[:, number, None] * b_scales[None, :, number].expand(1, 5)
        expected = expected + chain * scales
    left = blocks(a, a_scales, 1)
    right = blocks(b, b_scales, height)
    for fast in (True, False):  # blocks have one way alone
        assert same_bits(tensor_cores.product(left, right, HOPPER_FP8, fast=fast), expected)
    exact = tensor_cores.exact_product(left, right)
    magnitude = tensor_cores.exact_product(
        blocks(a & 0x7F, a_scales, 1), blocks(b & 0x7F, b_scales, height)
    )
    share = float(((expected - exact).abs() / magnitude).max())
    assert tensor_cores.error_share(left, right, HOPPER_FP8) == pytest.approx(share, rel=1e-2)


def test_a_unit_refuses_codes_that_it_does_not_multiply() -> None:
    codes = quantizer(QuantSpec(), "cpu").codes(torch.ones(16, 64))
    with pytest.raises(ValueError, match="Hopper, FP8: the unit does not multiply E2M1"):
        tensor_cores.product(codes, codes, HOPPER_FP8)
    assert (
        tensor_cores.unit_for((9, 0), E2M1) is None and tensor_cores.unit_for((12, 0), E4M3) is None
    )
