"""The README is correct and short: its Python runs, its commands are valid, its links lead
somewhere.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import options_of
from configured import config_of, points_of

from fp4train.cli.main import VERBS
from fp4train.config import overrides
from fp4train.exchange import LAYOUTS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for kind, text in fenced if kind == language]


def test_the_claim_about_hardware_stands_beside_what_was_verified() -> None:
    claim = README.partition("Transformer Engine](")[2][:200]
    assert "not been verified on hardware yet" in claim, "beside the claim, not at the end"


@pytest.mark.parametrize("code", blocks("python"))
def test_python_in_the_readme_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def commands() -> list[list[str]]:
    lines = [
        line.partition("#")[0].strip() for block in blocks("bash") for line in block.splitlines()
    ]
    return [shlex.split(line) for line in lines if line.startswith("fp4train")]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_in_the_readme_name_existing_verbs_and_keys(command: list[str]) -> None:
    words = command[1:]
    own = ["resume", "at"]
    if words and "=" not in words[0] and not words[0].startswith("-"):
        verb = words.pop(0)
        assert verb in {*VERBS, "help"}
        words += ["-m"] * (verb == "rank")  # it sweeps
        if verb != "help":
            own += options_of(verb)
    flags, words = overrides.flags_and_words(words)
    keys = [word for word in words if "=" in word and word.partition("=")[0] not in own]
    assert points_of([*flags, *keys])


def test_links_and_pictures_of_the_readme_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_readme_links_every_page_of_the_documentation() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", README))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


def cools_fprop_down(config: Any) -> bool:
    return [phase.gemms for phase in config.phases.values()] == [("fprop",)]


HERE: dict[str, tuple[str, Callable[[], bool]]] = {
    "NVFP4 training": (
        "any machine, by emulation",
        lambda: (
            config_of().recipe.name == "NVFP4" and config_of("backend=emulate").backend == "emulate"
        ),
    ),
    "BF16 for fprop alone from a step on": (
        "yes, the default",
        lambda: cools_fprop_down(config_of()),
    ),
    "another recipe for a running job": ("yes", lambda: "swap" in VERBS),
    "which layers and recipes cost how much, with tests": (
        "yes",
        lambda: {"sensitivity", "rank"} <= set(VERBS),
    ),
    "live steps audited by an independent reference, faults named": (
        "yes: a layer in 100 steps on a CPU, on GPUs as `audit.every` says",
        lambda: [config_of().audit.steps(device) for device in ("cpu", "cuda")] == [100, 0],
    ),
    "export of packed NVFP4": ("yes", lambda: {"modelopt", "compressed-tensors"} <= set(LAYOUTS)),
    "context parallelism": (
        "attention in the bits of one rank that passes the chunks; Mamba-2 and Hyena within 1e-6",
        lambda: "cp" in vars(config_of().parallel),
    ),
    "expert parallelism": (
        "in the bits of one rank that passes the microbatches; rows in BF16",
        lambda: "ep" in vars(config_of().parallel),
    ),
}
"""What the table of the README says that this has, or lacks, and what shows it."""


def test_the_table_of_what_others_lack_says_of_this_what_it_has() -> None:
    header, _, *rows = re.findall(r"^\|(.*)\|$", README.partition("others lack")[2], re.MULTILINE)[
        : len(HERE) + 2
    ]
    others = [cell.strip() for cell in header.split("|")]
    assert others[1] == "fp4train" and len(others) == 7
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert {row[0]: row[1] for row in cells} == {name: said for name, (said, _) in HERE.items()}
    assert all(len(row) == len(others) and all(row) for row in cells)
    assert all(shown() for _, shown in HERE.values())


def test_the_cooldown_that_the_readme_calls_the_default_is_it() -> None:
    said = " ".join(README.split())
    assert "A cooldown of fprop alone is the default here" in said
    assert cools_fprop_down(config_of())
