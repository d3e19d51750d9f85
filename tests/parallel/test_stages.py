"""A model's blocks are divided over the stages of a pipeline by what they multiply, in a run as in
its plan.
"""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configured import shape_of
from families import SMALL_SHAPES
from lengths import long_but
from torch import nn

import fp4train as f4
from fp4train.hardware import Device, find_gpu
from fp4train.lab.costs.workload import Workload
from fp4train.models.common import multiplications
from fp4train.models.hybrid import Hybrid
from fp4train.parallel import Parallel
from fp4train.parallel.held import Inventory
from fp4train.parallel.stages import cut_of, cut_stages
from fp4train.parallel.world import World
from fp4train.precision import BF16, Timeline, find_layers, make_plan

NO_STATE = Inventory(state=frozenset(), layers={}, modules=())


def built(shape: Any, time: int) -> nn.Module:
    with torch.device("meta"):
        return f4.convert(shape.build(vocab_size=64, seq_len=time))


def run_of(model: nn.Module, parallel: Parallel, time: int) -> list[list[int]]:
    """The blocks that each rank of a run holds."""
    found = []
    for rank in range(parallel.pp):
        group: Any = SimpleNamespace(rank=partial(int, rank))
        world = World(device=torch.device("meta"), mesh=parallel.mesh(parallel.pp), pipeline=group)
        pipeline = cut_stages(model, cut_of(model, parallel), NO_STATE, parallel, world, time)
        found.append(
            [int(name) for name, _ in pipeline.model.get_submodule("blocks").named_children()]
        )
    return found


@pytest.mark.parametrize("time", long_but([4096], [64, 4096]))
@pytest.mark.parametrize("family", long_but(("llama", "hybrid"), SMALL_SHAPES))
def test_a_run_and_its_plan_divide_blocks_equally(family: str, time: int) -> None:
    model = built(SMALL_SHAPES[family], time)
    layers = find_layers(model).values()
    device = Device.elsewhere(find_gpu("H100"))
    plan = make_plan(layers, Timeline(recipe=BF16(), steps=1), None, tokens=time, device=device)
    load = Workload(model=model, stretch=plan.at(0), sequences=1, seq_len=time, states={})
    shapes = [Parallel(pp=pp) for pp in (2, 4)]
    for parallel in (*shapes, Parallel(pp=3, pp_schedule="interleaved")):
        divided = run_of(model, parallel, time)
        assert sorted(index for held in divided for index in held) == [*range(9)]
        planned = load.stages(parallel.mesh(parallel.pp))
        assert [Counter(load.blocks[index] for index in held) for held in divided] == planned


def test_attention_weighs_more_in_longer_sequences() -> None:
    """The blocks of the second half attend, those of the first do not."""
    shape = Hybrid(width=32, pattern="----****", heads=2, hidden=64)
    lengths = {
        time: list(map(len, run_of(built(shape, time), Parallel(pp=2), time)))
        for time in (16, 4096)
    }
    assert lengths == {16: [4, 4], 4096: [6, 2]}


@pytest.mark.parametrize(
    ("name", "vocabulary", "blocks"),
    [
        ("hybrid_12b", 131_072, [17, 16, 17, 12]),
        pytest.param("llama_405b", 128_256, [15, *[16] * 6, 15], marks=pytest.mark.long),
        pytest.param("llama_405b", 128_256, [7, *[8] * 14, 7], marks=pytest.mark.long),
    ],
    ids=["62 on 4", "126 on 8", "126 on 16"],
)
def test_published_numbers_of_blocks_that_ranks_do_not_divide_are_shared_by_cost(
    name: str, vocabulary: int, blocks: list[int]
) -> None:
    """The head weighs as much as several blocks of the hybrid, and about as much as one of the
    largest Llama.
    """
    shape = shape_of(name)
    with torch.device("meta"):
        model = f4.convert(shape.build(vocab_size=vocabulary, seq_len=4096))
    divided = run_of(model, Parallel(pp=len(blocks)), 4096)
    assert [index for held in divided for index in held] == [*range(sum(blocks))]
    assert [*map(len, divided)] == blocks


def test_a_family_that_says_nothing_of_its_products_counts_by_its_weights() -> None:
    assert multiplications(nn.TransformerEncoderLayer(8, 2, 16), 4096) == 4 * 8 * 8 + 2 * 8 * 16
