"""Every file of configs/data composes with every tokenizer, binds to its dataclass, and holds its
defaults.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from fp4train.data import Chat, Dna, HuggingFace, Stdlib, Text, Tokens
from fp4train.data.tokenizers import BytePairs, Bytes, Pretrained

CONFIGS = Path(__file__).parents[2] / "configs" / "data"
SOURCES: dict[str, tuple[type, list[str]]] = {
    "stdlib": (Stdlib, []),
    "text": (Text, ["data.path=a"]),
    "hf": (HuggingFace, ["data.path=a.jsonl"]),
    "chat": (Chat, ["data.path=a.jsonl"]),
    "dna": (Dna, ["data.path=a.fa"]),
    "tokens": (Tokens, ["data.path=a.bin", "data.vocab_size=50304"]),
}
TOKENIZERS: dict[str, tuple[type, list[str]]] = {
    "bytes": (Bytes, []),
    "pretrained": (Pretrained, ["data.tokenizer.name=gpt2"]),
    "bpe": (BytePairs, []),
}

PARTS = ("fineweb_10b", "fineweb_edu_29b", "fineweb_edu_138b", "fineweb_edu_1t")
OF_THE_HUB = ("gpt2", "gpt_neox", "qwen3")


def bind(overrides: Sequence[str]) -> Any:
    with initialize_config_dir(str(CONFIGS.parent.resolve()), version_base=None):
        return instantiate(compose(overrides=[f"+{overrides[0]}", *overrides[1:]]).data)


def test_every_file_is_tested_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*SOURCES, *PARTS, "mixture"}
    assert {path.stem for path in (CONFIGS / "tokenizer").glob("*.yaml")} == {
        *TOKENIZERS,
        *OF_THE_HUB,
    }


@pytest.mark.parametrize("source", PARTS)
def test_a_part_of_a_data_set_is_of_the_hub(source: str) -> None:
    bound = bind([f"data={source}"])
    assert type(bound) is HuggingFace and str(bound.name).startswith("HuggingFaceFW/fineweb")


@pytest.mark.parametrize("tokenizer", OF_THE_HUB)
def test_a_tokenizer_of_the_hub_is_named(tokenizer: str) -> None:
    bound = bind(["data=text", "data.path=a", f"data/tokenizer={tokenizer}"])
    assert type(bound.tokenizer) is Pretrained and "/" in bound.tokenizer.name


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_binds_with_the_defaults_of_its_dataclass(source: str) -> None:
    kind, mandatory = SOURCES[source]
    bound = bind([f"data={source}", *mandatory])
    assert type(bound) is kind
    given = {override.split("=")[0].removeprefix("data.") for override in mandatory}
    for field in dataclasses.fields(bound):
        if field.default is not dataclasses.MISSING and field.name not in given:
            value = getattr(bound, field.name)
            assert (tuple(value) if field.name == "suffixes" else value) == field.default, (
                field.name
            )


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("source", ["stdlib", "text", "hf"])
def test_a_tokenizer_is_chosen_within_its_source(source: str, tokenizer: str) -> None:
    kind, mandatory = TOKENIZERS[tokenizer]
    bound = bind([f"data={source}", *SOURCES[source][1], f"data/tokenizer={tokenizer}", *mandatory])
    assert type(bound.tokenizer) is kind
