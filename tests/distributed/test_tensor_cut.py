"""What tensor parallelism makes of a model, without other ranks: shards, plan, refusals."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_steps
import pytest
import torch
import torch.distributed as dist
from families import SMALL_SHAPES
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fp4train as f4
from fp4train.checkpoint import read_header, write_parts
from fp4train.models.common import multiplications
from fp4train.models.hybrid import Hybrid, ScanShape
from fp4train.models.hyena import FilterShape, Hyena
from fp4train.models.llama import Llama
from fp4train.models.moe import ExpertShape, MixtureOfExperts
from fp4train.optim.adamw import AdamW
from fp4train.parallel.tensor import cut_tensors, replicas
from fp4train.precision import NVFP4, FP8Block
from fp4train.precision.plan import plan
from fp4train.precision.recipes import QuartetII
from fp4train.run.checks import divided_blocks
from fp4train.shards import RowOrder, TensorShard, row_orders, shard_of


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """Four ranks, of which this process is one and the others do not exist: nothing may be sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_heads_that_the_ranks_do_not_divide_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(
        ValueError,
        match=r"model.heads=6 cannot be divided over parallel.tp=4 .* allowed: 1, 2, 3, 6",
    ):
        cut_tensors(llama_steps.model(width=96, heads=6, kv_heads=6), mesh)


def test_kv_heads_that_the_ranks_do_not_divide_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(
        ValueError, match=r"model.kv_heads=2 cannot be divided over parallel.tp=4 .* allowed: 1, 2"
    ):
        cut_tensors(llama_steps.model(heads=4, kv_heads=2), mesh)


def test_a_hidden_width_that_the_ranks_do_not_divide_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(
        ValueError, match=r"mlp.gate: 254 out_features cannot be divided over parallel.tp=4"
    ):
        cut_tensors(llama_steps.model(hidden=254), mesh)


def test_a_model_that_does_not_say_how_it_is_cut_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(
        TypeError, match=r"Sequential does not say how .* fp4train_parameters .* parallel.tp=1"
    ):
        cut_tensors(f4.convert(nn.Sequential(nn.Linear(16, 16))), mesh)


def test_a_model_that_is_not_converted_is_refused(mesh: DeviceMesh) -> None:
    model = Llama(width=128, layers=1, heads=4, kv_heads=4).build(vocab_size=256, seq_len=16)
    with pytest.raises(TypeError, match="convert the model before it is cut"):
        cut_tensors(model, mesh)


def test_tokens_that_the_ranks_do_not_divide_are_refused(mesh: DeviceMesh) -> None:
    model = cut_tensors(llama_steps.model(layers=1), mesh)
    with pytest.raises(
        ValueError, match=r"9 tokens of a microbatch cannot be cut over 4 .* parallel.sp=false"
    ):
        model(torch.zeros(3, 3, dtype=torch.int64))


def test_a_shard_that_divides_blocks_stays_in_high_precision_and_the_plan_says_why(
    mesh: DeviceMesh,
) -> None:
    model = cut_tensors(llama_steps.model(layers=1, width=160, heads=4, kv_heads=4), mesh)
    rows = {(row.layer.name, row.gemm): row for row in plan(model, NVFP4()).rows}
    wq = rows["blocks.0.attention.wq", "dgrad"]
    assert wq.elements == "BF16·BF16"
    assert wq.why == "160 out features over 4 ranks: a shard of 40 is not whole blocks of 16 (dy)"
    assert rows["blocks.0.attention.wq", "wgrad"].elements == "E2M1·E2M1"
    assert rows["blocks.0.mlp.gate", "fprop"].elements == "E2M1·E2M1"


def test_a_run_whose_shards_divide_blocks_warns_and_names_the_first(mesh: DeviceMesh) -> None:
    narrow, wide = (
        plan(
            cut_tensors(llama_steps.model(layers=1, width=width, hidden=2 * width), mesh),
            QuartetII(),
        )
        for width in (128, 512)
    )
    assert divided_blocks(wide) is None
    said = str(divided_blocks(narrow))
    assert said.startswith(
        "parallel.tp keeps GEMMs of 5 of 8 layers in high precision that one rank quantises"
    )
    assert (
        "(blocks.0.attention.wq dgrad: 128 out features over 4 ranks: a shard of 32 is not "
        "whole Hadamard" in said
    )


def test_larger_blocks_need_larger_shards(mesh: DeviceMesh) -> None:
    model = cut_tensors(llama_steps.model(layers=1), mesh)
    rows = {(row.layer.name, row.gemm): row for row in plan(model, FP8Block()).rows}
    assert "a shard of 32 is not whole blocks of 128" in rows["blocks.0.attention.wq", "fprop"].why


def test_a_backend_that_runs_layers_as_a_whole_is_refused_for_a_shard(mesh: DeviceMesh) -> None:
    model = cut_tensors(llama_steps.model(layers=1), mesh)
    with pytest.raises(ValueError, match="tensor parallelism needs collectives between them"):
        for module in model.modules():
            if isinstance(module, f4.nn.Linear):
                module.rename(module.layer, "te")
        plan(model, NVFP4())


def test_parameters_are_dtensors_with_the_shapes_of_the_whole_model(mesh: DeviceMesh) -> None:
    whole = {name: p.shape for name, p in llama_steps.model(layers=1).named_parameters()}
    model = cut_tensors(llama_steps.model(layers=1), mesh)
    cut = dict(model.named_parameters())
    assert {name: p.shape for name, p in cut.items()} == whole
    assert model.head.weight is model.embed.weight
    assert cut["blocks.0.attention.wq.weight"].to_local().shape == (32, 128)  # type: ignore[attr-defined]
    assert cut["blocks.0.mlp.down.weight"].to_local().shape == (128, 64)  # type: ignore[attr-defined]
    assert cut["norm.weight"].to_local().shape == (128,)  # type: ignore[attr-defined]


def hybrid(**scan: int) -> nn.Module:
    shape = ScanShape(**{"heads": 64, "head_dim": 4, "state": 16, "groups": 4, **scan})  # type: ignore[arg-type]
    torch.manual_seed(0)
    return f4.convert(Hybrid(width=64, pattern="M-", scan=shape).build(vocab_size=256, seq_len=16))


def test_a_rank_has_its_part_of_each_segment(mesh: DeviceMesh) -> None:
    """z, x, B, C and dt of whole heads and groups; rows and channels of the convolution with
    them.
    """
    whole = {name: p.detach() for name, p in hybrid().named_parameters()}
    model = cut_tensors(hybrid(), mesh)
    orders = row_orders(model)
    names = dict(model.named_parameters())
    assert sorted(orders) == [
        f"blocks.0.mixer.{name}" for name in ("conv1d.bias", "conv1d.weight", "in_proj.weight")
    ]
    shard = shard_of(
        names["blocks.0.mixer.in_proj.weight"], orders["blocks.0.mixer.in_proj.weight"]
    )
    assert shard.runs == ((0, 64), (256, 64), (512, 16), (576, 16), (640, 16))
    for name, parameter in names.items():
        for box in shard_of(parameter, orders.get(name)).boxes():
            place = [
                slice(at, at + size) for at, size in zip(box.offsets, box.tensor.shape, strict=True)
            ]
            assert torch.equal(box.tensor, whole[name][tuple(place)]), name
    assert names["blocks.0.mixer.A_log"].to_local().shape == (16,)  # type: ignore[attr-defined]


def test_a_rank_has_whole_channels_with_their_filters(mesh: DeviceMesh) -> None:
    """The rows of `in_proj` alternate between q, k and v, so a quarter of them is a quarter of the
    channels.
    """
    shape = Hyena(
        width=64,
        pattern="SDH*",
        heads=4,
        kv_heads=4,
        hidden=64,
        filters=FilterShape(groups=16, poles=4),
    )
    names = dict(
        cut_tensors(f4.convert(shape.build(vocab_size=256, seq_len=16)), mesh).named_parameters()
    )
    wanted = {
        "0.in_proj.weight": (48, 64),
        "0.taps": (4, 1, 7),
        "1.direct": (16,),
        "2.log_poles": (16, 4, 1),
    }
    for name, held in (wanted | {"3.qkv.weight": (48, 64), "3.out_proj.bias": (64,)}).items():
        block, _, parameter = name.partition(".")
        assert names[f"blocks.{block}.mixer.{parameter}"].to_local().shape == held  # type: ignore[attr-defined]
    whole = shape.build(vocab_size=256, seq_len=16)
    assert {name: p.shape for name, p in names.items()} == {
        name: p.shape for name, p in whole.named_parameters()
    }


def test_a_rank_has_whole_experts_of_which_the_plan_lists_all_and_a_whole_router(
    mesh: DeviceMesh,
) -> None:
    """However narrow: no block is divided. A token has two experts, so a rank's two of eight have
    half of the rows.
    """
    experts = ExpertShape(count=8, hidden=24, shared=8, bias=True)
    shape = MixtureOfExperts(
        width=64, layers=2, dense=1, heads=4, kv_heads=4, head_dim=16, hidden=64, experts=experts
    )
    model = cut_tensors(f4.convert(shape.build(vocab_size=256, seq_len=16)), mesh)
    held = {name: p.to_local() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert held["blocks.1.mlp.gate_up.weight"].shape == (2, 48, 64)
    assert held["blocks.1.mlp.down.weight"].shape == (2, 64, 24)
    assert held["blocks.1.mlp.shared.down.weight"].shape == (64, 48)
    assert held["blocks.1.mlp.router.weight"].shape == (8, 64)
    found = {f"{name}.weight": each for name, each in plan(model, NVFP4()).at(0).layers.items()}
    rest = {"blocks.1.mlp.router.weight", "embed.weight"}  # the tied head is listed
    assert (
        found.keys() - {"head.weight"} == {name for name, w in held.items() if w.dim() > 1} - rest
    )
    assert all(
        found[name].layer.weights == held[name].numel() for name in found.keys() & held.keys()
    )
    routed = found["blocks.1.mlp.gate_up.weight"]
    assert routed.size("fprop", 64) == (32, 48, 64) and not any(
        gemm.divided for gemm in routed.gemms
    )


def test_a_segment_that_the_ranks_do_not_divide_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(
        ValueError,
        match=r"model.scan.groups=2 cannot be divided over parallel.tp=4 .* allowed: 1, 2",
    ):
        cut_tensors(hybrid(groups=2), mesh)
    model: Any = hybrid()
    specs = [
        replace(spec, segments=(510, 2)) if spec.name == "blocks.1.mixer.up.weight" else spec
        for spec in model.fp4train_parameters()
    ]
    model.fp4train_parameters = lambda: specs
    with pytest.raises(
        ValueError, match=r"up: segment 1 of 2 has 510 out_features, which cannot be divided"
    ):
        cut_tensors(model, mesh)


def test_a_segment_whose_share_is_not_whole_blocks_keeps_its_gemm_in_high_precision(
    mesh: DeviceMesh,
) -> None:
    model = cut_tensors(hybrid(heads=32), mesh)
    rows = {(row.layer.name, row.gemm): row for row in plan(model, NVFP4()).rows}
    own = rows["blocks.0.mixer.in_proj", "dgrad"]
    assert (
        own.why
        == "a segment of 32 out features over 4 ranks: a shard of 8 is not whole blocks of 16 (dy)"
    )
    assert rows["blocks.0.mixer.in_proj", "wgrad"].elements == "E2M1·E2M1"


def test_runs_of_rows_cover_a_weight_once_and_are_read_from_a_file(tmp_path: Path) -> None:
    """Of ranks whose parts are cut further, as FSDP does, at places that are none of the
    segments.
    """
    whole = torch.arange(48.0).view(24, 2)
    order = RowOrder((12, 4, 8), 2)
    assert order.runs(0, 24) == ((0, 6), (12, 2), (16, 4), (6, 6), (14, 2), (20, 4))
    for number, (first, count) in enumerate(((0, 7), (7, 5), (12, 12))):
        runs = order.runs(first, count)
        rows = torch.cat([whole[at : at + n] for at, n in runs])
        part = TensorShard(shape=(24, 2), offsets=(runs[0][0], 0), tensor=rows, runs=runs)
        with open(tmp_path / f"{number}", "wb") as file:
            size, _ = write_parts(file.fileno(), {"w": part})
        with open(tmp_path / f"{number}", "rb") as file:
            boxes = read_header(file.fileno(), size)["w"]
        assert [(box.offsets, box.sizes) for box in boxes] == [((at, 0), (n, 2)) for at, n in runs]
    with pytest.raises(ValueError, match="are not the rows of a part"):
        TensorShard(shape=(24, 2), offsets=(0, 0), tensor=whole[:3], runs=((0, 2), (4, 2)))


def test_an_optimizer_takes_parameters_of_a_mesh_and_plain_ones(mesh: DeviceMesh) -> None:
    model = nn.Sequential(cut_tensors(llama_steps.model(layers=1), mesh), nn.Linear(4, 4))
    optimizer = AdamW().build(model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [8, 3, 1, 1]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_adamw_of_shards_is_torchs(mesh: DeviceMesh) -> None:
    ours, theirs = (cut_tensors(llama_steps.model(layers=1), mesh) for _ in range(2))
    optimizer = AdamW().build(ours)
    reference = torch.optim.AdamW(
        AdamW().groups(theirs.parameters()),
        lr=3e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    for step in range(3):
        for each in (ours, theirs):
            draw = torch.Generator().manual_seed(step)
            for p in each.parameters():
                assert isinstance(p, DTensor)
                p.grad = DTensor.from_local(
                    torch.randn(p.to_local().shape, generator=draw),
                    mesh,
                    p.placements,
                    run_check=False,
                )
        reference.step()
        optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(one, DTensor) and isinstance(other, DTensor)
        assert torch.equal(one.to_local(), other.to_local())
        assert isinstance(optimizer.state[one]["exp_avg"], DTensor), (
            "checkpoints read where a shard lies"
        )


def test_whole_parameters_are_counted_once_in_a_sum_over_the_ranks(mesh: DeviceMesh) -> None:
    model = cut_tensors(llama_steps.model(layers=1), mesh)
    found = {name: replicas(p) for name, p in model.named_parameters()}
    assert found["norm.weight"] == found["blocks.0.mlp_norm.weight"] == 4
    assert found["embed.weight"] == found["blocks.0.attention.wo.weight"] == 1


@pytest.mark.parametrize("family", SMALL_SHAPES)
def test_tensor_parallel_ranks_divide_blocks_over_stages_as_one_rank_does(
    family: str, mesh: DeviceMesh
) -> None:
    with torch.device("meta"):
        model = f4.convert(SMALL_SHAPES[family].build(vocab_size=64, seq_len=96))
    whole = [multiplications(each, 96) for each in model.children()]
    assert [multiplications(each, 96) for each in cut_tensors(model, mesh).children()] == whole


def test_a_cut_model_on_the_meta_device_runs_for_a_plan(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = cut_tensors(llama_steps.model(layers=2), mesh)
        tokens = torch.zeros(2, 64, dtype=torch.int64)
    with f4.autocast(NVFP4(), step=0):
        model(tokens, tokens).backward()
    gradient = model.blocks[1].mlp.down.weight.grad  # type: ignore[union-attr, index]
    assert gradient.to_local().shape == (128, 64)
