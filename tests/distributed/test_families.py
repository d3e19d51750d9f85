"""Families other than Llama: their runs are the same on one rank and over two, cut in every way,
and go on in every bit.
"""

from typing import Any

import pytest
from families import BEYOND_LLAMA, tiny_run
from patches import DIES_AT_3
from shown import write_shown

pytestmark = pytest.mark.long

Ranks = Any
Cut = tuple[str, ...]
WORDS: dict[str, Cut] = {
    "hybrid": ("model.pattern=M-M*",),
    # Half of each filter is a multiple of 16 values: torch's fused AdamW rounds what does not fill
    # a vector otherwise.
    "hyena": ("model.filters.groups=32",),
    "moe": ("model.layers=3",),
}
"""What two ranks need of a family's tiny run."""
RUNS: dict[str, Cut] = {
    family: tiny_run(family, *WORDS.get(family, ()), "train.microbatch=2")
    for family in BEYOND_LLAMA
}
TENSOR_WORDS: dict[str, Cut] = {
    # Each segment of `in_proj` is whole blocks on two ranks.
    "hybrid": (
        "model.pattern=M*-",
        "model.kv_heads=2",
        "model.scan.heads=32",
        "model.scan.head_dim=4",
        "model.scan.groups=2",
    ),
    "moe": ("model.layers=3", "model.kv_heads=2", "model.experts.shared=1"),
}
"""What tensor-parallel ranks need besides or instead."""
CUT: dict[str, Cut] = {
    family: tiny_run(
        family,
        *TENSOR_WORDS.get(family, WORDS.get(family, ())),
        "train.microbatch=2",
        "policy=all",
        "schedule.warmup=0",
        "eval.every=0",
    )
    for family in BEYOND_LLAMA
}
EXPERTS = CUT["moe"]
PARTED = ("moe", "hybrid")
"""Experts, and segments of a weight: what ranks hold of these is put together otherwise than that of
a llama, on which the same is tested. The tests above and below of what is computed take each family.
"""
GPIPE = ("parallel.pp=2", "parallel.pp_schedule=gpipe", "model.recompute=true")
INTERLEAVED = ("parallel.pp=2", "parallel.pp_schedule=interleaved")
FLOAT32_WIRE = ("parallel.gather=fp32", "parallel.reduce=float32")
SAME = [
    pytest.param("hybrid", "nvfp4", GPIPE, id="hybrid, gpipe"),
    pytest.param("moe", "nvfp4", FLOAT32_WIRE, id="moe, float32 on the wire"),
    pytest.param("moe", "bf16", ("parallel.gather=bf16",), id="moe, BF16 on the wire"),
    pytest.param("hyena", "fp8_current", INTERLEAVED, id="hyena, interleaved in FP8"),
]
"""What the tests of Llama promise in every bit, and the test of families beside it does not train:
each way with experts, and with one of the families whose linear layers are those of a llama.
"""


def four(family: str) -> Cut:
    """A run of four blocks, which `interleaved` needs."""
    patterns = {"hybrid": "model.pattern=M*-M", "hyena": "model.pattern=SDH*"}
    return (*CUT[family], patterns.get(family, "model.layers=4"), "train.steps=2")


@pytest.mark.parametrize(
    ("recipe", "family"),
    [
        *(("nvfp4", family) for family in RUNS),
        # Of experts each form of codes is sent apart; linear layers are those of a llama.
        *((recipe, "moe") for recipe in ("mxfp8", "fp8_delayed", "quartet_ii")),
    ],
)
def test_shards_and_stages_are_one_rank(ranks: Ranks, recipe: str, family: str) -> None:
    """Weights go over the wire as codes: `parallel.gather` is `recipe`. Stages send none, so one
    recipe is enough for them.
    """
    options = (*RUNS[family], f"recipe={recipe}", "policy=all", "train.steps=3")
    reference = ranks.reference(*options)
    for key in ("dp_shard", "pp") if recipe == "nvfp4" else ("dp_shard",):
        ranks.train(2, key, *options, f"parallel.{key}=2")
        ranks.same(reference, key)


def test_recomputed_experts_without_tokens_on_a_rank_are_sent_along(ranks: Ranks) -> None:
    """Forward and backward multiply other codes of the weights, in blocks of rows and of columns;
    eight tokens on each rank reach half of the experts at most.
    """
    options = (
        *RUNS["moe"],
        "model.experts.count=16",
        "model.experts.top=1",
        "model.recompute=true",
        "recipe=mxfp8",
        "recipe.two_d_weights=false",
        "policy=all",
        "train.seq_len=4",
        "train.steps=2",
    )
    ranks.train(2, "two", *options, "parallel.dp_shard=2")
    ranks.same(ranks.reference(*options), "two")


def test_outlier_channels_are_those_of_one_rank_on_shards_and_refused_elsewhere(
    ranks: Ranks,
) -> None:
    """Experts too: a rank has tokens for some of them, and all ranks choose by the tokens of
    all.
    """
    own = ("recipe=tetrajet_v2_outliers", "policy=all", "recipe.outliers.multiple=8")
    own = (*own, "recipe.outliers.start=0", "recipe.outliers.steps=2")
    options = (*RUNS["moe"], *own)
    ranks.train(2, "shards", *options, "parallel.dp_shard=2", "parallel.gather=fp32")
    ranks.same(ranks.reference(*options), "shards")
    for key, cut in {"pp": options, "tp": (*EXPERTS, *own)}.items():
        said = ranks(2, f"run.name={key}", *cut, f"parallel.{key}=2").message
        assert "outlier channels" in said and "recipe.outliers=null" in said


@pytest.mark.parametrize("family", PARTED)
def test_a_run_goes_on_in_every_bit(ranks: Ranks, family: str) -> None:
    """With recomputed blocks, from shards to stages."""
    options = (*RUNS[family], "recipe=nvfp4", "model.recompute=true")
    ranks.train(2, "moved", *options, "parallel.dp_shard=2", "checkpoint.every=2", patch=DIES_AT_3)
    ended = ranks(2, "resume=runs/moved", "parallel.dp_shard=1", "parallel.pp=2")
    assert not any(ended.codes), ended.err
    ranks.same(ranks.reference(*options), "moved")


def close(ranks: Ranks, one: Any, other: Any, first: float, later: float) -> None:
    """Losses and norms of the first step, within 1e-6 and `first`, and of later ones; the first
    step's loads of experts and losses of balance.
    """
    for number, (a, b) in enumerate(zip(ranks.losses(one), ranks.losses(other), strict=True)):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=later if number else 1e-6), (
            number
        )
        assert b["train/grad_norm"] == pytest.approx(
            a["train/grad_norm"], rel=later if number else first
        ), number
        routed = [{key: each[key] for key in each if key.startswith("experts/")} for each in (a, b)]
        assert number or routed[1] == pytest.approx(routed[0], rel=1e-5)


@pytest.mark.parametrize("family", CUT)
def test_tensor_parallel_ranks_give_the_first_step_of_one_rank_in_nvfp4(
    ranks: Ranks, family: str
) -> None:
    """The codes are equal, random bits included; a few BF16 roundings of sums in another order
    spread from there.
    """
    options = (*CUT[family], "recipe=nvfp4", "train.steps=2")
    two = ranks.reference(*options, "parallel.tp=2", count=2)
    close(ranks, ranks.reference(*options), two, 2e-4, 2e-2)


@pytest.mark.parametrize("family", PARTED)
def test_a_run_goes_over_tensor_parallel_ranks_shards_and_one_rank(
    ranks: Ranks, family: str
) -> None:
    """FP32, so that what is compared is the state that travels and not the roundings of 4 bits."""
    options = (*CUT[family], "recipe=fp32", "schedule=constant", "phases=none")
    ranks.train(2, "parts", *options, "train.steps=1", "parallel.tp=2", "parallel.sp=false")
    both = ("parallel.tp=2", "parallel.dp_shard=2", "parallel.sp=true")
    for count, steps, mesh in (
        (4, 2, both),
        (1, 3, ("parallel.tp=1", "parallel.dp_shard=1")),
        (2, 4, both[:1]),
    ):
        ended = ranks(count, "resume=runs/parts", f"train.steps={steps}", *mesh)
        assert ended.codes == [0] * count, ended.err
    close(ranks, ranks.reference(*options, "train.steps=4"), "parts", 1e-6, 1e-5)


@pytest.mark.parametrize("family", PARTED)
def test_stages_of_tensor_parallel_ranks_are_one_stage(ranks: Ranks, family: str) -> None:
    options = (*CUT[family], "recipe=nvfp4", "train.steps=2", "parallel.tp=2")
    ranks.train(4, "stages", *options, "parallel.pp=2")
    ranks.same(ranks.reference(*options, count=2), "stages")


def test_shards_of_tensor_parallel_experts_are_sent_as_codes(ranks: Ranks) -> None:
    """The bits are those of float32; three experts on a rank, which two shards do not divide, are
    sent so.
    """
    for count in (4, 6):
        options = (
            *EXPERTS,
            f"model.experts.count={count}",
            "model.layers=2",
            "recipe=nvfp4",
            "train.steps=2",
        )
        for name in ("fp32", "recipe"):
            both = ("parallel.tp=2", "parallel.dp_shard=2", f"parallel.gather={name}")
            ranks.train(4, f"{name}{count}", *options, *both)
        ranks.same(f"fp32{count}", f"recipe{count}")
    why = "3 experts do not divide over 2 shards"
    assert [why in (ranks.run(f"recipe{count}") / "plan.txt").read_text() for count in (4, 6)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(("family", "recipe", "cut"), SAME)
def test_every_other_way_to_cut_a_run_is_one_rank(
    ranks: Ranks, family: str, recipe: str, cut: Cut
) -> None:
    ranks.train(2, "two", *four(family), f"recipe={recipe}", *cut)
    ranks.same(ranks.reference(*four(family), f"recipe={recipe}"), "two")


def test_groups_that_the_ranks_do_not_divide_are_refused(ranks: Ranks) -> None:
    said = ranks(2, "run.name=a", *RUNS["hybrid"], "model.kv_heads=2", "parallel.tp=2").message
    assert (
        "model.scan.groups=1 cannot be divided over parallel.tp=2 ranks; parallel.tp allowed: 1"
        in said
    )
    said = ranks(2, "run.name=b", *RUNS["hyena"], "model.filters.groups=1", "parallel.tp=2").message
    assert "blocks.0.mixer.taps: 1 rows cannot be divided over parallel.tp=2 ranks" in said
    fewer = ("model.experts.count=1", "model.experts.top=1")
    said = ranks(2, "run.name=c", *EXPERTS, *fewer, "parallel.tp=2").message
    assert (
        "blocks.1.mlp.gate_up: 1 experts cannot be divided over parallel.tp=2 ranks; choose "
        "a multiple of 2" in said
    )


def test_a_family_of_a_plugin_is_cut_in_every_way(ranks: Ranks) -> None:
    """That of docs/plugins.md: one package and one YAML, which no file of fp4train names."""
    folder = write_shown(ranks.folder)
    own = ("--config-dir", str(folder), "plugins=[shifted]")
    options = (
        *own,
        "model=shifted_tiny",
        "model.width=32",
        "model.hidden=64",
        "policy=all",
        "train.microbatch=2",
    )
    options = (*options, "train.steps=2", "schedule.warmup=0")
    reference = ranks.reference(*options, "recipe=nvfp4")
    for key in ("dp_shard", "dp_replicate", "pp"):
        ranks.train(2, key, *options, "recipe=nvfp4", f"parallel.{key}=2")
        ranks.same(reference, key)
    ranks.train(2, "tp", *options, "recipe=nvfp4", "parallel.tp=2")
    close(ranks, reference, "tp", 2e-4, 2e-2)
