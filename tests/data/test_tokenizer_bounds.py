"""Tokenizer files of strangers cost a line, not minutes or gigabytes."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import KINDS, tokenizer_json

from fp4train.data.tokenizers import Pretrained
from fp4train.data.tokenizers.bounds import BRACKETS, check_file
from fp4train.errors import DataError


def edited(**changes: Any) -> str:
    return json.dumps(json.loads(tokenizer_json("byte level")) | changes)


def replace(old: dict[str, str], new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": old, "content": new}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


CHARSMAP = base64.b64encode(b"\x04\0\0\0" + b"\0\0\0\0" + b"x" * 500 + b"\0").decode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            edited(normalizer=sequence(*[replace({"String": "a"}, "aaaaaaaa")] * 9)),
            "its normalizer may make 134,217,728",
        ),
        (
            edited(normalizer=replace({"Regex": ""}, "x" * 200)),
            "its normalizer may make 201 characters of one",
        ),
        (
            edited(normalizer={"type": "Prepend", "prepend": "x" * 100}),
            "its normalizer may make 100 characters",
        ),
        (
            edited(normalizer={"type": "Precompiled", "precompiled_charsmap": CHARSMAP}),
            "its normalizer may make 500",
        ),
        (
            edited(
                normalizer=sequence(
                    sequence(replace({"String": " "}, "_" * 30)),
                    sequence(replace({"String": "_"}, "__" * 30)),
                )
            ),
            "its normalizer may make 1,800",
        ),
        (
            edited(decoder={"type": "Sequence", "decoders": [replace({"String": "a"}, "a" * 100)]}),
            "its decoder may make",
        ),
        (
            edited(
                post_processor={
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}] * 1000,
                    "pair": [],
                    "special_tokens": {
                        "</s>": {"id": "</s>", "ids": [0] * 6000, "tokens": ["</s>"] * 6000}
                    },
                }
            ),
            "its post_processor adds 6,000,000 tokens",
        ),
        (edited(pre_tokenizer={"type": "ByteLevel", "trim_offsets": "x" * 10**6}), r"x….{12}$"),
        ("[" * 100_000, "is no JSON file"),
        ('{"model":' * 100_000, "is no JSON file"),
        (
            '{"version": ' + "9" * 5000 + "}",
            r"no JSON file: an integer has more than 4,300 digits$",
        ),
        ("[" * (BRACKETS + 1), "lists and tables; up to"),
        (
            edited(model={"type": "WordLevel", "vocab": {"</s>": 1 << 31}, "unk_token": "</s>"}),
            "has the token id 2,147,483,648",
        ),
    ],
)
def test_a_file_that_would_cost_too_much_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=said):
        Pretrained(name=str(tmp_path / "tokenizer.json"), end_of_document="</s>").open()


def test_a_sparse_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(6 << 30)
    with pytest.raises(
        DataError, match=r"tokenizer\.json cannot be read: 6,442,450,944 bytes; more than"
    ):
        Pretrained(name=str(tmp_path)).open()


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_in_use_are_within_the_bounds(kind: str) -> None:
    assert check_file(tokenizer_json(kind), kind)["model"]


def test_equal_text_has_equal_ids_where_the_file_drops_merges(tmp_path: Path) -> None:
    table = json.loads(tokenizer_json("byte level"))
    table["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    found = Pretrained(name=str(tmp_path / "tokenizer.json")).open()
    assert len({tuple(found.encode("def wrap(text, width)")) for _ in range(20)}) == 1
