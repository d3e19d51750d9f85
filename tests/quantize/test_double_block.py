"""Double-block scales of TetraJet-v2: an E4M3 scale per 1×16 under a float32 scale per 1×128."""

from dataclasses import replace

import pytest
import torch
from double_block import double_block
from hypothesis import given, settings, strategies as st

from fp4train.backends.te.quantizers import family
from fp4train.kernels import cpu as kernels
from fp4train.precision import TetraJetV2
from fp4train.quantize import (
    Hadamard,
    QuantSpec,
    RandomKey,
    amax_extent,
    quantize,
    quantize_dequantize,
    quantizer,
    to_torch,
    why_not_cut,
)
from fp4train.quantize.triton import why_not_spec

SPEC = QuantSpec(global_scale="block")
KEY = RandomKey(seed=3, step=7, layer=11, operand=4)


def sample(rows: int, cols: int, seed: int) -> torch.Tensor:
    """Heavy-tailed, with zeros and columns of other magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) / torch.rand(
        rows, cols, generator=generator
    ).clamp(min=1e-3)
    x[:, ::7] *= torch.logspace(-6, 6, len(range(0, cols, 7)), base=4)
    x[0] = 0.0
    x[1, 16:32] = 0.0
    return x


@pytest.mark.parametrize(("rows", "cols"), [(5, 128), (4, 272), (3, 16), (2, 1024)])
def test_it_equals_an_independent_oracle_in_every_bit(rows: int, cols: int) -> None:
    x = sample(rows, cols, seed=cols)
    assert torch.equal(quantize(x, SPEC).dequantize(), torch.from_numpy(double_block(x.numpy())))


def test_the_authors_order_of_operations_moves_less_than_a_thousandth_of_the_values() -> None:
    x = sample(64, 1024, seed=1)
    ours = quantize(x, SPEC).dequantize()
    theirs = torch.from_numpy(double_block(x.numpy(), dividing=True))
    assert ((ours - theirs).abs() > 1e-5 * ours.abs()).float().mean() < 1e-3


def test_values_equal_decoded_codes_and_carry_no_scale_of_the_product() -> None:
    for rounding in ("nearest", "stochastic"):
        spec = replace(SPEC, rounding=rounding, hadamard=Hadamard())
        x = sample(9, 200, seed=2)
        values = quantize_dequantize(x, spec, key=KEY)
        coded = quantize(x, spec, key=KEY)
        assert torch.equal(values.values, coded.decoded().values)
        assert values.scale is None and values.values.dtype == torch.float32
        assert torch.equal(coded.dequantize(), values.values)
        assert coded.amax is not None and coded.amax.shape == (9, 2)


@settings(max_examples=30)
@given(st.integers(-30, 30), st.integers(0, 7), st.integers(0, 1 << 20))
def test_an_outer_block_is_quantised_by_itself(exponent: int, at: int, seed: int) -> None:
    """Scaling one outer block by a power of two scales its values and no others: what one scale per
    tensor cannot.
    """
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(seed))
    y = quantize(x, SPEC).dequantize()
    where = slice(128 * at, 128 * at + 128)
    x[:, where] *= 2.0**exponent
    y[:, where] *= 2.0**exponent
    assert torch.equal(quantize(x, SPEC).dequantize(), y)


def test_shards_of_whole_outer_blocks_need_no_amax_of_the_others() -> None:
    x = sample(8, 512, seed=5)
    whole = quantize(x, SPEC)
    parts = [quantize(part, SPEC) for part in x.split(128, dim=1)]
    assert torch.equal(torch.cat([part.dequantize() for part in parts], dim=1), whole.dequantize())
    assert amax_extent(SPEC) is None
    assert (
        why_not_cut(SPEC, 128, columns=True) is None and why_not_cut(SPEC, 3, columns=False) is None
    )
    assert "outer blocks of 128" in str(why_not_cut(SPEC, 64, columns=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_outer_block_and_no_other(bad: float) -> None:
    x = torch.ones(2, 384)
    x[0, 130] = bad
    y = quantize(x, SPEC).dequantize()
    assert y[0, 128:256].isnan().all() and y[1].isfinite().all()
    assert y[0, :128].isfinite().all() and y[0, 256:].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (16, 16)}, "spans rows"),
        ({"block": (1, 48)}, "does not divide an outer block of 128"),
        ({"four_over_six": "mse"}, "not per block"),
        ({"rounding": "eden", "hadamard": Hadamard(size=128)}, "not per block"),
        ({"scale": "e8m0"}, "use None"),
    ],
)
def test_specs_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantSpec(**{"global_scale": "block", **options})  # type: ignore[arg-type]


def test_it_has_kernels_no_counterpart_in_te_and_no_layout_of_torch() -> None:
    assert quantizer(SPEC, "cpu").kernel == "cpu" or kernels.unavailable()
    assert why_not_spec(SPEC) is None
    with pytest.raises(ValueError, match="for each tensor or each row"):
        family(SPEC)
    with pytest.raises(ValueError, match="one float32 scale per tensor or row"):
        to_torch(quantize(torch.ones(16, 128), SPEC))
    with pytest.raises(ValueError, match="no global scale to take it"):
        quantize(torch.ones(16, 128), SPEC, amax=torch.ones(1))


@pytest.mark.long
def test_aligned_operands_are_those_that_the_forward_pass_multiplied() -> None:
    """w of dgrad is, on average over its random bits and signs, w of fprop; unaligned it is the
    weight itself.
    """
    w = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    forward = quantize(w, SPEC).dequantize(torch.bfloat16).float()
    for aligned, mean_of in ((True, forward), (False, w)):
        spec = TetraJetV2(aligned=aligned, guard=16 / 17).table()["dgrad"].second
        assert spec is not None
        keys = [RandomKey(seed=1, step=step, layer=0, operand=3) for step in range(400)]
        mean = sum(quantize(w.T, spec, key=key).restore(key=key) for key in keys).T / len(keys)  # type: ignore[union-attr]
        other = w if aligned else forward
        assert (mean - mean_of).square().mean() < 0.1 * (mean - other).square().mean()
