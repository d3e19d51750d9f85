"""UE5M3 in both codebooks as gfloat rounds it, and under a tensor scale as arXiv 2609.02846's package
does.
"""

import pytest
import torch
from golden import REDUCED
from safetensors.torch import load_file

from fp4train.formats import decode, get_scale_format
from fp4train.quantize import QuantSpec, quantize

TENSORS = load_file(REDUCED / "ue5m3.safetensors")
PAPER = QuantSpec(scale="ue5m3_ieee")


@pytest.mark.parametrize("name", ["ue5m3", "ue5m3_ieee"])
def test_codes_of_scales_equal_those_of_gfloat(name: str) -> None:
    """At every value, halfway between two, beside that, and beyond the largest."""
    codes = get_scale_format(name).encode(TENSORS["scales.x"])
    assert len(codes) > 1500 and torch.equal(codes, TENSORS[f"scales.{name}"])


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize(
    "name", [name for name in TENSORS if name.startswith("blocks.") and name != "blocks.x"]
)
def test_blocks_under_a_tensor_scale_equal_those_of_the_papers_package(
    name: str, kernel: str
) -> None:
    """It multiplies the element by one product of both scales; a held amax, a tenth of the real
    one, puts scales above 448.
    """
    _, form, bound, share = name.split(".", 3)
    x = TENSORS["blocks.x"]
    spec = QuantSpec(
        scale="ue5m3_ieee",
        block=(16, 16) if form == "2d" else (1, 16),
        global_bound=float(bound),
    )
    q = quantize(x, spec, amax=float(share) * x.abs().amax(), kernel=kernel)
    scales = q.block_scales() * q.global_decode()
    factors = scales.repeat_interleave(16, dim=1)[:, : x.shape[1]]
    if form == "2d":
        factors = factors.repeat_interleave(16, dim=0)[: x.shape[0]]
    values = decode(q.element_codes, spec.format)[:, : x.shape[1]] * factors
    assert torch.equal(values, TENSORS[name])
    if share != "1":
        assert q.block_scales().max() > 448


@pytest.mark.parametrize(
    ("value", "amax", "scale"),
    [
        # of tests/test_formats.py of that package: half a step apart for another order of operations
        (7.209771652307365e-15, 8.30072435974513e-17, 40960.0),
        # and growth that no scale of the codebook holds
        (1e-20, 1e-40, 61440.0),
    ],
)
def test_block_scales_take_its_order_of_operations(value: float, amax: float, scale: float) -> None:
    q = quantize(torch.full((1, 16), value), PAPER, amax=torch.tensor(amax))
    assert q.block_scales().item() == scale
