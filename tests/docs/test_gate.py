"""docs/gate.md: its commands run and print what it shows, its tables are those of the code."""

import shlex
from pathlib import Path

import pytest
from command_line import options_of
from shown import blocks, commands, in_tenths, shortened, table

from fp4train.cli import main
from fp4train.lab.gate import EXIT_CODES

PAGE = "gate.md"


@pytest.mark.long
def test_every_command_works_and_the_first_gate_prints_what_the_page_shows(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = {}
    for _, *shown in commands(PAGE):
        words = in_tenths(shown, ("step", "checkpoint.every"))
        if words[0] == "gate":
            few = () if "forks=0" in words else ("forks=2",)
            words += ["steps=1", "batches=1", "processes=1", *few]
        elif words[0] != "compare":
            words = shortened(words)
        with pytest.raises(SystemExit) as ended:
            main(words)
        printed[shown[-1]] = capsys.readouterr().out
        assert ended.value.code in ((0, 2) if words[0] == "gate" else (0,)), shlex.join(words)
    assert blocks(PAGE, "text")[0] in printed["forks=0"]


def test_the_table_has_every_key() -> None:
    named = [name.strip("` ") for keys, *_ in table(PAGE, "key") for name in keys.split(",")]
    assert sorted(named) == sorted(options_of("gate"))


def test_the_exit_codes_are_those_of_the_command() -> None:
    rows = table(PAGE, "verdict")
    assert {verdict: int(code) for verdict, code, _ in rows if verdict != "–"} == EXIT_CODES
