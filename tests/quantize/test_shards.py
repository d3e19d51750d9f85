"""The codes of a shard are the shard of the codes, whatever the cut, the rounding and the
transform.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from lengths import long_but
from torch import Tensor

from fp4train.precision import MXFP4, MXFP8, NVFP4, FP8Block, FP8Current, FP8Row, Recipe
from fp4train.precision.recipes import QuartetII, TetraJetV2
from fp4train.quantize import (
    QuantSpec,
    RandomKey,
    amax_extent,
    measure_amax,
    quantised_in_runs,
    quantize,
    quantizer,
    requantised,
    why_not_cut,
)

RECIPES: list[Recipe] = [
    NVFP4(),
    NVFP4(four_over_six="all", hadamard=False, stochastic_rounding=False),
    *(MXFP8(), MXFP4(), FP8Current(), FP8Row(), FP8Block(), QuartetII(), TetraJetV2()),
]
KEY = RandomKey(seed=7, step=3, layer=11, operand=2, row_offset=48, col_offset=64)
SPECS = list(dict.fromkeys(spec for recipe in RECIPES for spec in recipe.table().specs()))


def drawn(rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Values whose blocks and rows differ in size by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    spread = (
        torch.randn(rows, 1, generator=generator).exp()
        * torch.randn(1, columns, generator=generator).exp()
    )
    return (torch.randn(rows, columns, generator=generator) * spread).to(dtype)


def shards(
    x: Tensor, spec: QuantSpec, axis: int, extent: int
) -> list[tuple[Tensor, RandomKey, Tensor | None]]:
    """(values, key, amax) of each shard; the amax is the maximum of what the shards measure, as
    over ranks.
    """
    pieces = x.split(extent, axis)
    if spec.requantises is not None and amax_extent(spec.requantises) is not None:
        largest = torch.stack([measure_amax(piece.T, spec.requantises) for piece in pieces]).amax(0)
        pieces = tuple(requantised(piece, spec, largest) for piece in pieces)
    amax: Tensor | None = None
    own = [
        None if amax_extent(spec) is None else measure_amax(piece, spec, KEY) for piece in pieces
    ]
    crosses = amax_extent(spec) == "tensor" or axis == 1
    if own[0] is not None and crosses:
        amax = torch.stack([each for each in own if each is not None]).amax(0)
    found = []
    for index, piece in enumerate(pieces):
        first = index * extent
        at = (
            (KEY.row_offset + first, KEY.col_offset)
            if axis == 0
            else (KEY.row_offset, KEY.col_offset + first)
        )
        found.append(
            (piece, KEY.replace(row_offset=at[0], col_offset=at[1]), amax if crosses else None)
        )
    return found


def rest(spec: QuantSpec) -> QuantSpec:
    """The spec of what `shards` gives."""
    over = spec.requantises is not None and amax_extent(spec.requantises) is not None
    return replace(spec, requantises=None) if over else spec


@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.element}-{s.block}-{s.rounding[:4]}-{bool(s.hadamard)}"
)
@pytest.mark.parametrize("kernel", long_but(("auto",), ("reference", "auto")))
@settings(max_examples=6)
@given(
    axis=st.sampled_from([0, 1]),
    parts=st.sampled_from([2, 4]),
    seed=st.integers(0, 1 << 20),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    transposed=st.booleans(),
)
def test_the_codes_of_a_shard_are_the_shard_of_the_codes(
    spec: QuantSpec,
    kernel: str,
    axis: int,
    parts: int,
    seed: int,
    dtype: torch.dtype,
    transposed: bool,
) -> None:
    x = drawn(512, 512, seed, dtype)
    x = x.T if transposed else x
    extent = 512 // parts
    assert why_not_cut(spec, extent, columns=axis == 1) is None
    whole = quantize(x, spec, key=KEY, kernel=kernel)
    given = shards(x, spec, axis, extent)
    last = rest(spec)
    made = [quantize(p, last, key=k, amax=a, kernel=kernel) for p, k, a in given]
    assert torch.equal(torch.cat([q.codes for q in made], axis), whole.codes)
    if spec.block[axis] is not None:
        assert torch.equal(torch.cat([q.scales for q in made], axis), whole.scales)
    else:
        assert all(torch.equal(q.scales, whole.scales) for q in made)
    values = [quantizer(last, "cpu", kernel).values(p, k, a).values for p, k, a in given]
    assert torch.equal(
        torch.cat(values, axis), quantizer(spec, "cpu", kernel).values(x, KEY).values
    )


@pytest.mark.parametrize(
    "spec",
    [s for s in SPECS if not s.requantises],
    ids=lambda s: f"{s.element}-{s.block}-{s.rounding[:4]}",
)
@pytest.mark.parametrize("columns", [False, True])
def test_the_codes_of_several_runs_are_theirs_of_the_whole(spec: QuantSpec, columns: bool) -> None:
    """A tensor-parallel rank has a run in each segment of a weight."""
    x = drawn(512, 512, 3, torch.float32)
    axis = int(columns)
    runs = ((0, 128), (256, 128))
    whole = quantize(x, spec, key=KEY)
    own = torch.cat([x.narrow(axis, *run) for run in runs], axis)
    amax = measure_amax(x, spec, KEY) if amax_extent(spec) else None
    if amax is not None and amax.ndim == 2 and not columns:
        amax = torch.cat([amax.narrow(0, *run) for run in runs])
    first = (KEY.row_offset, KEY.col_offset)[axis]
    found = quantised_in_runs(
        own, spec, KEY, tuple((first + at, n) for at, n in runs), amax, columns=columns
    )
    assert found.shape == tuple(own.shape)
    values = whole.dequantize()
    assert torch.equal(
        found.dequantize(), torch.cat([values.narrow(axis, *run) for run in runs], axis)
    )


@pytest.mark.parametrize(
    "spec",
    [s for s in SPECS if amax_extent(s)],
    ids=lambda s: f"{s.element}-{s.block}-{s.rounding[:4]}",
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_reaches_the_scales_of_every_shard(
    spec: QuantSpec, bad: float
) -> None:
    x = drawn(64, 64, 0, torch.bfloat16)
    x[:, 3] = bad
    first, second = shards(x, spec, 1, 32)
    spec = rest(spec)
    assert first[2] is not None and first[2].isinf().all()
    assert quantize(second[0], spec, key=second[1], amax=second[2]).dequantize().isnan().all()


def test_without_the_offsets_and_the_amax_of_the_whole_the_codes_differ() -> None:
    """The test above can see the difference."""
    x = drawn(512, 512, 0, torch.bfloat16)
    spec = NVFP4().table().dgrad.first
    assert spec is not None and spec.rounding == "stochastic"
    whole = quantize(x, spec, key=KEY).codes
    assert not torch.equal(
        quantize(x[256:], spec, key=KEY, amax=measure_amax(x, spec)).codes, whole[256:]
    )
    moved = KEY.replace(row_offset=KEY.row_offset + 256)
    assert not torch.equal(quantize(x[256:] / 3, spec, key=moved).codes, whole[256:])


@pytest.mark.parametrize(
    ("spec", "extent", "columns", "why"),
    [
        (NVFP4().table().fprop.first, 24, True, "blocks of 16"),
        (NVFP4().table().fprop.second, 24, False, "blocks of 16"),
        (NVFP4().table().fprop.first, 24, False, None),
        (MXFP8().table().fprop.first, 48, True, "blocks of 32"),
        (FP8Block().table().fprop.second, 64, False, "blocks of 128"),
        (FP8Current().table().fprop.first, 3, True, None),
    ],
)
def test_a_shard_that_splits_a_block_is_named(
    spec: QuantSpec, extent: int, columns: bool, why: str | None
) -> None:
    reason = why_not_cut(spec, extent, columns=columns)
    assert reason is None if why is None else why in str(reason)
