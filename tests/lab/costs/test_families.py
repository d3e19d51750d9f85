"""What families other than Llama compute between their linear layers is counted, and experts one by
one.
"""

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from families import SMALL_SHAPES
from family_models import parameters
from llama_shapes import STATES

import fp4train as f4
from fp4train.hardware import Device, find_gpu
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.roofline import LAUNCH, gemm_seconds
from fp4train.lab.costs.rows import layer_costs
from fp4train.lab.costs.weights import tensor_traffic
from fp4train.lab.costs.workload import Workload
from fp4train.models.hybrid import Hybrid, ScanShape
from fp4train.models.hyena import FilterShape, Hyena
from fp4train.models.moe import ExpertShape, MixtureOfExperts
from fp4train.models.olmo2 import Olmo2
from fp4train.parallel import Mesh
from fp4train.precision import BF16, NVFP4, Layer, Timeline, find_layers, make_plan, resolve

BATCH = 2
TIME = 64
PLACES = 128
"""Places of the transforms of a long convolution: 64 + 64 − 1, rounded up."""
WIDTH = 32


def measured(shape: Any) -> Workload:
    with torch.device("meta"):
        model = f4.convert(shape.build(vocab_size=64, seq_len=TIME))
    layers = find_layers(model).values()
    device = Device.elsewhere(find_gpu("B200"))
    plan = make_plan(
        layers, Timeline(recipe=BF16(), steps=1), None, tokens=BATCH * TIME, device=device
    )
    return Workload(model=model, stretch=plan.at(0), sequences=BATCH, seq_len=TIME, states=STATES)


def test_short_convolutions_have_bytes_alone() -> None:
    found = measured(
        Hyena(width=WIDTH, pattern="S", heads=2, hidden=48, filters=FilterShape(groups=8))
    )
    assert found.blocks[0].forward.flops == 0 and found.blocks[0].forward.operators > 0
    weights = [*found.blocks[0].weights, *found.outside]
    matrices = [w for w in weights if len(w.shape) > 1 and w.spec.stage != "first"]
    assert found.flops_per_token == 6 * sum(w.count for w in matrices)


def test_a_scan_costs_its_products_forward_and_twice_backward() -> None:
    scan = ScanShape(heads=2, head_dim=8, state=16, groups=1, chunk=16)
    shape = Hybrid(width=WIDTH, pattern="M-", heads=2, kv_heads=2, hidden=48, scan=scan)
    found = measured(shape).blocks[0]
    # C·Bᵀ of a group; within, into, out of the state
    per_token = 2 * (16 * 16 + 2 * 16 * 8 + 2 * 8 * 16 + 2 * 16 * 8)
    assert found.forward.flops == pytest.approx(BATCH * TIME * per_token)
    assert found.backward.flops == pytest.approx(2 * found.forward.flops)


@pytest.mark.parametrize("shape", SMALL_SHAPES.values(), ids=SMALL_SHAPES)
def test_a_block_multiplies_its_weights_and_what_its_own_code_does_besides(shape: Any) -> None:
    """Counted while the code runs, but for the transforms of x and of y of long convolutions: each
    of n places has 2.5·log2(n) operations. A router's weight is multiplied there, too.
    """
    found = measured(shape)
    for cost, said in zip(found.blocks, found.multiplied[0], strict=True):
        weights = [w for w in cost.weights if len(w.shape) > 1]
        routers = sum(w.count for w in weights if "router" in w.spec.name)
        transforms = 2 * BATCH * 2.5 * shape.width * PLACES * math.log2(PLACES)
        long = any(w.spec.name.endswith("mixer.direct") for w in cost.weights)
        run = cost.forward.flops + cost.forward.attention - 2 * found.tokens * routers
        run += long * transforms
        idle = sum(
            w.count * (1 - w.plan.layer.per_token / w.plan.layer.experts)
            for w in weights
            if w.plan is not None and w.plan.layer.experts
        )
        assert said + idle - sum(w.count for w in weights) == pytest.approx(
            run / (2 * found.tokens), abs=1
        )
        assert run > 0 or not cost.forward.attention


def test_62_blocks_of_three_kinds_are_shared_out_over_4_ranks_by_their_cost() -> None:
    """The blocks of the 12B of arXiv:2508.14444, of a tenth of its width; the last rank has the
    head, too.
    """
    scan = ScanShape(heads=16, head_dim=64, state=128, groups=1)
    pattern = "M-M-M-M*-" * 6 + "M-M-M-M-"
    found = measured(
        Hybrid(
            width=512, pattern=pattern, heads=4, kv_heads=1, head_dim=128, hidden=2048, scan=scan
        )
    )
    stages = found.stages(Mesh(pipeline=4))
    assert sum(map(Counter.total, stages)) == 62 and {*map(Counter.total, stages)} == {15, 16}
    costs = dict(zip(found.blocks, found.multiplied[0], strict=True))
    spent = [sum(costs[kind] * times for kind, times in held.items()) for held in stages]
    assert max(spent) - min(spent) <= max(costs.values())


def test_a_token_multiplies_the_weights_of_its_experts_and_of_the_router_once() -> None:
    shape = MixtureOfExperts(
        width=WIDTH, layers=2, heads=2, kv_heads=2, experts=ExpertShape(count=4, top=2, hidden=16)
    )
    found = measured(shape)
    attention = sum(3 * block.forward.attention for block in found.blocks) / found.tokens
    # Of 4 experts of 3 matrices a token meets 2, in each of 2 layers.
    active = parameters(shape, 64) - 2 * 2 * 3 * WIDTH * 16
    assert (
        shape.tied
        and found.parameters == parameters(shape, 64)
        and found.active_parameters == active
    )
    blocks = [w for block in found.blocks for w in block.weights]
    vectors = sum(w.count for w in (*blocks, *found.outside) if len(w.shape) == 1)
    assert found.flops_per_token == 6 * (active - vectors) + attention


def mixture(count: int, mesh: Mesh | None = None) -> ClusterCost:
    gpu = find_gpu("B200")
    experts = ExpertShape(count=count, hidden=16)
    shape = MixtureOfExperts(width=WIDTH, layers=2, heads=2, kv_heads=2, experts=experts)
    return ClusterCost(measured(shape), gpu, mesh or Mesh())


def test_tensor_parallel_ranks_have_their_experts_and_sum_their_outputs() -> None:
    two = Mesh(tensor=2)
    half = mixture(8, two)
    more = mixture(16, two)
    # of two blocks, in addition; the router's rows are whole
    weights = 2 * 8 * (3 * WIDTH * 16) // 2
    assert more.memory.parameters - half.memory.parameters == weights + 2 * 8 * WIDTH
    # bytes of a stream in BF16, of which a rank sends half in each of two blocks
    whole = 2 * BATCH * TIME * WIDTH
    attention, experts = (1 + 2) + (1 + 1 + 3 * 2), (1 + 2) + (1 + 2)  # sums are float32
    sent = {each.name: each.sent for each in half.collectives}
    assert sent["tensor gathers and scatters"] == pytest.approx(
        2 * (attention + experts) * whole / 2
    )


@pytest.mark.parametrize("sequence", [True, False])
def test_norms_over_the_heads_of_all_ranks_sum_a_number_per_token(sequence: bool) -> None:
    """Of queries and of keys, in float32, once in each pass of a block: an all-reduce is two
    gathers.
    """
    shape = Olmo2(width=WIDTH, layers=3, heads=4, kv_heads=2, hidden=48)
    block = measured(shape).blocks[0]
    mesh = Mesh(tensor=2, sequence=sequence)
    with_norms = tensor_traffic(block.weights, block.input, mesh)
    layers = [weight for weight in block.weights if weight.plan is not None]
    of_layers = tensor_traffic(layers, block.input, mesh)
    for sizes, without in zip(with_norms, of_layers, strict=True):
        assert sum(sizes) - sum(without) == 2 * 2 * 4 * BATCH * TIME


def test_a_product_of_all_experts_takes_less_than_one_for_each() -> None:
    gpu = find_gpu("B200")
    one = partial(gemm_seconds, find_gpu("B200"), "E2M1·E2M1", 128, 1024, 1024)
    assert one() < one(products=16) < 16 * one() - 15 * LAUNCH
    layer = Layer(name="up", in_features=1024, out_features=1024, block=0, blocks=1, experts=16)
    rows = layer_costs(
        resolve(layer, NVFP4(), None, "native", Device.elsewhere(gpu)), gpu, 16 * 128
    )
    assert [row.gemm for row in rows[:2]] == pytest.approx([one(products=16)] * 2)
    assert rows[2].gemm == pytest.approx(16 * gemm_seconds(gpu, "E2M1·E2M1", 1024, 1024, 128))
    assert rows[0].bf16 == pytest.approx(16 * gemm_seconds(gpu, "BF16", 128, 1024, 1024))


def test_a_weight_that_came_as_it_is_multiplied_is_held_once() -> None:
    """Of a layer in BF16 no copy is made beside the gathered BF16; one is of gathered float32."""
    load = measured(
        MixtureOfExperts(width=WIDTH, layers=2, heads=2, kv_heads=2, experts=ExpertShape(count=4))
    )
    (weight,) = (w for w in load.blocks[0].weights if w.spec.name.endswith("mlp.down.weight"))
    assert weight.on_rank(Mesh(shard=2)).resident == 2 * weight.count
    assert weight.on_rank(Mesh(shard=2, gather="fp32")).resident == (4 + 2) * weight.count
    assert weight.on_rank(Mesh(shard=8)).resident == (4 + 2) * weight.count, (
        "4 experts are no 8 shards, so float32 is sent"
    )
    assert weight.on_rank(Mesh()).resident == 2 * weight.count
