"""The README is correct: its Python runs, its commands are valid, its tree exists."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fp4train.config import overrides

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for kind, text in fenced if kind == language]


def own_files(folder: Path) -> None:
    """Write the files below mine/ that the README shows to `folder`; "continued" adds to one."""
    for block in [*blocks("python"), *blocks("yaml")]:
        for path, text in re.findall(r"^# (mine/[\w/.]+).*\n((?:(?!# mine/).*\n)*)", block, re.MULTILINE):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("a") as file:
                file.write(text)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the README's folder of a user's own."""
    own_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("code", [code for code in blocks("python") if not code.startswith("# mine/")])
def test_python_in_the_readme_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def commands() -> list[list[str]]:
    lines = [line.partition("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("fp4train")]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_in_the_readme_name_existing_verbs_and_keys(command: list[str], mine: Path) -> None:
    words = command[1:]
    if words and "=" not in words[0] and not words[0].startswith("-"):
        verb = words.pop(0)
        assert verb in {"plan", "swap", "compare", "sensitivity", "rank", "report", "formats", "doctor"}
        words += ["-m"] * (verb == "rank")  # it sweeps
    flags, words = overrides.flags_and_words(words)
    overrides.check(
        [
            *flags,
            *(word for word in words if "=" in word and not word.startswith(("resume=", "at=", "full=", "cancel="))),
        ]
    )


def test_recipe_in_the_readme_is_one() -> None:
    import yaml

    from fp4train.config.binding import bind
    from fp4train.precision import Recipe

    text, _ = blocks("yaml")
    assert isinstance(bind(yaml.safe_load(text), Recipe, "recipe"), Recipe)


def test_the_readmes_own_classes_train_and_resume(mine: Path) -> None:
    """Every option it shows, in a process of its own, as the command line that it shows."""
    shown = sorted(str(path.relative_to(mine / "mine")) for path in (mine / "mine").rglob("*.*"))
    assert shown == [
        "data/counting.yaml",
        "model/shift.yaml",
        "mylab.py",
        "optim/momentum.yaml",
        "recipe/four_bit_gradients.yaml",
        "recipe/house.yaml",
        "schedule/inverse_root.yaml",
    ]
    first, again = [command[1:] for command in commands() if "plugins=[mylab]" in command]
    small = ["train.steps=2", "train.batch_size=2", "train.seq_len=32", "eval.batches=1", "track=jsonl"]
    train([*first, *small], mine)
    train([*first, *small, "recipe=four_bit_gradients"], mine)
    train([word.replace("=400", "=3") for word in again], mine)
    metrics = (mine / "runs/shift-house/metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, metrics) if "train/loss" in line] == [1, 2, 3]
    plan = (mine / "runs/shift-four_bit_gradients/plan.txt").read_text()
    assert "blocks.0" in plan and "E2M1·E4M3" in plan


def train(arguments: list[str], folder: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fp4train", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
