"""docs/studies.md: its commands are run, in order, and its options are those of the command."""

import re
import shlex
from pathlib import Path

import pytest
from shown import SMALL, commands

from fp4train.cli import main, sensitivity

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_every_command_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands("studies.md"):
        with pytest.raises(SystemExit) as ended:
            main([*words[1:], *(() if words[1] == "sensitivity" and "runs/a" in words else SMALL)])
        assert ended.value.code == 0, f"{shlex.join(words)}: {capsys.readouterr().err}"
    folder = re.findall(r"in `(runs/[\w/-]+)`", TEXT)[0]
    for name in re.findall(r"`([\w]+\.(?:json|png|yaml|jsonl))`", TEXT):
        assert (tmp_path / folder / name).is_file(), name


def test_the_options_are_those_of_the_command() -> None:
    section = TEXT.partition("### Options\n")[2].partition("\n### ")[0]
    listed = set(
        re.findall(r"`(\w+)=", "".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE)))
    )
    assert listed == {*sensitivity.OPTIONS, "step", "recipe", "gpu"}


def test_its_links_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
