"""What the README shows works: its Python is run, its commands are understood, its tree exists."""

import re
import shlex
from pathlib import Path

import pytest

from fp4train.config import overrides

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for kind, text in fenced if kind == language]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_in_the_readme_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def commands() -> list[list[str]]:
    lines = [line.partition("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("fp4train")]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_in_the_readme_name_existing_verbs_and_keys(command: list[str]) -> None:
    words = command[1:]
    if words and "=" not in words[0] and not words[0].startswith("-"):
        assert words.pop(0) in {"plan", "swap", "compare", "formats"}
    settings = [w for w in words if w.startswith("-") or ("=" in w and not w.startswith(("resume=", "at=")))]
    overrides.check(settings)


def test_recipe_in_the_readme_is_one() -> None:
    import yaml

    from fp4train.config.binding import bind
    from fp4train.precision import Recipe

    (text,) = blocks("yaml")
    assert isinstance(bind(yaml.safe_load(text), Recipe, "recipe"), Recipe)


def test_every_place_in_the_tree_of_the_readme_exists() -> None:
    (tree,) = [block for block in blocks("") if "fp4train/" in block]
    base = ROOT
    for line in tree.splitlines():
        name = line.split()[0] if line.strip() else ""
        if name == "fp4train/":
            base = ROOT / "fp4train"
        elif name:
            assert (base / name).exists() if line.startswith(" ") else (ROOT / name).exists(), name


def test_links_and_pictures_of_the_readme_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
