"""The page of a family in docs/: its commands, and the keys that it lists."""

import re
import shlex
from pathlib import Path

import pytest

from fp4train.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
SMALL = ("train.steps=2", "train.batch_size=2", "train.seq_len=32", "eval.batches=1", "track=jsonl")


def check_commands(page: str, count: int) -> None:
    """Run the `count` commands of a page one after another; what trains is made smaller."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]
    assert len(commands) == count
    for words in commands:
        trains = words[0].startswith(("model=", "init="))
        with pytest.raises(SystemExit) as ended:
            main([*words, *(SMALL if trains else ())])
        assert ended.value.code == 0, words


def listed_keys(page: str) -> set[str]:
    """The keys `model.…` of the section Keys."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return set(re.findall(r"`(model\.[\w.]+)`", re.split(r"^## ", text.partition("## Keys\n")[2], flags=re.M)[0]))
