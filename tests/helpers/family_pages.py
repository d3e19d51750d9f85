"""The page of a family in docs/: its commands, and the keys that it lists."""

import re

import pytest
from command_line import UNAUDITED
from shown import DOCS, commands

from fp4train.cli import main

SMALL = (
    "train.steps=2",
    "train.batch_size=2",
    "train.seq_len=32",
    "eval.batches=1",
    "track=jsonl",
    *UNAUDITED,
)


def check_commands(page: str, count: int) -> None:
    """Run the `count` commands of a page one after another; what trains is made smaller."""
    found = [words[1:] for words in commands(page)]
    assert len(found) == count
    for words in found:
        trains = words[0].startswith(("model=", "init="))
        with pytest.raises(SystemExit) as ended:
            main([*words, *(SMALL if trains else ())])
        assert ended.value.code == 0, words


def listed_keys(page: str) -> set[str]:
    """The keys `model.…` of the section Keys."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return set(
        re.findall(
            r"`(model\.[\w.]+)`", re.split(r"^## ", text.partition("## Keys\n")[2], flags=re.M)[0]
        )
    )
