"""Published mean squared errors on N(0, 1), and where stochastic rounding is unbiased. All
seeded.
"""

from dataclasses import replace

import pytest
import torch

from fp4train.backends import EMULATE
from fp4train.precision import QuartetII
from fp4train.quantize import Hadamard, Quantized, QuantSpec, RandomKey, quantize

KEY = RandomKey(seed=11, step=0, layer=0, operand=0)
GUARD = 16 / 17
THREE_QUARTERS = QuantSpec(
    rounding="stochastic",
    block=(1, 32),
    scale="e8m0",
    scale_rounding="floor",
    global_scale=None,
    guard=0.75,
)
"""Elements of arXiv 2502.20586."""


@pytest.mark.parametrize(
    ("published", "spec"),
    [
        (9.0, QuantSpec()),
        (9.0, QuantSpec(formula="te2.13")),
        (9.0, QuantSpec(hadamard=Hadamard())),
        (7.6, QuantSpec(four_over_six="mse", global_bound=256)),
        (7.8, QuantSpec(four_over_six="mae", global_bound=256)),
        (12.4, QuantSpec(block=(16, 16))),
        (18.8, QuantSpec(rounding="stochastic")),
        (23.5, QuantSpec(rounding="stochastic", guard=GUARD)),
    ],
    ids=str,
)
def test_mean_squared_error_on_a_normal_tensor_is_the_published_one(
    published: float, spec: QuantSpec
) -> None:
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    y = quantize(x, spec, key=KEY, kernel="reference").restore()
    assert (y - x).square().mean().item() * 1e3 == pytest.approx(published, rel=0.01)


def mean_error(x: torch.Tensor, spec: QuantSpec, draws: int) -> tuple[float, float]:
    """(mean, standard error) of sign(x)*(y - x): the shrinkage or growth of magnitudes, over
    independent draws.
    """
    means = torch.stack(
        [
            (
                (
                    quantize(
                        x,
                        spec,
                        key=RandomKey(seed=1, step=step, layer=2, operand=3),
                        kernel="reference",
                    ).dequantize()
                    - x
                )
                * x.sign()
            ).mean()
            for step in range(draws)
        ]
    )
    return means.mean().item(), means.std().item() / draws**0.5


def clipped(x: torch.Tensor, q: Quantized) -> torch.Tensor:
    largest = q.spec.format.max * q.block_scales().repeat_interleave(q.spec.block[1], dim=1)
    scale = q.global_decode()
    return x.abs() > (largest if scale is None else largest * scale) * (1 + 1e-6)


def test_stochastic_rounding_is_biased_exactly_where_a_scale_rounded_down_clips() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    spec = QuantSpec(rounding="stochastic")
    share = clipped(x, quantize(x, spec, key=KEY, kernel="reference")).float().mean().item()
    assert 0.01 < share < 0.05
    mean, error = mean_error(x, spec, 64)
    assert mean < -5 * error, "clipping shrinks magnitudes"
    largest = quantize(x, spec, key=KEY, kernel="reference")
    assert clipped(x, largest).reshape(-1, 16).sum(dim=1).max() <= 3, "only the largest of a block"


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(rounding="stochastic", guard=GUARD),
        QuantSpec(rounding="stochastic", block=(1, 32), scale="e8m0", global_scale=None),
        QuantSpec(
            rounding="stochastic", element="e4m3", block=(1, 32), scale="e8m0", global_scale=None
        ),
        THREE_QUARTERS,
        replace(THREE_QUARTERS, scale_rounding="even"),
    ],
    ids=["guarded nvfp4", "mxfp4 rceil", "mxfp8 rceil", "mxfp4 floor · 3/4", "mxfp4 even · 3/4"],
)
def test_scales_that_never_clip_make_stochastic_rounding_unbiased(spec: QuantSpec) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    assert not clipped(x, quantize(x, spec, key=KEY, kernel="reference")).any()
    mean, error = mean_error(x, spec, 64)
    # 2^-17 of a quantum (at most a third of 6) is the resolution of 16 random bits.
    assert abs(mean) < 4 * error + 2.0**-17 * x.abs().max().item() / 3


def test_scales_rounded_down_shrink_magnitudes_without_the_three_quarters() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    mean, error = mean_error(x, replace(THREE_QUARTERS, guard=1.0), 64)
    assert mean < -20 * error


def test_a_product_of_operands_by_three_quarters_is_unbiased() -> None:
    """The recipe of arXiv 2502.20586: both operands turned with the same fresh signs; its mean over
    256 steps lies where that of independent errors does.
    """
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(16, 128, generator=generator), torch.randn(16, 128, generator=generator)
    a[:, 3] *= 20
    spec = replace(THREE_QUARTERS, hadamard=Hadamard(size=64, signs="step"))
    products = []
    for step in range(256):
        key = RandomKey(seed=7, step=step, layer=1, operand=2)
        first, second = quantize(a, spec, key=key), quantize(b, spec, key=key.replace(operand=3))
        products.append(EMULATE.product(first.decoded(), second.decoded(), out_dtype=torch.float32))
    draws = torch.stack(products)
    z = (draws.mean(dim=0) - a @ b.T) / (draws.std(dim=0) / len(draws) ** 0.5)
    assert z.abs().max() < 4.5
    assert abs(z.mean().item()) < 4 / z.numel() ** 0.5
    assert z.square().mean().item() == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("spec", [QuantSpec(rounding="stochastic", guard=GUARD), THREE_QUARTERS])
def test_each_element_is_unbiased_on_its_own(spec: QuantSpec) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    draws = torch.stack(
        [
            quantize(
                x, spec, key=RandomKey(seed=3, step=step, layer=0, operand=0), kernel="reference"
            ).dequantize()
            for step in range(256)
        ]
    )
    # Elements close to the grid are almost always rounded to one neighbour, so their sample
    # deviation is unreliable.
    upper = (draws == draws.amax(dim=0)).float().mean(dim=0)
    mixed = (upper > 0.05) & (upper < 0.95)
    assert mixed.float().mean() > 0.7
    z = ((draws.mean(dim=0) - x) / (draws.std(dim=0) / 256**0.5))[mixed]
    assert z.abs().max() < 5.0
    assert z.square().mean().item() == pytest.approx(1.0, abs=0.12)


def test_the_guard_costs_range_only_where_scales_are_normal_numbers() -> None:
    """E4M3's subnormal scales (blocks 10^5 below the tensor's amax) round by more than 1/16:
    clipping remains there.
    """
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    x[:32] *= 2e-5
    q = quantize(x, QuantSpec(rounding="stochastic", guard=GUARD), key=KEY, kernel="reference")
    over = clipped(x, q)
    assert over[:32].any()
    assert not over[32:].any()


EDEN = QuartetII().table()["wgrad"].first


def test_ms_eden_has_the_published_error_half_of_stochastic_rounding() -> None:
    """9.8e-3: notebooks/unbiasedness.ipynb of the authors, on rows of N(0, 1) over eight
    binades.
    """
    assert EDEN is not None
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(0, 8, 2048, base=2)[:, None]

    def error(y: torch.Tensor) -> float:
        return ((y - x).square().sum(dim=1) / x.square().sum(dim=1)).mean().item()

    found = error(quantize(x, EDEN, key=KEY).restore(key=KEY))
    assert found * 1e3 == pytest.approx(9.8, rel=0.01)
    stochastic = error(quantize(x, QuantSpec(rounding="stochastic"), key=KEY).restore())
    assert found < stochastic / 1.9


def eden_mean(x: torch.Tensor, spec: QuantSpec, draws: int) -> tuple[torch.Tensor, float]:
    """(mean over transforms, mean squared error of one draw)."""
    total = torch.zeros_like(x)
    error = 0.0
    for step in range(draws):
        key = RandomKey(seed=5, step=step, layer=1, operand=3)
        y = quantize(x, spec, key=key).restore(key=key)
        total += y
        error += (y - x).square().mean().item() / draws
    return total / draws, error


@pytest.mark.parametrize("outliers", [pytest.param(False, marks=pytest.mark.long), True])
def test_ms_eden_is_unbiased_over_transforms_and_without_its_correction_is_not(
    outliers: bool,
) -> None:
    assert EDEN is not None
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    if outliers:
        x[:, ::64] *= 20
    draws = 400
    mean, error = eden_mean(x, EDEN, draws)
    # Independent unbiased draws: the error of their mean is 1/draws of one's. Random signs are not
    # a uniformly random rotation: where two outliers dominate a group of 128, 7e-5 of the energy
    # stays as bias.
    floor = error / draws
    bias = 2e-4 * x.square().mean().item() if outliers else 0.3 * floor
    assert (mean - x).square().mean().item() < floor + bias
    along = ((mean * x).sum() / x.square().sum()).item() - 1
    assert abs(along) < 4 * (floor / x.square().sum().item()) ** 0.5 + 2e-4
    nearest = replace(EDEN, rounding="nearest", guard=1.0, hadamard=Hadamard(size=128))
    shrunk = quantize(x, nearest).restore()
    assert abs(((shrunk * x).sum() / x.square().sum()).item() - 1) > 2e-3, (
        "rounding to nearest shrinks"
    )


def test_a_product_of_ms_eden_operands_is_unbiased() -> None:
    """dw of Quartet II: both operands turned alike, so that the transform cancels, and
    independently rounded.
    """
    assert EDEN is not None
    generator = torch.Generator().manual_seed(4)
    dy = torch.randn(32, 256, generator=generator)
    x = torch.randn(48, 256, generator=generator)
    exact = dy @ x.T
    total = torch.zeros(32, 48)
    single = 0.0
    draws = 300
    for step in range(draws):
        keys = [RandomKey(seed=9, step=step, layer=2, operand=operand) for operand in (4, 5)]
        a, b = (
            quantize(t, EDEN, key=key).dequantize() for t, key in zip((dy, x), keys, strict=True)
        )
        product = a @ b.T
        total += product
        single += (product - exact).square().mean().item() / draws
    assert (total / draws - exact).square().mean().item() < 1.3 * single / draws
