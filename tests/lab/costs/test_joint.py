"""What a plan of joint products costs: one launch of the size of all layers per GEMM, copies, the host's part."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fp4train.config import composition, to_config
from fp4train.hardware import Device, find_gpu
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.estimate import GemmCost, estimate
from fp4train.lab.costs.host import HOST, JOINT, host_seconds
from fp4train.lab.costs.links import interconnect
from fp4train.lab.costs.roofline import COPY, gemm_seconds, move_seconds, own_seconds, stored_bytes
from fp4train.lab.costs.search import MeshPlan
from fp4train.lab.costs.workload import Workload, workload
from fp4train.models.llama import Llama
from fp4train.parallel.config import Mesh
from fp4train.precision import BF16, MXFP8, NVFP4, Recipe, Timeline
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import Plan, make_plan
from fp4train.run.build import build_model, build_timeline

B200 = find_gpu("B200")
TOKENS, WIDTH, KV, HIDDEN = 512, 256, 128, 512


def built() -> tuple[torch.nn.Module, Any]:
    with torch.device("meta"):
        model = Llama(width=WIDTH, layers=1, heads=4, kv_heads=2, hidden=HIDDEN).build(vocab_size=64, seq_len=TOKENS)
    return model, find_layers(model)


def planned(recipe: Recipe, *, joint: bool, backend: str = "native") -> Plan:
    options: dict[str, Any] = {"tokens": TOKENS, "device": Device.elsewhere(B200), "backend": backend, "joint": joint}
    return make_plan(built()[1].values(), Timeline(recipe=recipe, steps=1), None, **options)


def rows(recipe: Recipe, *, joint: bool, microbatches: int = 1) -> dict[tuple[str, str], GemmCost]:
    found = estimate(planned(recipe, joint=joint), B200, microbatches=microbatches).stretches[0].rows
    return {(row.layer.rpartition(".")[2], row.gemm_name): row for row in found}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_product_is_one_launch_of_all_out_features_and_its_copies(microbatches: int) -> None:
    joint, apart = (rows(MXFP8(), joint=each, microbatches=microbatches) for each in (True, False))
    n, elements, spec = WIDTH + 2 * KV, "E4M3·E4M3", MXFP8().table()["fprop"].second
    assert spec is not None
    code, dy = stored_bytes("E4M3"), move_seconds(B200, 4 * TOKENS * n, COPY)
    w = move_seconds(B200, 2 * code * n * WIDTH, COPY)
    sizes = {"fprop": (TOKENS, n, WIDTH), "dgrad": (TOKENS, WIDTH, n), "wgrad": (n, WIDTH, TOKENS)}
    copies = {"fprop": w, "dgrad": w + microbatches * dy / 2, "wgrad": microbatches * dy / 2}
    for gemm, size in sizes.items():
        found = {name: joint[name, gemm] for name in ("wq", "wk", "wv")}
        wanted = microbatches * gemm_seconds(B200, elements, *size) + copies[gemm]
        assert sum(row.gemm for row in found.values()) == pytest.approx(wanted)
        assert found["wq"].gemm == pytest.approx(WIDTH / KV * found["wk"].gemm) and found["wk"] != found["wq"]
        assert found["wq"].size == apart["wq", gemm].size and found["wq"].bf16 == apart["wq", gemm].bf16
    assert joint["wo", "fprop"] == apart["wo", "fprop"] and joint["down", "wgrad"] == apart["down", "wgrad"]
    saved = sum(apart[each].quantise - joint[each].quantise for each in joint)
    row, column = MXFP8().table()["dgrad"].first, MXFP8().table()["wgrad"].first
    groups = ((WIDTH, KV, KV), (HIDDEN, HIDDEN))
    launches = sum(
        sum(own_seconds(B200, TOKENS * each, row, column, codes=True) for each in group)
        - own_seconds(B200, TOKENS * sum(group), row, column, codes=True)
        for group in groups
    )
    assert saved == pytest.approx(microbatches * launches) and saved > 0, "dy of a group is quantised at once"


def test_dy_of_layers_with_random_bits_of_their_own_is_quantised_for_each() -> None:
    recipe = NVFP4(fused_scales=True)
    joint, apart = (rows(recipe, joint=each) for each in (True, False))
    assert {each for each in joint if joint[each].gemm != apart[each].gemm} == {
        (name, "fprop") for name in ("wq", "wk", "wv", "gate", "up")
    }
    assert {each: row.quantise for each, row in joint.items()} == {each: row.quantise for each, row in apart.items()}


def test_layers_in_high_precision_join_values() -> None:
    found, n = rows(BF16(), joint=True), WIDTH + 2 * KV
    joining = move_seconds(B200, 4 * n * WIDTH, COPY)
    wanted = gemm_seconds(B200, "BF16·BF16", TOKENS, n, WIDTH) + joining
    assert sum(found[name, "fprop"].gemm for name in ("wq", "wk", "wv")) == pytest.approx(wanted)
    assert not any(row.quantise for row in found.values())


def test_the_host_queues_fewer_quantised_products_and_no_longer_torchs_own_layers() -> None:
    for recipe, backend in ((MXFP8(), "native"), (BF16(), "torch")):
        plan = planned(recipe, joint=True).stretches[0].layers
        joint, alone = (host_seconds(plan[f"blocks.0.{name}"], TOKENS) for name in ("attention.wq", "attention.wo"))
        assert alone == HOST[backend] and joint == pytest.approx(HOST[backend] * (1 + 3 * JOINT[backend]))
    assert JOINT["te"] < JOINT["native"] < 0 < JOINT["torch"]


def test_on_transformer_engine_three_layers_of_one_call_take_the_host_not_much_longer_than_one() -> None:
    plan = planned(MXFP8(), joint=True, backend="te").stretches[0].layers
    group = [host_seconds(plan[f"blocks.0.attention.{name}"], TOKENS) for name in ("wq", "wk", "wv")]
    assert (
        sum(group) == pytest.approx(3 * HOST["te"] * (1 + 3 * JOINT["te"])) and HOST["te"] < sum(group) < 2 * HOST["te"]
    )


def load(plan: Plan, recipe: Recipe) -> Workload:
    return workload(built()[0], plan.stretches[0].layers, recipe, sequences=1, seq_len=TOKENS)


def test_a_step_on_a_mesh_is_priced_so_too() -> None:
    """Shards gather the weights of each microbatch, and join them there."""
    made = [load(planned(MXFP8(), joint=each), MXFP8()) for each in (True, False)]
    for mesh in (Mesh(), Mesh(microbatches=4), Mesh(shard=2, microbatches=4)):
        joint, apart = (ClusterCost(each, B200, interconnect(B200), mesh) for each in made)
        assert joint.host < apart.host and joint.parts["quantising"] < apart.parts["quantising"]
        assert joint.parts["GEMMs"] != apart.parts["GEMMs"]
    whole, shards = (
        ClusterCost(made[0], B200, interconnect(B200), replace(mesh, microbatches=4)).parts["GEMMs"]
        for mesh in (Mesh(), Mesh(shard=2))
    )
    assert shards > whole


def test_meshes_that_cut_layers_are_searched_without_joint_products() -> None:
    words = ["gpu=B200", "recipe=mxfp8", "backend=native", "train.joint_products=true", "policy=all", "phases=none"]
    config = to_config(composition.compose(words))
    model = build_model(config, 257, torch.device("meta"))
    wanted = MeshPlan(config, 4, True, model, build_timeline(config), B200, ())
    joint = [any(p.joint for p in wanted.plan(1, tensors).stretches[0].layers.values()) for tensors in (1, 2)]
    assert joint == [True, False]


def test_shards_leave_layers_of_transformer_engine_apart() -> None:
    """As a run does: FSDP gathers each weight into memory of its own."""
    words = ["gpu=B200", "recipe=mxfp8", "backend=te", "train.joint_products=true", "policy=all", "phases=none"]
    config = to_config(composition.compose(words))
    wanted = MeshPlan(config, 4, True, build_model(config, 257, torch.device("meta")), build_timeline(config), B200, ())
    plans = [wanted.plan(1, 1, data_ranks=ranks).stretches[0].layers.values() for ranks in (1, 2)]
    assert [any(each.joint for each in plan) for plan in plans] == [True, False]
