"""FSDP's gather of weights as codes and scales: what is sent, and that the loss does not know."""

import json
from typing import Any

import pytest
from wire import BYTES, COUNT, WEIGHTS, WIDE, plan, sent

pytestmark = pytest.mark.long

Ranks = Any

ADDING = """
import adding, json, pathlib
import fp4train.train as loop
added = adding.begin()
def train_step(run, recipe, first=loop.train_step):
    made = first(run, recipe)
    if rank == 0:
        pathlib.Path("added.json").write_text(json.dumps(len(added)))
    return made
loop.train_step = train_step
"""
"""Ranks whose products add dw to sums, as those of GPUs do; the first one writes how many did."""
SHORT = ("train.steps=2", "phases=none", "eval.every=0")


@pytest.mark.parametrize(
    ("recipe", "hidden"),
    [("nvfp4", 128), ("nvfp4", 80), ("quartet_ii", 128)],
)
def test_two_ranks_take_the_joint_scale_of_fused_weights_as_one_does(
    ranks: Ranks, recipe: str, hidden: int
) -> None:
    """From shards that are whole blocks, and from those that are not (40 rows), of which the
    masters are sent.
    """
    options = (*WIDE, f"recipe={recipe}", f"model.hidden={hidden}")
    fused = (*options, "recipe.fused_scales=true")
    one = ranks.reference("train.microbatch=2", *fused)
    ranks.train(2, "two", *fused)
    ranks.same(one, "two")
    assert ranks.losses(ranks.reference("train.microbatch=2", *options)) != ranks.losses(one)


@pytest.mark.parametrize(
    "recipe",
    BYTES,
)
def test_two_ranks_that_send_codes_are_two_microbatches(ranks: Ranks, recipe: str) -> None:
    """And a weight costs so many bytes per gather, counted in the collectives themselves."""
    each = BYTES[recipe]
    options = (*WIDE, f"recipe={recipe}", "model.hidden=128")
    ranks.train(2, "two", *options, patch=COUNT)
    ranks.same(ranks.reference("train.microbatch=2", *options), "two")
    gathers = [found for found in sent(ranks, step=1) if "gather" in found["collective"]]
    root = [found for found in gathers if found["dtype"] == "torch.float32"]
    assert [found["backward"] for found in root] == [False]
    blocks = [found["bytes"] for found in gathers if found not in root]
    assert blocks == [each * WEIGHTS / 2 + 2 * 64 * 4 / 2] * 4  # two blocks, forward and backward
    assert each <= 0.51 or recipe != "nvfp4"


def test_the_amaxes_of_all_weights_are_joined_once_per_step(ranks: Ranks) -> None:
    ranks.train(2, "two", *WIDE, "recipe=nvfp4", "train.microbatch=1", patch=COUNT)
    joined = [
        found["bytes"]
        for found in sent(ranks, step=1)
        if found["maximum"] and found["dtype"] == "torch.float32"
    ]
    assert joined == [4 * 14]  # of 14 weights, for two microbatches, forward and backward


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("mxfp8", ("model.recompute=true", "train.microbatch=1")),
        ("fp8_delayed", ("train.microbatch=1", "policy=last15")),
        ("nvfp4_forward_mxfp8_backward", ()),
        ("fp8_row", ()),
        ("nvfp4_dequantised", ("model.recompute=true", "phases=cooldown_fprop")),
        ("tetrajet_v2", ("train.microbatch=1", "phases=cooldown_fprop")),
    ],
)
def test_codes_give_the_bits_of_float32(
    ranks: Ranks, recipe: str, options: tuple[str, ...]
) -> None:
    """Recomputed blocks, microbatches, measured steps, a change of recipe, and two forms of a
    weight.
    """
    options = (*WIDE, f"recipe={recipe}", *options)
    ranks.train(2, "float32", *options, "parallel.gather=fp32")
    ranks.train(2, "codes", *options, patch=COUNT)
    ranks.same("float32", "codes")
    gathers = [found for found in sent(ranks, step=1) if "gather" in found["collective"]]
    microbatches = 2 if "train.microbatch=1" in options else 1
    assert len(gathers) == 5 * microbatches  # two blocks, forward and backward, and the root once
    assert sum(found["dtype"] == "torch.float32" for found in gathers) == microbatches


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("nvfp4", ()),
        ("mxfp8", ("model.recompute=true", "train.microbatch=1")),
        ("fp8_delayed", ("parallel.sp=false",)),
        ("tetrajet_v2", ("model.width=256", "model.hidden=256")),
    ],
)
def test_tensor_parallel_ranks_send_codes_of_their_parts(
    ranks: Ranks, recipe: str, options: tuple[str, ...]
) -> None:
    """The bits are those of float32: amaxes are joined over shards and tensor-parallel ranks, in
    one collective.
    """
    both = (*WIDE, *SHORT, "model.width=128", f"recipe={recipe}", "parallel.tp=2", *options)
    ranks.train(4, "float32", *both, "parallel.gather=fp32")
    ranks.train(4, "codes", *both, patch=COUNT)
    ranks.same("float32", "codes")
    assert plan(ranks, "codes")[0].startswith(
        "weights of the blocks are gathered from 2 shards as codes and scales ("
    )
    if recipe == "nvfp4":
        gathers = [each for each in sent(ranks, step=1) if "gather" in each["collective"]]
        # and tokens of x and dy
        blocks = [each["bytes"] for each in gathers if each["dtype"] == "torch.uint8"]
        weights = 4 * 128 * 128 + 3 * 128 * 128
        # two blocks, forward and backward
        assert blocks.count(BYTES[recipe] * weights / 4 + 2 * 128 * 4 / 2) == 4
        joined = [each["bytes"] for each in sent(ranks, step=1) if each["maximum"]]
        assert joined.count(4 * 14) == 1


@pytest.mark.parametrize(
    ("recipe", "schedule"),
    [
        ("nvfp4", "1f1b"),
        ("quartet_ii", "interleaved"),
    ],
)
def test_stages_gather_codes_for_every_pass(ranks: Ranks, recipe: str, schedule: str) -> None:
    """Two microbatches on two blocks per rank; what is gathered is never that of the step
    before.
    """
    stages = (
        "model.layers=4",
        "train.microbatch=1",
        "parallel.pp=2",
        f"parallel.pp_schedule={schedule}",
    )
    options = (*WIDE, *SHORT, f"recipe={recipe}", *stages)
    ranks.train(4, "float32", *options, "parallel.gather=fp32")
    ranks.train(4, "codes", *options, patch=COUNT)
    ranks.same("float32", "codes")
    gathers = [each for each in sent(ranks, step=1) if "gather" in each["collective"]]
    blocks = [
        (each["bytes"], each["backward"]) for each in gathers if each["dtype"] == "torch.uint8"
    ]
    bytes_ = BYTES[recipe] * WEIGHTS / 2 + 2 * 64 * 4 / 2
    assert sorted(blocks) == [(bytes_, False)] * 4 + [(bytes_, True)] * 4


def test_misaligned_weights_are_sent_in_float32_and_the_plan_names_them(ranks: Ranks) -> None:
    options = (*WIDE, "model.kv_heads=1", "recipe=mxfp8", "policy=all")
    ranks.train(1, "one", "train.microbatch=2", *options)
    ranks.train(2, "two", *options)
    ranks.same("one", "two")
    assert not plan(ranks, "one")
    assert plan(ranks, "two") == [
        "weights of the blocks are gathered from 2 shards: 5 layers each of blocks 0–1 as "
        "codes and scales "
        "(1.03 or 2 B per weight), which keep the bits of one rank; attention.wk, "
        "attention.wv of blocks 0–1 in "
        "float32 (4 B per weight), because a shard of 16 is not whole blocks of 32"
    ]


def test_a_bf16_gather_rounds_before_it_quantises(ranks: Ranks) -> None:
    """It is in every step what one rank gives whose masters are rounded."""
    for recipe in ("bf16", "nvfp4"):
        options = (*WIDE, f"recipe={recipe}")
        ranks.train(2, f"{recipe}_float32", *options, "parallel.gather=fp32")
        ranks.train(2, f"{recipe}_bf16", *options, "parallel.gather=bf16", patch=COUNT)
        blocks = [each["bytes"] for each in sent(ranks, step=1) if each["dtype"] == "torch.uint8"]
        assert blocks == [2 * WEIGHTS / 2 + 2 * 64 * 4 / 2] * 4
        assert plan(ranks, f"{recipe}_bf16")[0].startswith(
            "weights of the blocks are gathered from 2 shards in BF16 (2 B per weight)"
        )
    ranks.same("bf16_float32", "bf16_bf16")
    first, rounded = (
        ranks.losses(f"nvfp4_{gather}")[0]["train/loss"] for gather in ("float32", "bf16")
    )
    assert rounded != first and rounded == pytest.approx(first, rel=5e-3)


@pytest.mark.parametrize(
    ("cut", "microbatches"), [((), 2), (("parallel.tp=2",), 4)], ids=["shards", "tensor"]
)
def test_dw_of_microbatches_is_added_within_its_product_to_what_ranks_hold(
    ranks: Ranks, cut: tuple[str, ...], microbatches: int
) -> None:
    """FSDP sums the gradients of whole weights, whose BF16 values were gathered, until the last
    microbatch. Of each of two steps all but the first one add those of 14 layers, in recomputed
    blocks: the bits are those of autograd.
    """
    options = (
        *WIDE,
        *cut,
        "train.steps=2",
        "recipe=bf16",
        "train.microbatch=1",
        "model.recompute=true",
    )
    ranks.train(2, "product", *options, patch=ADDING)
    assert json.loads((ranks.folder / "added.json").read_text()) == 2 * 14 * (microbatches - 1)
    ranks.train(2, "autograd", *options, "train.kernels=torch", patch=ADDING)
    assert json.loads((ranks.folder / "added.json").read_text()) == 0
    ranks.same("product", "autograd")
    assert cut or "in BF16" in plan(ranks, "product")[0]


def test_gradients_in_bf16_are_half_the_bytes_and_other_digits(ranks: Ranks) -> None:
    """Rounded once and summed in float32; microbatches are summed before."""
    options = (*WIDE, *SHORT, "recipe=nvfp4", "train.microbatch=1")
    ranks.train(2, "float32", *options)
    ranks.train(2, "bf16", *options, "parallel.reduce=bf16", patch=COUNT)
    gradients = [each for each in sent(ranks, step=1) if each["collective"] == "all_to_all_single"]
    # two blocks and what is outside, once
    assert [each["dtype"] for each in gradients] == ["torch.bfloat16"] * 3
    assert [each["bytes"] for each in gradients][:2] == [2 * (WEIGHTS + 2 * 64)] * 2
    a = ranks.losses("float32")
    b = ranks.losses("bf16")
    assert (
        a[0]["train/loss"] == b[0]["train/loss"]
        and a[0]["train/grad_norm"] != b[0]["train/grad_norm"]
    )
    assert b[1]["train/loss"] == pytest.approx(a[1]["train/loss"], rel=1e-3)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4_dequantised"])
def test_a_resume_goes_on_in_the_same_bits_with_either_gather(ranks: Ranks, recipe: str) -> None:
    options = (*WIDE, f"recipe={recipe}", "checkpoint.every=2", "checkpoint.keep=2")
    ranks.train(2, "whole", *options)
    ended = ranks(2, "resume=runs/whole", "resume_step=2", "run.name=parts", "parallel.gather=fp32")
    assert ended.codes == [0, 0], ended.err
    assert ranks.state("whole") == ranks.state("parts")
