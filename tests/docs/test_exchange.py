"""docs/exchange.md, and the way to transformers that the README shows: its commands and its Python
run, in order.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import TINY, reading
from families import MODEL_TYPES

from fp4train.cli import main
from fp4train.cli.export import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "exchange.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.usefixtures("working_folder")
README = (ROOT / "README.md").read_text(encoding="utf-8")
TITLE = "From fp4train to transformers"
PACKED = "From fp4train to packed NVFP4"
BACK = "From a Hugging Face folder to fp4train"


def test_the_table_of_files_names_every_class_of_transformers_that_an_export_writes() -> None:
    sources = (
        path.read_text(encoding="utf-8") for path in (ROOT / "fp4train" / "models").rglob("*.py")
    )
    classes = {name for each in sources for name in re.findall(r'"(\w+ForCausalLM)"', each)}
    classes.remove("Dots1ForCausalLM")  # read, and written by no export
    (row,) = re.findall(r"^\| `config.json` \| .*$", PAGE, re.MULTILINE)
    assert "LlamaForCausalLM" in classes
    assert classes == set(re.findall(r"`(\w+ForCausalLM)`", row))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def way(text: str, title: str = TITLE) -> list[list[str]]:
    section = text.partition(f"# {title}\n")[2].partition("\n## ")[0]
    return [
        shlex.split(line, comments=True)
        for block in blocks(section, "bash")
        for line in block.splitlines()
    ]


def called(words: list[str], text: Path) -> None:
    """A command of fp4train, training with a smaller model; or of Python, in a process of its
    own.
    """
    if words[0] == "python":
        subprocess.run(
            [sys.executable, *words[1:]], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        return
    assert words[0] == "fp4train"
    tiny = [] if words[1] in ("export", "verify") else [*TINY, *reading(text)]
    verb = [words[1]] if words[1] == "plan" else []
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *verb,
                *tiny,
                *(word for word in words[1 + len(verb) :] if not word.startswith("step=")),
            ]
        )
    assert ended.value.code == 0


@pytest.mark.long
def test_the_commands_and_the_python_of_the_page_run(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in way(PAGE):
        called(words, text)
    exec(compile(blocks(PAGE, "python")[0], "exchange.md", "exec"), {})
    assert "def add(" in capsys.readouterr().out
    Path("texts").mkdir()
    Path("texts/a.txt").write_text(text.read_text())
    for words in way(PAGE, BACK):
        called(words, text)
    assert Path("runs/tuned/checkpoints").exists() and Path("runs/gently/checkpoints").exists()


def test_the_table_of_what_is_read_has_every_model_type() -> None:
    table = PAGE.partition("\n| `model_type` |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == MODEL_TYPES


@pytest.mark.long
def test_the_three_commands_of_the_readme_lead_to_transformers(text: Path) -> None:
    commands = way(README)
    assert len(commands) == 3 and [words[0] for words in commands] == [
        "fp4train",
        "fp4train",
        "python",
    ]
    for words in commands:
        called(words, text)


@pytest.mark.long
def test_the_four_commands_of_page_and_readme_lead_to_packed_nvfp4(text: Path) -> None:
    commands = way(README, PACKED)
    assert commands == way(PAGE, PACKED)
    assert len(commands) == 4 and [words[0] for words in commands] == ["fp4train"] * 3 + ["python"]
    for words in commands:
        called(words, text)


def test_the_table_of_formats_has_every_target() -> None:
    table = PAGE.partition("\n| `to=` |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == TARGETS
