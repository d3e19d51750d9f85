"""The commands and files that pages of `docs/` show: a block of code whose first line names a file,
as `# mine/model/own.yaml`, is that file.
"""

import re
import shlex
from itertools import takewhile
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
SHORT = {
    "train.steps": "30",
    "eval.every": "5",
    "checkpoint.every": "10",
    "audit.every": "0",
    "audit.sums": "0",
}
"""A tenth of the default steps; tests of audits have theirs."""


def blocks(page: str, language: str) -> list[str]:
    """The blocks of code of a page in a language."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """The commands of a page, split into words."""
    lines = (line for block in blocks(page, "bash") for line in block.splitlines())
    return [shlex.split(line, comments=True) for line in lines]


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the rows of a page's table whose first column is called `header`."""
    lines = iter((DOCS / page).read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"| {header} |"):
            next(lines)  # between header and rows
            rows = takewhile(lambda line: line.startswith("|"), lines)
            return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    raise AssertionError(f"{page} has no table of {header}")


def shortened(words: list[str]) -> list[str]:
    """The words of a run, small, and with `SHORT` for what they do not name."""
    named = {word.partition("=")[0] for word in words}
    return [
        *words,
        *SMALL,
        *(f"{key}={value}" for key, value in SHORT.items() if key not in named),
    ]


def in_tenths(words: list[str], keys: tuple[str, ...]) -> list[str]:
    """Words whose values for `keys`, numbers of steps of a default run, are those of a run of
    `SHORT`."""
    return [
        re.sub(r"(\d+)0\b", r"\1", word) if word.partition("=")[0] in keys else word
        for word in words
    ]


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
