"""Hadamard transforms and their alternatives: orthogonal, invertible, cancelling in a product,
spreading outliers.
"""

import pytest
import torch
from error_metrics import measure

from fp4train.quantize import (
    Hadamard,
    QuantSpec,
    Rotation,
    apply_hadamard,
    hadamard_signs,
    quantize,
    quantize_dequantize,
    undo_transform,
)
from fp4train.quantize.transform import SIZES, transform

TRANSFORMS = [
    *(Hadamard(size=size, signs=signs) for size in SIZES for signs in ("fixed", "none", "random")),
    Hadamard(signs="random", seed=7),
    Rotation(),
    Rotation(size=48),
    Rotation(kind="orthogonal", size=16, seed=3),
]
transforms = pytest.mark.parametrize("spec", TRANSFORMS, ids=str)


def sylvester(size: int) -> torch.Tensor:
    h = torch.ones(1, 1)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


@pytest.mark.parametrize("size", SIZES)
def test_the_butterfly_is_the_signed_sylvester_matrix(size: int) -> None:
    spec = Hadamard(size=size)
    x = torch.randn(5, 3 * size, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix = (
        torch.tensor(hadamard_signs(spec), dtype=torch.float64).diag()
        @ sylvester(size).double()
        / size**0.5
    )
    exact = (x.double().reshape(-1, size) @ matrix).reshape(x.shape)
    torch.testing.assert_close(apply_hadamard(x, spec).double(), exact, rtol=2**-8, atol=1e-6)


def test_fixed_signs_are_te_s_and_random_ones_depend_on_the_seed_only() -> None:
    assert hadamard_signs(Hadamard()) == [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    random = [hadamard_signs(Hadamard(size=128, signs="random", seed=seed)) for seed in (1, 1, 2)]
    assert random[0] == random[1] != random[2]
    assert set(random[0]) == {1, -1}
    assert abs(sum(random[0])) < 40


@transforms
def test_it_is_orthogonal_and_the_inverse_brings_x_back(spec: Hadamard | Rotation) -> None:
    x = (
        torch.randn(16, 3 * spec.size, generator=torch.Generator().manual_seed(1))
        .bfloat16()
        .float()
    )
    y = transform(x, spec)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float().norm(), x.norm(), rtol=1e-2, atol=0)
    torch.testing.assert_close(undo_transform(y, spec), x, rtol=0, atol=0.05)


@transforms
def test_it_cancels_in_a_product_even_when_the_contraction_fills_no_group(
    spec: Hadamard | Rotation,
) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 40, generator=generator)
    w = torch.randn(6, 40, generator=generator)
    quant = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None, hadamard=spec)
    a, b = (quantize_dequantize(t, quant, kernel="reference") for t in (x, w))
    assert a.values.shape[1] == -(-40 // spec.size) * spec.size
    error = (a.values.float() @ b.values.float().T - x @ w.T).norm() / (x @ w.T).norm()
    assert error < 0.08


@pytest.mark.parametrize("spec", [Hadamard(), Rotation(), Rotation(kind="orthogonal")], ids=str)
def test_it_spreads_an_outlier_so_that_its_neighbours_do_not_underflow(
    spec: Hadamard | Rotation,
) -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    x[:, 3] = 30.0
    assert measure(x, QuantSpec()).underflow > 0.7
    # Only the Hadamard matrix has entries of equal magnitude: the others spread an outlier
    # unevenly.
    assert measure(x, QuantSpec(hadamard=spec)).underflow < (
        0.05 if isinstance(spec, Hadamard) else 0.25
    )


@pytest.mark.parametrize("cols", [16, 40, 100, 128])
@pytest.mark.parametrize("size", [4, 16, 32, 128])
def test_the_fused_path_equals_the_codes_for_any_width(size: int, cols: int) -> None:
    x = torch.randn(9, cols, generator=torch.Generator().manual_seed(4))
    spec = QuantSpec(hadamard=Hadamard(size=size))
    q = quantize(x, spec, kernel="reference")
    assert torch.equal(q.decoded().values, quantize_dequantize(x, spec, kernel="reference").values)
    assert q.restore().shape == x.shape
    assert (q.restore() - x).norm() < 0.15 * x.norm()
