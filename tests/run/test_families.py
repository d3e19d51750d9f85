"""Families other than Llama through the command line: recipes, the plan, folders that runs begin with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Before, Cli, losses
from covering import COVERING
from families import BEYOND_LLAMA, tiny_run, tiny_shape
from hf_folders import write_evo2
from lengths import long_but

from fp4train.precision import find_layers
from fp4train.run.record.directory import read_config

OUTLIERS = ("recipe.outliers.multiple=8", "recipe.outliers.start=0", "recipe.outliers.steps=2")
"""Outlier channels that a run of a few steps on layers of 32 channels chooses."""
SCALED = ("recipe.scaling.initial=1024",)
"""A factor of the loss in FP16 with which no step of a run of a few overflows."""
RECORDED = ("recipe.outliers.start=2", "recipe.outliers.steps=3")
"""Steps before and after a run is resumed at the fourth."""
ELSEWHERE = ("hyena",)
"""Families that `transformers` does not have."""


def learning() -> Iterator[Any]:
    """Recipes that have all parts between them with experts, whose products are their own; every
    family in NVFP4. The linear layers of the others are those of a llama.
    """
    for family in BEYOND_LLAMA:
        yield pytest.param("nvfp4", family, marks=[pytest.mark.long] * (family == "olmo2"))
    for recipe in COVERING:
        yield pytest.param(recipe, "moe", marks=pytest.mark.long)


@pytest.mark.parametrize(("recipe", "family"), list(learning()))
def test_families_learn_in_recipes_of_every_part(cli: Cli, recipe: str, family: str) -> None:
    options = (
        "policy=all",
        "train.steps=5",
        "optim.lr=1e-2",
        *(OUTLIERS if recipe.endswith("_outliers") else ()),
        *(SCALED if recipe == "fp16" else ()),
    )
    ended = cli(*tiny_run(family), "run.name=a", f"recipe={recipe}", *options)
    assert (
        ended.code == 0 and "not converted" not in ended.err and "never chosen" not in ended.err
    ), ended.err
    found = losses("runs/a")
    assert found[5][0] < found[1][0] - 0.3


@pytest.mark.parametrize("family", ["hybrid", "hyena"])
def test_weight_decay_spares_the_filters_of_convolutions(
    cli: Cli, before: Before, family: str
) -> None:
    runs: list[Any] = []
    before(0, runs.append)
    assert cli("run.name=a", *tiny_run(family), "train.steps=1").code == 0
    (run,) = runs
    decays = {
        id(p): group["weight_decay"]
        for group in run.optimizer.param_groups
        for p in group["params"]
    }
    filters = {name for name, p in run.model.named_parameters() if p.dim() == 3}
    assert filters
    assert {
        name for name, p in run.model.named_parameters() if p.dim() == 3 and decays[id(p)]
    } == set()
    assert {decays[id(p)] for p in run.model.parameters()} == {0.0, 0.1}


@pytest.mark.long
def test_a_run_whose_filters_had_weight_decay_is_not_resumed_in_silence(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("train.steps=2", "phases=none", "schedule=constant")
    with monkeypatch.context() as older:
        older.setattr("fp4train.optim.elementwise", lambda model: set())
        assert cli("run.name=a", *tiny_run("hybrid"), *options).code == 0
    refused = cli("resume=runs/a", "train.steps=3")
    assert refused.code == 1
    assert "whether blocks.0.mixer.conv1d.weight has weight decay" in refused.message
    assert cli("run.name=b", "init=runs/a", *tiny_run("hybrid"), *options).code == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        *((family, ("recipe=fp8_delayed",)) for family in BEYOND_LLAMA),
        ("moe", ("recipe=tetrajet_v2_outliers", *OUTLIERS[:1], *RECORDED)),
    ],
)
def test_a_family_resumes_in_every_bit(cli: Cli, family: str, recipe: tuple[str, ...]) -> None:
    """With histories of amaxes; and experts in the middle of recording outlier channels."""
    options = (*tiny_run(family), *recipe, "phases=none")
    assert cli("run.name=whole", *options, "schedule=constant").code == 0
    assert cli("run.name=a", *options, "schedule=constant", "train.steps=4").code == 0
    assert cli("resume=runs/a", "train.steps=6").code == 0
    whole = losses("runs/whole")
    resumed = losses("runs/a")
    assert [resumed[step] for step in (5, 6)] == [whole[step] for step in (5, 6)]


SPARED = {
    "hybrid": ("embed.weight", ".conv1d.weight"),
    "hyena": ("embed.weight", ".featuriser", ".taps", ".log_poles", ".residues"),
    "moe": ("embed.weight", ".router.weight"),
}
"""Ends of names of what has two or more dimensions and is no weight of a linear layer: filters of
channels, rows of tokens, routers. Of a family that is not named it is the embedding.
"""


@pytest.mark.parametrize("family", BEYOND_LLAMA)
def test_the_plan_lists_all_weights_of_a_family(cli: Cli, family: str) -> None:
    ended = cli("plan", *tiny_run(family), "policy=all", "--json")
    assert ended.code == 0 and "not converted" not in ended.err
    listed = {row["layer"] for row in json.loads(ended.out)["gemms"]}
    model = tiny_shape(family).build(vocab_size=320, seq_len=32)
    layers = find_layers(model)
    assert listed == layers.keys()
    # a head that is tied to the embedding is a linear layer
    every = model.named_parameters(remove_duplicate=False)
    matrices = {
        name: p
        for name, p in every
        if p.dim() > 1 and not name.endswith(SPARED.get(family, ("embed.weight",)))
    }
    assert matrices.keys() == {f"{name}.weight" for name in layers}
    assert sum(p.numel() for p in matrices.values()) == sum(
        layer.weights for layer in layers.values()
    )


@pytest.mark.parametrize("family", long_but(("moe", "hyena"), BEYOND_LLAMA))
def test_a_run_measures_its_utilisation_by_the_flop_of_its_plan(
    cli: Cli, before: Before, family: str
) -> None:
    """Which are more than those of linear layers: attention, scans and Fourier transforms."""
    seen: list[int] = []
    before(0, lambda run: seen.append(run.multiplied))
    assert cli(*tiny_run(family), "run.name=a", "train.steps=1").code == 0
    ended = cli("plan", *tiny_run(family), "gpu=H100", "gpus=1", "--json")
    assert ended.code == 0, ended.err
    (stretch, *_) = json.loads(ended.out)["stretches"]
    assert 6 * seen[0] == stretch["flops_per_token"]


@pytest.mark.long
def test_a_folder_with_evo_2_s_names_needs_no_tokenizer(cli: Cli) -> None:
    """Its ids are bytes, and what an FP8 recipe kept beside the weights is passed over."""
    write_evo2(Path("evo2"))
    begun = (
        "init=evo2",
        "recipe=nvfp4",
        "train.steps=1",
        "train.seq_len=32",
        "train.batch_size=2",
        "track=jsonl",
    )
    begun = (*begun, "data=text", *cli.paths)
    assert cli.raw(*begun, "run.name=a").code == 0
    assert read_config(Path("runs/a")).data.tokenizer == {
        "_target_": "fp4train.data.tokenizers.bytes.Bytes"
    }
    assert cli.raw(*begun, "run.name=b", "data/tokenizer=bytes").code == 0
    assert losses("runs/a") == losses("runs/b")
    assert cli.raw("sample", "runs/a", "prompt=ACGT", "tokens=2").code == 0


@pytest.mark.parametrize("family", ELSEWHERE)
def test_what_no_serving_software_reads_is_not_exported(cli: Cli, family: str) -> None:
    run = cli.trained(
        "run.name=a", *tiny_run(family), "recipe=nvfp4", "phases=none", "train.steps=1"
    )
    ended = cli.raw("export", str(run), "to=compressed-tensors", "out=codes")
    assert (
        ended.code == 1
        and "no serving software reads the codes of a Hyena; to=hf writes its weights" in ended.err
    )
    assert cli.raw("export", str(run), "to=hf", "out=hf").code == 0
    card = Path("hf/README.md").read_text()
    assert "vortex" in card and "library_name" not in card and not Path("codes").exists()


def test_the_paper_s_policy_keeps_the_blocks_that_the_paper_kept(cli: Cli) -> None:
    """arXiv:2509.25149: of 62 blocks the first 2 and the last 8 in BF16."""
    data = ("data=tokens", "data.path=none.bin", "data.vocab_size=131072")
    ended = cli.raw(
        "plan", "model=hybrid_12b", "policy=paper", "recipe=nvfp4", "phases=none", *data
    )
    assert ended.code == 0
    assert (
        "blocks 0–1 " in ended.out and "blocks 2–53 " in ended.out and "blocks 54–61 " in ended.out
    )
    ended = cli.raw(
        "plan", "model=hybrid_12b", "policy=paper", "recipe=nvfp4", "phases=none", *data, "--json"
    )
    found: dict[int, set[str]] = {}
    for row in json.loads(ended.out)["gemms"]:
        if row["layer"] != "head":
            found.setdefault(int(row["layer"].split(".")[1]), set()).add(row["elements"])
    assert found == {
        block: {"E2M1·E2M1" if 2 <= block < 54 else "BF16·BF16"} for block in range(62)
    }
