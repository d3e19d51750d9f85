"""The commands and files that pages of `docs/` show: a block of code whose first line names a file,
as `# mine/model/own.yaml`, is that file.
"""

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
SMALL = (
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=64",
    "train.batch_size=4",
    "train.seq_len=32",
    "eval.batches=1",
    "track=jsonl",
)
"""Words that make the runs of a page small."""


def blocks(page: str, language: str) -> list[str]:
    """The blocks of code of a page in a language."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """The commands of a page, split into words."""
    lines = (line for block in blocks(page, "bash") for line in block.splitlines())
    return [shlex.split(line, comments=True) for line in lines]


def write_shown(folder: Path, page: str = "plugins.md") -> Path:
    """Write the folder `mine/` that a page shows into `folder`; a file that is shown again is
    continued.
    """
    for block in [*blocks(page, "python"), *blocks(page, "yaml")]:
        for path, content in re.findall(
            r"^# (mine/[\w/.]+).*\n((?:(?!# mine/).*\n)*)", block, re.MULTILINE
        ):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("a") as file:
                file.write(content)
    return folder / "mine"
