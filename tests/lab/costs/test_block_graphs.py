"""Graphs of blocks in an estimate: what the host queues and what is copied, as replayed blocks do it."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from replayed_blocks import ReplayedBlocks
from torch import nn

import fp4train as f4
from fp4train.hardware import Device, find_gpu
from fp4train.lab.costs import casts
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.host import GRAPH, OPERATION, host_seconds
from fp4train.lab.costs.links import interconnect
from fp4train.lab.costs.memory import rank_memory
from fp4train.lab.costs.workload import Workload, workload
from fp4train.models.common.experts import ExpertShape
from fp4train.models.llama import Llama
from fp4train.models.moe import MixtureOfExperts
from fp4train.parallel.config import Mesh
from fp4train.precision import BF16, NVFP4, Recipe, Timeline
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import make_plan

B200 = find_gpu("B200")
TOKENS = 16
SHAPES = {
    "dense": Llama(width=64, layers=3, heads=2, kv_heads=1, hidden=64),
    "mixture": MixtureOfExperts(
        width=64, layers=4, heads=2, kv_heads=1, hidden=64, dense=2, experts=ExpertShape(count=4, hidden=32)
    ),
}


def built(name: str) -> nn.Module:
    return f4.convert(SHAPES[name].build(vocab_size=32, seq_len=TOKENS), backend="emulate")


@cache
def planned(name: str, recipe: Recipe, recorded: Any, backend: str = "emulate") -> Workload:
    with torch.device("meta"):
        model = built(name)
    options: Any = {"tokens": TOKENS, "device": Device.elsewhere(B200), "backend": backend}
    plan = make_plan(find_layers(model).values(), Timeline(recipe=recipe, steps=1), None, **options)
    layers = plan.stretches[0].layers
    return workload(model, layers, recipe, sequences=1, seq_len=TOKENS, recorded=recorded)


@pytest.mark.parametrize("moved", [False, True], ids=["one rank", "data ranks"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_host_queues_and_copies_what_replayed_blocks_do(name: str, moved: bool) -> None:
    """Of a mixture dense blocks and attention; the first block of experts reads what the graph of the last dense one
    left. In the second microbatch gradients of data ranks are added outside of the graphs."""
    m, mesh = 2, Mesh(microbatches=2, shard=2 if moved else 1, gather="fp32")
    load, eager = (planned(name, NVFP4(), each) for each in ("block", False))
    tokens = torch.arange(TOKENS).view(1, TOKENS)
    graphs, calls = ReplayedBlocks(built(name), tokens, NVFP4(), microbatches=m, moved=moved).queued()
    number = Counter(operator for operator, _ in calls)
    kinds, others = ([each.kinds[kind] for kind in each.order] for each in (load, eager))
    weights = [weight for kind in kinds for weight in kind.weights if load.moves(weight, mesh)]
    assert graphs == m * sum(kind.cost.graphs for kind in kinds) == m * 2 * len(kinds)
    assert number == Counter(
        copy_=m * (sum(kind.cost.copies for kind in kinds) + 2 * len(weights)), add_=(m - 1) * len(weights)
    )
    activations = [out.nbytes for operator, out in calls if operator == "copy_" and out.dtype == torch.bfloat16]
    fused = (sum(kind.cost.fused_forward + kind.cost.fused_backward for kind in each) for each in (kinds, others))
    assert 2 * sum(activations) == m * (next(fused) - next(fused))
    passes = {"copy_": 2, "add_": 3}
    of_weights = sum(passes[operator] * out.nbytes for operator, out in calls if out.dtype == torch.float32)
    small = sum(weight.count for weight in weights if not weight.is_multiplied)
    counted = sum(casts.of_block(weight, load, mesh) for weight in weights)
    assert of_weights == counted + small * (casts.COPIED * m + casts.ADDED * (m - 1))


@pytest.mark.parametrize(
    ("recipe", "backend", "mesh", "per_weight"),
    [
        (BF16(), "auto", Mesh(microbatches=3), 6),
        (BF16(), "auto", Mesh(microbatches=3, shard=2, gather="fp32"), 3 * (2 * 6 + 16) + 2 * 12),
        (NVFP4(), "te", Mesh(microbatches=3), 4),
        (NVFP4(), "te", Mesh(microbatches=3, shard=2, gather="fp32"), 3 * (4 + 16) + 2 * 12),
        (NVFP4(), "native", Mesh(replicate=2, gather="fp32"), 16),
    ],
)
def test_weights_of_data_ranks_are_copied_and_their_gradients_added_outside_of_the_graphs(
    recipe: Recipe, backend: str, mesh: Mesh, per_weight: int
) -> None:
    """On Transformer Engine to zeros of each microbatch. The copy of one block is in memory."""
    load = planned("dense", recipe, "block", backend)
    weights = load.kinds[0].weights
    for weight in (each for each in weights if each.is_multiplied):
        assert casts.of_block(weight, load, mesh) == per_weight * weight.count
    held, without = (rank_memory(each, mesh) for each in (load, replace(load, in_graphs=frozenset())))
    copied = 4 * sum(weight.count for weight in weights) if mesh.data > 1 else 0
    assert held.total - without.total == copied


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_waits_for_graphs_and_experts_where_it_would_wait_for_kernels(name: str) -> None:
    """Recomputed blocks take no more launches, but experts do."""

    def cost(recorded: Any, again: float = 0.0) -> ClusterCost:
        load = replace(planned(name, BF16(), recorded), recomputed=again)
        return ClusterCost(load, B200, interconnect(B200), Mesh())

    eager, block, whole = cost(False), cost("block"), cost(True)
    load = block.workload
    blocks = [load.kinds[kind] for kind in load.order]
    experts = [plan for kind in blocks for plan in kind.plans if plan.layer.name not in load.in_graphs]
    assert all(plan.layer.experts for plan in experts) and bool(experts) is (name == "mixture")
    graphs = sum(2 * GRAPH + OPERATION * kind.cost.copies for kind in blocks)
    left = OPERATION * sum(kind.cost.operations for kind in blocks) + sum(host_seconds(e, TOKENS) for e in experts)
    assert block.host == pytest.approx(graphs + left)
    assert cost("block", 1.0).host == pytest.approx(graphs + 4 / 3 * left)
    waits = [each.parts.get("waiting for the host", 0.0) for each in (whole, block, eager)]
    assert waits[0] == 0 < waits[1] < waits[2]
