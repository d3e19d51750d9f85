"""The ledger of published recipes: each entry is a recipe that runs, trains, resumes and is ranked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from configured import config_of, policy_named, recipe_named
from families import TINY_RUNS, tiny_shape
from lengths import long_but
from recipes_table import markdown
from torch import nn

import fp4train as f4
from fp4train.config import own_options
from fp4train.errors import UserError
from fp4train.lab.ledger import PublishedRecipe, ledger
from fp4train.precision import BF16, Layer, LayerPolicy, find_layers
from fp4train.quantize import RandomKey, quantize

ENTRIES = ledger()
RECIPE_FILES = Path(__file__).parents[2] / "recipes"
RECIPES = list(dict.fromkeys(entry.recipe for entry in ENTRIES))
SHORT = ("nvfp4", "quartet_ii", "averis", "mxfp4_backward")
ENTRY = {
    "recipe": "nvfp4",
    "title": "A paper",
    "year": 2026,
    "mirrored": "all",
    "differs": "nothing",
    "kept": "none",
}


SWITCH = {"flux_residual": "cooldown_fprop"}
"""Recipes whose source changes them within a run; the default would change any."""


@pytest.mark.parametrize(
    "entry",
    long_but([entry for entry in ENTRIES if entry.recipe in (*SHORT, *SWITCH)], ENTRIES),
    ids=lambda entry: f"{entry.recipe} {entry.source}",
)
def test_the_words_of_an_entry_are_a_command_without_phases_that_its_source_has_not(
    entry: PublishedRecipe,
) -> None:
    assert entry.recipe in own_options()["recipe"]
    assert any(word.startswith("policy=") for word in entry.words)
    (phases,) = (word for word in entry.words if word.partition("=")[0] == "phases")
    assert phases == f"phases={SWITCH.get(entry.recipe, 'none')}"
    config = config_of(f"recipe={entry.recipe}", *entry.words)
    assert bool(config.phases) == (entry.recipe in SWITCH)


@pytest.mark.parametrize("name", long_but(SHORT, RECIPES))
def test_a_recipe_of_the_ledger_trains_and_shows_its_plan(name: str) -> None:
    """Three steps with the public API: the loss falls, and is not that of BF16 in every bit."""
    losses_of = {}
    policy = LayerPolicy(last=0)
    for form in (recipe_named(name), BF16()):
        torch.manual_seed(0)
        model = f4.convert(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.randn(96, 64)
        losses_of[form] = []
        for step in range(3):
            with f4.autocast(form, policy=policy, step=step, token_offset=0):
                loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses_of[form].append(loss.item())
    quantised, high = losses_of.values()
    assert quantised[2] < quantised[0] < 2
    assert quantised != high
    assert quantised == pytest.approx(high, rel=0.1)
    plan = str(f4.plan(model, recipe_named(name), policy))
    elements = {spec.element.upper() for spec in recipe_named(name).table().specs()}
    assert elements and all(element in plan for element in elements)


def test_policies_of_papers_keep_what_they_say() -> None:
    kept = policy_named("mfu_last4")
    assert kept.count("last", 32) == 4
    policy = policy_named("nemotron3")
    assert policy.count("last", 88) == 14 and policy.keep == ("class:*Attention",)
    assert [entry.layers for entry in policy.recipes] == [("out_proj",)]


def policy_of(entry: PublishedRecipe) -> LayerPolicy:
    """The policy of an entry's command."""
    return config_of(f"recipe={entry.recipe}", *entry.words).policy


@pytest.mark.parametrize(
    ("name", "blocks", "last"), [("if4", 24, 4), ("mfu_operands", 32, 0), ("chon", 24, 0)]
)
def test_words_of_an_entry_keep_as_many_blocks_as_it_says(
    name: str, blocks: int, last: int
) -> None:
    (entry,) = (entry for entry in ENTRIES if entry.recipe == name)
    assert policy_of(entry).count("last", blocks) == last


def test_the_words_of_chon_keep_value_and_output_projections_of_the_default_model() -> None:
    (entry,) = (entry for entry in ENTRIES if entry.recipe == "chon")
    policy = policy_of(entry)
    names = [f"blocks.0.attention.{name}" for name in ("wq", "wk", "wv", "wo")]
    policy.check(names)
    kept = [name for name in names if policy.why_kept(layer(name)) is not None]
    assert kept == ["blocks.0.attention.wv", "blocks.0.attention.wo"]


def layer(name: str, *classes: str) -> Layer:
    return Layer(
        name=name,
        in_features=64,
        out_features=64,
        block=0,
        blocks=6,
        classes=tuple(f"class:{name}" for name in classes),
    )


@pytest.mark.parametrize(
    ("name", "of_attention"), [("deepseek_v4_qat", "FP8Block"), ("w4a16_qat", "BF16")]
)
def test_words_of_weights_in_four_bits_leave_attention_in_the_precision_of_the_paper(
    name: str, of_attention: str
) -> None:
    (entry,) = (entry for entry in ENTRIES if entry.recipe == name)
    policy = policy_of(entry)
    attention = layer("blocks.0.attention.wq", "Linear", "Attention")
    own = policy.recipe_by_pattern(attention)
    kept = policy.why_kept(attention) is not None
    assert kept == (of_attention == "BF16")
    assert (own is not None and type(own[0]).__name__ == "FP8Block") == (of_attention != "BF16")
    for mlp in (layer("blocks.5.mlp.down", "Linear"), layer("blocks.5.mlp.down", "Experts")):
        assert policy.why_kept(mlp) is None and policy.recipe_by_pattern(mlp) is None


MLPS = {"SwiGLU", "SquaredReluMLP", "HyenaMLP", "Experts"}
"""Classes of MLPs and experts; what else a block multiplies mixes tokens."""


@pytest.mark.parametrize("family", TINY_RUNS)
@pytest.mark.parametrize("name", ["deepseek_v4_qat", "w4a16_qat"])
def test_weights_in_four_bits_are_those_of_mlps_and_experts_in_every_family(
    name: str, family: str
) -> None:
    (entry,) = (entry for entry in ENTRIES if entry.recipe == name)
    policy, form = policy_of(entry), recipe_named(name)
    with torch.device("meta"):
        model = tiny_shape(family).build(vocab_size=64, seq_len=32)
    layers = [found for found in find_layers(model).values() if found.block is not None]
    policy.check(layers[0].names)
    of_mlps = {
        found.name
        for found in layers
        if MLPS & {class_name.removeprefix("class:") for class_name in found.classes}
    }
    quantised = {found.name for found in layers if policy.recipe_for(found, form) == form}
    assert 0 < len(of_mlps) < len(layers)
    assert quantised == of_mlps


def test_both_forms_of_ufp4_have_the_same_codes_and_values() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    key = RandomKey(seed=0, step=1, layer=2, operand=3)
    for gemm, operands in recipe_named("ufp4_e1m2").table().items():
        for fine, wide in zip(
            operands.both, recipe_named("ufp4_int4").table()[gemm].both, strict=True
        ):
            assert fine is not None and wide is not None
            assert 4 * fine.format.max == wide.format.max
            quarters, integers = (quantize(x, spec, key=key) for spec in (fine, wide))
            assert torch.equal(quarters.codes, integers.codes)
            assert torch.equal(
                quarters.dequantize(torch.float32), integers.dequantize(torch.float32)
            )


def test_every_entry_has_the_number_of_its_paper_or_an_address() -> None:
    assert not [entry.recipe for entry in ENTRIES if (entry.arxiv is None) == (entry.url is None)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arxiv": "2509.25149", "journal": "x"}, "journal"),
        ({"arxiv": "2509.25149", "year": "soon"}, "year"),
    ],
)
def test_an_entry_that_says_too_little_or_too_much_is_refused(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.yaml"
    path.write_text(yaml.safe_dump({"published": [{**ENTRY, **changed}]}))
    with pytest.raises((UserError, ValueError), match=message):
        ledger(path)


def test_the_page_has_every_entry() -> None:
    page = "\n".join(markdown(ENTRIES))
    for entry in ENTRIES:
        assert f"| `recipe={entry.recipe} {' '.join(entry.words)}` | [{entry.title}]" in page
        assert entry.link in page
        assert f"| {entry.kept} |" in page
