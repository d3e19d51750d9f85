"""What a rank of a mesh holds and sends: against sizes counted by hand and measured elsewhere."""

from dataclasses import replace

import pytest
from family_models import parameters
from llama_shapes import SEQ_LEN, SHAPES, measured, model

from fp4train.hardware import Gpu, find_gpu, gpus
from fp4train.lab.costs.blocks import BlockCost
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.links import Collectives
from fp4train.lab.costs.memory import rank_memory
from fp4train.lab.costs.weights import ModelWeight, on_rank, tensor_traffic
from fp4train.lab.costs.workload import Workload
from fp4train.parallel import Mesh
from fp4train.parameters import Split
from fp4train.precision import BF16, MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed, Recipe

MIB = 2**20


def layers_of(block: BlockCost) -> list[ModelWeight]:
    """The weights of its linear layers."""
    return [weight for weight in block.weights if weight.plan is not None]


GB200 = find_gpu("GB200")
H100 = find_gpu("H100")


@pytest.mark.parametrize(
    ("recipe", "published"), [(NVFP4(), 1466), (MXFP8(), 1564), (BF16(), 2117)], ids=str
)
def test_a_block_of_8b_keeps_what_hooks_on_the_whole_block_counted(
    recipe: Recipe, published: float
) -> None:
    """Counted elsewhere with RMSNorm in separate operations, which keep a float32 and a BF16 copy
    more.
    """
    load = measured(
        "8B", recipe, H100, compiled=False, backend="emulate" if recipe.quantised else "auto"
    )
    cost = load.blocks[0]
    weights = 0
    if not recipe.quantised:  # the layers keep copies in BF16
        weights = 2 * sum(weight.count for weight in layers_of(load.blocks[0]))
    norms = 2 * 6 * SEQ_LEN * SHAPES["8B"].width
    assert (cost.saved + weights + norms) / MIB == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("name", "attention"), [("8B", 4096), ("Qwen2 7B", 3584), ("Qwen3 4B", 4096)]
)
def test_biases_norms_of_heads_and_wide_heads_are_counted(name: str, attention: int) -> None:
    """`attention`: heads × head dimension, which is not the width of Qwen3 4B."""
    shape = SHAPES[name]
    found = measured(name, BF16(), H100)
    assert found.parameters == parameters(shape, 128256)
    embedding = 0 if shape.tied else 128256 * shape.width
    matrices = sum(p.numel() for p in model(name).parameters() if p.dim() > 1) - embedding
    assert found.flops_per_token == 6 * (matrices + shape.layers * attention * SEQ_LEN)
    memory = rank_memory(found, Mesh(tensor=2)).parameters
    assert found.parameters / 2 < memory < found.parameters / 2 * 1.001


def test_ranks_that_share_sequences_gather_keys_and_values_twice_and_scatter_their_gradients() -> (
    None
):
    """Of 8 heads of 128 in BF16, in each block; weights lie in parts on them."""
    load = measured("8B", BF16(), H100)
    cost = ClusterCost(load, H100, Mesh(context=4, shard=2))
    keys = 2 * 8 * 128 * 2 * load.tokens
    (sent,) = (flow.sent for flow in cost.collectives if "keys and values" in flow.name)
    assert sent == 32 * 3 * keys * 3 / 4
    recomputed = ClusterCost(load, H100, Mesh(context=4, shard=2), recomputed=1.0)
    assert [flow.sent for flow in recomputed.collectives if "keys and" in flow.name] == [sent]
    assert cost.memory.parameters == rank_memory(load, Mesh(shard=8)).parameters
    alone = ClusterCost(load, H100, Mesh(shard=2))
    assert cost.parts["attention"] == alone.parts["attention"] / 4 * (2 - 1 / 4)


@pytest.mark.long
def test_405b_on_1024_ranks_holds_396_million_parameters_each() -> None:
    memory = rank_memory(measured("405B", NVFP4(), GB200, tensor=8), Mesh(shard=128, tensor=8))
    assert memory.parameters == pytest.approx(396e6, rel=0.002)
    state = sum(memory.parts[name] for name in ("weights, float32", "moments", "gradients"))
    assert state / 2**30 == pytest.approx(5.9, abs=0.05)
    assert memory.host == 12 * memory.parameters


@pytest.mark.long
def test_parameters_of_the_published_shapes() -> None:
    assert [round(measured(name, BF16(), H100).parameters / 1e9, 1) for name in SHAPES] == [
        8.0,
        70.6,
        405.9,
        7.4,
        4.0,
    ]


def test_a_weight_is_gathered_as_half_a_byte() -> None:
    """Codes and one scale byte per 16×16 block; 2 bytes in BF16."""
    load = measured("405B", NVFP4(), GB200, backend="emulate", tensor=8)
    weight = next(w for w in load.blocks[0].weights if w.spec.name.endswith("mlp.down.weight"))
    mesh = Mesh(shard=128, tensor=8)
    part = weight.on_rank(mesh)
    assert part.forward / part.elements == pytest.approx(0.504, abs=1e-3)
    assert weight.on_rank(replace(mesh, gather="bf16")).forward / part.elements == 2


def test_a_gather_of_405b_under_tensor_parallelism_sends_a_quarter_of_bf16() -> None:
    """25.6 and 101 GB per gather of the whole model, where all shards are aligned and the head's
    share is left out.
    """
    load = measured("405B", NVFP4(), GB200, backend="emulate", tensor=8)
    mesh = Mesh(shard=8, replicate=16, tensor=8)
    layers = layers_of(load.blocks[0])
    sent = {
        name: on_rank(layers, replace(mesh, gather=name)).forward * len(load.blocks)
        for name in ("recipe", "bf16")
    }
    assert sent["recipe"] / 1e9 == pytest.approx(25.4, abs=0.3)
    assert sent["bf16"] / 1e9 == pytest.approx(100.7, abs=0.7)


def not_coded(load: Workload, mesh: Mesh) -> dict[str, list[str]]:
    """Quantised weights that are not gathered as codes: why → their layers, a name per block."""
    reasons: dict[str, list[str]] = {}
    for block in load.blocks:
        for weight in layers_of(block):
            why = weight.wire(mesh).why
            if mesh.shard > 1 and why is not None:
                layer = weight.spec.layer.partition(f".{weight.block}.")[2]
                reasons.setdefault(why, []).append(layer)
    return reasons


@pytest.mark.parametrize(
    ("name", "shard", "tensor", "expected"),
    [
        ("70B", 32, 8, {4: ["attention.wk", "attention.wv"]}),
        ("405B", 128, 8, {1: ["attention.wk", "attention.wv"], 52: ["mlp.gate", "mlp.up"]}),
        ("8B", 8, 1, {}),
    ],
)
def test_shards_that_cut_blocks_of_scales_are_named(
    name: str, shard: int, tensor: int, expected: dict[int, list[str]]
) -> None:
    load = measured(name, NVFP4(), GB200, backend="emulate", tensor=tensor)
    mesh = Mesh(shard=shard, tensor=tensor)
    assert not_coded(load, mesh) == {
        f"a shard of {rows} is not whole blocks of 16": names * len(load.blocks)
        for rows, names in expected.items()
    }


@pytest.mark.parametrize(("recipe", "rows"), [(MXFP8(), 32), (FP8Block(), 128)], ids=str)
def test_larger_blocks_need_larger_shards(recipe: Recipe, rows: int) -> None:
    """wk of 8B has 1024 rows."""
    load = measured("8B", recipe, GB200 if rows == 32 else H100, backend="emulate")
    assert not not_coded(load, Mesh(shard=1024 // rows))
    (names,) = not_coded(load, Mesh(shard=2048 // rows)).values()
    assert "attention.wk" in names


def test_scales_of_whole_tensors_are_never_cut() -> None:
    assert not not_coded(measured("8B", FP8Current(), H100, backend="emulate"), Mesh(shard=512))


def test_a_form_is_gathered_when_its_gemm_runs() -> None:
    """MXFP8 has one for fprop and one for dgrad; recomputation needs both. The square blocks of
    NVFP4 serve both.
    """
    mesh = Mesh(shard=8)
    for recipe, bytes_, again in ((MXFP8(), 1 + 1 / 32, 2), (NVFP4(), 0.5 + 1 / 256, 1)):
        load = measured("8B", recipe, GB200, backend="emulate")
        weight = next(w for w in load.blocks[0].weights if w.spec.name.endswith("mlp.down.weight"))
        part = weight.on_rank(mesh)
        repeated = weight.on_rank(mesh, repeats=True)
        sent = [part.forward, part.backward, repeated.backward]
        assert [size / weight.count for size in sent] == pytest.approx(
            [bytes_, bytes_, again * bytes_]
        )


def test_what_is_sent_is_what_a_run_sends() -> None:
    """Transformer Engine takes codes, but not under delayed scaling; others send BF16."""
    load = measured("8B", NVFP4(), GB200)
    down = "mlp.down"
    delayed = not_coded(measured("8B", FP8Delayed(), GB200, backend="te"), Mesh(shard=8))
    assert delayed.keys() == {
        "Transformer Engine enters the amax of the weight into its history of delayed scaling"
    }
    assert not not_coded(load, Mesh(shard=8))
    assert not not_coded(load, Mesh(shard=8, tensor=2)) and not not_coded(load, Mesh(tensor=2))
    weight = next(
        w
        for w in measured("8B", BF16(), H100).blocks[0].weights
        if w.spec.name.endswith(f"{down}.weight")
    )
    assert weight.on_rank(Mesh(shard=8)).forward == 2 * weight.count


def test_the_parts_of_a_step_add_up_and_the_bubble_is_its_share() -> None:
    load = measured("405B", NVFP4(), GB200, tensor=8)
    cost = ClusterCost(load, GB200, Mesh(shard=8, tensor=8, pipeline=2, microbatches=8))
    staged = {k: v for k, v in cost.parts.items() if k != "optimizer"}
    assert cost.parts["pipeline bubble"] / sum(staged.values()) == pytest.approx(cost.mesh.bubble)
    assert cost.mesh.bubble == pytest.approx(1 / 9)
    assert cost.tokens_per_gpu * cost.seconds * cost.mesh.gpus == pytest.approx(cost.tokens)
    assert cost.tokens == 8 * 8 * SEQ_LEN


@pytest.mark.parametrize("shard", [2, 8, 64])
def test_more_shards_hold_less_and_send_more(shard: int) -> None:
    load = measured("70B", NVFP4(), GB200)
    few, many = (
        ClusterCost(load, GB200, Mesh(shard=n, microbatches=2)) for n in (shard, 2 * shard)
    )
    assert many.memory.parts["moments"] == pytest.approx(few.memory.parts["moments"] / 2)
    assert many.memory.total < few.memory.total
    assert many.collectives[0].sent > few.collectives[0].sent


def test_recomputation_keeps_inputs_only_and_costs_a_forward_pass() -> None:
    load = measured("70B", NVFP4(), GB200)
    mesh = Mesh(shard=64)
    kept, again = (ClusterCost(load, GB200, mesh, share) for share in (0.0, 1.0))
    inputs = 80 * SEQ_LEN * 8192 * 2
    assert again.memory.parts["activations"] == pytest.approx(inputs + load.blocks[0].saved)
    assert again.memory.total < kept.memory.total
    assert again.seconds > kept.seconds
    assert "recomputation" not in kept.parts


def test_a_recomputed_forward_pass_sends_again_what_tensor_parallel_ranks_exchange_in_it() -> None:
    load = measured("8B", BF16(), H100, tensor=8)
    mesh = Mesh(tensor=8, microbatches=2)
    block = load.blocks[0]
    forward, _ = tensor_traffic(block.weights, block.input, mesh)
    flows = []
    for share in (0.0, 1.0):
        cost = ClusterCost(load, H100, mesh, share)
        (flow,) = cost.collectives
        flows.append(flow)
    kept, again = flows
    assert again.sent - kept.sent == pytest.approx(2 * 32 * 7 / 8 * sum(forward))
    assert again.seconds > kept.seconds


def test_tensor_parallelism_divides_activations_and_sequence_parallelism_the_rest() -> None:
    load = measured("70B", NVFP4(), GB200)
    cost = load.blocks[0]
    whole, part, all_parts = (
        rank_memory(load, mesh).parts["activations"]
        for mesh in (Mesh(), Mesh(tensor=8, sequence=False), Mesh(tensor=8))
    )
    assert all_parts == pytest.approx(whole / 8)
    assert part == pytest.approx(80 * (cost.unsplit + (cost.saved - cost.unsplit) / 8))


def test_activations_sent_as_codes_are_a_quarter_of_bf16_and_a_little() -> None:
    """Per block of 8 B: two gathers of x (0.5625 B), two of dy (both forms), two of x again; seven
    sums, in float32 or BF16.
    """
    load = measured("8B", NVFP4(), H100, backend="emulate", tensor=8)
    mesh = Mesh(tensor=8)
    elements = SEQ_LEN * 4096
    blocks = 32
    for sum_bytes in (4, 2):
        cost = ClusterCost(load, H100, replace(mesh, sum_bytes=sum_bytes))
        sent = {each.name: each.sent for each in cost.collectives}
        expected = 7 / 8 * elements * blocks * ((2 + 2 * 2 + 2) * 0.5625 + 7 * sum_bytes)
        assert sent["tensor gathers and scatters"] == pytest.approx(expected, rel=1e-3)
    load = measured("8B", BF16(), H100, tensor=8)
    in_bf16 = ClusterCost(load, H100, Mesh(tensor=8, joined=True))
    plain = {each.name: each.sent for each in in_bf16.collectives}
    assert plain["tensor gathers and scatters"] == pytest.approx(7 / 8 * elements * blocks * 10 * 2)


def test_what_tensor_parallel_ranks_send_follows_from_the_table_of_parameters() -> None:
    """Attention and MLP send as much as each other; what the table does not cut sends nothing."""
    kind = measured("8B", BF16(), H100, tensor=8).blocks[0]
    mesh = Mesh(tensor=8, joined=True)

    def sent(uncut: str) -> list[float]:
        weights = [
            replace(weight, spec=replace(weight.spec, cut=Split.WHOLE))
            if uncut in weight.spec.name
            else weight
            for weight in layers_of(kind)
        ]
        return [sum(sizes) for sizes in tensor_traffic(weights, kind.input, mesh)]

    forward, backward = sent("nothing")
    assert forward == pytest.approx(4 * kind.input)
    assert sent("mlp") == sent("attention") == pytest.approx([forward / 2, backward / 2])
    assert sent("blocks.0") == [0, 0]


def test_accumulated_gradients_are_held_unsharded() -> None:
    """Gradients are reduced in the last microbatch only."""
    load = measured("8B", BF16(), H100)
    one, two = (rank_memory(load, Mesh(shard=8, microbatches=m)).parts["gradients"] for m in (1, 2))
    assert two - one == 4 * load.parameters


def test_the_first_stage_of_1f1b_holds_a_microbatch_per_stage() -> None:
    load = measured("70B", NVFP4(), GB200)
    whole = rank_memory(load, Mesh()).parts["activations"]
    memory = rank_memory(load, Mesh(pipeline=4, microbatches=16))
    assert memory.stage == 0
    assert memory.parts["activations"] == pytest.approx(whole)


def test_a_stage_rounds_its_weights_to_bf16_once_whatever_is_in_flight() -> None:
    """And shards round what they send, which is freed after each use."""
    load = measured("8B", BF16(), H100, compiled=False)
    inner = sum(w.count for block in load.blocks for w in layers_of(block))
    for microbatches in (1, 16):
        memory = rank_memory(load, Mesh(pipeline=4, microbatches=microbatches))
        assert memory.parts["weights in BF16"] == 2 * inner / 4
    assert rank_memory(load, Mesh(shard=8)).parts["weights in BF16"] == 0


def test_embedding_and_head_count_in_what_is_sent() -> None:
    """In float32, once per microbatch, and their gradients once per step."""
    load = measured("8B", NVFP4(), GB200, backend="emulate")
    outside = 4 * sum(weight.count for weight in load.outside)
    blocks = sum(on_rank(block.weights, Mesh(shard=8)).forward for block in load.blocks)
    cost = ClusterCost(load, GB200, Mesh(shard=8, microbatches=2))
    sent = {each.name: each.sent for each in cost.collectives}
    assert sent["weight gathers"] == pytest.approx(7 / 8 * 2 * (2 * blocks + outside))
    assert sent["gradient reduction"] == pytest.approx(7 / 8 * 4 * load.parameters)


@pytest.mark.long
def test_the_ranks_of_a_pipeline_hold_the_blocks_that_a_run_gives_them() -> None:
    """405B on 16 stages: one block less on the first and the last, as arXiv:2407.21783, section
    3.3.2, has it.
    """
    load = measured("405B", BF16(), H100)
    assert [counts.total() for counts in load.stages(Mesh(pipeline=16))] == [7, *[8] * 14, 7]
    assert [counts.total() for counts in load.stages(Mesh(pipeline=8))] == [15, *[16] * 6, 15]
    assert [counts.total() for counts in load.stages(Mesh(pipeline=4, virtual=2))] == [
        31,
        32,
        32,
        31,
    ]


@pytest.mark.parametrize("gpu", gpus(), ids=str)
def test_every_gpu_has_links(gpu: Gpu) -> None:
    assert gpu.nvlink > gpu.network or gpu.domain == 1
    assert gpu.domain in (1, 8, 72)


def group(gpu: Gpu, size: int, stride: int) -> Collectives:
    """Ranks whose numbers differ by `stride`."""
    return Collectives("weight gathers", "weight_ranks", Mesh(tensor=stride, shard=size), gpu)


def test_a_group_within_a_domain_uses_nvlink_and_one_beyond_the_network() -> None:
    assert group(H100, 8, 1).link == "NVLink"
    assert group(H100, 2, 8).link == "network"
    assert group(H100, 16, 1).near == 8
    assert group(GB200, 64, 1).link == "NVLink"
    assert group(GB200, 128, 1).near == 64
    near, far = (group(H100, 8, stride).alone(8e9) for stride in (1, 8))
    assert far > 5 * near
    assert group(H100, 1, 1).alone(8e9) == 0


def test_a_ring_of_gathers_sends_all_but_the_own_part() -> None:
    ring = group(H100, 8, 1)
    ring.add(1, [8e9])
    assert ring.sent == 7e9


def test_what_a_computation_hides_is_not_counted_and_what_is_left_of_it_hides_more() -> None:
    flow = group(H100, 8, 1)
    alone = flow.alone(8e9)
    left = flow.add(2, [8e9], 1.5 * alone)
    assert (flow.exposed, left) == (0, pytest.approx(alone / 2))
    assert flow.add(2, [8e9], left) == 0
    assert flow.exposed == pytest.approx(alone)
    assert (flow.sent, flow.seconds) == (4 * 7e9, pytest.approx(4 * alone))
