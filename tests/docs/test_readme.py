"""The README is correct and short: its Python runs, its commands are valid, its links lead
somewhere.
"""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from fp4train.cli.main import VERBS
from fp4train.config import composition, overrides

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
            own += getattr(import_module(f"fp4train.cli.{verb}"), "OPTIONS", {})
    flags, words = overrides.flags_and_words(words)
    list(
        composition.composed(
            [*flags, *(word for word in words if "=" in word and word.partition("=")[0] not in own)]
        )
    )


def test_links_and_pictures_of_the_readme_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_readme_links_every_page_of_the_documentation() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", README))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
