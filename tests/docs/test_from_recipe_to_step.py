"""docs/from-recipe-to-step.md: its commands print what it shows, and its files exist."""

import re
import shlex
from pathlib import Path

import pytest
from shown import DOCS, blocks, commands

from fp4train.cli import main

PAGE = "from-recipe-to-step.md"


@pytest.mark.parametrize(
    ("words", "shown"),
    list(zip(commands(PAGE), blocks(PAGE, "text"), strict=True)),
    ids=lambda value: shlex.join(value) if isinstance(value, list) else "",
)
def test_a_command_prints_what_stands_below_it(
    words: list[str],
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as ended:
        main(words[1:])
    assert ended.value.code == 0
    assert shown in capsys.readouterr().out


def test_the_files_to_read_exist_and_the_page_is_short() -> None:
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    files = re.findall(r"`((?:fp4train|recipes)/[\w/.]+)`", page)
    assert len(files) >= 8
    assert [file for file in files if not (Path(DOCS).parent / file).is_file()] == []
    assert len(page.split()) <= 900
