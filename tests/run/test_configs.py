"""Every configuration that ships composes, becomes objects, and is planned; the largest model
allocates nothing.
"""

import pytest
import torch
from command_line import Cli
from configured import composed_of
from lengths import long_but
from memory import most_memory

from fp4train.config import (
    CONFIGS,
    RECIPES,
    Config,
    bind,
    complete,
    overrides,
    plain,
    to_config,
    unknown_keys,
)
from fp4train.hardware import Device
from fp4train.precision import find_layers
from fp4train.run.build import build_model, build_plan
from fp4train.run.timeline import build_timeline

GIVEN = {
    "data=text": ["data.path=x"],
    "data=chat": ["data.path=x"],
    "data=dna": ["data.path=x"],
    "data=hf": ["data.name=x"],
    "data=mixture": [
        "data.parts={a: {weight: 1, source: {_target_: fp4train.data.Text, path: x}}}"
    ],
    "data=tokens": ["data.path=x", "data.vocab_size=50257"],
    "data/tokenizer=pretrained": ["data.tokenizer.name=x"],
    "policy=nemotron3": ["model=hybrid_tiny"],
}
OPTIONS = [
    f"{group}={option}" for group, options in overrides.groups().items() for option in options
]
SHORT = [
    *{option.partition("=")[0]: option for option in OPTIONS}.values(),
    "model=llama_tiny",
    "model=moe_tiny",
    "model=hybrid_tiny",
    "model=hyena_tiny",
    "model=olmo2_tiny",
    "recipe=nvfp4",
    "recipe=fp16",
    "recipe=bf16_forward_nvfp4_backward",
]
"""One of each group, and of models and recipes those that are planned otherwise than the others."""
PLANNED = ("model=", "recipe=", "policy=", "phases=", "experiment=")
"""Options that change what a plan has."""


def test_all_yaml_files_of_the_tree_are_covered() -> None:
    files = [*CONFIGS.rglob("*.yaml"), *RECIPES.glob("*.yaml")]
    assert len(OPTIONS) == len(files) - 3, "train, classes and ledger.yaml are none"
    assert {"recipe=nvfp4", "data/tokenizer=bpe"} <= set(OPTIONS)


@pytest.mark.parametrize("option", long_but(SHORT, OPTIONS))
def test_it_is_planned_and_means_the_same_with_its_defaults_written_out(option: str) -> None:
    phases = ["phases=none"] if option == "recipe=fp16" else []
    composed = composed_of(option, *GIVEN.get(option, []), *phases, "run.name=x")
    node = plain(composed)
    assert list(unknown_keys(node, Config)) == []
    assert bind(complete(node, Config), Config, "") == bind(node, Config, "")
    found = to_config(composed)
    if not option.startswith(PLANNED):
        return
    meta = torch.device("meta")
    model = build_model(found, 257, meta)
    assert all(p.device == meta for p in model.parameters())
    plan = build_plan(
        found, find_layers(model), build_timeline(found), Device.of(torch.device("cpu"))
    )
    assert sum(plan.shares(0).values()) == pytest.approx(1)


def test_defaults_are_written_out_as_the_classes_have_them() -> None:
    node = plain(composed_of("run.name=x"))
    for section in ("model", "data", "optim", "schedule", "recipe", "policy", "track"):
        node[section] = {"_target_": node[section]["_target_"]}
    written = complete(node, Config)
    assert bind(written, Config, "") == bind(node, Config, "")
    assert written["optim"]["betas"] == [0.9, 0.95] and written["train"]["compile"] is False
    assert (
        written["policy"]["recipe_for_kept"]["_target_"] == "fp4train.precision.recipes.high.BF16"
    )
    assert complete(written, Config) == written


def test_the_plan_of_the_largest_model_holds_none_of_its_weights(cli: Cli) -> None:
    block = 218_000_000 * 2  # bytes of one of its 32 blocks in BF16

    def plan() -> None:
        ended = cli.raw("plan", "model=llama_8b", "recipe=nvfp4", "policy=paper")
        assert ended.code == 0
        assert "blocks 1–26" in ended.out and "main memory holds a copy" in ended.out

    assert most_memory(plan) < block / 3, "modules, imports and the table alone"


def test_the_comments_of_the_table_of_contents_name_what_there_is() -> None:
    text = (CONFIGS / "train.yaml").read_text()
    for group in (
        "model",
        "data",
        "optim",
        "schedule",
        "recipe",
        "policy",
        "phases",
        "track",
        "experiment",
    ):
        assert f"- {group}:" in text
