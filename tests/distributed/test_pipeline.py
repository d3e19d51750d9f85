"""A pipeline is one stage, in every bit: losses, norms, weights, moments, scales."""

from typing import Any

import pytest
from patches import ASKS_FOR_MXFP8, DIES_AT_3, GRAPHS

pytestmark = pytest.mark.long

RECIPES = ("bf16", "nvfp4", "fp8_delayed")
MEASURED = "eval.errors_every=3"
SMALL = ("model.layers=4", "train.microbatch=1", "eval.every=0")
Ranks = Any
Cut = tuple[str, ...]


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_stages_are_one_stage(ranks: Ranks, recipe: str) -> None:
    options = (*SMALL, f"recipe={recipe}", "policy=all")
    ranks.train(2, "two", "parallel.pp=2", *options)
    ranks.same(ranks.reference(*options), "two")


@pytest.mark.parametrize("cut", ["pp", "tp", "dp_shard"])
def test_every_rank_counts_the_multiplications_of_the_whole_model(ranks: Ranks, cut: str) -> None:
    """By which a run measures its utilisation."""
    counted = (
        "import pathlib\nimport fp4train.train as loop\noriginal = loop.train_step\n"
        "def step(run, recipe):\n    name = f'{run.config.run.name}.{rank}.counted'\n"
        "    pathlib.Path(name).write_text(str(run.multiplied))\n    return original(run, recipe)\n"
        "loop.train_step = step"
    )
    options = (*SMALL, "model.kv_heads=2", "train.steps=1", "recipe=bf16")
    ranks.train(1, "one", *options, patch=counted)
    ranks.train(2, "two", *options, f"parallel.{cut}=2", patch=counted)
    found = [path.read_text() for path in ranks.folder.glob("*.counted")]
    assert len(found) == 3 and len(set(found)) == 1


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, ("parallel.pp=2", "parallel.pp_schedule=gpipe", "model.tied=false")),
        (2, ("parallel.pp=2", "parallel.pp_schedule=interleaved", MEASURED)),
        (4, ("parallel.pp=4", MEASURED)),
        (2, ("parallel.pp=2", "model.layers=3", "model.vocab_multiple=2048")),
        (2, ("parallel.pp=2", "parallel.pp_schedule=interleaved", "model.layers=5")),
    ],
    ids=[
        "gpipe",
        "interleaved",
        "four stages",
        "unequal stages",
        "unequal, interleaved",
    ],
)
def test_schedules_and_four_stages_are_one_stage(
    ranks: Ranks, count: int, options: tuple[str, ...]
) -> None:
    """With the default policy, which counts blocks of the whole model, and recomputed blocks; two
    of them with measured errors.
    """
    both = (*SMALL, "recipe=nvfp4", "model.recompute=true")
    ranks.train(count, "several", *both, *options)
    reference = ranks.reference(
        *both, *(each for each in options if not each.startswith("parallel"))
    )
    ranks.same(reference, "several")


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("fp8_delayed", ("parallel.dp_replicate=2",)),
        ("nvfp4", ("parallel.dp_shard=2", "parallel.pp_schedule=interleaved")),
    ],
)
def test_stages_on_data_ranks_are_data_ranks(ranks: Ranks, recipe: str, options: Cut) -> None:
    both = (*SMALL, f"recipe={recipe}", options[0])
    ranks.train(2, "data", *both)
    ranks.train(4, "both", *both, "parallel.pp=2", *options[1:])
    ranks.same("data", "both")


@pytest.mark.parametrize(
    ("recipe", "before", "after"),
    [
        ("fp8_delayed", ("parallel.pp=2",), ("parallel.pp=2", "parallel.pp_schedule=interleaved")),
        ("nvfp4", ("parallel.pp=2", "parallel.pp_schedule=interleaved"), ()),
        ("fp8_delayed", (), ("parallel.pp=2",)),
    ],
)
def test_a_run_goes_on_with_any_number_of_stages(
    ranks: Ranks, recipe: str, before: Cut, after: Cut
) -> None:
    options = (*SMALL, f"recipe={recipe}")
    ranks.train(
        2 if before else 1, "moved", *options, *before, "checkpoint.every=2", patch=DIES_AT_3
    )
    ended = ranks(2 if after else 1, "resume=runs/moved", *(after or ("parallel.pp=1",)))
    assert not any(ended.codes), ended.err
    ranks.same(ranks.reference(*options), "moved")


def test_a_run_goes_on_where_its_blocks_are_divided_otherwise(ranks: Ranks) -> None:
    """A checkpoint has the names of the whole model and no stages."""
    options = (*SMALL, "recipe=fp8_delayed")
    one_and_three = (
        "import fp4train.parallel.stages as stages\n"
        "stages.share_blocks = lambda costs, last, parts: [range(1), range(1, len(costs))]\n"
    )
    ranks.train(
        2, "moved", *options, "parallel.pp=2", "checkpoint.every=2", patch=one_and_three + DIES_AT_3
    )
    ended = ranks(2, "resume=runs/moved")
    assert not any(ended.codes), ended.err
    ranks.same(ranks.reference(*options), "moved")


def test_a_new_run_takes_the_weights_of_another(ranks: Ranks) -> None:
    taken = (*SMALL, "recipe=nvfp4", f"init={ranks.reference(*SMALL, 'recipe=nvfp4')}")
    ranks.train(1, "one", *taken)
    ranks.train(2, "two", *taken, "parallel.pp=2")
    ranks.same("one", "two")


def test_a_swap_is_resolved_for_the_layers_of_all_stages(ranks: Ranks) -> None:
    options = (*SMALL, "phases=none")
    ranks.train(2, "asked", *options, "parallel.pp=2", patch=ASKS_FOR_MXFP8)
    ranks.train(1, "one", *options, patch=ASKS_FOR_MXFP8)
    assert [line["precision/recipe"] for line in ranks.losses("asked")] == ["NVFP4"] * 2 + [
        "MXFP8"
    ] * 2
    ranks.same("one", "asked")
    plans = [(ranks.folder / "runs" / run / "plan.txt").read_text() for run in ("asked", "one")]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(("stage", "block"), [(0, 1), (1, 3)])
def test_a_loss_that_is_not_finite_names_the_layer_of_its_stage(
    ranks: Ranks, stage: int, block: int
) -> None:
    poison = f"""
import fp4train.train as loop
original = loop.train_step
def step(run, recipe):
    if run.step == 2 and rank == {stage}:
        layer = run.model.get_submodule("blocks.{block}.mlp.down")
        layer.register_forward_hook(lambda m, a, y: y * float("nan"))
    return original(run, recipe)
loop.train_step = step
"""
    said = ranks(2, "run.name=a", *SMALL, "parallel.pp=2", patch=poison).message
    assert said.startswith(
        f"step 2: loss is nan in NVFP4; first non-finite: output of blocks.{block}.mlp.down"
    )
    assert "A checkpoint from before this step is saved" in said


LEAVES_OUT = """
import fp4train.models.llama.model as llama
specs = llama.LlamaModel.fp4train_parameters
llama.LlamaModel.fp4train_parameters = lambda model: [s for s in specs(model) if s.name != "norm.weight"]
"""
NO_STAGES = "from fp4train.models.common.decoder import Decoder\ndel Decoder.fp4train_parameters"


@pytest.mark.parametrize(
    ("count", "arguments", "patch", "said"),
    [
        (
            2,
            ("parallel.pp=2", "model.layers=1"),
            "",
            "1 block cannot be divided over parallel.pp=2 stages, which need",
        ),
        (
            2,
            ("parallel.pp=2", "parallel.pp_schedule=interleaved", "model.layers=2"),
            "",
            "2 blocks cannot be divided over parallel.pp=2 × parallel.pp_chunks=2 stages, "
            "which need one each; use",
        ),
        (
            2,
            ("parallel.pp=2", "train.microbatch=null"),
            "",
            "1 microbatch per rank cannot fill parallel.pp=2 stages",
        ),
        (
            2,
            ("parallel.pp=2", "parallel.pp_schedule=interleaved", "train.batch_size=5"),
            "",
            "interleaved does not take 5 microbatches per rank: make them a multiple of "
            "parallel.pp=2",
        ),
        (
            1,
            ("parallel.pp=2",),
            "",
            "parallel.pp=2 does not divide the 1 rank of this run: start it under torchrun",
        ),
        (
            2,
            ("parallel.pp=2", "parallel.pp_schedule=zbv"),
            "",
            "would run the GEMMs of every backward pass twice",
        ),
        (
            2,
            ("parallel.pp=2",),
            LEAVES_OUT,
            "LlamaModel.fp4train_parameters leaves out norm.weight",
        ),
        (2, ("parallel.pp=2",), NO_STAGES, "LlamaModel does not say how it is cut into stages"),
    ],
)
def test_what_no_pipeline_can_run_is_one_message(
    ranks: Ranks, count: int, arguments: Cut, patch: str, said: str
) -> None:
    given = {each.partition("=")[0] for each in arguments}
    base = [each for each in SMALL if each.partition("=")[0] not in given]
    assert said in ranks(count, "run.name=a", *base, *arguments, patch=patch).message


def test_compiled_stages_are_one_compiled_stage(ranks: Ranks) -> None:
    options = (*SMALL, "train.compile=true", "model.layers=2", "train.steps=2")
    ranks.train(2, "two", *options, "parallel.pp=2", patch=GRAPHS)
    ranks.same(ranks.reference(*options, patch=GRAPHS), "two")
