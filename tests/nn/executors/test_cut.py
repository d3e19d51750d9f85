"""Which ranks an amax covers, where a shard's random bits begin, and the collectives."""

import pytest
import torch
import torch.distributed as dist

from fp4train.nn import Cut, LayerShard, Ranks
from fp4train.precision import MXFP8, NVFP4, FP8Delayed, FP8Row
from fp4train.quantize import QuantSpec

TENSOR = Ranks(group=None, rank=1, size=2)
NVFP4_X = NVFP4().table().fprop.first
ROW = FP8Row().table().fprop.first
assert NVFP4_X is not None and ROW is not None


def shard(cut: Cut, sequence: bool = False) -> LayerShard:
    return LayerShard(tensor=TENSOR, cut=cut, first=64, sequence=sequence)


@pytest.mark.parametrize(
    ("cut", "tensor", "shared"),
    [
        *[("out", "x", False), ("out", "w", True), ("out", "dy", True)],
        *[("in", "x", True), ("in", "w", True), ("in", "dy", False)],
    ],
)
def test_the_amax_of_a_tensor_covers_the_ranks_that_hold_its_parts(
    cut: Cut, tensor: str, shared: bool
) -> None:
    for transposed in (False, True):
        assert shard(cut).amax_ranks(tensor, NVFP4_X, transposed=transposed) == (
            (TENSOR,) if shared else ()
        )


def test_the_amax_of_a_row_covers_the_ranks_that_hold_its_parts() -> None:
    assert shard("in").amax_ranks("x", ROW) == (TENSOR,)  # a token's features lie on two ranks
    # a feature's tokens lie on this one
    assert shard("in").amax_ranks("x", ROW, transposed=True) == ()
    assert shard("out").amax_ranks("w", ROW) == ()
    assert shard("out").amax_ranks("w", ROW, transposed=True) == (TENSOR,)


def test_tokens_that_are_gathered_as_codes_share_their_amax() -> None:
    assert shard("out", sequence=True).amax_ranks("x", NVFP4_X, tokens=True) == (TENSOR,)


@pytest.mark.parametrize("spec", [MXFP8().table().fprop.first, FP8Delayed().table().fprop.first])
def test_scales_of_blocks_and_of_histories_need_no_other_rank(spec: QuantSpec) -> None:
    assert shard("in").amax_ranks("x", spec) == ()


def test_random_bits_begin_at_the_shards_first_element() -> None:
    assert [shard("out").starts(t) for t in ("x", "w", "dy")] == [(0, 0), (64, 0), (0, 64)]
    assert [shard("in").starts(t) for t in ("x", "w", "dy")] == [(0, 64), (0, 64), (0, 0)]


def test_a_cut_needs_ranks() -> None:
    with pytest.raises(ValueError, match="a layer that is cut has ranks"):
        LayerShard(cut="in")


def test_no_collective_has_a_name_that_torch_warns_of() -> None:
    """Every tensor-parallel run printed torch's FutureWarning; a warning is an error in a test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = Ranks(group=dist.group.WORLD, rank=0, size=1)
        x = torch.randn(4, 2)
        for each in (ranks.sum, ranks.largest, ranks.sum_rows, ranks.gather_rows, ranks.part):
            assert torch.equal(each(x.clone()), x)
    finally:
        dist.destroy_process_group()
