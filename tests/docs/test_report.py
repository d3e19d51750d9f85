"""docs/report.md: its commands are run, in order, and its sections are those of the report."""

import re
import shlex
from pathlib import Path

import pytest
from shown import SMALL as PAGE_RUN, commands

from fp4train.cli import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
SMALL = (*PAGE_RUN, "train.steps=60")


@pytest.mark.long
def test_every_command_works_and_the_report_has_the_sections(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"report": (), "rank": ("steps=2",)}
    for words in [
        *commands("report.md")[:2],
        shlex.split("fp4train sensitivity runs/a batches=2 repeats=1"),
        *commands("report.md")[2:],
    ]:
        options = () if words[1] == "sensitivity" else small.get(words[1], SMALL)
        with pytest.raises(SystemExit) as ended:
            main([*words[1:], *options])
        assert ended.value.code == 0, f"{shlex.join(words)}: {capsys.readouterr().err}"
    page = (working_folder / "report.html").read_text(encoding="utf-8")
    named = re.findall(r"^\| ([A-Z][^|]+) \|", TEXT, re.MULTILINE)
    assert re.findall(r"<h2>([^<]+)</h2>", page) == [
        title for each in named for title in each.split(", ")
    ]
    assert 'class="warnings"' not in page, "nothing of a whole run is missing"
    assert page.count("<img") == 4 and (working_folder / "a.html").is_file()


def test_its_links_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
