"""The sizes of known differences that the ledger gives, computed on the samples that it names."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from configured import recipe_named
from torch import Tensor

from fp4train.lab.ledger import ledger
from fp4train.quantize import QuantSpec, quantize, quantize_dequantize

NORMAL = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))


def spec_of(recipe: str, role: str) -> QuantSpec:
    """How fprop's operand `role`, x or w, is quantised."""
    operands = recipe_named(recipe).operands()["fprop"]
    spec = operands.first if role == "x" else operands.second
    assert isinstance(spec, QuantSpec)
    return spec


def values(x: Tensor, spec: QuantSpec) -> Tensor:
    return quantize_dequantize(x, spec).tensor(torch.float32)


def unequal(a: Tensor, b: Tensor) -> float:
    """Percent of the elements."""
    return 100 * (a != b).double().mean().item()


def by_blocks_of_32_rows() -> float:
    spec = spec_of("amd_mxfp4", "w")
    return unequal(values(NORMAL, spec), values(NORMAL, replace(spec, block=(32, 32))))


def by_halves_away_from_zero() -> float:
    """Percent of the codes: of |x| / scale halfway between two codes, the lower of which is even."""
    x, spec = NORMAL.bfloat16().float(), spec_of("amd_mxfp4", "x")
    scales = quantize(x, spec).block_scales().repeat_interleave(32, dim=1)
    halves = torch.tensor([0.25, 1.25, 2.5, 5.0])
    return 100 * torch.isin((x / scales).abs(), halves).double().mean().item()


def by_a_rounding_before(recipe: str, role: str, x: Tensor) -> float:
    """Percent of the codes that change if x is rounded to BF16 first."""
    spec = spec_of(recipe, role)
    codes = quantize(x, spec).element_codes
    return unequal(codes, quantize(x.bfloat16().float(), spec).element_codes)


def by_a_rounding_after(recipe: str, role: str) -> float:
    """Percent of the norm of the values that their rounding to BF16 moves."""
    exact = values(NORMAL, spec_of(recipe, role))
    return 100 * ((exact - exact.bfloat16().float()).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("recipe", "sentence", "size"),
    [
        ("amd_mxfp4", "14 % of the values of N(0, 1)", by_blocks_of_32_rows),
        ("amd_mxfp4", "0.7 % of the codes of N(0, 1) in BF16", by_halves_away_from_zero),
        (
            "w4a16_qat",
            "0.5 % of the codes of N(0, 0.02)",
            lambda: by_a_rounding_before("w4a16_qat", "w", 0.02 * NORMAL),
        ),
        ("w4a16_qat", "0.2 % of the norm", lambda: by_a_rounding_after("w4a16_qat", "w")),
        (
            "ue5m3_fp4",
            "in BF16 by 0.2 % of the norm",
            lambda: by_a_rounding_after("ue5m3_fp4", "x"),
        ),
        (
            "averis",
            "1 % of the codes of N(0, 1)",
            lambda: by_a_rounding_before("averis", "x", NORMAL - NORMAL.mean(0)),
        ),
    ],
)
def test_a_size_in_the_ledger_is_that_of_the_sample(
    recipe: str, sentence: str, size: Callable[[], float]
) -> None:
    (entry,) = (entry for entry in ledger() if entry.recipe == recipe)
    assert sentence in entry.differs
    printed = sentence.split(" %")[0].split()[-1]
    digits = len(printed.partition(".")[2])
    assert f"{size():.{digits}f}" == printed
