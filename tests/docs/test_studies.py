"""docs/studies.md: its commands are run, in order, and its options are those of the command."""

import re
import shlex
from pathlib import Path

import pytest
from command_line import options_of
from shown import SMALL, commands, shortened

from fp4train.cli import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")


def of_the_short_run(path: str) -> str:
    """A path of the page, whose folders have the number of the default run's last step."""
    return re.sub(r"-300\b", "-30", path)


@pytest.mark.long
def test_every_command_works(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _, *shown in commands("studies.md"):
        words = [of_the_short_run(word) for word in shown]
        if words[0] != "sensitivity":
            words = shortened(words)
        elif "runs/a" not in words:
            words += SMALL
        elif words[-1].startswith("out="):
            words.append("batches=2")  # the study before it has as many as by default
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0, f"{shlex.join(words)}: {capsys.readouterr().err}"
    folder = of_the_short_run(re.findall(r"in `(runs/[\w/-]+)`", TEXT)[0])
    for name in re.findall(r"`([\w]+\.(?:json|png|yaml|jsonl))`", TEXT):
        assert (working_folder / folder / name).is_file(), name


def test_the_options_are_those_of_the_command() -> None:
    section = TEXT.partition("### Options\n")[2].partition("\n### ")[0]
    listed = set(
        re.findall(r"`(\w+)=", "".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE)))
    )
    assert listed == {*options_of("sensitivity"), "recipe"}


def test_its_links_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
